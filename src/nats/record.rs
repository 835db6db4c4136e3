//! What is stored of a lock, and how it is read.
//!
//! A lock's record is one message. Two things in it are known only once it is stored: its sequence,
//! which is the token of whom it granted, and its time, from which the TTL of whom it stamped runs.
//! A holder without a token or a time is one that this very message granted or stamped; the next
//! message, whoever writes it, spells both out.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::bucket::{Clock, unix_ns};
use crate::error::{Error, Result};
use crate::fence::HolderTag;
use crate::lease::{AcquireRequest, HolderId, HolderState, LeaseInfo, LockState, Ttl};
use crate::name::LockName;
use crate::token::FencingToken;

/// How far a stamp may be ahead of the clock before it counts as another clock's: the two are asked
/// for together, and answered one after the other.
const AHEAD: Duration = Duration::from_secs(1);

/// A message, as the JetStream API gives it.
#[derive(Deserialize)]
pub(super) struct Answer {
    message: Message,
}

#[derive(Deserialize)]
struct Message {
    seq: u64,
    #[serde(default)]
    hdrs: String,
    #[serde(default)]
    data: String,
    time: String,
}

/// A message as it was read.
pub(super) struct Stored {
    /// Its sequence.
    pub(super) at: u64,
    /// When it was stored, by the clock of the server that led then.
    pub(super) stamped_ns: u64,
    pub(super) headers: String,
    pub(super) body: Vec<u8>,
}

/// The record of a name, as it is stored.
#[derive(Serialize, Deserialize)]
struct Record {
    name: String,
    /// The last token counts as at least this; 0 for none.
    last: u64,
    /// True where a grant wrote this: the last token is then the message's own sequence, where that
    /// is larger.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    granted: bool,
    /// The capacity of the last grant; 0 for none.
    permits: u32,
    holders: Vec<StoredHolder>,
}

#[derive(Serialize, Deserialize)]
struct StoredHolder {
    id: String,
    /// `None` for the last token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<u64>,
    /// When it was granted or renewed, in nanoseconds; `None` for when this was stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    at_ns: Option<u64>,
    ttl_ms: u64,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    released: bool,
    #[serde(default)]
    host: String,
    #[serde(default)]
    pid: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    label: Option<String>,
    #[serde(default)]
    since_us: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
}

/// A lock, with everything spelled out.
#[derive(Clone, Debug, Default)]
pub(super) struct Lock {
    /// The sequence of its record; 0 where it has none.
    pub(super) at: u64,
    pub(super) last: Option<FencingToken>,
    pub(super) capacity: Option<u32>,
    pub(super) holders: Vec<Holder>,
}

/// One who holds it, or keeps it taken.
#[derive(Clone, Debug)]
pub(super) struct Holder {
    pub(super) id: HolderId,
    /// `None` where what is to be written grants it.
    pub(super) token: Option<FencingToken>,
    pub(super) stamp: Stamp,
    pub(super) ttl: Duration,
    /// Given up with a linger time: it keeps others out and is nobody's.
    pub(super) released: bool,
    pub(super) info: LeaseInfo,
}

/// From when on a holder's TTL runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stamp {
    /// From when what is to be written is stored.
    Now,
    /// From this time on, in nanoseconds.
    At(u64),
}

/// What a clock says of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    Lapsed,
    /// Good for this long, unless it is renewed.
    Good(Duration),
    /// Stamped by another clock, which this one cannot be compared with.
    Unknown,
}

impl Stored {
    pub(super) fn of(answer: Answer) -> Result<Self> {
        let message = answer.message;
        let decoded = |text: &str| {
            STANDARD.decode(text).map_err(|e| {
                Error::unavailable("the NATS server's answer cannot be read").with_source(e)
            })
        };
        Ok(Self {
            at: message.seq,
            stamped_ns: unix_ns(&message.time)?,
            headers: String::from_utf8_lossy(&decoded(&message.hdrs)?).into_owned(),
            body: decoded(&message.data)?,
        })
    }

    /// The value of a header.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        let of = |line: &str| line.split_once(':').is_some_and(|(key, _)| key == name);
        let line = self.headers.lines().find(|line| of(line))?;
        line.split_once(':').map(|(_, value)| value.trim())
    }
}

