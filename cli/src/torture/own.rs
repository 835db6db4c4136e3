//! Servers of a run's own, which may be stopped, killed and started again: from the `PATH`, on a free
//! port of the loopback interface, in a temporary directory, and gone at the end.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use clap::ValueEnum;
use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

use crate::exit_codes;
use crate::failure::{Failure, Result};

/// The engines whose servers can be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OwnKind {
    /// redis-server, which syncs every write to its disk
    #[cfg(feature = "redis")]
    Redis,
    /// postgres, in a new cluster
    #[cfg(feature = "postgres")]
    Postgres,
    /// etcd, one member
    #[cfg(feature = "etcd")]
    Etcd,
}

/// Where servers are that no PATH leads to.
const ELSEWHERE: [&str; 3] = ["/usr/sbin", "/sbin", "/usr/local/bin"];

/// Where Debian has those of PostgreSQL, by version.
const POSTGRES_VERSIONS: &str = "/usr/lib/postgresql";

/// Whom PostgreSQL runs as where we are root, which it refuses.
const POSTGRES_USER: &str = "postgres";

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
    /// Starts a server. It may not be ready yet.
    pub(crate) fn start(kind: OwnKind) -> Result<Self> {
        let dir = tempfile::Builder::new()
            .prefix("fencelock-torture-")
            .tempdir()
            .map_err(|e| Failure::system("temporary directory", e))?;
        let port = free_port()?;
        let command = match kind {
            #[cfg(feature = "redis")]
            OwnKind::Redis => redis(dir.path(), port)?,
            #[cfg(feature = "postgres")]
            OwnKind::Postgres => postgres(dir.path(), port)?,
            #[cfg(feature = "etcd")]
            OwnKind::Etcd => etcd(dir.path(), port)?,
        };
        let mut own = Self {
            kind,
            dir,
            command,
            port,
            process: None,
            state: State::Killed,
        };
        own.launch()?;
        Ok(own)
    }

    /// The URL of its locks.
    pub(crate) fn url(&self) -> String {
        let port = self.port;
        match self.kind {
            #[cfg(feature = "redis")]
            OwnKind::Redis => format!("redis://127.0.0.1:{port}"),
            #[cfg(feature = "postgres")]
            OwnKind::Postgres => format!("postgres://{POSTGRES_USER}@127.0.0.1:{port}/postgres"),
            #[cfg(feature = "etcd")]
            OwnKind::Etcd => format!("etcd://127.0.0.1:{port}"),
        }
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

/// Signals a process and all below it, the parents first, so that none starts another.
pub(crate) fn signal_tree(root: u32, signal: Signal) {
    let mut tree = vec![root];
    if let Some(pid) = pid_of(root) {
        // It may be gone.
        let _ = kill_process(pid, Signal::STOP);
    }
    let mut parents = vec![root];
    while let Some(parent) = parents.pop() {
        for child in children(parent) {
            if let Some(pid) = pid_of(child) {
                let _ = kill_process(pid, Signal::STOP);
            }
            parents.push(child);
            tree.push(child);
        }
    }
    if signal == Signal::STOP {
        return;
    }
    for member in tree {
        if let Some(pid) = pid_of(member) {
            let _ = kill_process(pid, signal);
        }
    }
}

fn pid_of(raw: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(raw).ok()?)
}

fn children(parent: u32) -> Vec<u32> {
    let Ok(processes) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    processes
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // After the name, which may hold anything, come the state and the parent.
            let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
            let found = after.split_whitespace().nth(1);
            found.and_then(|found| found.parse::<u32>().ok()) == Some(parent)
        })
        .collect()
}

fn free_port() -> Result<u16> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| listener.local_addr())
        .map(|address| address.port())
        .map_err(|e| Failure::system("no free port", e))
}

fn program(name: &str, more: &[PathBuf]) -> Result<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(ELSEWHERE.iter().map(PathBuf::from))
        .chain(more.iter().cloned())
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
        .map(|file| file.display().to_string())
        .ok_or_else(|| {
            Failure::new(
                exit_codes::CONFIG,
                format!("{name} is not installed, and --own starts it; give --store URL instead"),
            )
        })
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[cfg(feature = "redis")]
fn redis(dir: &Path, port: u16) -> Result<Vec<String>> {
    let (program, port) = (program("redis-server", &[])?, port.to_string());
    let dir = dir.display().to_string();
    // A kill must not lose what was acknowledged, so each write is synced before its answer.
    Ok(words(&[
        &program,
        "--port",
        &port,
        "--bind",
        "127.0.0.1",
        "--dir",
        &dir,
        "--save",
        "",
        "--appendonly",
        "yes",
        "--appendfsync",
        "always",
    ]))
}

#[cfg(feature = "postgres")]
fn postgres(dir: &Path, port: u16) -> Result<Vec<String>> {
    let mut versions: Vec<PathBuf> = fs::read_dir(POSTGRES_VERSIONS)
        .map(|dirs| dirs.flatten().map(|dir| dir.path().join("bin")).collect())
        .unwrap_or_default();
    versions.sort();
    versions.reverse();
    let data = dir.join("data").display().to_string();
    let (dir, port) = (dir.display().to_string(), port.to_string());
    let mut as_user = Vec::new();
    if geteuid().is_root() {
        run(&words(&["chown", POSTGRES_USER, &dir]))?;
        as_user = words(&[
            "setpriv",
            "--reuid",
            POSTGRES_USER,
            "--regid",
            POSTGRES_USER,
            "--init-groups",
            "--",
        ]);
    }
    let mut initdb = as_user.clone();
    let program_of = |name| program(name, &versions);
    initdb.extend(words(&[
        &program_of("initdb")?,
        "-A",
        "trust",
        "-U",
        POSTGRES_USER,
        "--no-sync",
        "-D",
        &data,
    ]));
    run(&initdb)?;
    let mut command = as_user;
    command.extend(words(&[
        &program_of("postgres")?,
        "-D",
        &data,
        "-p",
        &port,
        "-c",
        "listen_addresses=127.0.0.1",
        "-c",
        "shared_buffers=16MB",
        "-c",
    ]));
    command.push(format!("unix_socket_directories={dir}"));
    Ok(command)
}

#[cfg(feature = "etcd")]
fn etcd(dir: &Path, port: u16) -> Result<Vec<String>> {
    let program = program("etcd", &[])?;
    let clients = format!("http://127.0.0.1:{port}");
    let peers = format!("http://127.0.0.1:{}", free_port()?);
    let data = dir.join("data").display().to_string();
    // The shortest lease is one and a half election timeouts.
    Ok(words(&[
        &program,
        "--data-dir",
        &data,
        "--listen-client-urls",
        &clients,
        "--advertise-client-urls",
        &clients,
        "--listen-peer-urls",
        &peers,
        "--initial-advertise-peer-urls",
        &peers,
        "--initial-cluster",
        &format!("default={peers}"),
        "--heartbeat-interval",
        "50",
        "--election-timeout",
        "250",
        "--log-level",
        "error",
    ]))
}

/// Runs a program to its end.
#[cfg(feature = "postgres")]
fn run(command: &[String]) -> Result<()> {
    let mut words = command.iter();
    let program = words.next().map_or("", String::as_str);
    let output = Command::new(program)
        .args(words)
        .current_dir("/")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Failure::system(program, e))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Failure::new(
        exit_codes::CONFIG,
        format!("{program} failed: {}", said.trim()),
    ))
}
