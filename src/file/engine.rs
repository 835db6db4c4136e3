//! The lock operations, each one read, decision and write under the record's kernel lock.

use std::time::Duration;

use crate::clock::{Clock, Tick, unix_micros};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::unhex;
use crate::file::live::Live;
use crate::file::locked::LockedRecord;
use crate::file::record::{Entry, Judge};
use crate::file::records::{Halt, Pace, Records, name_within};
use crate::file::watch::{Glimpse, Notifier};
use crate::lease::{
    AcquireRequest, Attempt, Contention, Grant, INFO_TEXT_MAX_BYTES, LeaseInfo, LeaseRef,
    LockState, Pruned, Release, Renewal, Ttl,
};
use crate::name::{LockName, decode};
use crate::token::{FencingToken, check_jump};

/// A store's parts, shared with the threads that may block.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) records: Records,
    pub(crate) live: Live,
    pub(crate) notifier: Notifier,
    pub(crate) clock: Clock,
}

impl Engine {
    pub(crate) fn acquire(&self, request: &AcquireRequest, pace: Pace) -> Result<Attempt, Halt> {
        check(request)?;
        let mut record = self.records.open_or_create(&request.name, pace)?;
        let mut judge = self.judge();
        record.state.keep_good(&mut judge)?;
        let held = record.state.holders.len();
        if held > 0 && record.state.capacity != Some(request.permits) {
            return Err(other_capacity(&record, request).into());
        }
        let granted = |token| {
            Attempt::Granted(Grant {
                token,
                ttl: request.ttl,
            })
        };
        let live = if request.detached {
            None
        } else {
            Some(self.live.id()?)
        };
        if let Some(entry) = record
            .state
            .holders
            .iter_mut()
            .find(|e| e.is_of(&request.holder))
        {
            entry.extend(request.ttl, &judge);
            entry.tie(live);
            let token = entry.token()?;
            record.store()?;
            return Ok(granted(token));
        }
        if held >= usize::try_from(request.permits).unwrap_or(usize::MAX) {
            return Ok(Attempt::Held(contention(&record, &judge)));
        }
        let token = next_token(record.state.last, request.above)?;
        record.reserve(token, pace)?;
        let mut entry = Entry::new(&request.holder, token, &request.info);
        // The reservation may have taken a while; the grant lasts a whole TTL all the same.
        judge.now = self.clock.now();
        entry.extend(request.ttl, &judge);
        entry.tie(live);
        record.state.last = token.get();
        record.state.capacity = Some(request.permits);
        record.state.holders.push(entry);
        record.store()?;
        Ok(granted(token))
    }

    pub(crate) fn renew(&self, lease: &LeaseRef, ttl: Ttl, pace: Pace) -> Result<Renewal, Halt> {
        let Some(mut record) = self.records.open(&lease.name, pace)? else {
            return Ok(Renewal::Lost);
        };
        let mut judge = self.judge();
        record.state.keep_good(&mut judge)?;
        let Some(entry) = record.state.find_mut(lease) else {
            return Ok(Renewal::Lost);
        };
        if entry.ttl()? == Ttl::NONE {
            return Ok(Renewal::StillHeld);
        }
        if ttl == Ttl::NONE {
            return Err(
                Error::invalid("a lease with a TTL cannot be renewed to last for ever").into(),
            );
        }
        entry.extend(ttl, &judge);
        record.store()?;
        Ok(Renewal::Renewed)
    }

    pub(crate) fn release(
        &self,
        lease: &LeaseRef,
        linger: Duration,
        pace: Pace,
    ) -> Result<Release, Halt> {
        let Some(mut record) = self.records.open(&lease.name, pace)? else {
            return Ok(Release::NotHeld);
        };
        let mut judge = self.judge();
        record.state.keep_good(&mut judge)?;
        if !record.state.give_up(lease, linger, &judge) {
            return Ok(Release::NotHeld);
        }
        record.store()?;
        Ok(Release::Released)
    }

    pub(crate) fn inspect(&self, name: &LockName, pace: Pace) -> Result<Option<LockState>, Halt> {
        let Some(mut record) = self.records.open(name, pace)? else {
            return Ok(None);
        };
        Ok(Some(self.show(&mut record, name)?))
    }

