//! At a terminal: the command can read from it, and Ctrl-C and Ctrl-Z do what they do elsewhere.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::Command;

use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

use crate::bench::{Bench, Running, eventually};

/// `fencelock` as the leader of a session whose terminal we hold the other end of.
struct Terminal {
    /// Keeps the terminal open between its users.
    _slave: File,
    keys: File,
    screen: BufReader<File>,
    session: Running,
}

impl Terminal {
    fn start(bench: &Bench, script: &str) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap();
        let mut options = File::options();
        let slave = options.read(true).write(true);
        let slave = slave.open(path.to_str().unwrap()).unwrap();
        // It forks, as we start it as a group's leader, and passes the exit code on.
        let run = bench.run_sh("job", &["--ttl", "60s"], script);
        let mut command = Command::new("setsid");
        command
            .args(["--ctty", "--wait"])
            .arg(run.get_program())
            .args(run.get_args());
        for (name, value) in run.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
            .current_dir(run.get_current_dir().unwrap())
            .stdin(slave.try_clone().unwrap())
            .env("OUT", path.to_str().unwrap());
        let session = Running::start(&mut command);
        let master = File::from(master);
        Self {
            _slave: slave,
            keys: master.try_clone().unwrap(),
            screen: BufReader::new(master),
            session,
        }
    }

    fn press(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).unwrap();
    }

    /// The next line of the screen that begins with `>`, which the echo of keys does not.
    fn line(&mut self) -> String {
        loop {
            let mut line = String::new();
            self.screen.read_line(&mut line).unwrap();
            if let Some(line) = line.trim_end().strip_prefix('>') {
                return line.to_owned();
            }
        }
    }

    /// The process of `fencelock run`, by what the command said of its parent.
    fn run_pid(&mut self) -> Pid {
        Pid::from_raw(self.line().parse().unwrap()).unwrap()
    }
}

fn is_stopped(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap();
    stat.rsplit_once(") ").unwrap().1.starts_with('T')
}

#[test]
fn the_command_reads_from_the_terminal() {
    let bench = Bench::new();
    let mut terminal = Terminal::start(
        &bench,
        "echo '>ready' >$OUT; read -r line; echo \">got $line\" >$OUT; exit 3",
    );
    assert_eq!(terminal.line(), "ready");
    terminal.press(b"hello\n");
    assert_eq!(terminal.line(), "got hello");
    terminal.session.end().expect_code(3);
}

#[test]
fn control_c_reaches_the_command_and_its_code_comes_back() {
    let bench = Bench::new();
    let script = "trap 'exit 7' INT; echo '>ready' >$OUT; while :; do sleep 0.02; done";
    let mut terminal = Terminal::start(&bench, script);
    assert_eq!(terminal.line(), "ready");
    terminal.press(b"\x03");
    terminal.session.end().expect_code(7);
    assert!(!bench.is_held("job"));
}

#[test]
fn control_z_stops_both_and_they_go_on_together() {
    let bench = Bench::new();
    let script = "echo \">$PPID\" >$OUT; read -r line; echo \">got $line\" >$OUT";
    let mut terminal = Terminal::start(&bench, script);
    let run = terminal.run_pid();
    terminal.press(b"\x1a");
    eventually("run is stopped", || is_stopped(run));
    kill_process(run, Signal::CONT).unwrap();
    terminal.press(b"hello\n");
    assert_eq!(terminal.line(), "got hello");
    terminal.session.end().expect_code(0);
}
