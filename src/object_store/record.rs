//! The record of a lock: the body of one object.
//!
//! It says all about the lock but when it was written, which is the store's to say. Each write draws
//! a nonce, so that no two bodies of a lock are alike: an ETag is the content's alone on many stores,
//! and a body that came back would bring its ETag back, and with it a stale writer's condition.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result};
use crate::fence::{HolderTag, hex, unhex};
use crate::lease::{
    Contention, HolderId, HolderState, LeaseInfo, LeaseRef, LockState, PERMITS_MAX, Ttl,
};
use crate::name::LockName;
use crate::random;
use crate::token::FencingToken;

/// What a record begins with, before the checksum of the rest of it.
const MAGIC: &str = "fencelock-lock 1 ";

/// What is known of a lock, but for its time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    name: String,
    /// All tokens up to this one count as told; 0 for none.
    last: u64,
    pub(super) capacity: Option<u32>,
    pub(super) holders: Vec<Entry>,
    /// Drawn by the write that made this body.
    pub(super) nonce: String,
}

/// One grant.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    /// The holder's secret, in hexadecimal.
    holder: String,
    token: u64,
    ttl_ms: u64,
    /// The nonce of the write from which its TTL counts: its grant, or its last renewal.
    pub(super) beat: String,
    /// When that was by the store's clock, in microseconds since the Unix epoch; none in the body
    /// of that very write, whose time the store notes beside it.
    pub(super) stamped_us: Option<u64>,
    /// Given up, and lingering.
    released: bool,
    info: Info,
}

/// [`LeaseInfo`] in its stored form.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    host: String,
    pid: u32,
    label: Option<String>,
    since_unix_us: u64,
    trace_id: Option<String>,
}

/// A fresh nonce.
pub(super) fn nonce() -> String {
    hex(&random::id())
}

impl Record {
    /// The record of a name of which nothing is known.
    pub(super) fn new(name: &LockName) -> Self {
        Self {
            name: name.as_str().to_owned(),
            last: 0,
            capacity: None,
            holders: Vec::new(),
            nonce: String::new(),
        }
    }

    /// The last token; `None` where none was told.
    pub(super) fn last(&self) -> Option<FencingToken> {
        FencingToken::new(self.last).ok()
    }

    /// Counts all tokens up to `last` as told.
    pub(super) fn set_last(&mut self, last: FencingToken) {
        self.last = last.get();
    }

    /// The grant that `lease` names, where it was not given up (L5).
    pub(super) fn find_mut(&mut self, lease: &LeaseRef) -> Option<&mut Entry> {
        self.holders
            .iter_mut()
            .find(|entry| entry.is_named_by(lease))
    }

