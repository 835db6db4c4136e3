//! Job control: lets the command, which is in a group of its own, read from our terminal.

use std::io;

use nix::sys::signal::{SigSet, Signal as Number};
use rustix::process::{Pid, Signal, getpgrp, getpid, kill_process};
use rustix::termios::{isatty, tcgetpgrp, tcsetpgrp};

use super::group::Group;

/// The terminal, handed to the command's group.
#[derive(Debug)]
pub(super) struct Terminal {
    ours: Pid,
    theirs: Pid,
}

impl Terminal {
    /// Hands the terminal on standard input to `group`, where it is ours to hand on.
    pub(super) fn hand_to(group: Group) -> Option<Self> {
        let terminal = Self {
            ours: getpgrp(),
            theirs: group.id,
        };
        if !isatty(io::stdin()) || !terminal.is_ours() {
            return None;
        }
        // Otherwise taking it back, from the background, would stop us.
        let mut background = SigSet::empty();
        background.add(Number::SIGTTOU);
        background.thread_block().ok()?;
        tcsetpgrp(io::stdin(), terminal.theirs).ok()?;
        Some(terminal)
    }

    /// Takes the terminal back.
    pub(super) fn take_back(&self) {
        // Where it has hung up there is nothing to take.
        let _ = tcsetpgrp(io::stdin(), self.ours);
    }

    /// Stops us too, as the shell that started us expects of a job whose command the terminal
    /// stopped; returns once we are continued, with the terminal handed on again where the shell
    /// gave it to us.
    pub(super) fn stop_with_command(&self) {
        self.take_back();
        stop_self();
        if self.is_ours() {
            let _ = tcsetpgrp(io::stdin(), self.theirs);
        }
    }

    fn is_ours(&self) -> bool {
        tcgetpgrp(io::stdin()).is_ok_and(|group| group == self.ours)
    }
}

/// Stops this process; returns once it is continued.
pub(super) fn stop_self() {
    let _ = kill_process(getpid(), Signal::STOP);
}
