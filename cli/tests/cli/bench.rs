//! What the tests of the command line share: a store of their own for each, and processes that do
//! not outlive their test.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tempfile::TempDir;

/// Far more than anything here takes; a test that waits for so long fails.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// A directory with a store of its own.
pub(crate) struct Bench {
    dir: TempDir,
    /// The store where it is not one of this directory.
    store: Option<String>,
}

/// How a command ended, and what it said.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self {
            dir: tempfile::tempdir().expect("a temporary directory"),
            store: None,
        }
    }

    /// A bench whose store is this one.
    pub(crate) fn on(store: &str) -> Self {
        Self {
            store: Some(store.to_owned()),
            ..Self::new()
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn store(&self) -> String {
        match &self.store {
            Some(store) => store.clone(),
            None => format!("file://{}", self.path("locks").display()),
        }
    }

    /// `fencelock` with the store of this bench, and nothing else of fencelock's in the environment.
    pub(crate) fn command<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_fencelock"));
        for name in ["NAME", "TOKEN", "FENCE", "HOLDER"] {
            command.env_remove(format!("FENCELOCK_{name}"));
        }
        command
            .env_remove("TRACEPARENT")
            .env("FENCELOCK_STORE", self.store())
            // For private servers, which know no others; a URL holds none.
            .env("AWS_ACCESS_KEY_ID", fencelock_testbed::s3::KEY)
            .env("AWS_SECRET_ACCESS_KEY", fencelock_testbed::s3::SECRET)
            // So that `sh -c 'fencelock …'` finds the one under test.
            .env("PATH", path_with_fencelock())
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .args(args);
        command
    }

    /// `fencelock` as a user who owns nothing here, where we are one who may do everything.
    pub(crate) fn command_without_rights(&self, args: &[&str]) -> Command {
        if !rustix::process::geteuid().is_root() {
            return self.command(args);
        }
        // Where that user reaches it.
        let executable = self.path("fencelock");
        if !executable.exists() {
            std::fs::copy(env!("CARGO_BIN_EXE_fencelock"), &executable).expect("a copy");
            let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(self.dir.path(), open).expect("an open directory");
        }
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(executable)
            .args(args)
            .env("FENCELOCK_STORE", self.store())
            .current_dir(self.dir.path())
            .stdin(Stdio::null());
        command
    }

    pub(crate) fn fencelock<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Ended {
        ended(&mut self.command(args))
    }

    /// `fencelock run NAME FLAGS -- sh -c SCRIPT`.
    pub(crate) fn run_sh(&self, name: &str, flags: &[&str], script: &str) -> Command {
        let mut command = self.command(["run", name]);
        command.args(flags).args(["--", "sh", "-c", script]);
        command
    }

    /// The state of a lock, as `show --json` tells it.
    pub(crate) fn show(&self, name: &str) -> serde_json::Value {
        let shown = self
            .fencelock(["show", "--json", "--", name])
            .expect_code(0);
        serde_json::from_str(&shown.out).expect("JSON")
    }

    pub(crate) fn is_held(&self, name: &str) -> bool {
        self.show(name)["holders"]
            .as_array()
            .is_some_and(|h| !h.is_empty())
    }
}

impl Ended {
    #[track_caller]
    pub(crate) fn expect_code(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).expect("one JSON object")
    }
}

pub(crate) fn ended(command: &mut Command) -> Ended {
    let output = command.output().expect("fencelock starts");
    Ended {
        code: code(output.status),
        out: String::from_utf8_lossy(&output.stdout).into_owned(),
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn code(status: std::process::ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 1000 + status.signal().unwrap_or(0))
}

fn path_with_fencelock() -> std::ffi::OsString {
    let dir = Path::new(env!("CARGO_BIN_EXE_fencelock"))
        .parent()
        .expect("a directory");
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths(std::iter::once(dir.to_owned()).chain(std::env::split_paths(&path)))
        .expect("a PATH")
}

/// A process under way, in a session of its own, killed with all of it when dropped.
pub(crate) struct Running {
    pub(crate) process: Child,
    lines: Option<BufReader<ChildStdout>>,
}

impl Running {
    /// Starts `command` in a process group of its own, its standard output and error read by us.
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut process = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("it starts");
        let lines = process.stdout.take().map(BufReader::new);
        Self { process, lines }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.process.id()).expect("a pid")).expect("a pid")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("it can be signalled");
    }

    /// The next line of its standard output, without its end; empty at the end of all.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        if let Some(lines) = &mut self.lines {
            lines.read_line(&mut line).expect("a line");
        }
        line.trim_end().to_owned()
    }

    /// The first line of its standard error, which [`end`](Self::end) then lacks.
    pub(crate) fn said(&mut self) -> String {
        let err = self.process.stderr.as_mut().expect("its errors");
        let mut line = Vec::new();
        let mut byte = [0];
        while err.read(&mut byte).expect("a line") == 1 && byte != *b"\n" {
            line.extend(byte);
        }
        String::from_utf8_lossy(&line).into_owned()
    }

    /// Reads a line that has to be a process id.
    pub(crate) fn line_pid(&mut self) -> Pid {
        let line = self.line();
        line.parse()
            .ok()
            .and_then(Pid::from_raw)
            .unwrap_or_else(|| panic!("a pid: {line:?}"))
    }

    /// True once its handler for TERM is in place.
    pub(crate) fn catches_term(&self) -> bool {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()));
        let status = status.unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
        caught.unwrap_or(0) & (1 << 14) != 0
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.process.try_wait().expect("a status").is_some()
    }

    /// Waits for its end and returns all that it said and was not read.
    #[track_caller]
    pub(crate) fn end(mut self) -> Ended {
        eventually("it ends", || self.has_ended());
        let status = self.process.wait().expect("a status");
        let mut ended = Ended {
            code: code(status),
            out: String::new(),
            err: String::new(),
        };
        if let Some(lines) = &mut self.lines {
            lines.read_to_string(&mut ended.out).expect("its output");
        }
        if let Some(err) = &mut self.process.stderr {
            err.read_to_string(&mut ended.err).expect("its errors");
        }
        ended
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.has_ended() {
            let _ = kill_process_group(self.pid(), Signal::KILL);
            let _ = self.process.wait();
        }
    }
}

/// True while the process runs; a zombie does not.
pub(crate) fn is_alive(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.is_ok_and(|stat| {
        let state = stat
            .rsplit_once(')')
            .map(|(_, rest)| rest.trim_start().chars().next());
        !matches!(state, Some(Some('Z' | 'X')))
    })
}

/// Waits until `condition` holds; fails after [`LIMIT`].
#[track_caller]
pub(crate) fn eventually(what: &str, condition: impl FnMut() -> bool) -> Duration {
    within(LIMIT, what, condition)
}

/// Waits until `condition` holds, and returns how long that took; fails after `limit`.
#[track_caller]
pub(crate) fn within(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) -> Duration {
    let started = now();
    while !condition() {
        assert!(started.elapsed() < limit, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
    started.elapsed()
}

#[expect(
    clippy::disallowed_methods,
    reason = "a test's stopwatch decides no lease"
)]
pub(crate) fn now() -> Instant {
    Instant::now()
}
