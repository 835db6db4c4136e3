//! Job control: lets the command, which is in a group of its own, use our terminal as if it had been
//! started by the shell itself.

use std::io;

use nix::sys::signal::{SigSet, Signal as Number};
use rustix::process::{Pid, Signal, getpid, kill_process};
use rustix::termios::{isatty, tcgetpgrp, tcsetpgrp};

use super::group::{Group, Stat};

/// The terminal on standard input, shared with the command's group. Taken back when dropped.
#[derive(Debug)]
pub(super) struct Terminal {
    ours: Pid,
    theirs: Pid,
}

impl Terminal {
    /// Hands the terminal to `group` where it is ours to hand on; `None` where there is none.
    pub(super) fn shared_with(group: Group) -> Option<Self> {
        if !isatty(io::stdin()) {
            return None;
        }
        // Otherwise taking it back, from the background, would stop us.
        let mut background = SigSet::empty();
        background.add(Number::SIGTTOU);
        background.thread_block().ok()?;
        let terminal = Self {
            ours: Pid::from_raw(Stat::of_self().ok()?.group)?,
            theirs: group.id,
        };
        terminal.hand_on();
        Some(terminal)
    }

    /// Hands the terminal to the command, where it is ours: started in the background, it is not.
    pub(super) fn hand_on(&self) {
        self.pass(self.ours, self.theirs);
    }

    /// Stops us too, as the shell that started us expects of a job whose command the terminal
    /// stopped; returns once we are continued.
    pub(super) fn stop_with_command(&self) {
        self.take_back();
        stop_self();
        self.hand_on();
    }

    /// Takes the terminal back, where the command has it: the shell may have taken it meanwhile.
    fn take_back(&self) {
        self.pass(self.theirs, self.ours);
    }

    fn pass(&self, from: Pid, to: Pid) {
        if tcgetpgrp(io::stdin()).is_ok_and(|group| group == from) {
            // Where it has hung up meanwhile there is nothing to pass.
            let _ = tcsetpgrp(io::stdin(), to);
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.take_back();
    }
}

/// Stops this process; returns once it is continued.
pub(super) fn stop_self() {
    let _ = kill_process(getpid(), Signal::STOP);
}
