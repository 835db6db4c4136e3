//! What users meet: open a store, acquire locks, look after them.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::acquire::{Acquire, Once, Wait};
use crate::clock::Clock;
use crate::driver::{Driver, Owned, within};
use crate::error::{Error, Result};
use crate::guard::LockGuard;
use crate::held::Held;
use crate::keeper::{Keeper, silent};
use crate::lease::{
    Finding, LeaseRef, LeaseStore, LockState, Pruned, Release, Renewal, StoreProfile, Ttl, Watch,
};
use crate::name::LockName;
use crate::queue::Queues;
use crate::token::FencingToken;

/// How long one request to the store may take.
const REQUEST_LIMIT: Duration = Duration::from_secs(4);

/// For how long a request of unknown outcome is retried before its caller hears of it.
const PATIENCE: Duration = Duration::from_secs(8);

/// Locks in one store. Cheap to clone; clones share the store, its connections and the thread that
/// renews.
///
/// ```
/// use fencelock::{Locks, memory::MemoryStore};
/// use std::time::Duration;
/// # async fn example() -> fencelock::Result<()> {
/// let locks = Locks::new(MemoryStore::new());
/// let guard = locks
///     .acquire("payment-export")
///     .ttl(Duration::from_secs(30))
///     .wait(Duration::from_secs(10))
///     .await?;
/// assert!(locks.try_acquire("payment-export").await?.is_none());
/// println!("token {}", guard.token());
/// guard.release().await?;
/// # Ok(()) }
/// # pollster::block_on(example()).unwrap();
/// ```
#[derive(Clone)]
pub struct Locks {
    inner: Arc<Inner>,
}

/// How to build [`Locks`]; see [`Locks::builder`].
#[derive(Debug)]
pub struct LocksBuilder {
    store: Arc<dyn LeaseStore>,
    driver: Arc<Driver>,
    clock: Clock,
    ttl: Ttl,
    request_limit: Duration,
    patience: Duration,
}

/// What all clones and guards share.
pub(crate) struct Inner {
    pub(crate) store: Arc<dyn LeaseStore>,
    pub(crate) clock: Clock,
    pub(crate) driver: Arc<Driver>,
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) queues: Queues,
    pub(crate) ttl: Ttl,
    pub(crate) request_limit: Duration,
    pub(crate) patience: Duration,
    pub(crate) pid: u32,
    /// Watermarks that holders met above their own tokens (L10); almost always empty.
    floors: Mutex<HashMap<LockName, FencingToken>>,
}

impl Locks {
    /// Locks in `store`, with the common settings.
    pub fn new(store: impl LeaseStore) -> Self {
        Self::builder(store).build()
    }

    /// Locks in a shared store, with the common settings.
    #[must_use]
    pub fn from_arc(store: Arc<dyn LeaseStore>) -> Self {
        LocksBuilder::new(store).build()
    }

    /// Locks in `store`, with settings of your own.
    pub fn builder(store: impl LeaseStore) -> LocksBuilder {
        LocksBuilder::new(Arc::new(store))
    }

    /// Opens a store by its URL: `memory:`, `file:///var/lib/jobs`, …; see [`open`](crate::open)
    /// for all schemes and options.
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// `Invalid` for an unknown scheme or option, `Unsupported` where the store cannot keep its
    /// promises there, `Unavailable` where it cannot be reached.
    pub async fn open(url: &str) -> Result<Self> {
        crate::open::locks(url).await
    }

    /// Acquires `name`, waiting 30 s for it unless told otherwise:
    ///
    /// ```
    /// # use fencelock::{Locks, memory::MemoryStore};
    /// # use std::time::Duration;
    /// # async fn example() -> fencelock::Result<()> {
    /// # let locks = Locks::new(MemoryStore::new());
    /// let guard = locks.acquire("nightly").wait(Duration::from_secs(5)).await?;
    /// # Ok(()) }
    /// # pollster::block_on(example()).unwrap();
    /// ```
    ///
    /// The name is checked when the builder is awaited.
    pub fn acquire(&self, name: impl TryInto<LockName, Error = Error>) -> Acquire<Wait> {
        Acquire::new(Arc::clone(&self.inner), name.try_into())
    }

    /// Asks for `name` once: `None` where somebody else holds it.
    pub fn try_acquire(&self, name: impl TryInto<LockName, Error = Error>) -> Acquire<Once> {
        Acquire::new(Arc::clone(&self.inner), name.try_into())
    }

