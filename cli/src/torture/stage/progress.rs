//! What the run tells whoever watches it at a terminal.

use std::io::{self, IsTerminal as _, Write as _};

use super::Play;

impl Play<'_> {
    pub(super) fn progress(&self) {
        if !io::stderr().is_terminal() {
            return;
        }
        let faults: u64 = self.played.faults.values().sum();
        let seconds = self.stage.watch.now() / 1_000_000;
        let all = self.stage.plan.duration.as_secs();
        let stage = if self.is_ending { ", ending" } else { "" };
        // Progress that cannot be shown is no failure.
        let _ = write!(
            io::stderr(),
            "\r\u{1b}[K{seconds} of {all} s: {} grants, {} writes, {faults} faults{stage}",
            self.grants,
            self.writes
        );
    }

    pub(super) fn clear_progress(&self) {
        if io::stderr().is_terminal() {
            let _ = write!(io::stderr(), "\r\u{1b}[K");
        }
    }
}
