//! What a record holds, in JSON that an operator can read, and who of its holders is good.
//!
//! A record has two parts. The [`Reservation`] is synced before any token that it covers is told;
//! the [`State`] is not, and is believed within one boot only (L8).

use std::collections::HashMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::Tick;
use crate::error::{Error, Result};
use crate::fence::{HolderTag, unhex};
use crate::file::live::Live;
use crate::host::Host;
use crate::lease::{HolderId, HolderState, LeaseInfo, LeaseRef, LockState, PERMITS_MAX, Ttl};
use crate::name::LockName;
use crate::token::FencingToken;

/// How many tokens the first reservation of a boot covers. Small, so that rare use wastes few.
pub(crate) const STEP_FIRST: u64 = 16;

/// How many tokens a reservation of a busy lock covers at most.
const STEP_MAX: u64 = 4_096;

/// The synced part: all tokens up to `reserved` may have been told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Reservation {
    pub(crate) name: String,
    /// The boot in which it was made. No grant is made in a boot before a reservation is.
    pub(crate) boot: String,
    pub(crate) reserved: u64,
    pub(crate) made_unix_us: u64,
}

/// The unsynced part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct State {
    pub(crate) name: String,
    pub(crate) boot: String,
    /// All tokens up to this one count as told.
    pub(crate) last: u64,
    /// How many tokens the next reservation covers.
    pub(crate) step: u64,
    pub(crate) capacity: Option<u32>,
    pub(crate) used_unix_us: u64,
    pub(crate) holders: Vec<Entry>,
}

/// One grant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    /// The holder's secret, in hexadecimal: records are for their owner's eyes only.
    holder: String,
    token: u64,
    /// The tick at which the grant lapses; none for `Ttl::NONE`.
    expires_ns: Option<u64>,
    /// The time namespace that the tick was read in.
    time_namespace: String,
    ttl_ns: Option<u64>,
    /// The liveness file that the grant is tied to; none where it outlives its process.
    live: Option<String>,
    /// Given up, and lingering.
    released: bool,
    info: Info,
}

/// [`LeaseInfo`] in its stored form.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Info {
    host: String,
    pid: u32,
    label: Option<String>,
    since_unix_us: u64,
    trace_id: Option<String>,
}

/// Decides which grants are good, at one moment and with one look at each liveness file.
pub(crate) struct Judge<'a> {
    pub(crate) now: Tick,
    host: &'a Host,
    live: &'a Live,
    seen: HashMap<String, bool>,
}

impl Reservation {
    /// True where it can be one of `name`, whose file it was found in.
    pub(crate) fn is_sound(&self, name: &LockName) -> bool {
        self.name == name.as_str() && self.reserved <= FencingToken::MAX.get()
    }
}

impl State {
    /// A state without holders, in which all tokens up to `last` count as told.
    pub(crate) fn new(name: &LockName, host: &Host, last: u64, used_unix_us: u64) -> Self {
        Self {
            name: name.as_str().to_owned(),
            boot: host.boot.clone(),
            last,
            step: first_step(host),
            capacity: None,
            used_unix_us,
            holders: Vec::new(),
        }
    }

    /// True where it can be one of `name`, whose file it was found in.
    pub(crate) fn is_sound(&self, name: &LockName) -> bool {
        self.name == name.as_str()
            && self.last <= FencingToken::MAX.get()
            && self.capacity.is_none_or(|n| (1..=PERMITS_MAX).contains(&n))
            && self.holders.iter().all(Entry::is_sound)
    }

    /// The next reservation's size: doubled each time, since a lock that uses one up is busy.
    pub(crate) fn take_step(&mut self, host: &Host) -> u64 {
        let step = self.step.clamp(1, STEP_MAX);
        if host.knows_boot() {
            self.step = (step * 2).min(STEP_MAX);
        }
        step
    }

