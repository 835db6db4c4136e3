//! Stores that fail by a script, before or after the effect.
//!
//! A client cannot tell a request that never arrived from an answer that was lost. [`FaultyLease`]
//! and [`FaultyFence`] stand before any backend and make both, on purpose:
//!
//! ```
//! use std::sync::Arc;
//! use fencelock::conformance::faults::{FaultyLease, Op, Strike};
//! use fencelock::lease::{AcquireRequest, Attempt, LeaseStore as _, Ttl};
//! use fencelock::{ErrorKind, memory::MemoryStore};
//! # async fn example() -> fencelock::Result<()> {
//! let store = FaultyLease::new(Arc::new(MemoryStore::new()));
//! store.faults().next(Op::Acquire, Strike::After(ErrorKind::Indeterminate));
//!
//! let request = AcquireRequest::new("payment-export".parse()?, Ttl::DEFAULT);
//! assert!(store.acquire(&request).await.is_err());
//! // The grant is there all the same, and the same request finds it.
//! assert!(matches!(store.acquire(&request).await?, Attempt::Granted(_)));
//! # Ok(()) }
//! # pollster::block_on(example()).unwrap();
//! ```
#![deny(clippy::missing_trait_methods)]

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::Notify;

use crate::body::Body;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::{Fence, FencedStore, Snapshot, Written};
use crate::lease::{
    AcquireRequest, Attempt, Finding, LeaseRef, LeaseStore, LockState, Pruned, Release, Renewal,
    StoreProfile, Ttl, Watch,
};
use crate::name::{LockName, ResourceName};
use crate::token::FencingToken;

/// An operation of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Op {
    /// [`LeaseStore::acquire`].
    Acquire,
    /// [`LeaseStore::renew`]: the whole batch.
    Renew,
    /// [`LeaseStore::release`].
    Release,
    /// [`LeaseStore::watch`].
    Watch,
    /// [`LeaseStore::inspect`].
    Inspect,
    /// [`LeaseStore::list`].
    List,
    /// [`LeaseStore::break_lock`].
    Break,
    /// [`LeaseStore::raise_floor`].
    RaiseFloor,
    /// [`LeaseStore::prune`].
    Prune,
    /// [`LeaseStore::probe`] and [`FencedStore::probe`].
    Probe,
    /// [`FencedStore::put`].
    Put,
    /// [`FencedStore::get`].
    Get,
    /// [`FencedStore::raise`].
    Raise,
    /// [`FencedStore::delete`].
    Delete,
    /// [`FencedStore::rebind`].
    Rebind,
}

/// What happens to one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Strike {
    /// Nothing is applied; the caller gets an error of this kind.
    Before(ErrorKind),
    /// It is applied, the answer is lost, and the caller gets an error of this kind:
    /// `Indeterminate`, for an honest backend.
    After(ErrorKind),
    /// It is applied late.
    Delay(Duration),
    /// Nothing is applied and no answer comes until [`Faults::clear`]; then the call goes on.
    StallBefore,
    /// It is applied, and no answer comes until [`Faults::clear`].
    StallAfter,
    /// It passes.
    Pass,
}

/// The script of a faulty store. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    script: Arc<Mutex<Script>>,
    cleared: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Script {
    next: HashMap<Op, VecDeque<Strike>>,
    always: HashMap<Op, Strike>,
    calls: HashMap<Op, u64>,
    struck: u64,
    clears: u64,
}

impl Faults {
    /// Strikes the next call of `op` that no earlier strike is waiting for.
    pub fn next(&self, op: Op, strike: Strike) {
        self.script().next.entry(op).or_default().push_back(strike);
    }

    /// Strikes every call of `op` for which [`next`](Self::next) says nothing.
    pub fn always(&self, op: Op, strike: Strike) {
        self.script().always.insert(op, strike);
    }

    /// Forgets all strikes, and lets stalled calls go on.
    pub fn clear(&self) {
        let mut script = self.script();
        script.next.clear();
        script.always.clear();
        script.clears += 1;
        drop(script);
        self.cleared.notify_waiters();
    }

    /// How many calls of `op` were made, the struck ones among them.
    #[must_use]
    pub fn calls(&self, op: Op) -> u64 {
        self.script().calls.get(&op).copied().unwrap_or(0)
    }

