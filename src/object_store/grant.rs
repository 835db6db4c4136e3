//! How a record changes: it is found, judged, decided on, and written where it still is what was
//! found. A write that is refused, or whose answer is lost, is followed by another look.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::connect::{Swap, Version};
use super::lease::Inner;
use super::record::{Entry, Record, nonce};
use super::time::{Reading, micros};
use crate::backoff::Backoff;
use crate::clock::Tick;
use crate::driver::within;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{AcquireRequest, Attempt, Grant, LeaseRef, Release, Renewal, Ttl};
use crate::name::LockName;
use crate::token::{FencingToken, check_jump};

/// Every change ends within this time.
pub(super) const LIMIT: Duration = Duration::from_secs(9);

/// Pauses between tries of a change that met another one.
const RETRY: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(400));

/// How often a write is tried whose answers are lost.
const DOUBTS_MAX: usize = 3;

/// How old a reading of the store's clock may be to begin the tokens of a name from.
const READING_MAX_AGE: Duration = Duration::from_secs(60);

/// A record as it was found, or as this client wrote it last.
#[derive(Clone, Debug)]
pub(super) struct Base {
    pub(super) record: Record,
    /// `None` where the name has no record.
    pub(super) version: Option<Version>,
    /// When it was written by the store's clock, in microseconds since the Unix epoch; `None` for
    /// what this client wrote itself, and has not asked about.
    pub(super) noted_us: Option<u64>,
}

/// What a change is decided on.
#[derive(Debug)]
pub(super) struct Draft {
    /// The record without grants that have lapsed: nothing revives them (L5).
    pub(super) record: Record,
    /// How long each grant is still good.
    pub(super) left: Vec<Duration>,
    /// What the write will be known by.
    nonce: String,
    /// What the next token is at least: the store's time in microseconds.
    least: u64,
    exists: bool,
    /// A write of this change may have been applied already.
    pub(super) in_doubt: bool,
}

/// What becomes of a draft.
pub(super) enum Decision<T> {
    /// Nothing is written.
    Leave(T),
    /// The draft's record is written, and then this is the answer.
    Write(T),
}

/// How a change begins.
#[derive(Debug, Default)]
pub(super) struct Start {
    /// What the record probably is, instead of a look.
    pub(super) base: Option<Base>,
    /// The draft needs to know the store's time even where there is no record.
    pub(super) needs_time: bool,
    /// A damaged record counts as one of which nothing is known.
    pub(super) mend: bool,
}

impl Inner {
    /// Changes the record of `name` as `decide` says, which may be asked several times.
    ///
    /// Cancel safe, as a request whose answer is lost.
    pub(super) async fn change<T>(
        &self,
        name: &LockName,
        start: Start,
        decide: impl FnMut(&mut Draft) -> Result<Decision<T>>,
    ) -> Result<T> {
        let in_doubt = AtomicBool::new(false);
        let changed = within(LIMIT, self.try_change(name, start, decide, &in_doubt)).await;
        let in_doubt = in_doubt.load(Ordering::Relaxed);
        match changed {
            Some(Err(error)) if in_doubt && error.kind() == ErrorKind::Unavailable => {
                Err(error.into_kind(ErrorKind::Indeterminate))
            }
            Some(changed) => changed,
            None if in_doubt => Err(super::failure::silent(LIMIT)),
            None => Err(Error::unavailable(
                "the lock's record changes too often, or the object store is too slow",
            )
            .with("limit", format_args!("{LIMIT:?}"))),
        }
    }

