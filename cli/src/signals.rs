//! The signals that `run` passes on to its command, and that end a wait for a lock.

use std::future::poll_fn;
use std::task::Poll;

use nix::sys::signal::SigSet;
use rustix::process::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

use crate::exit_codes;
use crate::failure::{Failure, Result};

/// The passed-on signals, and whether one of them ends a wait for the lock.
const PASSED_ON: [(Signal, bool); 9] = [
    (Signal::HUP, true),
    (Signal::INT, true),
    (Signal::QUIT, true),
    (Signal::TERM, true),
    (Signal::USR1, false),
    (Signal::USR2, false),
    (Signal::WINCH, false),
    (Signal::TSTP, false),
    (Signal::CONT, false),
];

/// The exit code of a process that `signal` ended, as a shell tells it.
pub(crate) fn exit_code(signal: Signal) -> u8 {
    u8::try_from(signal.as_raw()).map_or(exit_codes::INDETERMINATE, |n| {
        exit_codes::SIGNAL_BASE.saturating_add(n)
    })
}

/// Listens for signals.
#[derive(Debug)]
pub(crate) struct Signals {
    passed_on: Vec<(Signal, Stream)>,
    /// Never read: our caller may have had us ignore SIGCHLD, and then the kernel would reap our
    /// children behind our back. A handler undoes that.
    _children: Stream,
}

impl Signals {
    /// Takes the signals over, but for those that our caller had us ignore, as nohup(1) does:
    /// those stay ignored here and in the command.
    pub(crate) fn listen() -> Result<Self> {
        let ignored = ignored_mask();
        let passed_on = PASSED_ON
            .into_iter()
            .map(|(signal, _)| signal)
            .filter(|signal| ignored & bit(*signal) == 0)
            .map(|number| Ok((number, stream(SignalKind::from_raw(number.as_raw()))?)))
            .collect::<Result<Vec<_>>>()?;
        unblock(&passed_on)?;
        Ok(Self {
            passed_on,
            _children: stream(SignalKind::child())?,
        })
    }

    /// The next signal. Cancel safe.
    pub(crate) async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            for (number, stream) in &mut self.passed_on {
                if let Poll::Ready(Some(())) = stream.poll_recv(context) {
                    return Poll::Ready(*number);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// The next signal that asks us to end. Cancel safe.
    pub(crate) async fn ending(&mut self) -> Signal {
        loop {
            let signal = self.next().await;
            if PASSED_ON.contains(&(signal, true)) {
                return signal;
            }
        }
    }
}

fn stream(kind: SignalKind) -> Result<Stream> {
    signal(kind).map_err(|e| Failure::system("signals cannot be handled", e))
}

/// Our caller may also have had us block them.
fn unblock(signals: &[(Signal, Stream)]) -> Result<()> {
    let mut set = SigSet::empty();
    for (signal, _) in signals {
        set.add(signal.as_raw().try_into().map_err(handling)?);
    }
    set.thread_unblock().map_err(handling)
}

fn handling(error: nix::errno::Errno) -> Failure {
    Failure::system("signals cannot be handled", error)
}

fn bit(signal: Signal) -> u64 {
    u32::try_from(signal.as_raw() - 1)
        .ok()
        .and_then(|shift| 1u64.checked_shl(shift))
        .unwrap_or(0)
}

/// The mask of ignored signals as /proc/self/status tells it; where it cannot be read, none.
fn ignored_mask() -> u64 {
    std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| parse_ignored(&status))
        .unwrap_or(0)
}

fn parse_ignored(status: &str) -> Option<u64> {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_read() {
        let mask = parse_ignored("Name:\tx\nSigIgn:\t0000000000001001\n").unwrap();
        assert_ne!(mask & bit(Signal::HUP), 0);
        assert_ne!(mask & bit(Signal::PIPE), 0);
        assert_eq!(mask & bit(Signal::TERM), 0);
    }
}
