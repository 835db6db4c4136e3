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
use crate::error::{Error, Result};
use crate::fence::{Fence, Fencing, Snapshot, Written};
use crate::held::LostReason;
use crate::lease::{LockState, Pruned};
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

    /// Runs `work` while holding `name`. Nothing can cancel it from outside: it asks
    /// [`LockGuard::check`](crate::LockGuard::check) before each step.
    ///
    /// # Errors
    /// What `work` returns; `Lost` where the lock was lost before the end; and what acquiring
    /// returns.
    pub fn with_lock<T, E: From<Error>>(
        &self,
        name: impl TryInto<LockName, Error = Error>,
        work: impl FnOnce(&LockGuard) -> Result<T, E>,
    ) -> Result<T, E> {
        wait_for(self.0.with_lock(name, async |guard: &crate::LockGuard| {
            guard.check()?;
            Ok::<_, E>(())
        }))?;
        let _ = work;
        todo!()
    }
}
