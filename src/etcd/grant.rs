//! How a lock is granted, and a grant extended.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp};

use super::connect::{Link, check_revision, lease_is_gone};
use super::lease::Inner;
use super::record::{Holder, Record, Seen, SeenHolder, ttl_of, whole_secs};
use crate::backoff::Backoff;
use crate::clock::unix_micros;
use crate::error::{Error, Result};
use crate::lease::{AcquireRequest, Attempt, Contention, Grant};
use crate::token::{FencingToken, check_jump};

/// Of how many holders a refused acquire asks when they lapse.
const LAPSES_ASKED_MAX: usize = 4;

/// The pauses after a race for one record was lost.
const RACE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(40));

/// What the record of a name was.
#[derive(Clone, Copy)]
pub(super) struct Hint {
    pub(super) at: i64,
    pub(super) last: Option<FencingToken>,
    /// We gave it up.
    pub(super) free: bool,
}

/// An etcd lease that nothing is attached to yet. Given back when dropped unused.
pub(super) struct Spare {
    pub(super) link: Arc<Link>,
    pub(super) id: i64,
    pub(super) ttl_secs: i64,
    pub(super) used: bool,
}

/// What becomes of a holder that is to have a whole TTL again.
pub(super) enum Extended {
    Until(i64),
    /// It is not as it was read any more: look again.
    Changed,
}

/// What a look at a lock says of an acquire.
enum Verdict {
    Answer(Attempt),
    LookAgain,
    Free,
}

impl Inner {
    pub(super) async fn acquire(&self, request: &AcquireRequest, ttl: Duration) -> Result<Attempt> {
        let name = &request.name;
        let mut seen = None;
        let mut base = match self.hint(name) {
            Some(hint) => hint,
            None => self.base(seen.insert(self.see(name).await?))?,
        };
        let mut lease: Option<Spare> = None;
        let mut backoff = Backoff::new(RACE.0, RACE.1);
        loop {
            if let Some(known) = &seen {
                match self.judge(request, ttl, known).await? {
                    Verdict::Answer(attempt) => return Ok(attempt),
                    Verdict::Free => {}
                    Verdict::LookAgain => {
                        tokio::time::sleep(backoff.next()).await;
                        base = self.base(seen.insert(self.see(name).await?))?;
                        continue;
                    }
                }
            }
            if let Some(above) = request.above {
                // One forged watermark must not use the tokens up (S11).
                check_jump(base.last, above, unix_micros())?;
            }
            let least = FencingToken::after(base.last.max(request.above))?;
            let spare = match &mut lease {
                Some(spare) => spare,
                None => lease.insert(self.spare(ttl).await?),
            };
            let txn = self.granting(request, base, seen.is_none(), least, spare)?;
            let known = self.link.revision();
            // From here on it may be in use, whatever becomes of this future.
            spare.used = true;
            let answer = match self.link.write(txn).await {
                Ok(answer) => answer,
                Err(failure) if lease_is_gone(&failure) => {
                    lease = None;
                    continue;
                }
                Err(failure) => return Err(failure.into()),
            };
            if answer.succeeded() {
                if let Err(error) = check_revision(known, answer.header()) {
                    // A token that may have been told before is not told.
                    spare.used = false;
                    return Err(error);
                }
                let at = answer.header().map_or(0, |header| header.revision());
                let token = minted(least, at)?;
                self.remember(
                    name,
                    Hint {
                        at,
                        last: Some(token),
                        free: false,
                    },
                );
                let ttl = ttl_of(spare.ttl_secs)?;
                return Ok(Attempt::Granted(Grant { token, ttl }));
            }
            spare.used = false;
            if seen.is_some() {
                tokio::time::sleep(backoff.next()).await;
            }
            let now = Seen::of(&self.keys, name, &mut answer.op_responses().into_iter())?;
            base = self.base(seen.insert(now))?;
        }
    }

    pub(super) fn base(&self, seen: &Seen) -> Result<Hint> {
        Ok(Hint {
            at: seen.at(),
            last: seen.last()?,
            free: false,
        })
    }

    /// What a look at the lock says, before anything is granted.
    async fn judge(&self, request: &AcquireRequest, ttl: Duration, seen: &Seen) -> Result<Verdict> {
        if let (Some(capacity), false) = (seen.capacity(), seen.holders.is_empty())
            && capacity != request.permits
        {
            return Err(Error::invalid(
                "the lock is held with another capacity; ask for the same number of permits, or wait until it is free",
            )
            .with("permits", request.permits)
            .with("capacity", capacity));
        }
        let own = seen.holders.iter().find(|seen| seen.id == request.holder);
        if let Some(own) = own
            && !own.holder.released
        {
            // The same request again: its answer was lost (L7).
            return Ok(match self.extend(own, ttl).await? {
                Extended::Changed => Verdict::LookAgain,
                Extended::Until(ttl_secs) => Verdict::Answer(Attempt::Granted(Grant {
                    token: own.token()?,
                    ttl: ttl_of(ttl_secs)?,
                })),
            });
        }
        let permits = usize::try_from(request.permits).unwrap_or(usize::MAX);
        // A holder that lingers has no second key.
        if seen.holders.len() >= permits || own.is_some() {
            self.forget(&request.name);
            return Ok(Verdict::Answer(Attempt::Held(self.contention(seen).await)));
        }
        Ok(Verdict::Free)
    }

