//! `fencelock torture` as its users meet it: real engines, real processes, real faults; and nothing of it
//! left, whatever becomes of it.
//!
//! A short run on each engine; `FENCELOCK_LONG=1` makes them long. One at a time: a machine that is busy
//! with others proves less.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that cannot go on has to fail, its helpers included"
)]

#[path = "../cli/bench.rs"]
#[expect(
    dead_code,
    reason = "the tests of the other commands use the rest of it"
)]
mod bench;
mod control;
mod engines;
mod figures;
mod proof;
mod remains;

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;

use self::bench::{Bench, Running, ended, eventually, is_alive};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A directory of a test's own, where torture has its temporary files too.
struct Yard {
    bench: Bench,
    /// What all processes of this yard have in their environment.
    mark: String,
    _turn: MutexGuard<'static, ()>,
}

impl Yard {
    fn new() -> Self {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let bench = Bench::new();
        std::fs::create_dir(bench.path("tmp")).unwrap();
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        // PostgreSQL runs as another user where we are root.
        std::fs::set_permissions(bench.path("."), open).unwrap();
        let mark = bench.path("").display().to_string();
        Self {
            bench,
            mark,
            _turn: turn,
        }
    }

    fn tmp(&self) -> PathBuf {
        self.bench.path("tmp")
    }

    fn torture(&self, args: &[&str]) -> Command {
        let mut command = self.bench.command(["torture", "--ttl", "500ms"]);
        // Where scripts/setup puts servers that no package brings.
        let set_up = PathBuf::from(fencelock_testbed::process::SETUP_DIR);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let dirs = std::env::split_paths(&path).chain([set_up]);
        command
            .args(args)
            .env("PATH", std::env::join_paths(dirs).unwrap())
            .env("TMPDIR", self.tmp())
            .env("FENCELOCK_TEST_YARD", &self.mark);
        command
    }

    /// Runs to the end; the answer is its JSON.
    fn run(&self, code: i32, args: &[&str]) -> Value {
        let ended = ended(self.torture(args).arg("--json"));
        assert_eq!(ended.code, code, "{}{}", ended.out, ended.err);
        ended.json()
    }

    /// The processes that are left: they have our mark, and are not this one.
    fn processes(&self) -> Vec<String> {
        let mark = format!("FENCELOCK_TEST_YARD={}", self.mark);
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
            let is_ours = environment
                .split(|byte| *byte == 0)
                .any(|variable| variable == mark.as_bytes());
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            if is_ours && is_alive(pid) {
                let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
                found.push(String::from_utf8_lossy(&line).replace('\0', " "));
            }
        }
        found
    }

    /// Fails unless all that torture made is gone, soon.
    fn expect_empty(&self) {
        eventually("no process is left", || self.processes().is_empty());
        eventually("no temporary file is left", || {
            std::fs::read_dir(self.tmp()).unwrap().next().is_none()
        });
    }
}

/// How long a run on an engine takes.
fn duration() -> &'static str {
    match std::env::var_os("FENCELOCK_LONG") {
        Some(_) => "10m",
        None => "12s",
    }
}

/// A run that held: its control lost, and raise did not.
#[track_caller]
fn expect_held(told: &Value) {
    let arm = |arm: &str, what: &str| told["arms"][arm][what].as_u64().unwrap();
    assert_eq!(told["held"], true, "{told}");
    assert_eq!(told["violations"], serde_json::json!([]), "{told}");
    assert_eq!(arm("raise", "lost"), 0, "{told}");
    assert!(arm("raise", "acknowledged") > 0, "{told}");
    assert!(arm("unfenced", "lost") > 0, "{told}");
    assert!(told["overlaps"].as_u64().unwrap() > 0, "{told}");
    assert!(told["faults"]["pause"].as_u64().unwrap() > 0, "{told}");
}
