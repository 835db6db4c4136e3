//! Renewal of all held leases, and the giving back of those that nobody waits for.
//!
//! The keeper runs on the driver's thread. It renews each lease a third of the way through its
//! TTL, in batches, and knows four answers: renewed, still held, unknown, lost. An unknown answer
//! never extends what the holder may believe. It knows no technology.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::backoff::Backoff;
use crate::clock::{Clock, Tick};
use crate::driver::{Driver, within};
use crate::error::{Error, ErrorKind, Result};
use crate::held::{Held, LostReason};
use crate::lease::{LeaseRef, LeaseStore, Release, Renewal, Ttl};
use crate::name::LockName;
use crate::runtime;
use crate::token::FencingToken;

/// How many leases one request renews at the most.
const BATCH_MAX: usize = 500;

/// The longest sleep: tokio's timers stand still in suspend, so that a lapse is seen at most this
/// long after the machine wakes. `check()` sees it at once.
const NAP_MAX: Duration = Duration::from_secs(1);

/// Leases that come due within this time are renewed together.
const TOGETHER: Duration = Duration::from_millis(10);

/// The pauses between tries to give a lease back.
const RELEASE_BACKOFF: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// Keeps the leases of one [`Locks`](crate::Locks).
#[derive(Debug)]
pub(crate) struct Keeper {
    store: Arc<dyn LeaseStore>,
    clock: Clock,
    request_limit: Duration,
    /// By age, so that batches are the same in every run.
    leases: Mutex<BTreeMap<u64, Arc<Held>>>,
    next_id: AtomicU64,
    /// The tick at which the loop wakes; a lease that is due earlier wakes it.
    wakes_at: AtomicU64,
    wake: Notify,
    started: AtomicBool,
    stop: CancellationToken,
    /// Releases and raises that are on their way, and the news that there are none.
    background: AtomicUsize,
    idle: Notify,
}

impl Keeper {
    pub(crate) fn new(store: Arc<dyn LeaseStore>, clock: Clock, request_limit: Duration) -> Self {
        Self {
            store,
            clock,
            request_limit,
            leases: Mutex::default(),
            next_id: AtomicU64::new(1),
            wakes_at: AtomicU64::new(Tick::NEVER.as_nanos()),
            wake: Notify::new(),
            started: AtomicBool::new(false),
            stop: CancellationToken::new(),
            background: AtomicUsize::new(0),
            idle: Notify::new(),
        }
    }