    async fn contention(&self, seen: &Seen) -> Contention {
        let mut free_in = None;
        if seen.holders.len() <= LAPSES_ASKED_MAX {
            // Only a hint: that the lock is held is known already.
            let left = self.left(&seen.holders).await.unwrap_or_default();
            let lapses = seen.holders.iter().filter_map(|seen| {
                // Whole seconds, cut off; and the cluster looks for lapsed leases twice a second.
                // Who asks too early asks again and again.
                let left = *left.get(&seen.lease)? + Duration::from_secs(1);
                Some(left.min(seen.holder.ttl().ok()?.duration()?))
            });
            free_in = lapses.min();
        }
        Contention {
            free_in,
            holder: seen.holders.first().map(|seen| seen.holder.info()),
        }
    }

    /// The one step that grants (L3, L8): nobody has come since the record was read, and there is
    /// room; record and holder are written in the revision that is the token.
    fn granting(
        &self,
        request: &AcquireRequest,
        base: Hint,
        guessed: bool,
        least: FencingToken,
        spare: &Spare,
    ) -> Result<Txn> {
        let name = &request.name;
        let (record_key, holders) = (self.keys.record(name), self.keys.holders(name));
        let own = format!("{holders}{}", request.holder.reveal());
        let mut compares = vec![
            Compare::mod_revision(record_key.as_str(), CompareOp::Equal, base.at),
            // The key's own revision is the token.
            Compare::create_revision(own.as_str(), CompareOp::Equal, 0),
        ];
        if guessed {
            // Of no key at all, every revision is 0.
            compares.push(Compare::create_revision(holders, CompareOp::Equal, 0).with_prefix());
        }
        let record = Record {
            name: name.as_str().to_owned(),
            last: least.get(),
            granted: true,
            permits: request.permits,
        };
        let holder = Holder::new(request, least, spare.ttl_secs).encode()?;
        let attached = PutOptions::new().with_lease(spare.id);
        Ok(Txn::new()
            .when(compares)
            .and_then([
                TxnOp::put(record_key, record.encode()?, None),
                TxnOp::put(own, holder, Some(attached)),
            ])
            .or_else(Seen::ops(&self.keys, name)))
    }

    /// Gives a holder, as it was read, a whole TTL from now on.
    pub(super) async fn extend(&self, seen: &SeenHolder, ttl: Duration) -> Result<Extended> {
        let ttl_secs = whole_secs(ttl).max(self.least_ttl_secs);
        if seen.holder.ttl_secs == ttl_secs {
            return match self.link.keep_alive(seen.lease).await {
                Ok(()) => Ok(Extended::Until(ttl_secs)),
                Err(failure) if lease_is_gone(&failure) => Ok(Extended::Changed),
                Err(failure) => Err(failure.into()),
            };
        }
        // A lease's TTL is fixed, so that another one takes its place; the key stays, and with it
        // the token.
        let mut holder = seen.holder.clone();
        let spare = self.spare(ttl).await?;
        holder.ttl_secs = spare.ttl_secs;
        self.reattach(seen, &holder, spare).await
    }

    /// Attaches a holder's key to another lease, unless it has changed.
    pub(super) async fn reattach(
        &self,
        seen: &SeenHolder,
        holder: &Holder,
        mut spare: Spare,
    ) -> Result<Extended> {
        let attached = PutOptions::new().with_lease(spare.id);
        let txn = Txn::new().when([unchanged(seen)]).and_then([TxnOp::put(
            seen.key.as_slice(),
            holder.encode()?,
            Some(attached),
        )]);
        spare.used = true;
        match self.link.write(txn).await {
            Ok(answer) if answer.succeeded() => {
                self.revoke_later([seen.lease]);
                Ok(Extended::Until(spare.ttl_secs))
            }
            Ok(_) => {
                spare.used = false;
                Ok(Extended::Changed)
            }
            Err(failure) if lease_is_gone(&failure) => Ok(Extended::Changed),
            Err(failure) => Err(failure.into()),
        }
    }

    /// A lease of at least this TTL that nothing is attached to.
    pub(super) async fn spare(&self, ttl: Duration) -> Result<Spare> {
        let ttl_secs = whole_secs(ttl).max(self.least_ttl_secs);
        let (id, ttl_secs) = self.link.grant(ttl_secs).await?;
        Ok(Spare {
            link: Arc::clone(&self.link),
            id,
            ttl_secs,
            used: false,
        })
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if !self.used {
            revoke_later(&self.link, self.id);
        }
    }
}

pub(super) fn revoke_later(link: &Arc<Link>, lease: i64) {
    // Outside of a runtime it is left to lapse.
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        let link = Arc::clone(link);
        runtime.spawn(async move { link.revoke(lease).await.is_ok() });
    }
}

/// The token of what a transaction of this revision granted.
pub(super) fn minted(least: FencingToken, revision: i64) -> Result<FencingToken> {
    let revision = u64::try_from(revision).unwrap_or(0);
    FencingToken::new(least.get().max(revision))
}

pub(super) fn unchanged(seen: &SeenHolder) -> Compare {
    Compare::mod_revision(seen.key.as_slice(), CompareOp::Equal, seen.at)
}
