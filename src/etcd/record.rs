//! What is stored of a lock, and how it is read.
//!
//! A name has one record, which is never deleted, and for each holder a key of its own that is
//! attached to an etcd lease. The holder's grant is good while that key exists. Only a grant makes
//! such a key, and each grant writes the record: whoever compares the record's revision knows that
//! no holder has come since it was read; holders that have gone meanwhile only make room.

use std::time::Duration;

use etcd_client::{GetOptions, KeyValue, TxnOp, TxnOpResponse};
use serde::{Deserialize, Serialize};

use super::keys::Keys;
use crate::error::{Error, Result};
use crate::fence::HolderTag;
use crate::lease::{AcquireRequest, HolderId, HolderState, LeaseInfo, LockState, Ttl};
use crate::name::LockName;
use crate::token::FencingToken;

/// The record of a name, as it is stored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) name: String,
    /// The last token counts as at least this.
    pub(super) last: u64,
    /// True where a grant wrote this: the last token is then the record's own revision, where
    /// that is larger.
    pub(super) granted: bool,
    /// The capacity of the last grant; 0 for none.
    pub(super) permits: u32,
}

/// A holder, as it is stored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Holder {
    /// The token is at least this: it is the revision in which the key was made, where that is
    /// larger.
    pub(super) token: u64,
    pub(super) ttl_secs: i64,
    /// Given up with a linger time: it keeps others out and is nobody's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) released: bool,
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

/// A record as it was read.
#[derive(Clone, Debug)]
pub(super) struct SeenRecord {
    pub(super) at: i64,
    pub(super) record: Record,
}

/// A holder as it was read.
#[derive(Clone, Debug)]
pub(super) struct SeenHolder {
    pub(super) key: Vec<u8>,
    pub(super) id: HolderId,
    pub(super) made_at: i64,
    pub(super) at: i64,
    pub(super) lease: i64,
    pub(super) holder: Holder,
}

/// A lock as one transaction saw it.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) record: Option<SeenRecord>,
    pub(super) holders: Vec<SeenHolder>,
}

impl Record {
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self)
            .map_err(|e| Error::invalid("a record that cannot be written").with_source(e))
    }
}

impl Holder {
    pub(super) fn new(request: &AcquireRequest, token: FencingToken, ttl_secs: i64) -> Self {
        let info = &request.info;
        Self {
            token: token.get(),
            ttl_secs,
            released: false,
            host: info.host.clone(),
            pid: info.pid,
            label: info.label.clone(),
            since_us: info.since_unix_us,
            trace_id: info.trace_id.clone(),
        }
    }

    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self)
            .map_err(|e| Error::invalid("a holder that cannot be written").with_source(e))
    }

    pub(super) fn info(&self) -> LeaseInfo {
        LeaseInfo {
            host: self.host.clone(),
            pid: self.pid,
            label: self.label.clone(),
            since_unix_us: self.since_us,
            trace_id: self.trace_id.clone(),
        }
    }

    pub(super) fn ttl(&self) -> Result<Ttl> {
        ttl_of(self.ttl_secs).map_err(|e| Error::corrupt(CORRUPT).with_source(e))
    }
}

impl SeenRecord {
    /// The last token, or what counts as it.
    pub(super) fn last(&self) -> Result<FencingToken> {
        let last = if self.record.granted {
            self.record.last.max(unsigned(self.at))
        } else {
            self.record.last
        };
        FencingToken::new(last).map_err(|e| Error::corrupt(CORRUPT).with_source(e))
    }

    fn of(kv: &KeyValue, name: &LockName) -> Result<Self> {
        Self::read(kv.value(), kv.mod_revision(), name)
    }

    fn read(value: &[u8], at: i64, name: &LockName) -> Result<Self> {
        let record: Record =
            serde_json::from_slice(value).map_err(|e| corrupt(name).with_source(e))?;
        if record.name != name.as_str() {
            return Err(corrupt(name));
        }
        Ok(Self { at, record })
    }
}

impl SeenHolder {
    /// The token: both parts of it are there from the grant on, and stay.
    pub(super) fn token(&self) -> Result<FencingToken> {
        FencingToken::new(self.holder.token.max(unsigned(self.made_at)))
            .map_err(|e| Error::corrupt(CORRUPT).with_source(e))
    }

    /// True where this is the grant that is meant, and not given up.
    pub(super) fn is(&self, id: &HolderId, token: Option<FencingToken>) -> bool {
        self.id == *id
            && !self.holder.released
            && token.is_none_or(|token| self.token().is_ok_and(|own| own == token))
    }

