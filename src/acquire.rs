//! What may be asked for when a lock is acquired.

use std::fmt;
use std::future::IntoFuture;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::error::{Error, ErrorKind, Result};
use crate::guard::LockGuard;
use crate::lease::{AcquireRequest, HolderId, INFO_TEXT_MAX_BYTES, LeaseInfo, PERMITS_MAX, Ttl};
use crate::locks::{HOST, Inner};
use crate::name::LockName;
use crate::operation::Operation;

/// How long an acquire waits where nothing is said.
const WAIT_DEFAULT: Duration = Duration::from_secs(30);

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
                // Set with each attempt.
                since_unix_us: 0,
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
    /// Waits for at most this long; zero asks once. A request that is on its way is given a second to
    /// be answered all the same.
    ///
    /// A store that has answered once may be away for a while, as in a fail-over: the wait goes on. One
    /// that has not is reported after 8 s ([`LocksBuilder::patience`](crate::LocksBuilder::patience)).
    pub fn wait(mut self, wait: Duration) -> Self {
        self.options.wait = Some(wait);
        self
    }

    /// Waits as long as it takes, for a store that has answered once.
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
            (Some(Err(error)), Err(unreleased)) => {
                tracing::warn!(error = %unreleased, "work failed, and its lock's release as well");
                Err(error)
            }
            (Some(Err(error)), Ok(())) => Err(error),
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
