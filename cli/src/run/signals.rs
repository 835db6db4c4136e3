//! The signals that `run` passes on to its command.

use std::future::poll_fn;
use std::task::Poll;

use rustix::process::Signal;
use tokio::signal::unix::{Signal as Stream, SignalKind, signal};

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

/// Listens for signals.
#[derive(Debug)]
pub(super) struct Signals(Vec<(Signal, Stream)>);

impl Signals {
    /// Takes the signals over, but for those that our caller had us ignore, as nohup(1) does:
    /// those stay ignored here and in the command.
    pub(super) fn listen() -> Result<Self> {
        let ignored = ignored_mask();
        PASSED_ON
            .into_iter()
            .map(|(signal, _)| signal)
            .filter(|signal| ignored & bit(*signal) == 0)
            .map(|number| {
                let stream = signal(SignalKind::from_raw(number.as_raw()))
                    .map_err(|e| Failure::system("signals cannot be handled", e))?;
                Ok((number, stream))
            })
            .collect::<Result<_>>()
            .map(Self)
    }

    /// The next signal. Cancel safe.
    pub(super) async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            for (number, stream) in &mut self.0 {
                if let Poll::Ready(Some(())) = stream.poll_recv(context) {
                    return Poll::Ready(*number);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// The next signal that asks us to end. Cancel safe.
    pub(super) async fn ending(&mut self) -> Signal {
        loop {
            let signal = self.next().await;
            if PASSED_ON.contains(&(signal, true)) {
                return signal;
            }
        }
    }
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
