//! The janitor: a small process that clears up after a run which was killed.
//!
//! It is in a session of its own, and reads from a pipe what there is to clear up. Where the pipe closes
//! without a farewell, the run is gone, and its clients with it by their death signal: then the janitor
//! kills the run's own server, and takes away its places.

use std::ffi::OsString;
use std::io::{self, BufRead as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::SigSet;
use rustix::process::{Signal, setsid};
use serde::{Deserialize, Serialize};

use super::own::signal_tree;
use super::place::{Trace, erase};
use crate::exit_codes;
use crate::failure::{Failure, Result};

/// The hidden first argument that makes the executable be a janitor.
pub(crate) const ARG: &str = "__torture-janitor";

/// How long what killed clients had sent may take to arrive.
const SETTLING: Duration = Duration::from_millis(500);

/// How long one place may take.
const ERASE_LIMIT: Duration = Duration::from_secs(15);

/// What there is to clear up. The URLs may hold passwords, so it has no `Debug`.
#[derive(Default, Serialize, Deserialize)]
pub(crate) struct Duties {
    pub(crate) mark: String,
    pub(crate) traces: Vec<Trace>,
    /// The directory of the run's own server.
    pub(crate) server_dir: Option<PathBuf>,
}

/// The side of the run.
#[derive(Debug)]
pub(crate) struct Janitor {
    process: Child,
    orders: ChildStdin,
}

impl Janitor {
    /// Starts it before there is anything to clear up.
    pub(crate) fn start() -> Result<Self> {
        let cannot = |e: io::Error| Failure::system("the janitor cannot be started", e);
        let mut process = Command::new("/proc/self/exe")
            .arg0("fencelock")
            .arg(ARG)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(cannot)?;
        let Some(orders) = process.stdin.take() else {
            return Err(cannot(io::ErrorKind::BrokenPipe.into()));
        };
        Ok(Self { process, orders })
    }

    /// Tells what there is to clear up from now on.
    pub(crate) fn duties(&mut self, duties: &Duties) -> Result<()> {
        let duties = serde_json::to_string(duties)
            .map_err(|e| Failure::system("the janitor cannot be told", io::Error::from(e)))?;
        self.order(&format!("duties {duties}"));
        Ok(())
    }

    /// Tells of the process of the run's own server, or of one that makes its data, whenever it is
    /// another.
    pub(crate) fn server(&mut self, pid: Option<u32>) {
        self.order(&format!("server {}", pid.unwrap_or(0)));
    }

    /// Sends it home: all is cleared up.
    pub(crate) fn dismiss(mut self) {
        self.order("dismiss");
        let _ = self.process.wait();
    }

    fn order(&mut self, line: &str) {
        use io::Write as _;
        // A janitor that is dead can clear up nothing; the run still does.
        let _ = writeln!(self.orders, "{line}");
    }
}

/// Is the janitor.
pub(crate) fn main(_: impl Iterator<Item = OsString>) -> Failure {
    // Nobody would hear why it failed.
    match watch() {
        Ok(()) => Failure::quiet(exit_codes::OK),
        Err(_) => Failure::quiet(exit_codes::INDETERMINATE),
    }
}

fn watch() -> Result<()> {
    let cannot = |e: io::Error| Failure::system("the janitor", e);
    SigSet::all().thread_block().map_err(|e| cannot(e.into()))?;
    setsid().map_err(|e| cannot(e.into()))?;
    let mut duties = Duties::default();
    let mut server = 0;
    for line in io::stdin().lock().lines() {
        let line = line.map_err(cannot)?;
        if line == "dismiss" {
            return Ok(());
        }
        if let Some(pid) = line.strip_prefix("server ") {
            server = pid.parse().unwrap_or(0);
        }
        if let Some(told) = line.strip_prefix("duties ") {
            duties = serde_json::from_str(told)
                .map_err(|_| Failure::usage(format!("{ARG} is internal to fencelock torture")))?;
        }
    }
    std::thread::sleep(SETTLING);
    if server != 0 {
        signal_tree(server, Signal::KILL);
    }
    if let Some(dir) = &duties.server_dir {
        let _ = std::fs::remove_dir_all(dir);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(cannot)?;
    runtime.block_on(async {
        for trace in &duties.traces {
            let engine_is_gone = matches!(trace, Trace::Engine(_)) && server != 0;
            if !engine_is_gone {
                let _ = tokio::time::timeout(ERASE_LIMIT, erase(trace, &duties.mark)).await;
            }
        }
    });
    Ok(())
}
