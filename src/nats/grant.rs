//! How a lock is granted, extended and given up.

use std::time::Duration;

use async_nats::HeaderMap;

use super::bucket::Clock;
use super::connect::Swap;
use super::failure::{Effect, Failure};
use super::lease::{Inner, whole_millis};
use super::record::{Holder, Lock, Stamp, Standing, corrupt};
use crate::backoff::Backoff;
use crate::clock::{Tick, unix_micros};
use crate::error::{Error, Result};
use crate::lease::{AcquireRequest, Attempt, Contention, Grant, LeaseRef, Release, Renewal, Ttl};
use crate::name::LockName;
use crate::token::{FencingToken, check_jump};

/// The pauses after a race for one record was lost.
const RACE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(40));

/// A record that this store wrote: of nobody, or of one holder of ours alone. Where it is still the
/// last one, the next change of it needs no look.
#[derive(Clone)]
pub(super) struct Known {
    at: u64,
    last: Option<FencingToken>,
    capacity: Option<u32>,
    /// The holder, and when the request was sent from which its TTL runs.
    holder: Option<(Holder, Tick)>,
}

/// A lock as it was read, and the clock that its holders lapse by.
pub(super) struct Look {
    pub(super) lock: Lock,
    pub(super) clock: Clock,
}

/// What is to become of a lock that was looked at.
pub(super) enum Edit<T> {
    Leave(T),
    Store(T),
}

impl Inner {
    /// Reads a lock. What is read only proposes: it is compared when something is written.
    pub(super) async fn look(&self, name: &LockName) -> Result<Look> {
        let known = self.known(name).map_or(0, |known| known.at);
        let subject = self.bucket.record(name);
        let (stored, clock) = tokio::join!(
            self.bucket.read(&self.link, &subject),
            self.bucket.clock(&self.link)
        );
        let (stored, clock) = (stored?, clock?);
        let Some(stored) = stored else {
            let lock = Lock::default();
            return Ok(Look { lock, clock });
        };
        if stored.at < known {
            return Err(Error::unavailable(
                "the NATS server answered with an older record than is known; its leader was replaced, and does not know it yet",
            )
            .with("name", format_args!("{name:?}")));
        }
        let (_, lock) = Lock::of(&stored, Some(name)).ok_or_else(|| corrupt(name))?;
        Ok(Look { lock, clock })
    }

    /// The one step that changes a lock (L3, L8): it is stored only where the record is still the
    /// one of `lock.at`. The new sequence; `None` where the record has changed.
    pub(super) async fn store(
        &self,
        name: &LockName,
        lock: &Lock,
        granting: bool,
    ) -> Result<Swap, Failure> {
        let body = lock.encode(name, granting).map_err(Failure::refused)?;
        let (stream, subject) = (&self.bucket.stream, self.bucket.record(name));
        let headers = HeaderMap::new();
        let swap = self.link.swap(stream, &subject, lock.at, headers, body);
        swap.await
    }

    /// Looks at a lock without those who have lapsed, and changes it, until nobody comes between.
    pub(super) async fn edit<T>(
        &self,
        name: &LockName,
        mut edit: impl FnMut(&mut Lock, Clock) -> Result<Edit<T>>,
    ) -> Result<T> {
        let mut backoff = Backoff::new(RACE.0, RACE.1);
        loop {
            let Look { mut lock, clock } = self.look(name).await?;
            lock.drop_lapsed(clock);
            let answer = match edit(&mut lock, clock)? {
                Edit::Leave(answer) => return Ok(answer),
                Edit::Store(answer) => answer,
            };
            match self.store(name, &lock, false).await? {
                Swap::Stored(at) => {
                    self.stored(name, at, lock);
                    return Ok(answer);
                }
                Swap::Moved => tokio::time::sleep(backoff.next()).await,
            }
        }
    }

    /// Remembers what was written, where nobody else is in it.
    fn stored(&self, name: &LockName, at: u64, lock: Lock) {
        if lock.holders.is_empty() {
            self.remember(
                name,
                Known {
                    at,
                    last: lock.last,
                    capacity: lock.capacity,
                    holder: None,
                },
            );
        } else {
            self.forget(name);
        }
    }