    async fn try_change<T>(
        &self,
        name: &LockName,
        start: Start,
        mut decide: impl FnMut(&mut Draft) -> Result<Decision<T>>,
        in_doubt: &AtomicBool,
    ) -> Result<T> {
        let path = self.path_of(name)?;
        let mut backoff = Backoff::new(RETRY.0, RETRY.1);
        // Writes that were not confirmed, by their nonces. A refusal is none for sure: a client
        // that repeats requests by itself may report its own success as a conflict.
        let mut sent: Vec<(String, T)> = Vec::new();
        let mut doubts = 0;
        let mut begin = start.base;
        loop {
            let remembered = begin.is_some();
            let base = match begin.take() {
                Some(base) => base,
                None => self.find(name, start.mend).await?,
            };
            if let Some(at) = sent.iter().position(|(n, _)| *n == base.record.nonce) {
                return Ok(sent.swap_remove(at).1);
            }
            let version = base.version.clone();
            let mut draft = self.draft(name, base, start.needs_time, doubts > 0).await?;
            let answer = match decide(&mut draft) {
                Ok(Decision::Write(answer)) => answer,
                // Only a write proves a memory right.
                _ if remembered => continue,
                Ok(Decision::Leave(answer)) => return Ok(answer),
                Err(error) => return Err(error),
            };
            let Draft {
                mut record, nonce, ..
            } = draft;
            record.nonce.clone_from(&nonce);
            if remembered && record.holders.iter().any(|entry| entry.is_undated(&nonce)) {
                // When our own last write was, only the store knows.
                continue;
            }
            let body = record.encode()?.into();
            let asked = self.clock.now();
            in_doubt.store(true, Ordering::Relaxed);
            let swapped = self.link.swap(&path, body, version.as_ref()).await;
            let unknown = matches!(&swapped, Err(e) if e.kind() == ErrorKind::Indeterminate);
            doubts += usize::from(unknown);
            in_doubt.store(doubts > 0, Ordering::Relaxed);
            match swapped {
                Ok(Swap::Done(version)) => {
                    self.wrote(name, record, version, asked);
                    return Ok(answer);
                }
                Ok(Swap::Refused) => {
                    self.forget(name);
                    sent.push((nonce, answer));
                    if remembered {
                        continue;
                    }
                }
                Err(error) if unknown && doubts < DOUBTS_MAX => {
                    tracing::debug!(%name, %error, "write unconfirmed; looking for it");
                    self.forget(name);
                    sent.push((nonce, answer));
                }
                Err(error) => return Err(error),
            }
            tokio::time::sleep(backoff.next()).await;
        }
    }

    /// The record as the store has it.
    pub(super) async fn find(&self, name: &LockName, mend: bool) -> Result<Base> {
        let Some(found) = self.link.read(&self.path_of(name)?).await? else {
            self.forget(name);
            return Ok(Base {
                record: Record::new(name),
                version: None,
                noted_us: Some(0),
            });
        };
        let record = match Record::decode(name, &found.body) {
            Err(error) if mend => {
                tracing::warn!(%name, %error, "a damaged record is written anew");
                Record::new(name)
            }
            record => record?,
        };
        self.seen.note(name, &record, self.clock.now());
        self.forget_unless(name, &found.version);
        Ok(Base {
            record,
            version: Some(found.version),
            noted_us: Some(found.modified_us),
        })
    }

    async fn draft(
        &self,
        name: &LockName,
        base: Base,
        needs_time: bool,
        in_doubt: bool,
    ) -> Result<Draft> {
        let exists = base.version.is_some();
        let mut record = base.record;
        let (left, least) = match base.noted_us {
            // Nobody has written since, so what we knew then of others still stands.
            None => (record.holders.iter().map(Entry::ttl).collect(), 0),
            Some(noted_us) => {
                let left = self.drop_lapsed(name, &mut record, noted_us).await?;
                let least = match exists {
                    true => noted_us,
                    false if needs_time => self.time_for_a_first_token().await?,
                    false => 0,
                };
                (left, least)
            }
        };
        Ok(Draft {
            record,
            left,
            nonce: nonce(),
            least,
            exists,
            in_doubt,
        })
    }