    /// Takes a lease into care. Called before the guard is handed out.
    pub(crate) fn keep(self: &Arc<Self>, driver: &Driver, held: &Arc<Held>) -> Result<()> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        held.set_keeper_id(id);
        self.leases().insert(id, Arc::clone(held));
        if !self.started.swap(true, Ordering::AcqRel) {
            driver.spawn(Arc::clone(self).run())?;
        }
        if held.next_event().as_nanos() < self.wakes_at.load(Ordering::Acquire) {
            self.wake.notify_one();
        }
        Ok(())
    }

    /// Stops caring for a lease. After this no renewal of it is sent, and the answer of one that is
    /// under way is ignored.
    pub(crate) fn forget(&self, held: &Held) {
        self.leases().remove(&held.keeper_id());
    }

    /// Ends the loop. Work in the background goes on as long as the driver lives.
    pub(crate) fn stop(&self) {
        self.stop.cancel();
    }

    /// Gives a lease back without anybody waiting for it, trying until it is certain or until
    /// `lapses`, when it is gone in any case. Never blocks and never fails; a lost release costs
    /// one TTL at most.
    pub(crate) fn release_later(
        self: &Arc<Self>,
        driver: &Driver,
        lease: LeaseRef,
        linger: Duration,
        lapses: Tick,
        freed: impl FnOnce(&LockName) + Send + 'static,
    ) {
        let keeper = Arc::clone(self);
        self.background(driver, async move {
            let mut backoff = Backoff::new(RELEASE_BACKOFF.0, RELEASE_BACKOFF.1);
            loop {
                match keeper.release_once(&lease, linger).await {
                    Ok(_) => break,
                    Err(error) => {
                        tracing::debug!(name = %lease.name, %error, "release not confirmed yet");
                    }
                }
                let pause = backoff.next();
                if keeper.clock.now().after(pause) >= lapses {
                    tracing::warn!(name = %lease.name, "release never confirmed; the lease lapses by its TTL");
                    break;
                }
                runtime::sleep(pause).await;
            }
            freed(&lease.name);
        });
    }

    /// One bounded try to give a lease back.
    pub(crate) async fn release_once(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        let answer = self.store.release(lease, linger);
        within(self.request_limit, answer)
            .await
            .unwrap_or_else(|| Err(silent("release", self.request_limit)))
    }

    /// Makes the next grant of a lock larger than a watermark that its holder met (L10).
    pub(crate) fn raise_later(
        self: &Arc<Self>,
        driver: &Driver,
        held: Arc<Held>,
        watermark: FencingToken,
        refused: impl FnOnce() + Send + 'static,
    ) {
        let keeper = Arc::clone(self);
        self.background(driver, async move {
            let mut backoff = Backoff::new(RELEASE_BACKOFF.0, RELEASE_BACKOFF.1);
            // At least once, though the guard may be gone by now: the watermark was met while the
            // lease was good, and a forged one has to be found out before the next acquire shows it.
            loop {
                let name = &held.lease().name;
                match keeper.store.raise_floor(name, watermark, false).await {
                    Ok(last) => {
                        tracing::warn!(%name, %watermark, %last, "the lock's tokens had fallen behind a resource; the next grant is larger");
                        break;
                    }
                    Err(error) => {
                        tracing::warn!(%name, %watermark, %error, "the lock's tokens cannot be raised above a resource's watermark");
                        if error.kind() == ErrorKind::Invalid {
                            // A forged watermark: no token of this lock will ever pass it.
                            refused();
                            break;
                        }
                    }
                }
                if held.check(&keeper.clock).is_err() {
                    break;
                }
                runtime::sleep(backoff.next()).await;
            }
        });
    }

    /// Resolves when no release or raise is under way in the background.
    pub(crate) async fn drained(&self) {
        loop {
            let mut idle = std::pin::pin!(self.idle.notified());
            idle.as_mut().enable();
            if self.background.load(Ordering::Acquire) == 0 {
                return;
            }
            idle.await;
        }
    }

    fn background(
        self: &Arc<Self>,
        driver: &Driver,
        work: impl Future<Output = ()> + Send + 'static,
    ) {
        self.background.fetch_add(1, Ordering::AcqRel);
        let counted = Counted(Arc::clone(self));
        let started = driver.spawn(async move {
            let _counted = counted;
            work.await;
        });
        if let Err(error) = started {
            tracing::warn!(%error, "background work not started; the lease lapses by its TTL");
        }
    }

    async fn run(self: Arc<Self>) {
        loop {
            // Until the next nap is settled, every newcomer wakes us: the survey may be past it, and the
            // end of the last nap says nothing of the next one.
            self.wakes_at
                .store(Tick::NEVER.as_nanos(), Ordering::Release);
            let (due, next) = self.survey();
            for batch in batches(due) {
                runtime::spawn(Arc::clone(&self).renew(batch));
            }
            let now = self.clock.now();
            let nap = next.since(now).min(NAP_MAX);
            self.wakes_at
                .store(now.after(nap).as_nanos(), Ordering::Release);
            tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = self.wake.notified() => {}
                () = runtime::sleep(nap) => {}
            }
        }
    }

    /// Declares lost what has run out, and returns what is due for renewal and when to look again.
    fn survey(&self) -> (Vec<Arc<Held>>, Tick) {
        let now = self.clock.now();
        let soon = now.after(TOGETHER);
        let mut due = Vec::new();
        let mut next = Tick::NEVER;
        for held in self.leases().values() {
            held.lapse(now);
            if held.begin_renewal(soon) {
                due.push(Arc::clone(held));
            }
            next = next.min(held.next_event());
        }
        (due, next)
    }

    async fn renew(self: Arc<Self>, mut batch: Vec<Arc<Held>>) {
        // A renewal counts from before it is sent (L4).
        let sent = self.clock.now();
        // Time may have passed since these came due, as in a pause: what was given up or lost meanwhile
        // is not renewed, or it would be kept from others for nothing.
        batch.retain(|held| held.is_good(sent));
        if batch.is_empty() {
            return;
        }
        let leases: Vec<(LeaseRef, Ttl)> =
            batch.iter().map(|h| (h.lease().clone(), h.ttl())).collect();
        let limit = batch
            .iter()
            .map(|held| held.renewal_limit(self.request_limit))
            .min()
            .unwrap_or(self.request_limit);
        let answers = within(limit, self.store.renew(&leases))
            .await
            .unwrap_or_default();
        let mut answers = answers.into_iter();
        for held in batch {
            let answer = answers
                .next()
                .unwrap_or_else(|| Renewal::Unknown(silent("renewal", limit)));
            let outcome = match &answer {
                Renewal::Renewed => "renewed",
                Renewal::StillHeld => "still_held",
                Renewal::Lost => "lost",
                Renewal::Unknown(error) => {
                    tracing::warn!(name = %held.lease().name, token = %held.token(), %error, "renewal unconfirmed");
                    "unknown"
                }
            };
            metrics::counter!("fencelock_renewals_total", "outcome" => outcome).increment(1);
            held.end_renewal(&answer, sent, self.clock.now());
        }
        self.wake.notify_one();
    }

    /// How many leases are kept, and how much is under way in the background.
    #[cfg(feature = "simulation")]
    pub(crate) fn load(&self) -> (usize, usize) {
        let background = self.background.load(Ordering::Acquire);
        (self.leases().len(), background)
    }

    fn leases(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Held>>> {
        // The map is whole at every unlock, so a panic elsewhere does not spoil it.
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Batches of leases that are renewed in one request each. One that was not answered last time goes
/// alone: with it, a stuck record or a dead shard would cost the others their answers.
fn batches(due: Vec<Arc<Held>>) -> Vec<Vec<Arc<Held>>> {
    let (alone, together): (Vec<_>, Vec<_>) = due.into_iter().partition(|h| h.is_unanswered());
    let mut batches: Vec<_> = alone.into_iter().map(|held| vec![held]).collect();
    batches.extend(together.chunks(BATCH_MAX).map(<[_]>::to_vec));
    batches
}

/// The error of a store that did not answer in time.
pub(crate) fn silent(request: &str, limit: Duration) -> Error {
    Error::indeterminate(format!("the store did not answer the {request} in time"))
        .with("limit", format_args!("{limit:?}"))
}

impl LostReason {
    pub(crate) fn report(self, held: &Held) {
        metrics::counter!("fencelock_lost_total", "reason" => self.as_str()).increment(1);
        tracing::error!(
            name = %held.lease().name,
            token = %held.token(),
            reason = self.as_str(),
            "lock lost"
        );
    }
}

/// Counts one piece of background work for as long as it lives, panics included.
struct Counted(Arc<Keeper>);

impl Drop for Counted {
    fn drop(&mut self) {
        if self.0.background.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.idle.notify_waiters();
        }
    }
}
