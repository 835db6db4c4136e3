//! What happened: one line of JSON for each event and its page, written by a client in one step, so
//! that neither a pause nor a kill tears it.
//!
//! A history is kept in memory: some 300 bytes for each event, and two events for each operation.
//! `--sections` bounds it.

use std::fmt;
use std::str::FromStr;

use fencelock::clock::{Clock, Tick};
use serde::{Deserialize, Serialize};

use super::plan::{Arm, Lane};

/// Every line is shorter than this, which a pipe takes in one piece (`PIPE_BUF`, pipe(7)).
pub(crate) const LINE_MAX_BYTES: usize = 4096;

/// Counts microseconds from the beginning of the run, on the clock that all processes of the host
/// share.
#[derive(Clone, Debug)]
pub(crate) struct Watch {
    clock: Clock,
    start: Tick,
}

impl Watch {
    pub(crate) fn start() -> Self {
        let clock = Clock::system();
        let start = clock.now();
        Self { clock, start }
    }

    /// The watch of another process, by its start.
    pub(crate) fn started_at(nanos: u64) -> Self {
        Self {
            clock: Clock::system(),
            start: Tick::from_nanos(nanos),
        }
    }

    pub(crate) fn start_nanos(&self) -> u64 {
        self.start.as_nanos()
    }

    /// Microseconds since the start.
    pub(crate) fn now(&self) -> u64 {
        let since = self.clock.now().since(self.start);
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
    }
}

/// One update: which client, in which of its lives, and its number there. Unique in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct Op {
    pub(crate) client: u32,
    pub(crate) life: u32,
    pub(crate) number: u64,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.client, self.life, self.number)
    }
}

impl FromStr for Op {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split('.');
        let parsed = (|| {
            Some(Self {
                client: parts.next()?.parse().ok()?,
                life: parts.next()?.parse().ok()?,
                number: parts.next()?.parse().ok()?,
            })
        })();
        parsed
            .filter(|_| parts.next().is_none())
            .ok_or_else(|| format!("not the id of an update: {text:?}"))
    }
}

impl From<Op> for String {
    fn from(op: Op) -> Self {
        op.to_string()
    }
}

impl TryFrom<String> for Op {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Where a client pauses or dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Point {
    /// Between what it read and its look at the lock.
    BeforeCheck,
    /// Between its look at the lock and its first write: what no lock can help.
    BeforeWrite,
    /// Between two writes.
    BetweenWrites,
    /// Between its last write and its release.
    BeforeRelease,
}

/// What a client did or saw. Times are microseconds since the start of the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// It has opened everything.
    Ready { t: u64 },
    /// It could not go on.
    Failed { t: u64, message: String },
    /// The acquire for its update `op`, which the lock's record is labelled with, brought no grant.
    NotGranted {
        t: u64,
        lane: Lane,
        op: Op,
        kind: String,
    },
    /// It was told a grant that it had asked for at `asked`, for its update `op`. It believes until
    /// `until`.
    Granted {
        t: u64,
        asked: u64,
        lane: Lane,
        op: Op,
        token: u64,
        until: u64,
    },
    /// It looked at a lock from outside, and saw these labels and tokens of live grants.
    Seen {
        t: u64,
        sent: u64,
        lane: Lane,
        holders: Vec<(String, u64)>,
    },
    /// It read, or raised and read. `len` is the length of a list, or the number of a counter.
    Read {
        t: u64,
        sent: u64,
        lane: Lane,
        token: u64,
        arm: Arm,
        object: String,
        outcome: String,
        len: u64,
        last: Option<Op>,
        digest: u64,
    },
    /// It has read everything.
    Thinking { t: u64, lane: Lane, token: u64 },
    /// It looked at its lock at `t`.
    Checked {
        t: u64,
        lane: Lane,
        token: u64,
        good: bool,
        until: u64,
    },
    /// It is about to stop itself, to be woken `for_us` later.
    Paused {
        t: u64,
        lane: Lane,
        token: u64,
        point: Point,
        for_us: u64,
    },
    /// It goes on.
    Woke { t: u64 },
    /// It is about to kill itself.
    Dying { t: u64, lane: Lane, point: Point },
    /// It is about to send a write. `copy` 0 is the write itself, others are duplicates of it.
    Sent {
        t: u64,
        lane: Lane,
        token: u64,
        seq: u64,
        arm: Arm,
        object: String,
        /// The update that the writer is about.
        op: Op,
        /// All whose lines the write adds: its own, and those that it completes for others.
        ops: Vec<Op>,
        /// What a counter becomes; the length that a list becomes.
        len: u64,
        copy: u32,
    },
    /// The write of its update `op` was answered: `ok`, `repeated`, or the kind of the error.
    Answered {
        t: u64,
        arm: Arm,
        object: String,
        op: Op,
        copy: u32,
        outcome: String,
    },
    /// It showed a storage what has to be refused; `outcome` is `ok` where it was not.
    Forged {
        t: u64,
        lane: Lane,
        token: u64,
        arm: Arm,
        object: String,
        what: Forgery,
        outcome: String,
    },
    /// It is about to give its lock back: from here on it believes no more, whatever becomes of it.
    Releasing { t: u64, lane: Lane, token: u64 },
    /// The section is over. The release, or the notice of the loss, began at `sent`.
    Ended {
        t: u64,
        sent: u64,
        lane: Lane,
        token: u64,
        outcome: String,
    },
    /// The nemesis stopped it (SIGSTOP).
    Stopped { t: u64 },
    /// The nemesis let it go on.
    Continued { t: u64 },
    /// The nemesis is about to kill it (SIGKILL).
    Killed { t: u64 },
    /// The nemesis has killed the engine's server (SIGKILL).
    ServerKilled { t: u64 },
}

impl Event {
    pub(crate) fn at(&self) -> u64 {
        match self {
            Self::Ready { t }
            | Self::Failed { t, .. }
            | Self::NotGranted { t, .. }
            | Self::Seen { t, .. }
            | Self::Forged { t, .. }
            | Self::Granted { t, .. }
            | Self::Read { t, .. }
            | Self::Thinking { t, .. }
            | Self::Checked { t, .. }
            | Self::Paused { t, .. }
            | Self::Woke { t }
            | Self::Dying { t, .. }
            | Self::Sent { t, .. }
            | Self::Answered { t, .. }
            | Self::Releasing { t, .. }
            | Self::Ended { t, .. }
            | Self::Stopped { t }
            | Self::Continued { t }
            | Self::Killed { t }
            | Self::ServerKilled { t } => *t,
        }
    }
}

/// What a client shows that no storage may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Forgery {
    /// Its own fence, but of another lock (S9).
    Domain,
    /// A number that no lock tells (S11).
    Number,
}

/// An event and whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) client: u32,
    pub(crate) life: u32,
    /// The page that it is about; 0 where it is about the whole process.
    pub(crate) page: u32,
    pub(crate) event: Event,
}

#[cfg(test)]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_and_ids_round_trip() {
        let op = Op {
            client: 3,
            life: 1,
            number: 42,
        };
        assert_eq!(op.to_string().parse(), Ok(op));
        for bad in ["", "1.2", "1.2.3.4", "a.b.c", "-1.0.0"] {
            assert!(bad.parse::<Op>().is_err(), "{bad:?}");
        }
        let event = Event::Answered {
            t: 7,
            arm: Arm::Raise,
            object: "list".to_owned(),
            op,
            copy: 1,
            outcome: "ok".to_owned(),
        };
        let line = serde_json::to_string(&event).unwrap();
        assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
    }
}
