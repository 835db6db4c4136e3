//! Acquiring: what may be asked for, and how it is asked until it is granted.

use std::fmt;
use std::future::IntoFuture;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::backoff::Backoff;
use crate::clock::{Tick, unix_micros};
use crate::driver::within;
use crate::error::{Error, ErrorKind, Result};
use crate::guard::LockGuard;
use crate::held::{Granted, Held, LostReason, belief};
use crate::keeper::silent;
use crate::lease::{
    AcquireRequest, Attempt, Contention, Grant, HolderId, INFO_TEXT_MAX_BYTES, LeaseInfo, LeaseRef,
    PERMITS_MAX, Ttl, Watch,
};
use crate::locks::{HOST, Inner};
use crate::name::LockName;
use crate::random;

/// How long an acquire waits where nothing is said.
const WAIT_DEFAULT: Duration = Duration::from_secs(30);

/// Pauses between tries where the engine sends no notifications.
const POLL: (Duration, Duration) = (Duration::from_millis(25), Duration::from_secs(1));

/// The longest pause where it does: a notification is only a hint, and may be lost.
const NOTIFIED_POLL_MAX: Duration = Duration::from_secs(5);

/// Pauses between retries of a request that failed.
const RETRY: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// Marks an [`Acquire`] that waits: it yields a [`LockGuard`].
#[derive(Debug)]
pub enum Wait {}

/// Marks an [`Acquire`] that asks once: it yields an `Option<LockGuard>`.
#[derive(Debug)]
pub enum Once {}

/// An acquire that is being described; `.await` sends it.
///
/// Made by [`Locks::acquire`](crate::Locks::acquire) and
/// [`Locks::try_acquire`](crate::Locks::try_acquire).
///
/// # Cancel safety
/// Dropping the future gives the lock back: a request that is under way is completed in the
/// background, and whatever it was granted is released. At worst, where the store cannot be
/// reached, the lock stays taken for one TTL.
///
/// # Errors
/// - `Timeout`: somebody else held it for the whole wait.
/// - `Invalid`: a wrong name, TTL, label or number of permits, or another number of permits than
///   the present holders'.
/// - `Unavailable`: the store cannot be asked; nothing is held.
/// - `Indeterminate`: the store did not answer; if the lock was granted, it is given back in the
///   background or lapses by its TTL.
/// - `Lost`: the grant came later than its own TTL; it is given back.
/// - `Corrupt`, `Exhausted`: no token can be minted, so nothing is granted.
#[must_use = "an acquire does nothing until it is awaited"]
pub struct Acquire<Mode> {
    locks: Arc<Inner>,
    name: Result<LockName>,
    options: Options,
    mode: PhantomData<fn() -> Mode>,
}

#[derive(Clone, Debug)]
struct Options {
    ttl: Option<Result<Ttl, Duration>>,
    /// `None` is for ever.
    wait: Option<Duration>,
    permits: u32,
    label: Option<String>,
    trace_id: Option<String>,
    min_hold: Duration,
    max_hold: Option<Duration>,
    renews: bool,
    detached: bool,
}

impl<Mode> Acquire<Mode> {
    pub(crate) fn new(locks: Arc<Inner>, name: Result<LockName>) -> Self {
        Self {
            locks,
            name,
            options: Options {
                ttl: None,
                wait: Some(WAIT_DEFAULT),
                permits: 1,
                label: None,
                trace_id: None,
                min_hold: Duration::ZERO,
                max_hold: None,
                renews: true,
                detached: false,
            },
            mode: PhantomData,
        }
    }