    /// How many calls were struck. A test whose faults never struck proved nothing.
    #[must_use]
    pub fn struck(&self) -> u64 {
        self.script().struck
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn draw(&self, op: Op) -> (Strike, u64) {
        let mut script = self.script();
        *script.calls.entry(op).or_default() += 1;
        let next = script.next.get_mut(&op).and_then(VecDeque::pop_front);
        let strike = next
            .or_else(|| script.always.get(&op).copied())
            .unwrap_or(Strike::Pass);
        if strike != Strike::Pass {
            script.struck += 1;
        }
        (strike, script.clears)
    }

    async fn wait_for_clear(&self, clears_before: u64) {
        loop {
            let cleared = self.cleared.notified();
            tokio::pin!(cleared);
            // Registered before the count is read, so that a clear in between is not missed.
            cleared.as_mut().enable();
            if self.script().clears > clears_before {
                return;
            }
            cleared.await;
        }
    }

    /// Runs `call` as the script says; the error is the one that the caller gets instead.
    async fn run<T>(&self, op: Op, call: impl Future<Output = T> + Send) -> Result<T> {
        let (strike, clears) = self.draw(op);
        match strike {
            Strike::Pass => Ok(call.await),
            Strike::Before(kind) => Err(injected(kind, op, "before")),
            Strike::After(kind) => {
                drop(call.await);
                Err(injected(kind, op, "after"))
            }
            Strike::Delay(by) => {
                tokio::time::sleep(by).await;
                Ok(call.await)
            }
            Strike::StallBefore => {
                self.wait_for_clear(clears).await;
                Ok(call.await)
            }
            Strike::StallAfter => {
                let answer = call.await;
                self.wait_for_clear(clears).await;
                Ok(answer)
            }
        }
    }
}

fn injected(kind: ErrorKind, op: Op, moment: &str) -> Error {
    Error::new(kind, "a fault was injected")
        .with("op", format_args!("{op:?}"))
        .with("moment", moment)
}

/// A lock backend that fails by a script.
#[derive(Clone)]
pub struct FaultyLease {
    inner: Arc<dyn LeaseStore>,
    faults: Faults,
}

impl FaultyLease {
    /// Stands before `inner`; at first everything passes.
    #[must_use]
    pub fn new(inner: Arc<dyn LeaseStore>) -> Self {
        Self {
            inner,
            faults: Faults::default(),
        }
    }

    /// The script.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.faults
    }
}

impl fmt::Debug for FaultyLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FaultyLease").field(&self.inner).finish()
    }
}

#[async_trait]
impl LeaseStore for FaultyLease {
    fn profile(&self) -> &StoreProfile {
        self.inner.profile()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let call = self.inner.acquire(request);
        self.faults.run(Op::Acquire, call).await?
    }

    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        match self.faults.run(Op::Renew, self.inner.renew(leases)).await {
            Ok(answers) => answers,
            Err(error) => leases
                .iter()
                .map(|_| Renewal::Unknown(Error::new(error.kind(), error.to_string())))
                .collect(),
        }
    }

    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        let call = self.inner.release(lease, linger);
        self.faults.run(Op::Release, call).await?
    }

    async fn watch(&self, name: &LockName) -> Result<Box<dyn Watch>> {
        self.faults.run(Op::Watch, self.inner.watch(name)).await?
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        self.faults
            .run(Op::Inspect, self.inner.inspect(name))
            .await?
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        let call = self.inner.list(prefix, after, limit);
        self.faults.run(Op::List, call).await?
    }

    async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        self.faults
            .run(Op::Break, self.inner.break_lock(name))
            .await?
    }

    async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken> {
        let call = self.inner.raise_floor(name, floor, mend);
        self.faults.run(Op::RaiseFloor, call).await?
    }

    async fn prune(&self, idle: Duration) -> Result<Pruned> {
        self.faults.run(Op::Prune, self.inner.prune(idle)).await?
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        self.faults.run(Op::Probe, self.inner.probe()).await?
    }
}

/// A fenced storage that fails by a script.
#[derive(Clone)]
pub struct FaultyFence {
    inner: Arc<dyn FencedStore>,
    faults: Faults,
}

impl FaultyFence {
    /// Stands before `inner`; at first everything passes.
    #[must_use]
    pub fn new(inner: Arc<dyn FencedStore>) -> Self {
        Self {
            inner,
            faults: Faults::default(),
        }
    }

    /// The script.
    #[must_use]
    pub fn faults(&self) -> &Faults {
        &self.faults
    }
}

impl fmt::Debug for FaultyFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FaultyFence").field(&self.inner).finish()
    }
}

#[async_trait]
impl FencedStore for FaultyFence {
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written> {
        let call = self.inner.put(resource, body, fence);
        self.faults.run(Op::Put, call).await?
    }