    /// The body to write.
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        let json = serde_json::to_vec(self)
            .map_err(|e| Error::invalid("a record cannot be written as JSON").with_source(e))?;
        let mut body = Vec::with_capacity(json.len() + 128);
        body.extend_from_slice(MAGIC.as_bytes());
        body.extend_from_slice(checksum(&json).as_bytes());
        body.push(b'\n');
        body.extend_from_slice(&json);
        body.push(b'\n');
        Ok(body)
    }

    /// The record that `body` is, or what is wrong with it.
    fn parse(body: &[u8]) -> Result<Self, &'static str> {
        let rest = body
            .strip_prefix(MAGIC.as_bytes())
            .ok_or("it is no record of a lock that this version knows")?;
        let (sum, rest) = rest.split_at_checked(64).ok_or("it is cut short")?;
        let json = rest
            .strip_prefix(b"\n")
            .and_then(|rest| rest.strip_suffix(b"\n"))
            .ok_or("it is cut short")?;
        if checksum(json).as_bytes() != sum {
            return Err("its checksum does not fit");
        }
        let record: Self = serde_json::from_slice(json).map_err(|_| "its fields are unknown")?;
        let sound = record.last <= FencingToken::MAX.get()
            && record
                .capacity
                .is_none_or(|n| (1..=PERMITS_MAX).contains(&n))
            && record
                .holders
                .iter()
                .all(|entry| entry.is_sound(&record.nonce));
        if sound {
            Ok(record)
        } else {
            Err("a value is out of range")
        }
    }

    /// The record of `name` that was found at its key.
    pub(super) fn decode(name: &LockName, body: &[u8]) -> Result<Self> {
        let record = Self::parse(body).map_err(|what| damaged(name, what))?;
        if record.name != name.as_str() {
            return Err(damaged(name, "it is the record of another name"));
        }
        Ok(record)
    }

    /// The name in a body that was found at a key which does not tell it.
    pub(super) fn name_in(body: &[u8]) -> Option<LockName> {
        LockName::new(&Self::parse(body).ok()?.name).ok()
    }

    /// The lock as an operator sees it; `left` says how long each holder's grant is still good.
    pub(super) fn show(&self, name: &LockName, left: &[Duration]) -> Result<LockState> {
        let mut shown = LockState::new(name.clone(), self.last());
        shown.capacity = self.capacity;
        for (entry, left) in self.holders.iter().zip(left) {
            shown.holders.push(HolderState {
                token: entry.token()?,
                tag: HolderTag::of(&entry.holder.parse()?),
                ttl: Ttl::new(entry.ttl().max(Ttl::MIN))?,
                expires_in: Some(entry.shown(*left)),
                info: entry.info(),
            });
        }
        Ok(shown)
    }

    /// Why an acquire was not granted.
    pub(super) fn contention(&self, left: &[Duration]) -> Contention {
        let holders = self.holders.iter().zip(left);
        Contention {
            free_in: holders.map(|(entry, left)| entry.shown(*left)).min(),
            holder: self.holders.first().map(Entry::info),
        }
    }
}

impl Entry {
    pub(super) fn new(holder: &HolderId, token: FencingToken, info: &LeaseInfo) -> Self {
        Self {
            holder: holder.reveal(),
            token: token.get(),
            ttl_ms: 0,
            beat: String::new(),
            stamped_us: None,
            released: false,
            info: Info {
                host: info.host.clone(),
                pid: info.pid,
                label: info.label.clone(),
                since_unix_us: info.since_unix_us,
                trace_id: info.trace_id.clone(),
            },
        }
    }

    /// Lets the grant last for `ttl` from the write with this nonce on.
    pub(super) fn extend(&mut self, ttl: Duration, nonce: &str) {
        self.ttl_ms = millis(ttl);
        nonce.clone_into(&mut self.beat);
        self.stamped_us = None;
    }

    /// Gives the grant up: it ends `linger` after the write with this nonce.
    pub(super) fn linger(&mut self, linger: Duration, nonce: &str) {
        self.extend(linger.min(Ttl::MAX), nonce);
        self.released = true;
    }

    /// True where this is a grant of `holder` that it did not give up.
    pub(super) fn is_of(&self, holder: &HolderId) -> bool {
        !self.released && self.holder == holder.reveal()
    }

    pub(super) fn is_named_by(&self, lease: &LeaseRef) -> bool {
        let token = lease.token.map(FencingToken::get);
        self.is_of(&lease.holder) && token.is_none_or(|token| token == self.token)
    }

    /// True where only the store knows when the grant was made or renewed, unless this is the write
    /// with `nonce`.
    pub(super) fn is_undated(&self, nonce: &str) -> bool {
        self.stamped_us.is_none() && self.beat != nonce
    }

    pub(super) fn holder(&self) -> &str {
        &self.holder
    }

    pub(super) fn token(&self) -> Result<FencingToken> {
        FencingToken::new(self.token)
    }

    /// How long the grant lasts from its [`beat`](Self::beat) on.
    pub(super) fn ttl(&self) -> Duration {
        Duration::from_millis(self.ttl_ms)
    }

    /// How long the grant is said to last: the margin is for clocks, not for the holder.
    fn shown(&self, left: Duration) -> Duration {
        left.min(self.ttl())
    }

    fn info(&self) -> LeaseInfo {
        LeaseInfo {
            host: self.info.host.clone(),
            pid: self.info.pid,
            label: self.info.label.clone(),
            since_unix_us: self.info.since_unix_us,
            trace_id: self.info.trace_id.clone(),
        }
    }

    fn is_sound(&self, nonce: &str) -> bool {
        unhex::<16>(&self.holder).is_some()
            && self.token().is_ok()
            && self.ttl() <= Ttl::MAX
            && !self.is_undated(nonce)
    }
}