    pub(crate) fn break_lock(
        &self,
        name: &LockName,
        pace: Pace,
    ) -> Result<Option<LockState>, Halt> {
        let Some(mut record) = self.records.open(name, pace)? else {
            return Ok(None);
        };
        let before = self.show(&mut record, name)?;
        if !record.state.holders.is_empty() {
            record.state.holders.clear();
            record.store()?;
        }
        Ok(Some(before))
    }

    pub(crate) fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        mend: bool,
        pace: Pace,
    ) -> Result<FencingToken, Halt> {
        if matches!(self.records.open(name, pace), Ok(None)) {
            self.records.check_first(floor, pace.until()?)?;
        }
        let mut record = match self.records.open_or_create(name, pace) {
            Err(Halt::Failed(e)) if mend && e.kind() == ErrorKind::Corrupt => {
                self.records.mend(name, floor, pace.until()?)?;
                self.records.open_or_create(name, pace)?
            }
            opened => opened?,
        };
        let last = FencingToken::new(record.state.last).ok();
        check_jump(last, floor, unix_micros())?;
        match last {
            Some(last) if floor <= last => Ok(last),
            _ => {
                record.reserve(floor, pace)?;
                record.state.last = floor.get();
                record.store()?;
                Ok(floor)
            }
        }
    }

    pub(crate) fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
        until: Tick,
    ) -> Result<Vec<LockState>, Halt> {
        let mut found = Vec::new();
        for key in self.records.keys()? {
            let (name, nameless) = match self.name_of(&key, until) {
                Ok(Some(name)) if name.as_str().starts_with(prefix) => (name, None),
                Ok(_) => continue,
                Err(e) if may_begin_with(&key, prefix) => (LockName::new(&key)?, Some(e)),
                Err(_) => continue,
            };
            if after.is_none_or(|after| name > *after) {
                found.push((name, nameless));
            }
        }
        found.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        let mut states = Vec::new();
        for (name, nameless) in found {
            if states.len() >= limit {
                break;
            }
            let state = match nameless {
                None => self.inspect(&name, Pace::Until(until)),
                Some(e) => Err(e.into()),
            };
            match state {
                // One that was pruned in the meantime takes no place.
                Ok(state) => states.extend(state),
                Err(Halt::Failed(e)) => states.push(self.damaged(name, &e)?),
                Err(halt) => return Err(halt),
            }
        }
        Ok(states)
    }

    /// A record that cannot be read, which must not hide the others.
    ///
    /// # Errors
    /// Where it is the store that has failed, and not this record alone.
    fn damaged(&self, name: LockName, error: &Error) -> Result<LockState> {
        self.records.root.check_same()?;
        let mut state = LockState::new(name, None);
        state.damage = Some(error.to_string());
        Ok(state)
    }

    pub(crate) fn prune(&self, idle: Duration, until: Tick) -> Result<Pruned, Halt> {
        let mut pruned = Pruned::default();
        for key in self.records.keys()? {
            let removed = match self.prune_one(&key, idle, until) {
                Ok(None) => continue,
                Ok(Some(removed)) => removed,
                // A record that cannot be understood is evidence, and stays for whoever mends it.
                Err(Halt::Failed(e))
                    if matches!(e.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) =>
                {
                    false
                }
                // Somebody is at it right now, so it is not idle.
                Err(Halt::WouldWait) => false,
                Err(e) => return Err(e),
            };
            if removed {
                pruned.removed += 1;
            } else {
                pruned.kept += 1;
            }
        }
        self.live.reap()?;
        self.records.sweep()?;
        Ok(pruned)
    }

    /// What a waiter sees; `None` where the record is busy or cannot be read now.
    pub(crate) fn glimpse(&self, name: &LockName) -> Option<Glimpse> {
        match self.records.open(name, Pace::Inline) {
            Ok(None) => Some(None),
            Ok(Some(mut record)) => {
                record.state.keep_good(&mut self.judge()).ok()?;
                Some(Some((record.version(), record.state.holders.len())))
            }
            Err(_) => None,
        }
    }

    /// The lock of a record's file; `None` for a file that is not one of ours or is gone.
    pub(crate) fn name_of(&self, key: &str, until: Tick) -> Result<Option<LockName>> {
        if let Some(name) = decode(key) {
            return LockName::new(&name).map(Some);
        }
        if hashed_start(key).is_none() {
            return Ok(None);
        }
        name_within(self.records.dir(), key, until)
    }

    /// True where the record was removed; `None` where there is none.
    fn prune_one(&self, key: &str, idle: Duration, until: Tick) -> Result<Option<bool>, Halt> {
        let Some(name) = self.name_of(key, until)? else {
            return Ok(None);
        };
        let Some(mut record) = self.records.open(&name, Pace::Inline)? else {
            return Ok(None);
        };
        let mut judge = self.judge();
        // A grant that nobody gave up was held until it lapsed, or until a death of unknown time.
        let lapsed = record
            .state
            .holders
            .iter()
            .map(|e| judge.lapsed_for(e).unwrap_or_default());
        let unheld_for = lapsed.min().unwrap_or(Duration::MAX);
        record.state.keep_good(&mut judge)?;
        let unused_us = unix_micros().saturating_sub(record.state.used_unix_us);
        let idle_for = Duration::from_micros(unused_us).min(unheld_for);
        if !record.state.holders.is_empty() || idle_for < idle {
            return Ok(Some(false));
        }
        record.remove(until)?;
        Ok(Some(true))
    }

    fn show(&self, record: &mut LockedRecord<'_>, name: &LockName) -> Result<LockState> {
        let mut judge = self.judge();
        record.state.keep_good(&mut judge)?;
        record.state.show(name, &judge)
    }

    /// A judge of the present moment. Called with the record's lock held: a moment before that
    /// would let a grant that lapsed in the meantime pass for good.
    fn judge(&self) -> Judge<'_> {
        Judge::new(self.clock.now(), &self.records.host, &self.live)
    }
}

