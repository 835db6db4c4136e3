//! Storage that checks fences: what an implementation gives ([`FencedStore`]), and what users hold
//! ([`Fenced`]).

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use crate::body::Body;
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::fence::{Fence, Fencing};
use crate::lease::Finding;
use crate::name::ResourceName;
use crate::token::{FencingToken, Watermark};

/// The answer to a put or delete.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Written {
    /// The watermark after the write.
    pub watermark: Watermark,
    /// True where this call applied the write; false where the very same write had been applied
    /// before and was only acknowledged (S7).
    pub applied: bool,
}

impl Written {
    /// For backends: a write that was applied now.
    #[must_use]
    pub fn applied(watermark: Watermark) -> Self {
        Self {
            watermark,
            applied: true,
        }
    }

    /// For backends: a write that had been applied before.
    #[must_use]
    pub fn repeated(watermark: Watermark) -> Self {
        Self {
            watermark,
            applied: false,
        }
    }
}

/// A resource as one atomic read saw it.
#[derive(Debug)]
#[non_exhaustive]
pub struct Snapshot {
    /// The value; `None` where the resource was never written or is deleted.
    pub value: Option<Body>,
    /// The watermark; `None` where no fence was ever shown.
    pub watermark: Option<Watermark>,
    /// The token of whoever wrote the value; `None` where there is no value or it was written
    /// without a fence.
    pub writer: Option<FencingToken>,
}

impl Snapshot {
    /// For backends.
    #[must_use]
    pub fn new(
        value: Option<Body>,
        watermark: Option<Watermark>,
        writer: Option<FencingToken>,
    ) -> Self {
        Self {
            value,
            watermark,
            writer,
        }
    }
}

/// What a fenced storage implements. Users hold it as [`Fenced`].
///
/// Every method decides by [`judge`](crate::token::judge), or by a script that follows it, in the
/// same atomic step as its effect (S2), and answers `Ok` only once the effect is as durable as the
/// storage declares (S10). The conformance cases say the rest.
#[async_trait]
pub trait FencedStore: Send + Sync + fmt::Debug {
    /// Replaces the value.
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written>;

    /// Reads value and watermark together. Shows no token and is never refused.
    async fn get(&self, resource: &ResourceName) -> Result<Snapshot>;

    /// Moves the watermark up to the fence's token and reads the value, in one step (S5, S6).
    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot>;

    /// Removes the value and keeps the watermark. Removing what is not there is a success.
    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written>;

    /// Binds the resource to the fence's lock (S9). The token has to be larger than the watermark, and
    /// a fence that names no lock is `Invalid`.
    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written>;

    /// What an operator should know of this storage, for `fencelock doctor`.
    async fn probe(&self) -> Result<Vec<Finding>>;
}

/// Storage that refuses a stale token in the same atomic step as the write.
///
/// Cheap to clone. The last argument of each writing method takes a `&LockGuard`, a [`Fence`] or a
/// bare [`FencingToken`].
///
/// ```
/// use fencelock::{Fenced, FencingToken, memory::FencedMemory};
/// # async fn example() -> fencelock::Result<()> {
/// let store = Fenced::new(FencedMemory::new());
/// let (old, new) = (FencingToken::new(33)?, FencingToken::new(34)?);
/// store.put("today.csv", "new data", new).await?;
/// let refused = store.put("today.csv", "old data", old).await.unwrap_err();
/// assert_eq!(refused.kind(), fencelock::ErrorKind::Fenced);
/// # Ok(()) }
/// # pollster::block_on(example()).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Fenced {
    store: Arc<dyn FencedStore>,
    /// Where a storage that was opened by URL has its connections.
    driver: Option<Arc<Driver>>,
}

impl Fenced {
    /// Wraps a backend.
    pub fn new(store: impl FencedStore + 'static) -> Self {
        Self::from_arc(Arc::new(store))
    }

    /// Wraps a shared backend. Its futures are polled where the methods below are awaited.
    #[must_use]
    pub fn from_arc(store: Arc<dyn FencedStore>) -> Self {
        Self {
            store,
            driver: None,
        }
    }