    /// `None` where the key is none of ours.
    pub(super) fn of(kv: &KeyValue, prefix: &str, name: &LockName) -> Result<Self> {
        let id = kv
            .key()
            .strip_prefix(prefix.as_bytes())
            .and_then(|id| std::str::from_utf8(id).ok())
            .and_then(|id| id.parse().ok())
            .ok_or_else(|| corrupt(name))?;
        let holder =
            serde_json::from_slice(kv.value()).map_err(|e| corrupt(name).with_source(e))?;
        if kv.lease() == 0 {
            // Written by somebody else: it would never lapse.
            return Err(corrupt(name));
        }
        Ok(Self {
            key: kv.key().to_vec(),
            id,
            made_at: kv.create_revision(),
            at: kv.mod_revision(),
            lease: kv.lease(),
            holder,
        })
    }

    pub(super) fn state(&self, left: Option<Duration>) -> Result<HolderState> {
        let ttl = self.holder.ttl()?;
        Ok(HolderState {
            token: self.token()?,
            tag: HolderTag::of(&self.id),
            ttl,
            expires_in: left.or_else(|| ttl.duration()),
            info: self.holder.info(),
        })
    }
}

impl Seen {
    /// What reads a lock: its record and its holders, in one transaction.
    pub(super) fn ops(keys: &Keys, name: &LockName) -> [TxnOp; 2] {
        [
            TxnOp::get(keys.record(name), None),
            TxnOp::get(keys.holders(name), Some(GetOptions::new().with_prefix())),
        ]
    }

    /// The answers to [`ops`](Self::ops).
    pub(super) fn of(
        keys: &Keys,
        name: &LockName,
        answers: &mut impl Iterator<Item = TxnOpResponse>,
    ) -> Result<Self> {
        let mut next = || match answers.next() {
            Some(TxnOpResponse::Get(get)) => Ok(get),
            _ => Err(Error::indeterminate(
                "the etcd server answered a transaction in part",
            )),
        };
        let (record, holders) = (next()?, next()?);
        Self::of_parts(keys, name, record.kvs(), holders.kvs())
    }

    /// A lock from the key values of its record and its holders.
    pub(super) fn of_parts(
        keys: &Keys,
        name: &LockName,
        record: &[KeyValue],
        holders: &[KeyValue],
    ) -> Result<Self> {
        let record = record
            .first()
            .map(|kv| SeenRecord::of(kv, name))
            .transpose()?;
        let prefix = keys.holders(name);
        let holders = holders
            .iter()
            .map(|kv| SeenHolder::of(kv, &prefix, name))
            .collect::<Result<_>>()?;
        Ok(Self { record, holders })
    }

    pub(super) fn at(&self) -> i64 {
        self.record.as_ref().map_or(0, |seen| seen.at)
    }

    pub(super) fn last(&self) -> Result<Option<FencingToken>> {
        self.record.as_ref().map(SeenRecord::last).transpose()
    }

    /// The capacity that holders have it with.
    pub(super) fn capacity(&self) -> Option<u32> {
        let permits = self.record.as_ref().map(|seen| seen.record.permits)?;
        (permits > 0).then_some(permits)
    }

    /// What an operator sees; `left` says how long each holder has.
    pub(super) fn state(
        &self,
        name: &LockName,
        left: impl Fn(i64) -> Option<Duration>,
    ) -> Result<LockState> {
        let mut state = LockState::new(name.clone(), self.last()?);
        state.capacity = self.capacity();
        for seen in &self.holders {
            state.holders.push(seen.state(left(seen.lease))?);
        }
        state.holders.sort_by_key(|holder| holder.token);
        Ok(state)
    }
}

/// A TTL in whole seconds, as etcd has it.
pub(super) fn ttl_of(secs: i64) -> Result<Ttl> {
    Ttl::new(Duration::from_secs(unsigned(secs)))
}

/// The whole seconds that last at least as long.
pub(super) fn whole_secs(duration: Duration) -> i64 {
    let secs = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
    i64::try_from(secs).unwrap_or(i64::MAX)
}

fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

const CORRUPT: &str = "the record of the lock in etcd is damaged; repair it with `fencelock repair NAME --min-token N`";

pub(super) fn corrupt(name: &LockName) -> Error {
    Error::corrupt(CORRUPT).with("name", format_args!("{name:?}"))
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;
