//! Building what catches a defect, and running it within its budget.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::Failure;
use crate::copy::Copy;
use crate::list::{Catcher, Defect};

/// What became of one defect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The test failed by itself, within its budget.
    Caught,
    Survived,
    /// The text that it replaces is not there, or more than once.
    DoesNotApply,
    DoesNotCompile,
    /// The run was not over within its budget, which proves nothing.
    TooSlow,
    /// Without the defect the test fails too, or there is none of that name, or it crashed.
    NoProof,
}

impl Outcome {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Caught => "caught",
            Self::Survived => "SURVIVED",
            Self::DoesNotApply => "DOES NOT APPLY",
            Self::DoesNotCompile => "DOES NOT COMPILE",
            Self::TooSlow => "TOO SLOW",
            Self::NoProof => "NO PROOF",
        }
    }
}

pub(crate) struct Runner<'a> {
    copy: &'a Copy,
    target: PathBuf,
    logs: PathBuf,
    /// Whether a catcher passes where nothing is planted.
    sound: HashMap<Catcher, bool>,
}

enum Ran {
    Passed,
    Failed,
    TooSlow,
    /// It ended without saying whether a test failed.
    Unclear,
}

impl<'a> Runner<'a> {
    pub(crate) fn new(place: &Path, copy: &'a Copy) -> Result<Self, Failure> {
        let logs = place.join("logs");
        fs::create_dir_all(&logs).map_err(|e| Failure::at(&logs, e))?;
        Ok(Self {
            copy,
            target: place.join("build"),
            logs,
            sound: HashMap::new(),
        })
    }

    /// Runs what catches the defect without it, once for all defects that it catches.
    pub(crate) fn check_sound(&mut self, defect: &Defect) -> Result<bool, Failure> {
        if let Some(sound) = self.sound.get(&defect.caught_by) {
            return Ok(*sound);
        }
        let log = self.logs.join(format!("{}.without", defect.id));
        let sound = match self.build(&defect.caught_by, &log)? {
            None => false,
            Some(binary) => {
                // The budget is for finding; passing may take longer.
                let limit = Duration::from_secs(defect.budget_s.saturating_mul(2));
                let (ran, _) = self.run(&defect.caught_by, &binary, limit, &log)?;
                matches!(ran, Ran::Passed)
            }
        };
        self.sound.insert(defect.caught_by.clone(), sound);
        Ok(sound)
    }

    /// Plants the defect, sees whether it is caught and in how long, and takes it back.
    pub(crate) fn try_defect(&self, defect: &Defect) -> Result<(Outcome, Duration), Failure> {
        let Some(planted) = self.copy.plant(defect)? else {
            return Ok((Outcome::DoesNotApply, Duration::ZERO));
        };
        let outcome = self.try_planted(defect);
        self.copy.restore(&planted)?;
        outcome
    }

    fn try_planted(&self, defect: &Defect) -> Result<(Outcome, Duration), Failure> {
        let log = self.logs.join(&defect.id);
        let Some(binary) = self.build(&defect.caught_by, &log)? else {
            return Ok((Outcome::DoesNotCompile, Duration::ZERO));
        };
        let limit = Duration::from_secs(defect.budget_s);
        let (ran, took) = self.run(&defect.caught_by, &binary, limit, &log)?;
        let outcome = match ran {
            Ran::Passed => Outcome::Survived,
            Ran::Failed => Outcome::Caught,
            Ran::TooSlow => Outcome::TooSlow,
            Ran::Unclear => Outcome::NoProof,
        };
        Ok((outcome, took))
    }

