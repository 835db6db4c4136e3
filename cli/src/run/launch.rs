//! The step between `fencelock run` and its command: a process that ties its life to that of
//! `run`, waits for the word, and becomes the command.
//!
//! It is this executable again, because the death signal has to be set in the child between
//! fork(2) and execve(2), and a closure there (`pre_exec`) would need `unsafe`. The death signal
//! survives execve(2), except into a set-user-ID or set-group-ID program or one with file
//! capabilities, for which the kernel clears it (PR_SET_PDEATHSIG(2const)): there the warden alone
//! stands guard.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use rustix::process::{
    Pid, Signal, getpid, getppid, kill_process, set_parent_process_death_signal,
};

use crate::exit_codes;
use crate::failure::Failure;

/// The hidden first argument that makes the executable be this step.
pub(crate) const ARG: &str = "__launch";

/// Becomes the command. The arguments are the process id of `run`, the command, and its arguments.
pub(crate) fn main(mut args: impl Iterator<Item = OsString>) -> Failure {
    let parent = args.next().and_then(|a| a.to_str()?.parse().ok());
    let (Some(parent), Some(command)) = (parent.and_then(Pid::from_raw), args.next()) else {
        return Failure::usage(format!("{ARG} is internal to fencelock run"));
    };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return Failure::system("the death signal cannot be set", error);
    }
    // Had `run` died before that, the signal would never come.
    if getppid() != Some(parent) {
        return Failure::quiet(exit_codes::INDETERMINATE);
    }
    // Here `run` sees us stopped, tells the warden whom to guard, and lets us go on. So at no time
    // does the command run unguarded; and there is no descriptor to leak into it.
    if let Err(error) = kill_process(getpid(), Signal::STOP) {
        return Failure::system("the command cannot be held at its start", error);
    }
    // exec resets the signal mask, and SIGPIPE to its default, which the runtime had changed.
    let error = Command::new(&command).args(args).exec();
    cannot_run(&command, &error)
}

fn cannot_run(command: &OsString, error: &io::Error) -> Failure {
    let command = command.to_string_lossy();
    match error.kind() {
        io::ErrorKind::NotFound => Failure::new(
            exit_codes::NOT_FOUND,
            format!("{command}: command not found"),
        ),
        _ => Failure::new(
            exit_codes::NOT_EXECUTABLE,
            format!("{command}: cannot be executed: {error}"),
        ),
    }
}