    /// How long the grant lasts without renewal, 100 ms to a year. Renewal comes every third of it.
    /// 30 s, or what the store's URL says, where nothing is said.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.options.ttl = Some(Ttl::new(ttl).map_err(|_| ttl));
        self
    }

    /// The grant does not lapse: it lasts while this process lives. Only where the backend sees
    /// dead processes; elsewhere the acquire is `Unsupported`.
    pub fn no_expiry(mut self) -> Self {
        self.options.ttl = Some(Ok(Ttl::NONE));
        self
    }

    /// The capacity: up to `permits` holders at once. 1, the default, is a mutex. All who use the
    /// name have to agree. A token of one permit does not fence the other holders, it fences
    /// whoever held before: guard what only one may write by a lock of its own.
    pub fn permits(mut self, permits: u32) -> Self {
        self.options.permits = permits;
        self
    }

    /// What this holder calls its work, shown to operators; 256 bytes at the most.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.options.label = Some(label.into());
        self
    }

    /// The trace that this work belongs to, shown to operators; 256 bytes at the most.
    pub fn trace_id(mut self, trace_id: impl Into<String>) -> Self {
        self.options.trace_id = Some(trace_id.into());
        self
    }

    /// The lock stays taken for at least this long, even where it is released earlier: so that a
    /// late host does not run a short job of the same tick again. A crash still frees it by its
    /// TTL.
    pub fn min_hold(mut self, min_hold: Duration) -> Self {
        self.options.min_hold = min_hold;
        self
    }

    /// After this long the lock counts as lost, and is not renewed any more: so that a stuck holder
    /// does not keep it for ever.
    pub fn max_hold(mut self, max_hold: Duration) -> Self {
        self.options.max_hold = Some(max_hold);
        self
    }

    /// Leaves renewal to [`LockGuard::renew`].
    pub fn no_renew(mut self) -> Self {
        self.options.renews = false;
        self
    }

    /// The grant is not tied to this process: a backend that sees dead processes lets it live until
    /// its TTL all the same. For [`LockGuard::detach`].
    pub fn detached(mut self) -> Self {
        self.options.detached = true;
        self
    }

    fn into_operation(self) -> Result<(Arc<Inner>, Operation)> {
        self.locks.same_process()?;
        let Options { ttl, .. } = self.options;
        let ttl = match ttl {
            None => self.locks.ttl,
            Some(Ok(ttl)) => ttl,
            Some(Err(bad)) => Ttl::new(bad)?,
        };
        let options = &self.options;
        if ttl == Ttl::NONE {
            if !self.locks.store.profile().sees_dead_holders {
                return Err(Error::unsupported(
                    "this store cannot see dead processes, so a lock without expiry would stay for ever; give a TTL",
                )
                .with("store", self.locks.store.profile().kind));
            }
            if options.detached {
                return Err(Error::invalid(
                    "a detached lock without expiry would stay for ever; give a TTL",
                ));
            }
        }
        if !(1..=PERMITS_MAX).contains(&options.permits) {
            return Err(Error::invalid(format!(
                "number of permits is out of range; expected 1 to {PERMITS_MAX}"
            ))
            .with("permits", options.permits));
        }
        for (what, text) in [("label", &options.label), ("trace id", &options.trace_id)] {
            if let Some(text) = text
                && text.len() > INFO_TEXT_MAX_BYTES
            {
                return Err(Error::invalid(format!(
                    "{what} is too long; expected at most {INFO_TEXT_MAX_BYTES} bytes"
                ))
                .with("bytes", text.len()));
            }
        }
        if options.min_hold > Ttl::MAX {
            return Err(
                Error::invalid("minimum hold is out of range; expected at most 365 days")
                    .with("min_hold", format_args!("{:?}", options.min_hold)),
            );
        }
        if let Some(max_hold) = options.max_hold
            && (max_hold.is_zero() || max_hold < options.min_hold)
        {
            return Err(Error::invalid(
                "longest hold is too short; expected more than zero and at least the minimum hold",
            )
            .with("max_hold", format_args!("{max_hold:?}"))
            .with("min_hold", format_args!("{:?}", options.min_hold)));
        }
        let name = self.name?;
        let request = AcquireRequest {
            above: self.locks.floor(&name),
            name,
            holder: HolderId::random(),
            ttl,
            permits: self.options.permits,
            detached: self.options.detached,
            info: LeaseInfo {
                host: HOST.clone(),
                pid: self.locks.pid,
                label: self.options.label,
                since_unix_us: unix_micros(),
                trace_id: self.options.trace_id,
            },
        };
        let abandoned = CancellationToken::new();
        let operation = Operation {
            locks: Arc::clone(&self.locks),
            request,
            wait: self.options.wait,
            min_hold: self.options.min_hold,
            max_hold: self.options.max_hold,
            renews: self.options.renews,
            abandoned,
        };
        Ok((self.locks, operation))
    }
}