    /// Wraps a backend whose connections live on `driver`: what it does runs there.
    #[cfg_attr(
        not(feature = "_shared"),
        expect(dead_code, reason = "only engines with connections need it")
    )]
    pub(crate) fn on_driver(store: Arc<dyn FencedStore>, driver: Arc<Driver>) -> Self {
        Self {
            store,
            driver: Some(driver),
        }
    }

    /// Replaces the value of `resource`.
    ///
    /// Cancel safety: if the future is dropped, the write may or may not have been applied; a later
    /// write of the same holder supersedes it.
    ///
    /// # Errors
    /// `Fenced` where the token is stale, `DomainMismatch` where the resource is bound to another
    /// lock, `Lost` where the guard knows that it lost its lock; nothing was written then.
    /// `Indeterminate` where the write may have been applied.
    pub async fn put(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
        body: impl Into<Body>,
        fence: impl Fencing,
    ) -> Result<Written> {
        let body = body.into();
        self.fenced(
            "put",
            resource,
            fence,
            |store, resource, fence| async move { store.put(&resource, body, &fence).await },
        )
        .await
    }

    /// Reads value, watermark and the token of the writer together.
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// `Unavailable`, `Corrupt`. A resource that was never written is a snapshot without a value.
    pub async fn get(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
    ) -> Result<Snapshot> {
        let resource = resource.try_into()?;
        self.run(move |store| async move { store.get(&resource).await })
            .await
    }

    /// Moves the watermark up without writing, and reads the value in the same step.
    ///
    /// From here on the value changes only by writes with this token or a larger one (S5): raise,
    /// compute, put is a read-modify-write that loses nothing (S6). Cancel safe: raising twice is
    /// raising once.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub async fn raise(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
        fence: impl Fencing,
    ) -> Result<Snapshot> {
        self.fenced(
            "raise",
            resource,
            fence,
            |store, resource, fence| async move { store.raise(&resource, &fence).await },
        )
        .await
    }

    /// Removes the value and keeps the watermark, so that an older token stays refused.
    ///
    /// Cancel safety and errors as [`put`](Self::put).
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub async fn delete(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
        fence: impl Fencing,
    ) -> Result<Written> {
        self.fenced(
            "delete",
            resource,
            fence,
            |store, resource, fence| async move { store.delete(&resource, &fence).await },
        )
        .await
    }

    /// Binds `resource` to the fence's lock, for example after a move to another engine.
    ///
    /// The token has to be larger than the watermark. Where the new lock counts from below, make
    /// its next token larger first: `fencelock repair NAME --min-token N`. Cancel safety as
    /// [`put`](Self::put).
    ///
    /// # Errors
    /// As [`put`](Self::put), and `Invalid` where the fence names no lock, as a bare token does.
    pub async fn rebind(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
        fence: impl Fencing,
    ) -> Result<Written> {
        self.fenced(
            "rebind",
            resource,
            fence,
            |store, resource, fence| async move { store.rebind(&resource, &fence).await },
        )
        .await
    }

    /// What an operator should know of this storage. Cancel safe.
    ///
    /// # Errors
    /// `Unavailable` where it does not answer.
    pub async fn probe(&self) -> Result<Vec<Finding>> {
        self.run(move |store| async move { store.probe().await })
            .await
    }

    /// Does what shows a fence, and tells whoever watches how it went.
    async fn fenced<T, F>(
        &self,
        operation: &'static str,
        resource: impl TryInto<ResourceName, Error = Error>,
        fence: impl Fencing,
        work: impl FnOnce(Arc<dyn FencedStore>, ResourceName, Fence) -> F,
    ) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let (resource, shown) = (resource.try_into()?, fence.to_fence()?);
        let named = resource.clone();
        let done = self.run(|store| work(store, resource, shown)).await;
        observe(&fence, operation, &named, done)
    }

    async fn run<T, F>(&self, work: impl FnOnce(Arc<dyn FencedStore>) -> F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let work = work(Arc::clone(&self.store));
        match &self.driver {
            Some(driver) => driver.run(Box::pin(work)).await?,
            None => work.await,
        }
    }
}

fn observe<T>(
    fence: &impl Fencing,
    operation: &'static str,
    resource: &ResourceName,
    result: Result<T>,
) -> Result<T> {
    let outcome = match &result {
        Ok(_) => "ok",
        Err(error) => error.kind().as_str(),
    };
    metrics::counter!("fencelock_fenced_operations_total", "operation" => operation, "outcome" => outcome)
        .increment(1);
    if let Err(error) = &result {
        tracing::warn!(operation, %resource, outcome, %error, "fenced operation not done");
        if let Some(watermark) = error.watermark() {
            fence.refused(watermark);
        }
    }
    result
}
