//! The value that stands for a held lock.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

#[cfg(feature = "simulation")]
use crate::clock::Clock;
use crate::clock::Tick;
use crate::driver::within;
use crate::error::{ErrorKind, Result};
use crate::fence::{Domain, Fence, Fencing, HolderTag};
use crate::held::{Held, LostReason};
use crate::keeper::silent;
use crate::lease::{HolderId, LeaseRef, Release, Renewal, Ttl};
use crate::locks::Inner;
use crate::name::LockName;
use crate::token::FencingToken;

/// A held lock. It is renewed in the background until it is released, dropped or lost.
///
/// The guard is not a memory lock: while you hold it, the lease may be lost, because this process
/// was paused, the store was unreachable, or an operator broke it. [`check`](Self::check) says so
/// without I/O, [`lost`](Self::lost) wakes you, and a fenced storage refuses whoever did not look.
///
/// # Dropping
/// Dropping hands a best-effort release to fencelock's own thread and returns at once; it never
/// blocks, never panics and needs no runtime. If the process ends before that release is sent, the
/// lock frees itself by its TTL, or at once where the backend sees dead processes.
/// [`release`](Self::release) is the way to know; [`Locks::drain`](crate::Locks::drain) waits for
/// what was dropped.
///
/// After fork(2) the child's copy is lost: it answers `Lost` and never touches the store.
#[must_use = "a guard that is dropped at once releases the lock"]
pub struct LockGuard {
    held: Arc<Held>,
    locks: Arc<Inner>,
}

/// A lease that was left in the store: it lasts until its TTL, or until somebody shows the holder
/// id and the token to renew or release it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Detached {
    /// The lock.
    pub name: LockName,
    /// Its token.
    pub token: FencingToken,
    /// The secret that renews and releases it.
    pub holder: HolderId,
    /// What a storage checks, without a sequence.
    pub fence: Fence,
    /// How long a renewal lasts.
    pub ttl: Ttl,
    /// How much longer the holder may believe in it; `None` where it does not lapse.
    pub expires_in: Option<Duration>,
}

impl Detached {
    /// The lease, as [`Locks::renew`](crate::Locks::renew) and
    /// [`Locks::release`](crate::Locks::release) take it.
    #[must_use]
    pub fn lease(&self) -> LeaseRef {
        LeaseRef {
            name: self.name.clone(),
            holder: self.holder,
            token: Some(self.token),
        }
    }
}

impl LockGuard {
    pub(crate) fn new(held: Arc<Held>, locks: Arc<Inner>) -> Self {
        metrics::gauge!("fencelock_held").increment(1.0);
        Self { held, locks }
    }

    /// The lock.
    #[must_use]
    pub fn name(&self) -> &LockName {
        &self.held.lease().name
    }