impl Acquire<Wait> {
    /// Waits for at most this long. Zero asks once.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.options.wait = Some(wait);
        self
    }

    /// Waits as long as it takes.
    pub fn wait_forever(mut self) -> Self {
        self.options.wait = None;
        self
    }

    /// Acquires, runs `work`, and releases. If the lock is lost, `work` is dropped at its next
    /// await point and the answer is `Lost`.
    ///
    /// Where `work` fails, its error is returned, whatever becomes of the release. Where it
    /// succeeds and the store cannot confirm the release, the value is returned and the lock
    /// lapses by its TTL.
    ///
    /// Cancel safe: dropping the future drops `work` and releases in the background.
    ///
    /// # Errors
    /// What `work` returns; `Lost`; and what acquiring returns.
    pub async fn run<T, E, F>(self, work: F) -> Result<T, E>
    where
        F: AsyncFnOnce(&LockGuard) -> Result<T, E>,
        E: From<Error>,
    {
        let guard = self.await?;
        let done = tokio::select! {
            biased;
            done = work(&guard) => Some(done),
            _ = guard.lost() => None,
        };
        let released = guard.release().await;
        match (done, released) {
            (Some(Err(error)), _) => Err(error),
            (Some(Ok(value)), Ok(())) => Ok(value),
            (Some(Ok(value)), Err(error)) if error.kind() != ErrorKind::Lost => {
                tracing::warn!(%error, "work done, but its lock's release is not confirmed");
                Ok(value)
            }
            (_, Err(error)) => Err(error.into()),
            (None, Ok(())) => Err(Error::lost("lock lost: the work was cancelled").into()),
        }
    }
}

impl IntoFuture for Acquire<Wait> {
    type Output = Result<LockGuard>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let (locks, operation) = self.into_operation()?;
            let _abandons = operation.abandoned.clone().drop_guard();
            locks.driver.run(Box::pin(operation.wait_for_it())).await?
        })
    }
}

impl IntoFuture for Acquire<Once> {
    type Output = Result<Option<LockGuard>>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let (locks, operation) = self.into_operation()?;
            let _abandons = operation.abandoned.clone().drop_guard();
            locks.driver.run(Box::pin(operation.ask_once())).await?
        })
    }
}

impl<Mode> fmt::Debug for Acquire<Mode> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acquire")
            .field("name", &self.name)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// An acquire under way. Runs on the driver to its end, whatever becomes of the caller, and returns
/// guards, which give back in `Drop` what nobody takes.
struct Operation {
    locks: Arc<Inner>,
    request: AcquireRequest,
    wait: Option<Duration>,
    min_hold: Duration,
    max_hold: Option<Duration>,
    renews: bool,
    /// Cancelled when the caller's future is gone.
    abandoned: CancellationToken,
}

enum Answer {
    Granted(LockGuard),
    Held(Contention),
}

impl Operation {
    async fn ask_once(self) -> Result<Option<LockGuard>> {
        match count(self.attempt().await)? {
            Answer::Granted(guard) => Ok(Some(guard)),
            Answer::Held(_) => Ok(None),
        }
    }