    /// Takes the grants that have lapsed out of a record that was written at `noted_us`, notes in
    /// the others when they were made, and says how long these are still good.
    pub(super) async fn drop_lapsed(
        &self,
        name: &LockName,
        record: &mut Record,
        noted_us: u64,
    ) -> Result<Vec<Duration>> {
        for entry in &mut record.holders {
            entry.stamped_us = entry.stamped_us.or(Some(noted_us));
        }
        let all = self.judge(name, record).await?;
        let mut verdicts = all.iter();
        record
            .holders
            .retain(|_| verdicts.next().is_some_and(Option::is_some));
        Ok(all.into_iter().flatten().collect())
    }

    /// How long each grant is still good; `None` where it has lapsed.
    async fn judge(&self, name: &LockName, record: &Record) -> Result<Vec<Option<Duration>>> {
        if record.holders.is_empty() {
            return Ok(Vec::new());
        }
        let margin = self.margin;
        let end = |entry: &Entry| {
            entry
                .stamped_us
                .unwrap_or(u64::MAX)
                .saturating_add(micros(entry.ttl().saturating_add(margin)))
        };
        if self.time.is_trusted() {
            let now = self.clock.now();
            // What was noted once is past for ever; only between that and the latest time that it
            // can be now is it worth another look.
            let is_open = |reading: &Reading| {
                let open = reading.noted_us.saturating_add(1)..=reading.latest_us(now, margin);
                record
                    .holders
                    .iter()
                    .any(|entry| open.contains(&end(entry)))
            };
            let reading = match self.time.last().filter(|last| !is_open(last)) {
                Some(last) => last,
                None => self.look().await?,
            };
            let now = self.clock.now();
            let latest = reading.latest_us(now, margin);
            if record
                .holders
                .iter()
                .any(|entry| entry.stamped_us.is_none_or(|at| at > latest))
            {
                self.time
                    .distrust("an object was written later than it is now");
            }
            if self.time.is_trusted() {
                let likely = reading.likely_us(now);
                let left = record.holders.iter().map(|entry| {
                    let end = end(entry);
                    // Only what the store noted before now tells that a lease is over.
                    (reading.noted_us < end).then(|| {
                        Duration::from_micros(end.saturating_sub(likely))
                            .max(Duration::from_millis(1))
                    })
                });
                return Ok(left.collect());
            }
        }
        let now = self.clock.now();
        let left = record.holders.iter();
        Ok(left.map(|entry| self.seen.left(name, entry, now)).collect())
    }

    /// A record that is not there may have been there once: its tokens go on from the store's time.
    async fn time_for_a_first_token(&self) -> Result<u64> {
        let now = self.clock.now();
        let young = |reading: &Reading| now.since(reading.answered) <= READING_MAX_AGE;
        let reading = match self.time.last().filter(young) {
            Some(reading) => reading,
            None => self.look().await?,
        };
        Ok(reading.likely_us(self.clock.now()))
    }

    pub(super) async fn acquire(&self, request: &AcquireRequest, ttl: Duration) -> Result<Attempt> {
        let start = Start {
            // Where this client wrote the record last, and left it free, it probably still is.
            base: self.remembered(&request.name, |record, _| record.holders.is_empty()),
            needs_time: true,
            mend: false,
        };
        self.change(&request.name, start, |draft| grant(draft, request, ttl))
            .await
    }

