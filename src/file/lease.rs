//! The lock side: [`FileStore`].

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::driver::off_thread;
use crate::error::{Error, Result};
use crate::file::engine::Engine;
use crate::file::live::Live;
use crate::file::options::FileOptions;
use crate::file::probe;
use crate::file::records::{Halt, Pace, Records, highest_readable};
use crate::file::root::{Root, WAIT_MAX};
use crate::file::safe;
use crate::file::watch::{FileWatch, Notifier};
use crate::host::Host;
use crate::lease::{
    AcquireRequest, Attempt, Durability, Expiry, Finding, LeaseRef, LeaseStore, LockState, Pruned,
    Release, Renewal, StoreProfile, Ttl, Watch,
};
use crate::name::LockName;
use crate::token::FencingToken;

/// How long a renewal waits for a record's kernel lock at the most, and a sixth of the TTL where that
/// is less: it is sent at a third of the TTL, so that half is left for another try.
const RENEW_WAIT_MAX: Duration = Duration::from_secs(1);

/// Locks of one host, in the files of a directory. See the [module](crate::file) for how.
///
/// A store is one client: while it lives, the kernel holds a lock that shows the others that this
/// process does. Dropping it ends the grants that are not detached. After a fork, the child opens
/// a store of its own.
#[derive(Debug)]
pub struct FileStore {
    engine: Arc<Engine>,
    profile: StoreProfile,
}

impl FileStore {
    /// Opens the store in the directory `path`, which is made where it is missing. Blocks on file
    /// I/O for a moment.
    ///
    /// # Errors
    /// As [`FileOptions::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::options().open(path)
    }

    /// Options to open a store with.
    pub fn options() -> FileOptions {
        FileOptions::default()
    }

    /// The descriptor whose lock says that this store's holder lives. A process that inherits it
    /// keeps the grants that are not detached from being taken for a dead one's (L3) until it ends
    /// as well; their TTL ends them all the same.
    ///
    /// # Errors
    /// `Unavailable`.
    #[doc(hidden)]
    pub fn liveness(&self) -> Result<OwnedFd> {
        self.engine.live.share().map(OwnedFd::from)
    }

    pub(crate) fn open_with(path: &Path, options: FileOptions) -> Result<Self> {
        Self::open_there(path, options).map_err(safe::while_opening)
    }

    fn open_there(path: &Path, options: FileOptions) -> Result<Self> {
        let host = options.host.unwrap_or_else(Host::read);
        let root = Root::open(
            path,
            options.allow_network_fs,
            options.mend,
            highest_readable,
        )?;
        let live = Live::new(root.live_dir());
        live.reap()?;
        let mut profile =
            StoreProfile::new("file", root.realm(), Durability::D2PowerLoss, Expiry::Host);
        profile.wakes_waiters = cfg!(any(target_os = "linux", target_os = "android"));
        profile.sees_dead_holders = true;
        let engine = Engine {
            notifier: Notifier::new(root.locks_dir()),
            records: Records::new(root, host),
            live,
            clock: options.clock,
        };
        Ok(Self {
            engine: Arc::new(engine),
            profile,
        })
    }

    /// Runs what would have to wait where waiting harms nobody.
    async fn patiently<T: Send + 'static>(
        &self,
        operation: impl FnOnce(&Engine) -> Result<T, Halt> + Send + 'static,
    ) -> Result<T> {
        let engine = Arc::clone(&self.engine);
        settle(off_thread(move || operation(&engine)).await?)
    }

    #[cfg(test)]
    pub(crate) fn shared(&self) -> Arc<Engine> {
        Arc::clone(&self.engine)
    }

    #[cfg(test)]
    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }
}

/// Each operation is tried at once on the caller's thread, since it takes microseconds where it
/// neither meets another process nor has to sync; else it moves to a thread that may block.
#[async_trait]
impl LeaseStore for FileStore {
    fn profile(&self) -> &StoreProfile {
        &self.profile
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        match self.engine.acquire(request, Pace::Inline) {
            Err(Halt::WouldWait) => {
                let request = request.clone();
                self.patiently(move |engine| engine.acquire(&request, Pace::patient()))
                    .await
            }
            done => settle(done),
        }
    }

    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        // All that have to wait do so at the same time, and the rest is renewed before. The answers
        // go out together, so none waits for longer than the shortest lease of them can spare.
        let shortest = leases.iter().filter_map(|(_, ttl)| ttl.duration()).min();
        let spare = shortest.map_or(RENEW_WAIT_MAX, |ttl| (ttl / 6).min(RENEW_WAIT_MAX));
        let until = safe::within(spare);
        let started: Vec<_> = leases
            .iter()
            .map(
                |(lease, ttl)| match self.engine.renew(lease, *ttl, Pace::Inline) {
                    Err(Halt::WouldWait) => {
                        let (engine, lease, ttl) = (Arc::clone(&self.engine), lease.clone(), *ttl);
                        Err(off_thread(move || {
                            engine.renew(&lease, ttl, Pace::Until(until))
                        }))
                    }
                    done => Ok(done),
                },
            )
            .collect();
        let mut answers = Vec::with_capacity(started.len());
        for renewal in started {
            let done = match renewal {
                Ok(done) => done,
                Err(waiting) => waiting.await.unwrap_or_else(|e| Err(Halt::Failed(e))),
            };
            answers.push(settle(done).unwrap_or_else(Renewal::Unknown));
        }
        answers
    }

    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        match self.engine.release(lease, linger, Pace::Inline) {
            Err(Halt::WouldWait) => {
                let lease = lease.clone();
                self.patiently(move |engine| engine.release(&lease, linger, Pace::patient()))
                    .await
            }
            done => settle(done),
        }
    }

    async fn watch(&self, name: &LockName) -> Result<Box<dyn Watch>> {
        Ok(Box::new(FileWatch::new(
            Arc::clone(&self.engine),
            name.clone(),
        )))
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        match self.engine.inspect(name, Pace::Inline) {
            Err(Halt::WouldWait) => {
                let name = name.clone();
                self.patiently(move |engine| engine.inspect(&name, Pace::patient()))
                    .await
            }
            done => settle(done),
        }
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        let (prefix, after) = (prefix.to_owned(), after.cloned());
        self.patiently(move |engine| {
            engine.list(&prefix, after.as_ref(), limit, safe::within(WAIT_MAX))
        })
        .await
    }

    async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        let name = name.clone();
        self.patiently(move |engine| engine.break_lock(&name, Pace::patient()))
            .await
    }

    async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken> {
        let name = name.clone();
        self.patiently(move |engine| engine.raise_floor(&name, floor, mend, Pace::patient()))
            .await
    }

    async fn prune(&self, idle: Duration) -> Result<Pruned> {
        self.patiently(move |engine| engine.prune(idle, safe::within(WAIT_MAX)))
            .await
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        self.patiently(|engine| Ok(probe::findings(engine))).await
    }
}

fn settle<T>(done: Result<T, Halt>) -> Result<T> {
    done.map_err(|halt| match halt {
        Halt::Failed(error) => error,
        Halt::WouldWait => Error::unavailable("BUG: a patient operation would not wait"),
    })
}