    pub(super) async fn acquire(&self, request: &AcquireRequest, ttl: Duration) -> Result<Attempt> {
        let name = &request.name;
        let mut backoff = Backoff::new(RACE.0, RACE.1);
        let free = self.known(name).filter(|known| known.holder.is_none());
        let mut guess = free.map(|known| Lock {
            at: known.at,
            last: known.last,
            capacity: known.capacity,
            holders: Vec::new(),
        });
        loop {
            let mut lock = match guess.take() {
                Some(lock) => lock,
                None => {
                    let Look { mut lock, clock } = self.look(name).await?;
                    lock.drop_lapsed(clock);
                    match self.judge(request, ttl, &mut lock, clock).await? {
                        Verdict::Answer(attempt) => return Ok(attempt),
                        Verdict::LookAgain => {
                            tokio::time::sleep(backoff.next()).await;
                            continue;
                        }
                        Verdict::Free => lock,
                    }
                }
            };
            if let Some(above) = request.above {
                // One forged watermark must not use the tokens up (S11).
                check_jump(lock.last, above, unix_micros())?;
            }
            let least = FencingToken::after(lock.last.max(request.above))?;
            lock.last = Some(least);
            lock.capacity = Some(request.permits);
            lock.holders.push(Holder::new(request, ttl));
            let sent = self.clock.now();
            // Until there is an answer, it may come at any time.
            self.doubt(request.holder, lock.at);
            let swap = self.store(name, &lock, true).await;
            if !matches!(&swap, Err(failure) if failure.effect == Effect::Unknown) {
                self.settle(&request.holder);
            }
            match swap? {
                Swap::Stored(at) => {
                    let token = FencingToken::new(least.get().max(at))?;
                    self.remember_grant(name, at, token, lock, sent);
                    return Ok(Attempt::Granted(Grant {
                        token,
                        ttl: Ttl::new(ttl)?,
                    }));
                }
                Swap::Moved => {
                    self.forget(name);
                    tokio::time::sleep(backoff.next()).await;
                }
            }
        }
    }

    fn remember_grant(
        &self,
        name: &LockName,
        at: u64,
        token: FencingToken,
        mut lock: Lock,
        sent: Tick,
    ) {
        match lock.holders.pop() {
            Some(mut own) if lock.holders.is_empty() => {
                own.token = Some(token);
                self.remember(
                    name,
                    Known {
                        at,
                        last: Some(token),
                        capacity: lock.capacity,
                        holder: Some((own, sent)),
                    },
                );
            }
            _ => self.forget(name),
        }
    }

    /// What a look at the lock says of an acquire.
    async fn judge(
        &self,
        request: &AcquireRequest,
        ttl: Duration,
        lock: &mut Lock,
        clock: Clock,
    ) -> Result<Verdict> {
        let name = &request.name;
        if let (Some(capacity), false) = (lock.capacity, lock.holders.is_empty())
            && capacity != request.permits
        {
            return Err(Error::invalid(
                "the lock is held with another capacity; ask for the same number of permits, or wait until it is free",
            )
            .with("permits", request.permits)
            .with("capacity", capacity));
        }
        // The same request again: its answer was lost (L7).
        if let Some(own) = lock.grant(&request.holder, None) {
            let token = own.token.ok_or_else(|| corrupt(name))?;
            own.stamp = Stamp::Now;
            own.ttl = ttl;
            return Ok(match self.store(name, lock, false).await? {
                Swap::Moved => Verdict::LookAgain,
                Swap::Stored(_) => {
                    self.settle(&request.holder);
                    self.forget(name);
                    Verdict::Answer(Attempt::Granted(Grant {
                        token,
                        ttl: Ttl::new(ttl)?,
                    }))
                }
            });
        }
        let permits = usize::try_from(request.permits).unwrap_or(usize::MAX);
        // A holder that lingers does not come twice.
        let lingers = lock
            .holders
            .iter()
            .any(|holder| holder.id == request.holder);
        if lock.holders.len() < permits && !lingers {
            return Ok(Verdict::Free);
        }
        if self.stamp_anew(name, lock, clock).await? {
            return Ok(Verdict::LookAgain);
        }
        let left = lock
            .holders
            .iter()
            .map(|holder| match holder.standing(clock) {
                Standing::Lapsed => Duration::ZERO,
                Standing::Good(left) => left,
                Standing::Unknown => holder.ttl,
            });
        Ok(Verdict::Answer(Attempt::Held(Contention {
            free_in: left.min(),
            holder: lock.holders.first().map(|holder| holder.info.clone()),
        })))
    }

    /// Has those holders stamped by the present leader that another clock has stamped: whether they
    /// have lapsed cannot be known, so that each gets its whole TTL, once. True where something was
    /// stored, or something newer is there.
    async fn stamp_anew(&self, name: &LockName, lock: &mut Lock, clock: Clock) -> Result<bool> {
        let mut found = false;
        for holder in &mut lock.holders {
            if holder.standing(clock) == Standing::Unknown {
                holder.stamp = Stamp::Now;
                found = true;
            }
        }
        if found {
            self.forget(name);
            self.store(name, lock, false).await?;
        }
        Ok(found)
    }