    /// Renews all leases of one name in one write.
    pub(super) async fn renew(
        &self,
        name: &LockName,
        leases: &[(LeaseRef, Duration)],
    ) -> Vec<Renewal> {
        let now = self.clock.now();
        let start = Start {
            base: self.remembered(name, |record, asked| {
                leases.iter().all(|(lease, _)| {
                    let mut entries = record.holders.iter();
                    let entry = entries.find(|entry| entry.is_named_by(lease));
                    entry.is_none_or(|entry| is_surely_good(record, entry, asked, now))
                })
            }),
            ..Start::default()
        };
        let renewed = self.change(name, start, |draft| {
            let Draft { record, nonce, .. } = draft;
            let mut found = Vec::with_capacity(leases.len());
            for (lease, ttl) in leases {
                let entry = record.find_mut(lease);
                found.push(entry.is_some());
                if let Some(entry) = entry {
                    entry.extend(*ttl, nonce);
                }
            }
            Ok(if found.contains(&true) {
                Decision::Write(found)
            } else {
                Decision::Leave(found)
            })
        });
        match renewed.await {
            Ok(found) => found
                .into_iter()
                .map(|found| {
                    if found {
                        Renewal::Renewed
                    } else {
                        Renewal::Lost
                    }
                })
                .collect(),
            Err(error) => leases
                .iter()
                .map(|_| Renewal::Unknown(Error::new(error.kind(), error.to_string())))
                .collect(),
        }
    }

    pub(super) async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        let now = self.clock.now();
        let start = Start {
            base: self.remembered(&lease.name, |record, asked| {
                let mut entries = record.holders.iter();
                let entry = entries.find(|entry| entry.is_named_by(lease));
                entry.is_some_and(|entry| is_surely_good(record, entry, asked, now))
            }),
            ..Start::default()
        };
        self.change(&lease.name, start, |draft| {
            let Some(entry) = draft.record.find_mut(lease) else {
                return Ok(Decision::Leave(if draft.in_doubt {
                    // It was there when this began, and a write of ours may have taken it away.
                    Release::Released
                } else {
                    Release::NotHeld
                }));
            };
            if linger.is_zero() {
                draft
                    .record
                    .holders
                    .retain(|entry| !entry.is_named_by(lease));
            } else {
                entry.linger(linger, &draft.nonce);
            }
            Ok(Decision::Write(Release::Released))
        })
        .await
    }
}

impl Draft {
    /// True where the name has a record.
    pub(super) fn exists(&self) -> bool {
        self.exists
    }
}

/// True where the grant counts from our own last write, and cannot have lapsed since by any clock.
fn is_surely_good(record: &Record, entry: &Entry, asked: Tick, now: Tick) -> bool {
    entry.beat == record.nonce && now.since(asked) < entry.ttl() * 100 / 102
}

/// The whole decision of an acquire.
fn grant(draft: &mut Draft, request: &AcquireRequest, ttl: Duration) -> Result<Decision<Attempt>> {
    let record = &mut draft.record;
    if let (Some(capacity), false) = (record.capacity, record.holders.is_empty())
        && capacity != request.permits
    {
        return Err(Error::invalid(
            "the lock is held with another capacity; ask for the same number of permits, or wait until it is free",
        )
        .with("permits", request.permits)
        .with("capacity", capacity));
    }
    let granted = |token| -> Result<_> {
        let ttl = Ttl::new(ttl)?;
        Ok(Decision::Write(Attempt::Granted(Grant { token, ttl })))
    };
    // The same request again: its answer was lost (L7).
    let own = record.holders.iter_mut().find(|e| e.is_of(&request.holder));
    if let Some(own) = own {
        own.extend(ttl, &draft.nonce);
        return granted(own.token()?);
    }
    if record.holders.len() >= usize::try_from(request.permits).unwrap_or(usize::MAX) {
        return Ok(Decision::Leave(Attempt::Held(
            record.contention(&draft.left),
        )));
    }
    if let Some(above) = request.above {
        // One forged watermark must not use the tokens up (S11).
        check_jump(record.last(), above, crate::clock::unix_micros())?;
    }
    let mut token = FencingToken::after(record.last().max(request.above))?;
    if let Ok(by_clock) = FencingToken::new(draft.least) {
        token = token.max(by_clock);
    }
    record.set_last(token);
    record.capacity = Some(request.permits);
    let mut entry = Entry::new(&request.holder, token, &request.info);
    entry.extend(ttl, &draft.nonce);
    record.holders.push(entry);
    granted(token)
}