    async fn wait_for_it(self) -> Result<LockGuard> {
        let started = self.locks.clock.now();
        let deadline = self.wait.map_or(Tick::NEVER, |wait| started.after(wait));
        let guard = count(self.contend(deadline).await)?;
        let waited = guard.acquired_at().since(started);
        metrics::histogram!("fencelock_wait_seconds").record(waited.as_secs_f64());
        Ok(guard)
    }

    /// Tries at once where nobody queues, else queues and then tries until granted.
    async fn contend(&self, deadline: Tick) -> Result<LockGuard> {
        let name = &self.request.name;
        let mut contention = None;
        if !self.locks.queues.has_waiters(name) {
            match self.attempt_or_retry(deadline).await? {
                Answer::Granted(guard) => return Ok(guard),
                Answer::Held(held) => contention = Some(held),
            }
        }
        let place = self.locks.queues.join(name);
        let Some(_turn) = self.until(deadline, place.turn()).await else {
            return Err(self.timed_out(contention.as_ref()));
        };
        // Made before the next attempt, so that no change between the two is missed.
        let mut watch = self.watch().await?;
        let notified = self.locks.store.profile().wakes_waiters;
        let mut poll = Backoff::new(POLL.0, POLL.1);
        loop {
            let held = match self.attempt_or_retry(deadline).await? {
                Answer::Granted(guard) => return Ok(guard),
                Answer::Held(held) => held,
            };
            let pause = pause(&held, notified, &mut poll);
            let changed = async {
                tokio::select! {
                    () = watch.changed() => {}
                    () = place.freed() => {}
                    () = tokio::time::sleep(pause) => {}
                }
            };
            if self.until(deadline, changed).await.is_none() {
                return Err(self.timed_out(Some(&held)));
            }
        }
    }

    /// What `work` yields, or `None` at the deadline or where the caller is gone.
    async fn until<T>(&self, deadline: Tick, work: impl Future<Output = T>) -> Option<T> {
        let left = deadline.since(self.locks.clock.now());
        tokio::select! {
            biased;
            () = self.abandoned.cancelled() => None,
            value = work => Some(value),
            () = tokio::time::sleep(left), if deadline != Tick::NEVER => None,
        }
    }

    async fn watch(&self) -> Result<Box<dyn Watch>> {
        let limit = self.locks.request_limit;
        within(limit, self.locks.store.watch(&self.request.name))
            .await
            .unwrap_or_else(|| Err(silent("watch", limit)))
    }

