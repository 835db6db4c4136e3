//! Servers of a run's own, which may be stopped, killed and started again: from the `PATH`, on a free
//! port of the loopback interface, in a temporary directory, and gone at the end.

mod server;
mod tree;

use std::fs;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use clap::ValueEnum;
use rustix::process::Signal;
use tempfile::TempDir;

use super::janitor::{Duties, Janitor};
use super::site::temporary;
use crate::failure::{Failure, Result};

pub(crate) use self::tree::signal_tree;

/// The engines whose servers can be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OwnKind {
    /// redis-server, which syncs every write to its disk
    #[cfg(feature = "redis")]
    Redis,
    /// postgres, in a new cluster
    #[cfg(feature = "postgres")]
    Postgres,
    /// mariadbd, which syncs every commit to its disk
    #[cfg(feature = "mysql")]
    Mysql,
    /// etcd, one member
    #[cfg(feature = "etcd")]
    Etcd,
    /// nats-server with JetStream, which syncs every message to its disk
    #[cfg(feature = "nats")]
    Nats,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Runs,
    Paused,
    Killed,
}

/// A server of our own. Killed, with its directory removed, when it is dropped.
#[derive(Debug)]
pub(crate) struct Own {
    kind: OwnKind,
    dir: TempDir,
    command: Vec<String>,
    port: u16,
    process: Option<Child>,
    state: State,
}

impl Own {
    /// Starts a server, which may not be ready yet, and has the janitor know of it from the first.
    pub(crate) fn start(kind: OwnKind, janitor: &mut Janitor) -> Result<Self> {
        let dir = temporary("fencelock-torture-")?;
        janitor.duties(&Duties {
            server_dir: Some(dir.path().to_owned()),
            ..Duties::default()
        })?;
        let port = server::free_port()?;
        let command = server::command(kind, dir.path(), port, janitor)?;
        let mut own = Self {
            kind,
            dir,
            command,
            port,
            process: None,
            state: State::Killed,
        };
        own.launch()?;
        janitor.server(own.pid());
        Ok(own)
    }

    /// The URL of its locks.
    pub(crate) fn url(&self) -> String {
        server::url(self.kind, self.port)
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Its process id, while it runs.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Child::id)
    }

    /// What it has logged last, for an error.
    pub(crate) fn log(&self) -> String {
        let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().rev().take(5).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("; ")
    }

    /// Stops it and its children in their tracks.
    pub(crate) fn pause(&mut self) {
        if let Some(pid) = self.pid() {
            signal_tree(pid, Signal::STOP);
            self.state = State::Paused;
        }
    }

    /// Kills it and its children at once.
    pub(crate) fn kill(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            signal_tree(process.id(), Signal::KILL);
            process
                .wait()
                .map_err(|e| Failure::system("the server cannot be waited for", e))?;
        }
        self.state = State::Killed;
        Ok(())
    }

    /// Lets it go on, or starts it again on its data.
    pub(crate) fn go_on(&mut self) -> Result<()> {
        match self.state {
            State::Runs => {}
            State::Paused => {
                if let Some(pid) = self.pid() {
                    signal_tree(pid, Signal::CONT);
                }
            }
            State::Killed => return self.launch(),
        }
        self.state = State::Runs;
        Ok(())
    }

    fn launch(&mut self) -> Result<()> {
        let mut words = self.command.iter();
        let program = words.next().map_or("", String::as_str);
        let cannot = |e: io::Error| Failure::system(program, e);
        let log = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.dir.path().join("log"))
            .map_err(cannot)?;
        let process = Command::new(program)
            .args(words)
            .current_dir(self.dir.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(cannot)?)
            .stderr(log)
            // A terminal's signals are for us, who end it in order.
            .process_group(0)
            .spawn()
            .map_err(cannot)?;
        self.process = Some(process);
        self.state = State::Runs;
        Ok(())
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // There is nobody left to tell.
        let _ = self.kill();
    }
}