    /// The executable, or nothing where it does not compile.
    fn build(&self, catcher: &Catcher, log: &Path) -> Result<Option<PathBuf>, Failure> {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo
            .args(["test", "--no-run", "--locked"])
            .args(["--message-format=json-render-diagnostics"])
            .args(catcher.target())
            .current_dir(&self.copy.dir)
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_INCREMENTAL", "1");
        // This program's own package is not that of the tests.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("CARGO_PKG_") {
                cargo.env_remove(name);
            }
        }
        let built = cargo
            .output()
            .map_err(|e| Failure::new(format!("cargo cannot be run: {e}")))?;
        if !built.status.success() {
            fs::write(log, &built.stderr).map_err(|e| Failure::at(log, e))?;
            return Ok(None);
        }
        let text = String::from_utf8_lossy(&built.stdout);
        let mut executables = text.lines().filter_map(|line| {
            let message: Message = serde_json::from_str(line).ok()?;
            let target = message.target?;
            let wanted = match catcher.test.as_str() {
                "lib" => target.name == catcher.package,
                "bin" | "" => target.kind.iter().any(|kind| kind == "bin"),
                test => target.name == test,
            };
            message.executable.filter(|_| wanted)
        });
        match executables.next_back() {
            Some(executable) => Ok(Some(executable)),
            None => Err(Failure::new(format!(
                "cargo built no executable of {catcher}"
            ))),
        }
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "how long a run takes is told to people and decides nothing else"
    )]
    fn run(
        &self,
        catcher: &Catcher,
        binary: &Path,
        limit: Duration,
        log: &Path,
    ) -> Result<(Ran, Duration), Failure> {
        let place = match catcher.package.as_str() {
            "fencelock" => self.copy.dir.clone(),
            // The packages beside the library are named after their folders.
            package => self.copy.dir.join(package.trim_start_matches("fencelock-")),
        };
        let output = File::create(log).map_err(|e| Failure::at(log, e))?;
        let errors = output.try_clone().map_err(|e| Failure::at(log, e))?;
        let mut command = Command::new(binary);
        if catcher.is_torture() {
            command.arg("torture").args(&catcher.torture);
        } else {
            command.arg(&catcher.filter);
        }
        let began = Instant::now();
        let mut child = command
            .current_dir(place)
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .spawn()
            .map_err(|e| Failure::at(binary, e))?;
        let pid = child.id();
        let (ended, end) = channel();
        let waiting = std::thread::spawn(move || ended.send(child.wait()));
        let status = match end.recv_timeout(limit) {
            Ok(status) => status.map_err(|e| Failure::at(binary, e))?,
            Err(RecvTimeoutError::Timeout) => {
                // Its servers end with it. Still our child and not waited for, so the number is its.
                Command::new("kill")
                    .args(["-KILL", &pid.to_string()])
                    .status()
                    .map_err(|e| Failure::new(format!("kill cannot be run: {e}")))?;
                let _ = waiting.join();
                return Ok((Ran::TooSlow, began.elapsed()));
            }
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::new("a run cannot be waited for"));
            }
        };
        let said = fs::read_to_string(log).unwrap_or_default();
        let ran = match catcher.is_torture() {
            true => told_by_torture(status),
            false => told_by_tests(status, &said),
        };
        Ok((ran, began.elapsed()))
    }
}

/// A test binary says how many passed and failed; where it was killed, or was asked for a test that
/// does not exist, it proves nothing.
fn told_by_tests(status: ExitStatus, said: &str) -> Ran {
    let result = said.lines().rfind(|line| line.starts_with("test result:"));
    let ran_some = result.is_some_and(|line| !line.contains(" 0 passed; 0 failed;"));
    match (status.code(), ran_some) {
        (Some(0), true) => Ran::Passed,
        (Some(101), true) => Ran::Failed,
        _ => Ran::Unclear,
    }
}

/// Torture exits with 1 where a promise was broken, and with 70 where it proved nothing.
fn told_by_torture(status: ExitStatus) -> Ran {
    match status.code() {
        Some(0) => Ran::Passed,
        Some(1) => Ran::Failed,
        _ => Ran::Unclear,
    }
}

#[derive(Deserialize)]
struct Message {
    executable: Option<PathBuf>,
    target: Option<Target>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}