    /// An attempt that rides out an unavailable store, for a while.
    async fn attempt_or_retry(&self, deadline: Tick) -> Result<Answer> {
        let mut backoff = Backoff::new(RETRY.0, RETRY.1);
        let mut give_up = None;
        loop {
            match self.attempt().await {
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    let (pause, now) = (backoff.next(), self.locks.clock.now());
                    let give_up =
                        *give_up.get_or_insert(now.after(self.locks.patience).min(deadline));
                    if self.abandoned.is_cancelled() || now.after(pause) >= give_up {
                        return Err(error);
                    }
                    tracing::debug!(name = %self.request.name, %error, "store unavailable; trying again");
                    tokio::time::sleep(pause).await;
                }
                answer => return answer,
            }
        }
    }

    /// One request, repeated as the same request while its outcome is unknown (L7).
    async fn attempt(&self) -> Result<Answer> {
        let locks = &self.locks;
        let limit = locks.request_limit;
        let mut backoff = Backoff::new(RETRY.0, RETRY.1);
        let mut maybe_granted = false;
        let mut give_up = None;
        loop {
            // A grant counts from before its request is sent (L4).
            let sent = locks.clock.now();
            let give_up = *give_up.get_or_insert(sent.after(locks.patience));
            let left = give_up.since(sent).min(limit);
            let answer = within(left, locks.store.acquire(&self.request))
                .await
                .unwrap_or_else(|| Err(silent("acquire", left)));
            let error = match answer {
                Ok(Attempt::Granted(grant)) => return self.accept(grant, sent),
                Ok(Attempt::Held(contention)) => return Ok(Answer::Held(contention)),
                Err(error) => error,
            };
            maybe_granted |= error.kind() == ErrorKind::Indeterminate;
            if !maybe_granted {
                return Err(error);
            }
            let retriable = matches!(
                error.kind(),
                ErrorKind::Indeterminate | ErrorKind::Unavailable
            );
            let pause = backoff.next();
            if !retriable
                || self.abandoned.is_cancelled()
                || locks.clock.now().after(pause) >= give_up
            {
                self.give_back_whatever_was_granted();
                return Err(if retriable {
                    error.into_kind(ErrorKind::Indeterminate)
                } else {
                    error
                });
            }
            tracing::debug!(name = %self.request.name, %error, "acquire unconfirmed; asking again");
            tokio::time::sleep(pause).await;
        }
    }

    fn accept(&self, grant: Grant, sent: Tick) -> Result<Answer> {
        let locks = &self.locks;
        let answered = locks.clock.now();
        let lease = LeaseRef {
            name: self.request.name.clone(),
            holder: self.request.holder,
            token: Some(grant.token),
        };
        let held = Arc::new(Held::new(Granted {
            lease,
            token: grant.token,
            ttl: grant.ttl,
            sent,
            answered,
            renews: self.renews,
            min_hold: self.min_hold,
            max_hold: self.max_hold,
            pid: locks.pid,
        }));
        if belief(grant.ttl).is_some_and(|belief| answered >= sent.after(belief)) {
            // Whoever asks for a lock must not get one that may have lapsed already.
            self.give_back_whatever_was_granted();
            return Err(held.lost_error(LostReason::Unconfirmed));
        }
        // In the keeper's care before anybody sees the grant.
        locks.keeper.keep(&locks.driver, &held)?;
        tracing::debug!(name = %self.request.name, token = %grant.token, "lock acquired");
        Ok(Answer::Granted(LockGuard::new(held, Arc::clone(locks))))
    }

    fn give_back_whatever_was_granted(&self) {
        let lease = LeaseRef {
            name: self.request.name.clone(),
            holder: self.request.holder,
            token: None,
        };
        let lapses = match self.request.ttl.duration() {
            Some(ttl) => self.locks.clock.now().after(ttl * 102 / 100),
            None => Tick::NEVER,
        };
        Inner::give_back(&self.locks, lease, Duration::ZERO, lapses);
    }

    fn timed_out(&self, contention: Option<&Contention>) -> Error {
        let error = Error::new(
            ErrorKind::Timeout,
            "the lock is held by somebody else; the wait for it is over",
        )
        .with("name", format_args!("{:?}", self.request.name));
        match contention.and_then(|c| c.holder.as_ref()) {
            Some(info) => {
                let error = error.with("host", &info.host).with("pid", info.pid);
                match &info.label {
                    Some(label) => error.with("label", format_args!("{label:?}")),
                    None => error,
                }
            }
            None => error,
        }
    }
}

/// How long to wait for a hint before asking again: until the lock lapses, with some jitter so that
/// not all wake at once; or by growing pauses where the engine sends no hints.
fn pause(held: &Contention, notified: bool, poll: &mut Backoff) -> Duration {
    let at_the_most = if notified {
        NOTIFIED_POLL_MAX
    } else {
        poll.next()
    };
    let lapse = held.free_in.map_or(at_the_most, |free_in| {
        free_in + random::between(Duration::from_millis(1), Duration::from_millis(25))
    });
    lapse.min(at_the_most)
}

fn count<T>(result: Result<T>) -> Result<T> {
    let outcome = match &result {
        Ok(_) => "answered",
        Err(error) => error.kind().as_str(),
    };
    metrics::counter!("fencelock_acquires_total", "outcome" => outcome).increment(1);
    result
}