    /// Forgets the grants that are not good any more (L5: for ever).
    pub(crate) fn keep_good(&mut self, judge: &mut Judge<'_>) -> Result<()> {
        let mut good = Vec::with_capacity(self.holders.len());
        for entry in self.holders.drain(..) {
            if judge.is_good(&entry)? {
                good.push(entry);
            }
        }
        self.holders = good;
        Ok(())
    }

    /// The grant that `lease` names, where it was not given up (L5).
    pub(crate) fn find_mut(&mut self, lease: &LeaseRef) -> Option<&mut Entry> {
        self.holders
            .iter_mut()
            .find(|entry| entry.is_named_by(lease))
    }

    /// Gives up the grant that `lease` names, and says whether there was one.
    pub(crate) fn give_up(
        &mut self,
        lease: &LeaseRef,
        linger: Duration,
        judge: &Judge<'_>,
    ) -> bool {
        let Some(entry) = self.find_mut(lease) else {
            return false;
        };
        if linger.is_zero() {
            self.holders.retain(|entry| !entry.is_named_by(lease));
        } else {
            entry.linger(linger, judge);
        }
        true
    }

    /// The state as an operator sees it; call [`keep_good`](Self::keep_good) first.
    pub(crate) fn show(&self, name: &LockName, judge: &Judge<'_>) -> Result<LockState> {
        let mut shown = LockState::new(name.clone(), FencingToken::new(self.last).ok());
        shown.capacity = self.capacity;
        for entry in &self.holders {
            shown.holders.push(HolderState {
                token: entry.token()?,
                tag: HolderTag::of(&entry.holder.parse()?),
                ttl: entry.ttl()?,
                expires_in: judge.remaining(entry),
                info: entry.info(),
            });
        }
        Ok(shown)
    }
}