    /// Runs `work` while holding `name`: [`Acquire::run`] with the common settings.
    ///
    /// # Errors
    /// As [`Acquire::run`].
    pub async fn with_lock<T, E, F>(
        &self,
        name: impl TryInto<LockName, Error = Error>,
        work: F,
    ) -> Result<T, E>
    where
        F: AsyncFnOnce(&LockGuard) -> Result<T, E>,
        E: From<Error>,
    {
        self.acquire(name).run(work).await
    }

    #[cfg(feature = "simulation")]
    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    /// The backend.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn LeaseStore> {
        &self.inner.store
    }

    /// What the backend is and promises.
    #[must_use]
    pub fn profile(&self) -> &StoreProfile {
        self.inner.store.profile()
    }

    /// The present state of a lock; `None` where it has no record. Cancel safe.
    ///
    /// # Errors
    /// `Unavailable`, `Corrupt`.
    pub async fn inspect(
        &self,
        name: impl TryInto<LockName, Error = Error>,
    ) -> Result<Option<LockState>> {
        let name = name.try_into()?;
        self.ask(move |store| async move { store.inspect(&name).await })
            .await
    }

    /// At most `limit` locks whose names begin with `prefix` and follow `after`, ordered by name.
    /// Cancel safe.
    ///
    /// # Errors
    /// `Unavailable`, `Corrupt`.
    pub async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        let (prefix, after) = (prefix.to_owned(), after.cloned());
        self.ask(move |store| async move { store.list(&prefix, after.as_ref(), limit).await })
            .await
    }

    /// Takes a lock from whoever holds it and returns the state before; `None` where there was no
    /// record. The evicted holder is fenced: the next token is larger than its own.
    ///
    /// Not cancel safe: it may or may not have been applied.
    ///
    /// # Errors
    /// `Unavailable`, `Indeterminate`, `Corrupt`.
    pub async fn break_lock(
        &self,
        name: impl TryInto<LockName, Error = Error>,
    ) -> Result<Option<LockState>> {
        let name = name.try_into()?;
        self.ask(move |store| async move {
            let before = store.break_lock(&name).await?;
            tracing::warn!(%name, "lock broken by request");
            Ok(before)
        })
        .await
    }

    /// Makes the next token of `name` larger than `floor`; with `mend` also where its record is
    /// damaged. Returns what the last token now counts as. Cancel safe: raising twice is raising once.
    ///
    /// # Errors
    /// `Invalid` where the floor is implausibly far ahead; `Unavailable`, `Indeterminate`.
    pub async fn raise_floor(
        &self,
        name: impl TryInto<LockName, Error = Error>,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken> {
        let name = name.try_into()?;
        self.ask(move |store| async move { store.raise_floor(&name, floor, mend).await })
            .await
    }

    /// Removes records that nobody has held for `idle`. No token is ever told again. Cancel safe: it
    /// may go on in the background, and can be called again.
    ///
    /// # Errors
    /// `Unavailable`, `Unsupported`.
    pub async fn prune(&self, idle: Duration) -> Result<Pruned> {
        // Not limited as a whole: it is many requests, each of which has its limit.
        let store = Arc::clone(&self.inner.store);
        self.drive(Box::pin(async move { store.prune(idle).await }))
            .await?
    }

    /// What an operator should know of the store. Cancel safe.
    ///
    /// # Errors
    /// `Unavailable` where it does not answer.
    pub async fn probe(&self) -> Result<Vec<Finding>> {
        self.ask(move |store| async move { store.probe().await })
            .await
    }

    /// Hints that `name` may have changed, for whoever looks on. Cancel safe.
    ///
    /// # Errors
    /// `Unavailable`.
    pub async fn watch(
        &self,
        name: impl TryInto<LockName, Error = Error>,
    ) -> Result<Box<dyn Watch>> {
        let name = name.try_into()?;
        self.ask(move |store| async move { store.watch(&name).await })
            .await
    }

    /// Renews a lease that was [detached](LockGuard::detach), from whichever process. Cancel safe: it
    /// may or may not have been applied, and can be repeated.
    ///
    /// # Errors
    /// `Lost` where it is not good any more; `Unavailable` or `Indeterminate` where the store did
    /// not confirm.
    pub async fn renew(&self, lease: &LeaseRef, ttl: Ttl) -> Result<()> {
        let (inner, lease) = (Arc::clone(&self.inner), lease.clone());
        let answer = self
            .drive(Box::pin(async move { inner.renew_once(&lease, ttl).await }))
            .await?;
        match answer {
            Renewal::Renewed | Renewal::StillHeld => Ok(()),
            Renewal::Lost => Err(Error::lost(
                "there is no such lease: it lapsed, was released or was broken",
            )),
            Renewal::Unknown(error) => Err(error),
        }
    }

    /// Releases a lease that was [detached](LockGuard::detach), from whichever process. Cancel safe: it
    /// may or may not have been applied, and can be repeated.
    ///
    /// # Errors
    /// `Unavailable` or `Indeterminate` where the store did not confirm.
    pub async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        let (inner, lease) = (Arc::clone(&self.inner), lease.clone());
        self.drive(Box::pin(async move {
            let released = inner.keeper.release_once(&lease, linger).await;
            inner.queues.freed(&lease.name);
            released
        }))
        .await?
    }

    /// Waits until every release that was left to the background is done. Cancel safe.
    ///
    /// Call it before the process ends, where guards are dropped and not released.
    pub async fn drain(&self) {
        self.inner.keeper.drained().await;
    }

    /// Runs one question to the store on the driver, within the time limit.
    async fn ask<T, F>(&self, question: impl FnOnce(Arc<dyn LeaseStore>) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let limit = self.inner.patience;
        let answer = question(Arc::clone(&self.inner.store));
        self.drive(Box::pin(async move {
            within(limit, answer)
                .await
                .unwrap_or_else(|| Err(silent("request", limit)))
        }))
        .await?
    }

    async fn drive<T: Send + 'static>(&self, work: Owned<T>) -> Result<T> {
        self.inner.same_process()?;
        self.inner.driver.run(work).await
    }
}

