//! A server as a child process.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::OpenOptions;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::port::Port;
use crate::{Deadline, SKIP};

/// How long a server may take to be ready, on a machine that is busy with other tests.
const READY_LIMIT: Duration = Duration::from_secs(30);

/// How long a server may take to end when it is asked to.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// Kills the server and removes its directory when the pipe from the test's process closes: so
/// that a test which is itself killed leaves nothing behind. Not the kernel's parent-death signal,
/// which follows the thread that spawned, and a test's thread ends before its shared servers.
const WATCHDOG: &str = r#"trap '' INT TERM HUP; read _; kill -9 "$1"; rm -rf "$2""#;

/// Where `scripts/setup` puts the servers that no Debian package brings: a virtual environment of
/// Python, whose package index has them as binaries.
pub const SETUP_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/servers/bin");

/// The path of an installed program.
///
/// # Panics
/// Where it is neither in `PATH` nor in `elsewhere`; the message names the Debian package.
#[must_use]
pub fn program(server: &str, binary: &str, package: &str, elsewhere: &[&str]) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(elsewhere.iter().map(PathBuf::from))
        .map(|dir| dir.join(binary))
        .find(|file| file.is_file())
        .unwrap_or_else(|| {
            panic!(
                "{binary} is not installed: apt-get install {package}, \
                 or leave its tests out with {SKIP}={server}"
            )
        })
}

/// The path of a program that `scripts/setup` installs, the version that the tests are written for.
///
/// # Panics
/// Where it is not there; the message says how it comes there.
#[must_use]
pub fn set_up(server: &str, binary: &str) -> PathBuf {
    let file = PathBuf::from(SETUP_DIR).join(binary);
    assert!(
        file.is_file(),
        "{binary} is not installed: run scripts/setup, or leave its tests out with {SKIP}={server}"
    );
    file
}

/// True where every thread of the process is stopped.
fn stands_still(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        // It is gone.
        return true;
    };
    threads.flatten().all(|thread| {
        // Stopped, dead, or gone.
        after_name(&thread.path()).is_none_or(|state| state.starts_with(['T', 'Z', 'X']))
    })
}

/// Runs a program to its end and returns what it printed.
///
/// # Panics
/// Where it fails; the message holds its output.
pub fn run(command: &mut Command) -> String {
    let output = command
        .stdin(Stdio::null())
        .output()
        .unwrap_or_else(|e| panic!("{command:?} cannot be started: {e}"));
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{command:?} ended with {}:\n{stdout}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    stdout
}

/// How to start a server.
pub struct Launch {
    program: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    user: Option<String>,
    stop: Signal,
    port: Port,
    dir: TempDir,
    ready: Box<dyn Fn(u16) -> bool + Send + Sync>,
}

impl Launch {
    /// A launch of `program` on a free port in a new directory; ready when the port takes a
    /// connection, stopped by TERM.
    #[must_use]
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            env: Vec::new(),
            user: None,
            stop: Signal::TERM,
            port: Port::free(),
            dir: TempDir::with_prefix("fencelock-").expect("a temporary directory"),
            ready: Box::new(listens),
        }
    }

    /// The port, to be named in the arguments.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The directory, to be named in the arguments and filled before the start.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args
            .extend(args.into_iter().map(|a| a.as_ref().to_owned()));
        self
    }

    /// Sets a variable of the server's environment.
    #[must_use]
    pub fn env(mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env
            .push((key.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Runs it as this user where the test runs as root, through setpriv(1); the directory becomes
    /// that user's.
    #[must_use]
    pub fn user(mut self, user: &str) -> Self {
        if rustix::process::geteuid().is_root() {
            run(Command::new("chown").args(["-R", user]).arg(self.dir()));
            self.user = Some(user.to_owned());
        }
        self
    }

    /// The signal that ends it in order.
    #[must_use]
    pub fn stop_signal(mut self, signal: Signal) -> Self {
        self.stop = signal;
        self
    }

    /// How to see that it is ready, given the port. Asked again until it says so.
    #[must_use]
    pub fn ready(mut self, ready: impl Fn(u16) -> bool + Send + Sync + 'static) -> Self {
        self.ready = Box::new(ready);
        self
    }

    /// A command that runs `program` as the server's user: for what prepares its directory.
    #[must_use]
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let program = program.as_ref();
        match &self.user {
            None => Command::new(program),
            Some(user) => {
                let mut command = Command::new("setpriv");
                command
                    .args(["--reuid", user, "--regid", user, "--init-groups", "--"])
                    .arg(program);
                command
            }
        }
    }

    /// Starts the server and waits until it is ready.
    ///
    /// # Panics
    /// Where it ends, or is not ready in time; the message holds its log.
    #[must_use]
    pub fn start(self) -> Server {
        let mut server = Server {
            launch: self,
            running: None,
        };
        server.start();
        server
    }
}

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launch")
            .field("program", &self.program)
            .field("args", &self.args)
            .field("port", &self.port())
            .field("dir", &self.dir())
            .finish_non_exhaustive()
    }
}