impl Lock {
    /// `None` where the record cannot be right.
    pub(super) fn of(stored: &Stored, name: Option<&LockName>) -> Option<(LockName, Self)> {
        let record: Record = serde_json::from_slice(&stored.body).ok()?;
        let own = LockName::new(&record.name).ok()?;
        if name.is_some_and(|name| *name != own) {
            return None;
        }
        let last = if record.granted {
            record.last.max(stored.at)
        } else {
            record.last
        };
        let last = match last {
            0 => None,
            last => Some(FencingToken::new(last).ok()?),
        };
        let holders: Option<Vec<Holder>> = record
            .holders
            .into_iter()
            .map(|holder| holder.spelled_out(last, stored.stamped_ns))
            .collect();
        let lock = Self {
            at: stored.at,
            last,
            capacity: (record.permits > 0).then_some(record.permits),
            holders: holders?,
        };
        Some((own, lock))
    }

    /// The message that makes it so. `granting` says that it grants to the one holder without a
    /// token, whose token is then at least the last one.
    pub(super) fn encode(&self, name: &LockName, granting: bool) -> Result<Bytes> {
        let record = Record {
            name: name.as_str().to_owned(),
            last: self.last.map_or(0, FencingToken::get),
            granted: granting,
            permits: self.capacity.unwrap_or(0),
            holders: self.holders.iter().map(StoredHolder::of).collect(),
        };
        serde_json::to_vec(&record)
            .map(Bytes::from)
            .map_err(|e| Error::invalid("a record that cannot be written").with_source(e))
    }

    /// Drops those that have lapsed (L5).
    pub(super) fn drop_lapsed(&mut self, clock: Clock) {
        self.holders
            .retain(|holder| holder.standing(clock) != Standing::Lapsed);
    }

    /// The grant that is meant, where it is not given up.
    pub(super) fn grant(
        &mut self,
        id: &HolderId,
        token: Option<FencingToken>,
    ) -> Option<&mut Holder> {
        self.holders.iter_mut().find(|holder| holder.is(id, token))
    }

    /// What an operator sees.
    pub(super) fn state(&self, name: &LockName, clock: Clock) -> LockState {
        let mut state = LockState::new(name.clone(), self.last);
        state.capacity = self.capacity;
        for holder in &self.holders {
            let left = match holder.standing(clock) {
                Standing::Lapsed => continue,
                Standing::Good(left) => left,
                Standing::Unknown => holder.ttl,
            };
            // What lingers may have less than the shortest lease.
            let ttl = Ttl::new(holder.ttl.clamp(Ttl::MIN, Ttl::MAX));
            if let (Some(token), Ok(ttl)) = (holder.token, ttl) {
                state.holders.push(HolderState {
                    token,
                    tag: HolderTag::of(&holder.id),
                    ttl,
                    expires_in: Some(left),
                    info: holder.info.clone(),
                });
            }
        }
        state.holders.sort_by_key(|holder| holder.token);
        state
    }
}

impl Holder {
    /// Whom a record grants that is to be written.
    pub(super) fn new(request: &AcquireRequest, ttl: Duration) -> Self {
        Self {
            id: request.holder,
            token: None,
            stamp: Stamp::Now,
            ttl,
            released: false,
            info: request.info.clone(),
        }
    }

    pub(super) fn is(&self, id: &HolderId, token: Option<FencingToken>) -> bool {
        self.id == *id && !self.released && token.is_none_or(|token| self.token == Some(token))
    }

    /// Whether its TTL has passed, which only the clock that stamped it can tell. What was stamped
    /// since the leader leads was stamped by its clock, or by one that was ahead of it: then it
    /// lapses late, and never early.
    pub(super) fn standing(&self, clock: Clock) -> Standing {
        let Stamp::At(at_ns) = self.stamp else {
            return Standing::Good(self.ttl);
        };
        let ahead = u64::try_from(AHEAD.as_nanos()).unwrap_or(u64::MAX);
        let former = clock.since_ns.is_some_and(|since| at_ns < since);
        if former || at_ns > clock.now_ns.saturating_add(ahead) {
            return Standing::Unknown;
        }
        let age = Duration::from_nanos(clock.now_ns.saturating_sub(at_ns));
        match self.ttl.checked_sub(age) {
            Some(left) if !left.is_zero() => Standing::Good(left),
            _ => Standing::Lapsed,
        }
    }
}

impl StoredHolder {
    fn of(holder: &Holder) -> Self {
        let info = &holder.info;
        Self {
            id: holder.id.reveal(),
            token: holder.token.map(FencingToken::get),
            at_ns: match holder.stamp {
                Stamp::Now => None,
                Stamp::At(ns) => Some(ns),
            },
            ttl_ms: u64::try_from(holder.ttl.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX),
            released: holder.released,
            host: info.host.clone(),
            pid: info.pid,
            label: info.label.clone(),
            since_us: info.since_unix_us,
            trace_id: info.trace_id.clone(),
        }
    }