impl LocksBuilder {
    pub(crate) fn new(store: Arc<dyn LeaseStore>) -> Self {
        Self {
            store,
            driver: Arc::default(),
            clock: Clock::system(),
            ttl: Ttl::DEFAULT,
            request_limit: REQUEST_LIMIT,
            patience: PATIENCE,
        }
    }

    /// The driver on which the store's connections live already.
    pub(crate) fn driver(mut self, driver: Arc<Driver>) -> Self {
        self.driver = driver;
        self
    }

    /// The TTL of acquires that name none; 30 s at first.
    #[must_use]
    pub fn ttl(mut self, ttl: Ttl) -> Self {
        self.ttl = ttl;
        self
    }

    /// How long one request to the store may take before its outcome counts as unknown; 4 s at
    /// first.
    #[must_use]
    pub fn request_limit(mut self, limit: Duration) -> Self {
        self.request_limit = limit;
        self
    }

    /// For how long requests of unknown outcome are retried before the caller hears of it; 8 s at
    /// first.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// The clock of the lease arithmetic: for tests.
    #[must_use]
    pub fn clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }

    /// The locks.
    #[must_use]
    pub fn build(self) -> Locks {
        let keeper = Keeper::new(
            Arc::clone(&self.store),
            self.clock.clone(),
            self.request_limit,
        );
        Locks {
            inner: Arc::new(Inner {
                store: self.store,
                clock: self.clock,
                driver: self.driver,
                keeper: Arc::new(keeper),
                queues: Queues::new(),
                ttl: self.ttl,
                request_limit: self.request_limit,
                patience: self.patience,
                pid: std::process::id(),
                floors: Mutex::default(),
            }),
        }
    }
}

impl Inner {
    /// The keeper's thread and the random generator's state do not survive fork(2).
    pub(crate) fn same_process(&self) -> Result<()> {
        if self.pid == std::process::id() {
            return Ok(());
        }
        Err(Error::invalid(
            "these locks were opened before a fork; open the store again in the child",
        )
        .with("opened_by_pid", self.pid))
    }

    /// Remembers, and tells the store, that the tokens of a held lock have to be larger than a
    /// watermark that its holder met (L10).
    pub(crate) fn raise_above(locks: &Arc<Self>, held: &Arc<Held>, watermark: FencingToken) {
        let name = held.lease().name.clone();
        locks
            .floors()
            .entry(name.clone())
            .and_modify(|floor| *floor = (*floor).max(watermark))
            .or_insert(watermark);
        let alive = Arc::clone(locks);
        let refused = move || {
            alive.floors().remove(&name);
        };
        locks
            .keeper
            .raise_later(&locks.driver, Arc::clone(held), watermark, refused);
    }

    /// The watermark that the next token of `name` has to exceed, if one was met.
    pub(crate) fn floor(&self, name: &LockName) -> Option<FencingToken> {
        self.floors().get(name).copied()
    }

    fn floors(&self) -> MutexGuard<'_, HashMap<LockName, FencingToken>> {
        self.floors.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.keeper.stop();
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner")
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locks")
            .field("store", &self.inner.store)
            .finish_non_exhaustive()
    }
}

/// This host's name, for people.
pub(crate) static HOST: LazyLock<String> = LazyLock::new(|| {
    let name = rustix::system::uname();
    let mut host = name.nodename().to_string_lossy().into_owned();
    crate::lease::truncate(&mut host);
    host
});