/// A server that was started, and can be paused, killed and started again on the same port and
/// directory. Killed when dropped.
#[derive(Debug)]
pub struct Server {
    launch: Launch,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    watchdog: Child,
}

impl Server {
    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.launch.port()
    }

    /// `127.0.0.1:port`.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port()))
    }

    /// The directory; it outlives kills and restarts.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.launch.dir()
    }

    /// The process id.
    ///
    /// # Panics
    /// Where the server is not running.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.running.as_ref().expect("a running server").child.id()
    }

    /// What the server has printed, in all its lives.
    #[must_use]
    pub fn log(&self) -> String {
        let bytes = std::fs::read(self.log_path()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Stops the server and its children in their tracks (SIGSTOP), and returns once no thread of
    /// the server runs: on a busy machine one may answer a request after the signal was sent.
    pub fn pause(&self) {
        crate::eventually("a paused server", STOP_LIMIT, || {
            // Again, for a child that was started meanwhile.
            self.signal_all(Signal::STOP);
            tree(self.pid()).into_iter().all(stands_still)
        });
    }

    /// Lets a paused server go on.
    pub fn resume(&self) {
        self.signal_all(Signal::CONT);
    }

    /// Kills the server and its children at once (SIGKILL).
    pub fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            end(running, None);
        }
    }

    /// Ends the server in order, by its own signal.
    ///
    /// # Panics
    /// Where it does not end in time.
    pub fn stop(&mut self) -> Option<ExitStatus> {
        let mut running = self.running.take()?;
        send(running.child.id(), self.launch.stop);
        let deadline = Deadline::after(STOP_LIMIT);
        let status = loop {
            if let Some(status) = running.child.try_wait().expect("a child to wait for") {
                break Some(status);
            }
            if deadline.passed() {
                break None;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        end(running, status);
        assert!(status.is_some(), "the server did not stop:\n{}", self.log());
        status
    }

    /// Starts the server again after [`kill`](Self::kill) or [`stop`](Self::stop); kills it first
    /// where it runs.
    pub fn restart(&mut self) {
        self.kill();
        self.start();
    }

    /// Replaces the arguments of later starts.
    pub fn set_args<S: AsRef<OsStr>>(&mut self, args: impl IntoIterator<Item = S>) {
        self.launch.args = args.into_iter().map(|a| a.as_ref().to_owned()).collect();
    }

    fn start(&mut self) {
        let launch = &self.launch;
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log_path())
            .expect("a log file");
        let err = log.try_clone().expect("a second handle of the log");
        let mut child = launch
            .command(&launch.program)
            .args(&launch.args)
            .envs(launch.env.iter().map(|(k, v)| (k, v)))
            .current_dir(launch.dir())
            .stdin(Stdio::null())
            .stdout(Stdio::from(log))
            .stderr(Stdio::from(err))
            // Not in the test's group: a runner that signals that group must not stop us in the
            // middle of what a test does to its server.
            .process_group(0)
            .spawn()
            .unwrap_or_else(|e| panic!("{:?} cannot be started: {e}", launch.program));
        let watchdog = Command::new("sh")
            .args(["-c", WATCHDOG, "watchdog", &child.id().to_string()])
            .arg(launch.dir())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .expect("sh");
        let deadline = Deadline::after(READY_LIMIT);
        let failed = loop {
            if let Some(status) = child.try_wait().expect("a child to wait for") {
                break Some(format!("it ended with {}", describe(status)));
            }
            if (launch.ready)(launch.port()) {
                break None;
            }
            if deadline.passed() {
                break Some(format!("it is not ready after {READY_LIMIT:?}"));
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        self.running = Some(Running { child, watchdog });
        if let Some(why) = failed {
            self.kill();
            panic!("{:?}: {why}\n{}", self.launch.program, self.log());
        }
    }

    fn signal_all(&self, signal: Signal) {
        for pid in tree(self.pid()) {
            send(pid, signal);
        }
    }

    fn log_path(&self) -> PathBuf {
        self.dir().join("server.log")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// True where something takes connections on the port.
#[must_use]
pub fn listens(port: u16) -> bool {
    TcpStream::connect_timeout(
        &SocketAddr::from(([127, 0, 0, 1], port)),
        Duration::from_secs(1),
    )
    .is_ok()
}

/// Copies a directory with all its files, for servers that start from a prepared one.
///
/// # Panics
/// Where it cannot be copied.
pub fn copy_dir(from: &Path, to: &Path) {
    run(Command::new("cp").arg("-a").arg(from).arg(to));
}

fn end(mut running: Running, ended: Option<ExitStatus>) {
    // First, so that it cannot strike at a process that has the number later.
    let _ = running.watchdog.kill();
    let _ = running.watchdog.wait();
    if ended.is_none() {
        let all = tree(running.child.id());
        for pid in &all {
            send(*pid, Signal::KILL);
        }
        let _ = running.child.wait();
        // A server may refuse to start while a child of the last one is there.
        let deadline = Deadline::after(STOP_LIMIT);
        while all.iter().any(|pid| !is_dead(*pid)) && !deadline.passed() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// True where the process has ended, whether or not somebody has asked how.
fn is_dead(pid: u32) -> bool {
    let process = PathBuf::from(format!("/proc/{pid}"));
    after_name(&process).is_none_or(|state| state.starts_with(['Z', 'X']))
}

fn describe(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("signal {signal}"),
        None => status.to_string(),
    }
}

fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // It may have ended by itself.
        let _ = kill_process(pid, signal);
    }
}

/// A process and its descendants, parents first.
fn tree(root: u32) -> Vec<u32> {
    let mut children: Vec<(u32, u32)> = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        if let Some(parent) = parent(&entry.path()) {
            children.push((parent, pid));
        }
    }
    let mut found = vec![root];
    let mut next = 0;
    while let Some(&parent) = found.get(next) {
        found.extend(
            children
                .iter()
                .filter(|(p, _)| *p == parent)
                .map(|(_, c)| c),
        );
        next += 1;
    }
    found
}

fn parent(process: &Path) -> Option<u32> {
    after_name(process)?.split_whitespace().nth(1)?.parse().ok()
}

/// What is told of a process or thread behind its name: its state first, then its parent. `None` where it
/// is gone.
fn after_name(process: &Path) -> Option<String> {
    let stat = std::fs::read(process.join("stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    // The name is in brackets, and may hold any.
    let (_, rest) = stat.rsplit_once(") ")?;
    Some(rest.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_names_its_package() {
        let missing = std::panic::catch_unwind(|| program("x", "no-such-server", "some-pkg", &[]));
        let message = missing.unwrap_err();
        let message = message.downcast_ref::<String>().unwrap();
        assert!(message.contains("apt-get install some-pkg"), "{message}");
    }

    #[test]
    fn a_paused_tree_is_paused_whole_and_killed_whole() {
        let launch = Launch::new("/bin/sh")
            .args(["-c", "sleep 1000 & sleep 1000; true"])
            .ready(|_| true);
        let mut server = launch.start();
        let pid = server.pid();
        crate::eventually("children", Duration::from_secs(5), || tree(pid).len() == 3);
        let all = tree(pid);
        server.pause();
        crate::eventually("all stopped", Duration::from_secs(5), || {
            all.iter().all(|pid| state(*pid) == Some('T'))
        });
        server.kill();
        crate::eventually("all gone", Duration::from_secs(5), || {
            all.iter()
                .all(|pid| matches!(state(*pid), None | Some('Z')))
        });
    }

    #[test]
    fn what_a_killed_test_had_started_is_killed_too() {
        const CHILD: &str = "FENCELOCK_TESTBED_CHILD";
        if let Some(report) = std::env::var_os(CHILD) {
            let server = Launch::new("/bin/sleep")
                .arg("1000")
                .ready(|_| true)
                .start();
            let told = format!("{}\n{}\n", server.pid(), server.dir().display());
            std::fs::write(report, told).unwrap();
            std::thread::sleep(Duration::from_secs(1_000));
        }
        let scratch = TempDir::new().unwrap();
        let report = scratch.path().join("report");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "process::tests::what_a_killed_test_had_started_is_killed_too",
            ])
            .env(CHILD, &report)
            .spawn()
            .unwrap();
        let mut told = String::new();
        crate::eventually("a server in the child", Duration::from_secs(10), || {
            told = std::fs::read_to_string(&report).unwrap_or_default();
            told.lines().count() == 2
        });
        child.kill().unwrap();
        child.wait().unwrap();
        let (pid, dir) = told.trim().split_once('\n').unwrap();
        let pid = pid.parse().unwrap();
        crate::eventually("its end", Duration::from_secs(5), || {
            matches!(state(pid), None | Some('Z')) && !Path::new(dir).exists()
        });
    }

    fn state(pid: u32) -> Option<char> {
        after_name(Path::new(&format!("/proc/{pid}")))?
            .chars()
            .next()
    }
}
