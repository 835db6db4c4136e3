//! The same locks and fenced storage for code without an async runtime.
//!
//! Everything here blocks the calling thread; do not call it from async code. The work itself runs
//! on fencelock's own thread, as it does for the async types.
//!
//! ```
//! use fencelock::blocking::{Fenced, Locks};
//! use fencelock::memory::{FencedMemory, MemoryStore};
//! # fn main() -> fencelock::Result<()> {
//! let locks = Locks::from(fencelock::Locks::new(MemoryStore::new()));
//! let store = Fenced::from(fencelock::Fenced::new(FencedMemory::new()));
//! let guard = locks.acquire("payment-export", |acquire| acquire.label("export"))?;
//! store.put("today.csv", "data", &guard)?;
//! guard.release()?;
//! # Ok(()) }
//! ```

use std::future::IntoFuture;
use std::ops::Deref;
use std::time::Duration;

use crate::acquire::{Acquire, Once, Wait};
use crate::body::Body;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::{Fence, Fencing, Snapshot, Written};
use crate::guard::Detached;
use crate::held::LostReason;
use crate::lease::{Finding, LeaseRef, LockState, Pruned, Release, Ttl};
use crate::name::{LockName, ResourceName};
use crate::token::FencingToken;

/// [`crate::Locks`], blocking.
#[derive(Clone, Debug)]
pub struct Locks(crate::Locks);

impl Locks {
    /// Opens a store by its URL: see [`crate::Locks::open`].
    ///
    /// # Errors
    /// As [`crate::Locks::open`].
    pub fn open(url: &str) -> Result<Self> {
        wait_for(crate::Locks::open(url)).map(Self)
    }

    /// Acquires `name`; `describe` adds what may be asked for, such as
    /// `|a| a.ttl(ttl).wait(wait)`.
    ///
    /// # Errors
    /// As [`Acquire`].
    pub fn acquire(
        &self,
        name: impl TryInto<LockName, Error = Error>,
        describe: impl FnOnce(Acquire<Wait>) -> Acquire<Wait>,
    ) -> Result<LockGuard> {
        wait_for(describe(self.0.acquire(name)).into_future()).map(LockGuard)
    }

    /// Asks for `name` once: `None` where somebody else holds it.
    ///
    /// # Errors
    /// As [`Acquire`].
    pub fn try_acquire(
        &self,
        name: impl TryInto<LockName, Error = Error>,
        describe: impl FnOnce(Acquire<Once>) -> Acquire<Once>,
    ) -> Result<Option<LockGuard>> {
        let guard = wait_for(describe(self.0.try_acquire(name)).into_future())?;
        Ok(guard.map(LockGuard))
    }

    /// Acquires `name` as `describe` says, runs `work`, and releases. Nothing can cancel the work
    /// from outside: it asks [`LockGuard::check`](crate::LockGuard::check) before each step.
    ///
    /// # Errors
    /// What `work` returns; `Lost` where the lock was lost before the end; and what acquiring
    /// returns.
    pub fn with_lock<T, E: From<Error>>(
        &self,
        name: impl TryInto<LockName, Error = Error>,
        describe: impl FnOnce(Acquire<Wait>) -> Acquire<Wait>,
        work: impl FnOnce(&LockGuard) -> Result<T, E>,
    ) -> Result<T, E> {
        let guard = self.acquire(name, describe)?;
        let done = work(&guard);
        match (done, guard.release()) {
            (Err(error), _) => Err(error),
            (Ok(value), Ok(())) => Ok(value),
            (Ok(_), Err(error)) if error.kind() == ErrorKind::Lost => Err(error.into()),
            (Ok(value), Err(error)) => {
                tracing::warn!(%error, "work done, but its lock's release is not confirmed");
                Ok(value)
            }
        }
    }

    /// See [`crate::Locks::inspect`].
    ///
    /// # Errors
    /// As there.
    pub fn inspect(
        &self,
        name: impl TryInto<LockName, Error = Error>,
    ) -> Result<Option<LockState>> {
        wait_for(self.0.inspect(name))
    }