/// The readable start of a key that is hashed; `None` for any other.
fn hashed_start(key: &str) -> Option<&str> {
    let (start, hash) = key.split_once("==")?;
    unhex::<32>(hash).map(|_| start)
}

/// False where the lock of a hashed key certainly has another name.
fn may_begin_with(key: &str, prefix: &str) -> bool {
    match hashed_start(key).and_then(decode) {
        Some(start) => start.starts_with(prefix) || prefix.starts_with(&start),
        // Cut in the middle of a character.
        None => true,
    }
}

/// The token of the next grant: above the last one, and above what the caller has met (L10).
fn next_token(last: u64, above: Option<FencingToken>) -> Result<FencingToken> {
    let last = FencingToken::new(last).ok();
    if let Some(above) = above {
        // A forged watermark must not use up the tokens of the lock (S11).
        check_jump(last, above, unix_micros())?;
    }
    FencingToken::after(last.max(above))
}

fn check(request: &AcquireRequest) -> Result<()> {
    request.check_permits()?;
    if request.detached && request.ttl == Ttl::NONE {
        return Err(Error::invalid(
            "a lock without a TTL is held by a process and ends with it; give a TTL to one that outlives its process",
        ));
    }
    let LeaseInfo {
        host,
        label,
        trace_id,
        ..
    } = &request.info;
    let texts = [Some(host), label.as_ref(), trace_id.as_ref()];
    if let Some(long) = texts
        .into_iter()
        .flatten()
        .find(|t| t.len() > INFO_TEXT_MAX_BYTES)
    {
        return Err(Error::invalid("a host, label or trace id is too long")
            .with("bytes", long.len())
            .with("limit_bytes", INFO_TEXT_MAX_BYTES));
    }
    Ok(())
}

fn other_capacity(record: &LockedRecord<'_>, request: &AcquireRequest) -> Error {
    let error = Error::invalid(
        "the lock is held with another capacity; ask for the same number of permits",
    )
    .with("asked", request.permits);
    match record.state.capacity {
        Some(capacity) => error.with("capacity", capacity),
        None => error.with("capacity", "none"),
    }
}

fn contention(record: &LockedRecord<'_>, judge: &Judge<'_>) -> Contention {
    let holders = &record.state.holders;
    Contention {
        free_in: holders
            .iter()
            .filter_map(|entry| judge.remaining(entry))
            .min(),
        holder: holders.first().map(Entry::info),
    }
}

#[cfg(test)]
mod tests;