    /// Extends grants of one name.
    pub(super) async fn renew_batch(&self, batch: &[&(LeaseRef, Ttl)]) -> Result<Vec<Renewal>> {
        let Some((first, _)) = batch.first() else {
            return Ok(Vec::new());
        };
        let mut wanted = Vec::with_capacity(batch.len());
        for (lease, ttl) in batch {
            wanted.push((lease, whole_millis(*ttl)?));
        }
        let known = match wanted.as_slice() {
            [(lease, ttl)] => self.renew_known(lease, *ttl).await?,
            _ => None,
        };
        // For each, whether it now ends sooner; nothing where it is lost.
        let renewed = match known {
            Some(sooner) => vec![Some(sooner)],
            None => {
                let renewed = self.edit(&first.name, |lock, _| {
                    let mut renewed = Vec::with_capacity(wanted.len());
                    for (lease, ttl) in &wanted {
                        let own = lock.grant(&lease.holder, lease.token);
                        renewed.push(own.map(|own| {
                            let sooner = *ttl < own.ttl;
                            own.stamp = Stamp::Now;
                            own.ttl = *ttl;
                            sooner
                        }));
                    }
                    Ok(if renewed.iter().any(Option::is_some) {
                        Edit::Store(renewed)
                    } else {
                        Edit::Leave(renewed)
                    })
                });
                renewed.await?
            }
        };
        if renewed.contains(&Some(true)) {
            self.link.tell(self.bucket.freed(&first.name)).await;
        }
        let answer = |renewed: Option<bool>| match renewed {
            Some(_) => Renewal::Renewed,
            None => Renewal::Lost,
        };
        Ok(renewed.into_iter().map(answer).collect())
    }

    /// Extends a grant without a look, where it is certainly good still: whether it now ends sooner.
    /// `None` where a look is needed.
    async fn renew_known(&self, lease: &LeaseRef, ttl: Duration) -> Result<Option<bool>> {
        let Some((known, own)) = self.known_good(lease) else {
            return Ok(None);
        };
        let mut holder = own;
        let sooner = ttl < holder.ttl;
        holder.ttl = ttl;
        holder.stamp = Stamp::Now;
        let lock = Lock {
            at: known.at,
            last: known.last,
            capacity: known.capacity,
            holders: vec![holder.clone()],
        };
        let sent = self.clock.now();
        match self.store(&lease.name, &lock, false).await? {
            Swap::Stored(at) => {
                self.remember(
                    &lease.name,
                    Known {
                        at,
                        holder: Some((holder, sent)),
                        ..known
                    },
                );
                Ok(Some(sooner))
            }
            Swap::Moved => {
                self.forget(&lease.name);
                Ok(None)
            }
        }
    }

    /// A grant that is the record's only one, as far as we know, and that cannot have lapsed: its
    /// TTL has not passed by our own clock, since before it was stored.
    fn known_good(&self, lease: &LeaseRef) -> Option<(Known, Holder)> {
        let known = self.known(&lease.name)?;
        let (holder, sent) = known.holder.clone()?;
        // Clocks may run two in a hundred apart (L4).
        let believed = holder.ttl.mul_f64(1.0 / 1.02);
        let good = holder.is(&lease.holder, lease.token) && self.clock.now().since(sent) < believed;
        good.then_some((known, holder))
    }

    pub(super) async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        let name = &lease.name;
        let answer = match self.release_known(lease, linger).await? {
            Some(answer) => answer,
            None => {
                let doubted = self.doubted(&lease.holder);
                let released = self.edit(name, |lock, _| {
                    if !give_up(lock, lease, linger) {
                        // A grant without an answer may be under way still. Written anew, the record
                        // is not the one that it would replace.
                        return Ok(if doubted == Some(lock.at) {
                            Edit::Store(Release::NotHeld)
                        } else {
                            Edit::Leave(Release::NotHeld)
                        });
                    }
                    Ok(Edit::Store(Release::Released))
                });
                released.await?
            }
        };
        self.settle(&lease.holder);
        if answer == Release::Released {
            self.link.tell(self.bucket.freed(name)).await;
        }
        Ok(answer)
    }

    /// Gives a grant up without a look, where it is certainly good still.
    async fn release_known(&self, lease: &LeaseRef, linger: Duration) -> Result<Option<Release>> {
        let Some((known, own)) = self.known_good(lease) else {
            return Ok(None);
        };
        let mut lock = Lock {
            at: known.at,
            last: known.last,
            capacity: known.capacity,
            holders: vec![own],
        };
        give_up(&mut lock, lease, linger);
        // Whatever becomes of it, the grant is not to be counted on.
        self.forget(&lease.name);
        match self.store(&lease.name, &lock, false).await? {
            Swap::Stored(at) => {
                self.stored(&lease.name, at, lock);
                Ok(Some(Release::Released))
            }
            Swap::Moved => Ok(None),
        }
    }
}

enum Verdict {
    Answer(Attempt),
    LookAgain,
    Free,
}

/// Ends a grant, or lets it linger; false where there is none.
fn give_up(lock: &mut Lock, lease: &LeaseRef, linger: Duration) -> bool {
    let Some(own) = lock.grant(&lease.holder, lease.token) else {
        return false;
    };
    if linger.is_zero() {
        let id = own.id;
        lock.holders
            .retain(|holder| holder.id != id || holder.released);
    } else {
        own.released = true;
        own.stamp = Stamp::Now;
        own.ttl = linger;
    }
    true
}