    /// See [`crate::Locks::list`].
    ///
    /// # Errors
    /// As there.
    pub fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        wait_for(self.0.list(prefix, after, limit))
    }

    /// See [`crate::Locks::break_lock`].
    ///
    /// # Errors
    /// As there.
    pub fn break_lock(
        &self,
        name: impl TryInto<LockName, Error = Error>,
    ) -> Result<Option<LockState>> {
        wait_for(self.0.break_lock(name))
    }

    /// See [`crate::Locks::prune`].
    ///
    /// # Errors
    /// As there.
    pub fn prune(&self, idle: Duration) -> Result<Pruned> {
        wait_for(self.0.prune(idle))
    }

    /// See [`crate::Locks::raise_floor`].
    ///
    /// # Errors
    /// As there.
    pub fn raise_floor(
        &self,
        name: impl TryInto<LockName, Error = Error>,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken> {
        wait_for(self.0.raise_floor(name, floor, mend))
    }

    /// See [`crate::Locks::renew`].
    ///
    /// # Errors
    /// As there.
    pub fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<()> {
        wait_for(self.0.renew(lease, ttl))
    }

    /// See [`crate::Locks::release`].
    ///
    /// # Errors
    /// As there.
    pub fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        wait_for(self.0.release(lease, linger))
    }

    /// See [`crate::Locks::probe`].
    ///
    /// # Errors
    /// As there.
    pub fn probe(&self) -> Result<Vec<Finding>> {
        wait_for(self.0.probe())
    }

    /// See [`crate::Locks::drain`].
    pub fn drain(&self) {
        wait_for(self.0.drain());
    }
}

impl From<crate::Locks> for Locks {
    fn from(locks: crate::Locks) -> Self {
        Self(locks)
    }
}

/// [`crate::LockGuard`], blocking. What needs no waiting is called through `Deref`.
#[derive(Debug)]
#[must_use = "a guard that is dropped at once releases the lock"]
pub struct LockGuard(crate::LockGuard);

impl LockGuard {
    /// Blocks until the lock is lost.
    #[must_use]
    pub fn lost(&self) -> LostReason {
        wait_for(self.0.lost())
    }

    /// Renews now: see [`crate::LockGuard::renew`].
    ///
    /// # Errors
    /// As there.
    pub fn renew(&self) -> Result<()> {
        wait_for(self.0.renew())
    }

    /// Gives the lock up and waits for the store's answer: see [`crate::LockGuard::release`].
    ///
    /// # Errors
    /// As there.
    pub fn release(self) -> Result<()> {
        wait_for(self.0.release())
    }

    /// Leaves the lease in the store: see [`crate::LockGuard::detach`].
    pub fn detach(self) -> Detached {
        self.0.detach()
    }
}

impl Deref for LockGuard {
    type Target = crate::LockGuard;
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Fencing for &LockGuard {
    fn to_fence(&self) -> Result<Fence> {
        (&self.0).to_fence()
    }
    fn refused(&self, watermark: FencingToken) {
        (&self.0).refused(watermark);
    }
}

/// [`crate::Fenced`], blocking.
#[derive(Clone, Debug)]
pub struct Fenced(crate::Fenced);

impl Fenced {
    /// See [`crate::Fenced::put`].
    ///
    /// # Errors
    /// As there.
    pub fn put(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
        body: impl Into<Body>,
        fence: impl Fencing,
    ) -> Result<Written> {
        wait_for(self.0.put(resource, body, fence))
    }

    /// See [`crate::Fenced::get`].
    ///
    /// # Errors
    /// As there.
    pub fn get(&self, resource: impl TryInto<ResourceName, Error = Error>) -> Result<Snapshot> {
        wait_for(self.0.get(resource))
    }

    /// See [`crate::Fenced::raise`].
    ///
    /// # Errors
    /// As there.
    pub fn raise(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
        fence: impl Fencing,
    ) -> Result<Snapshot> {
        wait_for(self.0.raise(resource, fence))
    }

    /// See [`crate::Fenced::delete`].
    ///
    /// # Errors
    /// As there.
    pub fn delete(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
        fence: impl Fencing,
    ) -> Result<Written> {
        wait_for(self.0.delete(resource, fence))
    }

    /// See [`crate::Fenced::rebind`].
    ///
    /// # Errors
    /// As there.
    pub fn rebind(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
        fence: impl Fencing,
    ) -> Result<Written> {
        wait_for(self.0.rebind(resource, fence))
    }
}

impl From<crate::Fenced> for Fenced {
    fn from(store: crate::Fenced) -> Self {
        Self(store)
    }
}

fn wait_for<F: Future>(work: F) -> F::Output {
    pollster::block_on(work)
}