    /// The fencing token, for a storage of your own. Constant while the lock is held (L5).
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.held.token()
    }

    /// What a storage checks for one operation: the token, the holder's tag, the lock's domain, and
    /// a sequence that is new with each call, so that this holder's writes stay in order (S7).
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.unsequenced_fence().with_seq(self.held.next_seq())
    }

    /// The TTL that the store really gives.
    #[must_use]
    pub fn ttl(&self) -> Ttl {
        self.held.ttl()
    }

    /// The secret that renews and releases this lease from elsewhere.
    #[must_use]
    pub fn holder(&self) -> &HolderId {
        &self.held.lease().holder
    }

    /// Is the lock still ours? Compares the clock with the local deadline, without I/O (L4).
    ///
    /// The answer is good for an instant: ask before each step of the work, and let the storage
    /// decide in the end.
    ///
    /// # Errors
    /// `Lost`, for good: a lost lock is never found again.
    pub fn check(&self) -> Result<()> {
        if self.held.pid() != std::process::id() {
            return Err(self.held.lost_error(LostReason::Forked));
        }
        self.held.check(&self.locks.clock)
    }

    /// How much longer [`check`](Self::check) will agree unless a renewal comes; `None` where the
    /// lease does not lapse, zero where it is lost.
    #[must_use]
    pub fn remaining(&self) -> Option<Duration> {
        self.held.remaining(&self.locks.clock)
    }

    /// Resolves once, when the lock is lost. Cancel safe.
    ///
    /// A convenience for `select!`: whoever is about to write calls [`check`](Self::check).
    pub async fn lost(&self) -> LostReason {
        self.held.lost().cancelled().await;
        self.held.lost_reason().unwrap_or(LostReason::NotHeld)
    }

    /// A token that is cancelled when the lock is lost, to hand to code that does not know locks.
    #[must_use]
    pub fn lost_token(&self) -> CancellationToken {
        self.held.lost().child_token()
    }

    /// Why the lock was lost, if it was.
    #[must_use]
    pub fn lost_reason(&self) -> Option<LostReason> {
        self.held.lapse(self.locks.clock.now());
        self.held.lost_reason()
    }

    /// Renews now, for whoever turned the background renewal off or wants certainty.
    ///
    /// Cancel safe: the renewal may or may not have been applied, and the old deadline stands.
    ///
    /// # Errors
    /// `Lost` where the lease is not ours any more; `Unavailable` or `Indeterminate` where the
    /// store did not confirm, and the old deadline stands.
    pub async fn renew(&self) -> Result<()> {
        self.check()?;
        let (held, locks) = (Arc::clone(&self.held), Arc::clone(&self.locks));
        let work = async move {
            let sent = locks.clock.now();
            let answer = locks.renew_once(held.lease(), held.ttl()).await;
            held.end_renewal(&answer, sent, locks.clock.now());
            match answer {
                Renewal::Renewed | Renewal::StillHeld => held.check(&locks.clock),
                Renewal::Lost => Err(held.lost_error(LostReason::NotHeld)),
                Renewal::Unknown(error) => Err(error),
            }
        };
        self.locks.driver.run(Box::pin(work)).await?
    }

    /// Gives the lock up and waits for the store's answer.
    ///
    /// Cancel safe: a release that was started goes on in the background.
    ///
    /// # Errors
    /// `Lost` where the lease was not ours any more, which means that the work before may have
    /// overlapped with somebody's. `Unavailable` or `Indeterminate` where the store did not confirm
    /// it; the release is then retried in the background until the lease has lapsed.
    pub async fn release(self) -> Result<()> {
        if self.held.pid() != std::process::id() {
            return Err(self.held.lost_error(LostReason::Forked));
        }
        let Some(lost_before) = self.end() else {
            return Ok(());
        };
        match lost_before {
            // It is certainly gone, so there is nothing to ask the store.
            Some(reason @ LostReason::NotHeld) => return Err(self.held.lost_error(reason)),
            // Somebody may hold it by now: give it back, but keep nobody waiting.
            Some(reason @ LostReason::Unconfirmed) => {
                self.release_in_background();
                return Err(self.held.lost_error(reason));
            }
            Some(LostReason::MaxHold | LostReason::Forked) | None => {}
        }
        let (held, locks) = (Arc::clone(&self.held), Arc::clone(&self.locks));
        let work = async move { release_now(&held, &locks).await };
        self.locks.driver.run(Box::pin(work)).await?
    }

    /// Leaves the lease in the store and stops renewing it.
    ///
    /// Meant for grants that were acquired [`detached`](crate::Acquire::detached); another one may
    /// be seen as dead when this process ends.
    pub fn detach(self) -> Detached {
        let detached = Detached {
            name: self.name().clone(),
            token: self.token(),
            holder: *self.holder(),
            fence: self.unsequenced_fence(),
            ttl: self.ttl(),
            expires_in: self.remaining(),
        };
        self.end();
        detached
    }

    #[cfg(feature = "simulation")]
    pub(crate) fn parts(&self) -> (Arc<Held>, Clock) {
        (Arc::clone(&self.held), self.locks.clock.clone())
    }

    pub(crate) fn acquired_at(&self) -> Tick {
        self.held.acquired_at()
    }

    fn unsequenced_fence(&self) -> Fence {
        let profile = self.locks.store.profile();
        let domain = Domain::new(profile.kind, &profile.realm, self.name());
        Fence::new(self.token(), HolderTag::of(self.holder()), domain)
    }

    /// Takes the lease out of the keeper's care, once.
    fn end(&self) -> Option<Option<LostReason>> {
        let before = self.held.end()?;
        self.locks.keeper.forget(&self.held);
        metrics::gauge!("fencelock_held").decrement(1.0);
        let hold = self.locks.clock.now().since(self.held.acquired_at());
        metrics::histogram!("fencelock_hold_seconds").record(hold.as_secs_f64());
        Some(before)
    }

    fn release_in_background(&self) {
        give_back(&self.held, &self.locks);
    }
}

async fn release_now(held: &Arc<Held>, locks: &Arc<Inner>) -> Result<()> {
    let linger = held.linger(locks.clock.now());
    let released = locks.keeper.release_once(held.lease(), linger).await;
    match released {
        Ok(Release::Released) => {
            locks.queues.freed(&held.lease().name);
            Ok(())
        }
        Ok(Release::NotHeld) => {
            locks.queues.freed(&held.lease().name);
            Err(held.lost_error(LostReason::NotHeld))
        }
        Err(error) => {
            if matches!(
                error.kind(),
                ErrorKind::Unavailable | ErrorKind::Indeterminate
            ) {
                give_back(held, locks);
            }
            Err(error)
        }
    }
}

fn give_back(held: &Arc<Held>, locks: &Arc<Inner>) {
    let linger = held.linger(locks.clock.now());
    Inner::give_back(locks, held.lease().clone(), linger, held.lapses());
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        match self.end() {
            None | Some(Some(LostReason::NotHeld)) => {}
            // After a fork the parent holds the lock, and the keeper's thread does not exist here.
            Some(_) if self.held.pid() != std::process::id() => {}
            Some(_) => self.release_in_background(),
        }
    }
}

/// By reference only: a guard that is moved into a write would be dropped, and the lock released.
impl Fencing for &LockGuard {
    fn to_fence(&self) -> Result<Fence> {
        self.check()?;
        Ok(LockGuard::fence(self))
    }

    fn refused(&self, watermark: FencingToken) {
        if self.check().is_ok() {
            Inner::raise_above(&self.locks, &self.held, watermark);
        }
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("name", self.name())
            .field("token", &self.token())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}

impl Inner {
    /// Gives a lease back in the background. The work keeps the runtime alive until it is done.
    pub(crate) fn give_back(locks: &Arc<Self>, lease: LeaseRef, linger: Duration, lapses: Tick) {
        let alive = Arc::clone(locks);
        locks
            .keeper
            .release_later(&locks.driver, lease, linger, lapses, move |name| {
                alive.queues.freed(name);
            });
    }

    /// One bounded renewal.
    pub(crate) async fn renew_once(&self, lease: &LeaseRef, ttl: Ttl) -> Renewal {
        let request = [(lease.clone(), ttl)];
        let answer = within(self.request_limit, self.store.renew(&request)).await;
        answer
            .and_then(|answers| answers.into_iter().next())
            .unwrap_or_else(|| Renewal::Unknown(silent("renewal", self.request_limit)))
    }
}