    fn spelled_out(self, last: Option<FencingToken>, stamped_ns: u64) -> Option<Holder> {
        Some(Holder {
            id: self.id.parse().ok()?,
            token: Some(match self.token {
                Some(token) => FencingToken::new(token).ok()?,
                None => last?,
            }),
            stamp: Stamp::At(self.at_ns.unwrap_or(stamped_ns)),
            ttl: Duration::from_millis(self.ttl_ms),
            released: self.released,
            info: LeaseInfo {
                host: self.host,
                pid: self.pid,
                label: self.label,
                since_unix_us: self.since_us,
                trace_id: self.trace_id,
            },
        })
    }
}

pub(super) fn corrupt(name: &LockName) -> Error {
    Error::corrupt(DAMAGE).with("name", format_args!("{name:?}"))
}

pub(super) const DAMAGE: &str = "the record of the lock in NATS is damaged; repair it with `fencelock repair NAME --min-token N`";

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    const SEC: u64 = 1_000_000_000;

    fn holder(at_secs: u64) -> Holder {
        let mut request = AcquireRequest::new("a".parse().unwrap(), Ttl::DEFAULT);
        request.info.pid = 7;
        let mut holder = Holder::new(&request, Duration::from_secs(30));
        holder.stamp = Stamp::At(at_secs * SEC);
        holder
    }

    fn clock(now_secs: u64, since_secs: Option<u64>) -> Clock {
        Clock {
            now_ns: now_secs * SEC,
            since_ns: since_secs.map(|secs| secs * SEC),
        }
    }

    #[test]
    fn only_the_clock_that_stamped_lets_a_grant_lapse() {
        let good = |secs| Standing::Good(Duration::from_secs(secs));
        for (at, now, since, standing) in [
            (100, 100, None, good(30)),
            (100, 129, None, good(1)),
            (100, 130, None, Standing::Lapsed),
            (100, 129, Some(100), good(1)),
            (100, 130, Some(100), Standing::Lapsed),
            // A leader that came later may have a clock that is far ahead.
            (100, 9_999, Some(101), Standing::Unknown),
            // One whose clock is behind, or was set back.
            (100, 99, Some(50), good(30)),
            (100, 98, Some(50), Standing::Unknown),
        ] {
            let found = holder(at).standing(clock(now, since));
            assert_eq!(found, standing, "at={at} now={now} since={since:?}");
        }
    }

    #[test]
    fn a_grant_takes_its_token_and_its_time_from_its_message() {
        let name: LockName = "a".parse().unwrap();
        let mut lock = Lock {
            last: Some(FencingToken::new(7).unwrap()),
            capacity: Some(1),
            ..Lock::default()
        };
        let mut granted = holder(0);
        granted.stamp = Stamp::Now;
        let id = granted.id;
        lock.holders.push(granted);
        let stored = |at| Stored {
            at,
            stamped_ns: 5 * SEC,
            headers: String::new(),
            body: lock.encode(&name, true).unwrap().to_vec(),
        };
        for (at, token) in [(5, 7), (9, 9)] {
            let (own, mut read) = Lock::of(&stored(at), Some(&name)).unwrap();
            assert_eq!(own, name);
            let token = FencingToken::new(token).unwrap();
            assert_eq!(read.last, Some(token));
            let holder = read.grant(&id, Some(token)).unwrap();
            assert_eq!(holder.stamp, Stamp::At(5 * SEC));
            assert_eq!(holder.info.pid, 7);
            // What the next message says is the same, wherever it is stored.
            let next = Stored {
                at: 99,
                stamped_ns: 99 * SEC,
                headers: String::new(),
                body: read.encode(&name, false).unwrap().to_vec(),
            };
            let (_, again) = Lock::of(&next, None).unwrap();
            assert_eq!(again.last, Some(token));
            assert_eq!(again.holders[0].token, Some(token));
            assert_eq!(again.holders[0].stamp, Stamp::At(5 * SEC));
        }
    }

    #[test]
    fn headers_are_found() {
        let stored = Stored {
            at: 1,
            stamped_ns: 0,
            headers: "NATS/1.0\r\nA: b\r\nFence: {\"x\":1}\r\n\r\n".to_owned(),
            body: Vec::new(),
        };
        assert_eq!(stored.header("Fence"), Some("{\"x\":1}"));
        assert_eq!(stored.header("B"), None);
    }
}