/// Shows no secret.
impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry")
            .field("token", &self.token)
            .field("ttl_ms", &self.ttl_ms)
            .field("released", &self.released)
            .finish_non_exhaustive()
    }
}

pub(super) fn damaged(name: &LockName, what: &str) -> Error {
    Error::corrupt(format!(
        "the lock's record in the object store is damaged: {what}; repair it with a floor for its tokens"
    ))
    .with("name", format_args!("{name:?}"))
}

fn checksum(json: &[u8]) -> String {
    let mut text = String::with_capacity(64);
    for byte in Sha256::digest(json) {
        crate::name::push_hex(&mut text, byte);
    }
    text
}

/// In whole milliseconds, rounded up: a grant is never shorter than it was asked for.
fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX)
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> (LockName, Record) {
        let name = LockName::new("payment-export").unwrap();
        let mut record = Record::new(&name);
        record.nonce = nonce();
        record.set_last(FencingToken::new(34).unwrap());
        record.capacity = Some(1);
        let info = LeaseInfo {
            host: "h\"\u{0}".to_owned(),
            pid: 7,
            label: Some("π".to_owned()),
            since_unix_us: 1,
            trace_id: None,
        };
        let token = FencingToken::new(34).unwrap();
        let mut entry = Entry::new(&HolderId::random(), token, &info);
        entry.extend(Duration::from_secs(30), &record.nonce);
        record.holders.push(entry);
        (name, record)
    }

    #[test]
    fn a_record_comes_back() {
        let (name, record) = sample();
        let body = record.encode().unwrap();
        assert_eq!(Record::decode(&name, &body).unwrap(), record);
        assert_eq!(Record::name_in(&body), Some(name));
    }

    #[test]
    fn every_cut_and_every_flipped_bit_is_found() {
        let (name, record) = sample();
        let body = record.encode().unwrap();
        for end in 0..body.len() {
            assert!(Record::decode(&name, &body[..end]).is_err(), "cut at {end}");
        }
        for i in 0..body.len() {
            for bit in 0..8 {
                let mut bad = body.clone();
                bad[i] ^= 1 << bit;
                assert!(
                    Record::decode(&name, &bad).is_err(),
                    "bit {bit} of byte {i}"
                );
            }
        }
    }

    #[test]
    fn a_record_of_another_name_is_damage() {
        let (_, record) = sample();
        let body = record.encode().unwrap();
        let other = LockName::new("other").unwrap();
        let error = Record::decode(&other, &body).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Corrupt);
    }

    #[test]
    fn a_grant_without_a_time_is_damage() {
        let (name, mut record) = sample();
        record.nonce = nonce();
        let body = record.encode().unwrap();
        assert!(Record::decode(&name, &body).is_err());
        record.holders[0].stamped_us = Some(1);
        let body = record.encode().unwrap();
        assert!(Record::decode(&name, &body).is_ok());
    }

    #[test]
    fn the_most_holders_with_the_longest_infos_fit() {
        let name = LockName::new(&"\u{1}".repeat(512)).unwrap();
        let mut record = Record::new(&name);
        record.nonce = nonce();
        let long = "\u{1}".repeat(crate::lease::INFO_TEXT_MAX_BYTES);
        let info = LeaseInfo {
            host: long.clone(),
            pid: u32::MAX,
            label: Some(long.clone()),
            since_unix_us: u64::MAX,
            trace_id: Some(long),
        };
        for _ in 0..PERMITS_MAX {
            let mut entry = Entry::new(&HolderId::random(), FencingToken::MAX, &info);
            entry.extend(Ttl::MAX, &record.nonce);
            entry.stamped_us = Some(u64::MAX);
            record.holders.push(entry);
        }
        let bytes = u64::try_from(record.encode().unwrap().len()).unwrap();
        assert!(bytes <= super::super::connect::RECORD_MAX_BYTES, "{bytes}");
    }

    #[test]
    fn debug_shows_no_secret() {
        let (_, record) = sample();
        assert!(!format!("{record:?}").contains(record.holders[0].holder()));
    }
}
