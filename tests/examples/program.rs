//! An example as a process.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use rustix::process::{Pid, Signal, kill_process};

/// How long an example may take on a busy machine.
const END: Duration = Duration::from_secs(60);

/// The program of an example, as it was built last.
///
/// # Panics
/// Where it was not built, or one of its sources has changed since.
pub(crate) fn example(name: &str) -> Command {
    let built = "build the examples first: cargo build --workspace --all-features --examples";
    // Beside the directory of the tests.
    let test = std::env::current_exe().unwrap();
    let dir = test.ancestors().nth(2).unwrap().join("examples");
    let program = dir.join(name);
    let Ok(sources) = std::fs::read_to_string(program.with_extension("d")) else {
        panic!("{name} is not built; {built}");
    };
    let changed =
        |path: &str| -> SystemTime { std::fs::metadata(path).unwrap().modified().unwrap() };
    let made = changed(program.to_str().unwrap());
    let (_, sources) = sources.split_once(": ").expect("what cargo writes");
    for source in sources.split_whitespace() {
        assert!(changed(source) <= made, "{source} is newer; {built}");
    }
    let mut command = Command::new(program);
    // What the caller's environment says is not meant for it.
    for (key, _) in std::env::vars_os() {
        if key != "PATH" {
            command.env_remove(key);
        }
    }
    command
}

/// One that runs. Killed when it is dropped.
pub(crate) struct Running {
    child: Child,
    lines: Receiver<String>,
    errors: Option<JoinHandle<String>>,
}

impl Running {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let stdout = child.stdout.take().unwrap();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let mut stderr = child.stderr.take().unwrap();
        let errors = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            text
        });
        Self {
            child,
            lines,
            errors: Some(errors),
        }
    }

    /// The next line that it prints; fails where it ends without one.
    pub(crate) fn line(&mut self) -> String {
        match self.lines.recv_timeout(END) {
            Ok(line) => line,
            Err(error) => {
                let _ = self.child.kill();
                panic!("{error}: {}", self.errors.take().unwrap().join().unwrap())
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// What it printed since the last line, once it has ended well.
    pub(crate) fn end(mut self) -> Vec<String> {
        fencelock_testbed::eventually("the end of an example", END, || {
            self.child.try_wait().unwrap().is_some()
        });
        let errors = self.errors.take().unwrap().join().unwrap();
        let status = self.child.wait().unwrap();
        let lines = self.lines.iter().collect();
        assert!(status.success(), "{status} {lines:?} {errors}");
        lines
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs one to its end, and returns the lines that it printed.
pub(crate) fn run(command: &mut Command) -> Vec<String> {
    Running::start(command).end()
}