impl Entry {
    pub(crate) fn new(holder: &HolderId, token: FencingToken, info: &LeaseInfo) -> Self {
        Self {
            holder: holder.reveal(),
            token: token.get(),
            expires_ns: None,
            time_namespace: String::new(),
            ttl_ns: None,
            live: None,
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

    /// Makes the grant last for `ttl` from now.
    pub(crate) fn extend(&mut self, ttl: Ttl, judge: &Judge<'_>) {
        self.ttl_ns = ttl.duration().map(nanos);
        self.expires_ns = ttl.duration().map(|ttl| judge.now.after(ttl).as_nanos());
        self.time_namespace.clone_from(&judge.host.time_namespace);
    }

    /// Ties the grant to a liveness file, or to none.
    pub(crate) fn tie(&mut self, live: Option<String>) {
        self.live = live;
    }

    /// Lets a grant that is given up end after `linger`.
    fn linger(&mut self, linger: Duration, judge: &Judge<'_>) {
        self.released = true;
        self.live = None;
        self.expires_ns = Some(judge.now.after(linger.min(Ttl::MAX)).as_nanos());
        self.time_namespace.clone_from(&judge.host.time_namespace);
    }

    /// True where this is a grant of `holder` that it did not give up.
    pub(crate) fn is_of(&self, holder: &HolderId) -> bool {
        !self.released && self.holder == holder.reveal()
    }

    fn is_named_by(&self, lease: &LeaseRef) -> bool {
        let token = lease.token.map(FencingToken::get);
        self.is_of(&lease.holder) && token.is_none_or(|token| token == self.token)
    }

    pub(crate) fn token(&self) -> Result<FencingToken> {
        FencingToken::new(self.token)
    }

    /// The time namespace that its tick was read in.
    #[cfg(feature = "fuzzing")]
    pub(crate) fn time_namespace(&self) -> &str {
        &self.time_namespace
    }

    /// How long each renewal lasts.
    pub(crate) fn ttl(&self) -> Result<Ttl> {
        self.ttl_ns
            .map_or(Ok(Ttl::NONE), |ns| Ttl::new(Duration::from_nanos(ns)))
    }

    /// The liveness file that the grant is tied to.
    pub(crate) fn live(&self) -> Option<&str> {
        self.live.as_deref()
    }

    pub(crate) fn info(&self) -> LeaseInfo {
        LeaseInfo {
            host: self.info.host.clone(),
            pid: self.info.pid,
            label: self.info.label.clone(),
            since_unix_us: self.info.since_unix_us,
            trace_id: self.info.trace_id.clone(),
        }
    }

    /// A liveness id becomes part of a path, so it is checked before anything is done with it.
    fn is_sound(&self) -> bool {
        unhex::<16>(&self.holder).is_some()
            && self.token().is_ok()
            && self.ttl().is_ok()
            && self
                .live
                .as_deref()
                .is_none_or(|id| unhex::<16>(id).is_some())
            && (self.live.is_some() || self.expires_ns.is_some())
    }
}

impl<'a> Judge<'a> {
    pub(crate) fn new(now: Tick, host: &'a Host, live: &'a Live) -> Self {
        Self {
            now,
            host,
            live,
            seen: HashMap::new(),
        }
    }

    /// How long ago the grant lapsed by the clock; none where the clock does not tell.
    pub(crate) fn lapsed_for(&self, entry: &Entry) -> Option<Duration> {
        let expires = self.expiry(entry)?;
        (self.now >= expires).then(|| self.now.since(expires))
    }

    /// When the grant lapses; none where it does not, or where that cannot be known.
    pub(crate) fn remaining(&self, entry: &Entry) -> Option<Duration> {
        self.expiry(entry).map(|expires| expires.since(self.now))
    }

    fn is_good(&mut self, entry: &Entry) -> Result<bool> {
        if self.lapsed_for(entry).is_some() || self.is_of_another_boot(entry) {
            return Ok(false);
        }
        let Some(id) = &entry.live else {
            return Ok(true);
        };
        if let Some(alive) = self.seen.get(id) {
            return Ok(*alive);
        }
        let alive = self.live.is_alive(id)?;
        self.seen.insert(id.clone(), alive);
        Ok(alive)
    }

    /// Ticks of another time namespace are never compared: a grant from there is good while its
    /// process lives, and a detached one until it is released or broken.
    fn expiry(&self, entry: &Entry) -> Option<Tick> {
        let ours = entry.time_namespace == self.host.time_namespace;
        entry.expires_ns.filter(|_| ours).map(Tick::from_nanos)
    }

    /// Where the boot cannot be known, a tick further away than any TTL reaches tells.
    fn is_of_another_boot(&self, entry: &Entry) -> bool {
        !self.host.knows_boot() && self.remaining(entry).is_some_and(|left| left > Ttl::MAX)
    }
}

/// The size of the first reservation of a boot.
pub(crate) fn first_step(host: &Host) -> u64 {
    if host.knows_boot() { STEP_FIRST } else { 1 }
}

/// A part of a record as JSON.
pub(crate) fn encode(part: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(part)
        .map_err(|e| Error::invalid("a record cannot be written as JSON").with_source(e))
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::locked::REGION_BYTES;

    #[test]
    fn the_most_holders_with_the_longest_infos_fit_in_a_region() {
        let name = LockName::new(&"\u{1}".repeat(512)).unwrap();
        let host = Host {
            boot: "b".repeat(36),
            time_namespace: "time:[4026531834]".to_owned(),
        };
        let mut state = State::new(&name, &host, FencingToken::MAX.get(), u64::MAX);
        // JSON spells a control character with six bytes.
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
            entry.expires_ns = Some(u64::MAX);
            entry.ttl_ns = Some(u64::MAX);
            entry.time_namespace.clone_from(&host.time_namespace);
            entry.live = Some("0".repeat(32));
            state.holders.push(entry);
        }
        let bytes = u64::try_from(encode(&state).unwrap().len()).unwrap();
        assert!(bytes <= REGION_BYTES, "{bytes}");
    }
}