    async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        self.faults.run(Op::Get, self.inner.get(resource)).await?
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let call = self.inner.raise(resource, fence);
        self.faults.run(Op::Raise, call).await?
    }

    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let call = self.inner.delete(resource, fence);
        self.faults.run(Op::Delete, call).await?
    }

    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let call = self.inner.rebind(resource, fence);
        self.faults.run(Op::Rebind, call).await?
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        self.faults.run(Op::Probe, self.inner.probe()).await?
    }
}

#[cfg(all(test, feature = "memory"))]
mod tests {
    use super::*;
    use crate::memory::{FencedMemory, MemoryStore};

    fn store() -> FaultyLease {
        FaultyLease::new(Arc::new(MemoryStore::new()))
    }

    fn request() -> AcquireRequest {
        AcquireRequest::new("a".parse().unwrap(), Ttl::DEFAULT)
    }

    fn lease(request: &AcquireRequest) -> LeaseRef {
        LeaseRef {
            name: request.name.clone(),
            holder: request.holder,
            token: None,
        }
    }

    #[tokio::test]
    async fn a_strike_before_the_effect_leaves_nothing() {
        let (store, request) = (store(), request());
        let strike = Strike::Before(ErrorKind::Unavailable);
        store.faults().next(Op::Acquire, strike);
        let refused = store.acquire(&request).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unavailable);
        assert_eq!(store.inspect(&request.name).await.unwrap(), None);
        store.acquire(&request).await.unwrap();
        assert_eq!(
            (store.faults().calls(Op::Acquire), store.faults().struck()),
            (2, 1)
        );
    }

    #[tokio::test]
    async fn a_struck_renewal_is_unknown_for_the_whole_batch() {
        let (store, request) = (store(), request());
        store.acquire(&request).await.unwrap();
        let batch = [
            (lease(&request), Ttl::DEFAULT),
            (lease(&request), Ttl::DEFAULT),
        ];
        let strike = Strike::After(ErrorKind::Indeterminate);
        store.faults().always(Op::Renew, strike);
        let answers = store.renew(&batch).await;
        assert_eq!(answers.len(), 2);
        assert!(
            answers
                .iter()
                .all(|answer| matches!(answer, Renewal::Unknown(_)))
        );
        store.faults().clear();
        assert!(matches!(store.renew(&batch).await[0], Renewal::Renewed));
    }

    #[tokio::test]
    async fn a_stalled_call_goes_on_when_the_faults_are_cleared() {
        for (strike, applied) in [(Strike::StallBefore, false), (Strike::StallAfter, true)] {
            let (store, request) = (store(), request());
            store.faults().next(Op::Acquire, strike);
            let (twin, copy) = (store.clone(), request.clone());
            let stalled = tokio::spawn(async move { twin.acquire(&copy).await });
            while store.faults().struck() == 0 {
                tokio::task::yield_now().await;
            }
            let seen = store.inspect(&request.name).await.unwrap();
            assert_eq!(seen.is_some(), applied, "{strike:?}");
            assert!(!stalled.is_finished());
            store.faults().clear();
            let answer = stalled.await.unwrap().unwrap();
            assert!(matches!(answer, Attempt::Granted(_)));
        }
    }

    #[tokio::test]
    async fn a_delayed_call_is_applied_late() {
        let (store, request) = (store(), request());
        store
            .faults()
            .next(Op::Acquire, Strike::Delay(Duration::from_secs(3_600)));
        let early = tokio::time::timeout(Duration::from_millis(20), store.acquire(&request)).await;
        assert!(early.is_err());
        assert_eq!(store.inspect(&request.name).await.unwrap(), None);
        let short = Strike::Delay(Duration::from_millis(1));
        store.faults().next(Op::Acquire, short);
        store.acquire(&request).await.unwrap();
    }

    #[tokio::test]
    async fn strikes_come_in_the_order_in_which_they_were_scripted() {
        let store = FaultyFence::new(Arc::new(FencedMemory::new()));
        let (resource, fence) = ("r".parse().unwrap(), Fence::from(FencingToken::MIN));
        for strike in [Strike::Pass, Strike::Before(ErrorKind::Unavailable)] {
            store.faults().next(Op::Put, strike);
        }
        store.put(&resource, "1".into(), &fence).await.unwrap();
        store.put(&resource, "2".into(), &fence).await.unwrap_err();
        store.put(&resource, "3".into(), &fence).await.unwrap();
    }
}
