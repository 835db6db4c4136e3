//! Fenced objects: values of any size under keys of a bucket.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use super::connect::Link;
use super::options::{ObjectOptions, Place};
use super::probe;
use super::strict::Strict;
use super::url::options as parsed;
use crate::body::Body;
use crate::error::{Error, Result};
use crate::fence::{Fence, Fenced, FencedStore, Fencing, Snapshot, Written};
use crate::lease::{Finding, Severity};
use crate::name::ResourceName;
use crate::open::StoreUrl;

/// Fenced objects in an object store.
///
/// A resource's name is the key of its pointer object, below the prefix that was opened. Names are
/// parts between single slashes; none may end with `.fencelock`. Cheap to clone; clones share the
/// connections and what they know of pointers, so that steady writes of one process cost one
/// request each, or two where the value is larger than
/// [`INLINE_MAX_BYTES`](super::INLINE_MAX_BYTES).
///
/// The methods are those of [`Fenced`], for users of this storage alone.
#[derive(Clone)]
pub struct FencedObjects {
    strict: Arc<Strict>,
}

impl FencedObjects {
    /// Opens fenced objects by URL: `s3://bucket/prefix`, `gs://bucket/prefix` or
    /// `az://container/prefix`, with credentials from the environment.
    ///
    /// Writes and removes one small object to see whether the store honours conditional writes.
    /// Cancel safe, but that object may be left behind.
    ///
    /// # Errors
    /// `Invalid` for a URL or option that is wrong and for a bucket that does not exist,
    /// `Unavailable` where the store cannot be reached or refuses the credentials, `Unsupported`
    /// where it ignores conditions or this build does not know it.
    pub async fn open(url: &str) -> Result<Self> {
        ObjectOptions::default().open_fenced(url).await
    }

    pub(crate) async fn open_place(options: ObjectOptions, place: Place) -> Result<Self> {
        if options.realm.is_some() {
            return Err(
                Error::invalid("the option is for locks; a fenced object has none such")
                    .with("option", "realm"),
            );
        }
        Ok(Self::over(options.link(&place).await?))
    }

    pub(super) fn over(link: Link) -> Self {
        Self {
            strict: Arc::new(Strict::new(link)),
        }
    }

    fn fenced(&self) -> Fenced {
        Fenced::new(self.clone())
    }

    /// As [`Fenced::put`].
    ///
    /// # Errors
    /// As there.
    pub async fn put(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
        body: impl Into<Body>,
        fence: impl Fencing,
    ) -> Result<Written> {
        self.fenced().put(resource, body, fence).await
    }

    /// As [`Fenced::get`]. A value of more than 8 MiB is kept in a temporary file.
    ///
    /// # Errors
    /// As there.
    pub async fn get(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
    ) -> Result<Snapshot> {
        self.fenced().get(resource).await
    }

    /// As [`Fenced::raise`].
    ///
    /// # Errors
    /// As there.
    pub async fn raise(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
        fence: impl Fencing,
    ) -> Result<Snapshot> {
        self.fenced().raise(resource, fence).await
    }

    /// As [`Fenced::delete`].
    ///
    /// # Errors
    /// As there.
    pub async fn delete(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
        fence: impl Fencing,
    ) -> Result<Written> {
        self.fenced().delete(resource, fence).await
    }

    /// As [`Fenced::rebind`].
    ///
    /// # Errors
    /// As there.
    pub async fn rebind(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
        fence: impl Fencing,
    ) -> Result<Written> {
        self.fenced().rebind(resource, fence).await
    }
}

impl ObjectOptions {
    /// Opens fenced objects by a URL whose options are added to these.
    ///
    /// # Errors
    /// As [`FencedObjects::open`].
    pub async fn open_fenced(self, url: &str) -> Result<FencedObjects> {
        let (options, place) = super::url::onto(self, StoreUrl::parse(url)?)?;
        FencedObjects::open_place(options, place).await
    }

    /// Fenced objects below `prefix` of a store of your own. Its credentials, limits and retries are
    /// its own matter: a client that repeats a conditional write by itself makes some answers
    /// `Indeterminate`, and none wrong.
    ///
    /// ```
    /// # async fn example() -> fencelock::Result<()> {
    /// use std::sync::Arc;
    /// use fencelock::FencingToken;
    /// use fencelock::object_store::{ObjectOptions, client::memory::InMemory};
    /// let store = Arc::new(InMemory::new());
    /// let objects = ObjectOptions::default().open_fenced_store(store, "exports").await?;
    /// objects.put("today.csv", "new data", FencingToken::new(34)?).await?;
    /// let refused = objects.put("today.csv", "old data", FencingToken::new(33)?).await;
    /// assert_eq!(refused.unwrap_err().kind(), fencelock::ErrorKind::Fenced);
    /// # Ok(()) }
    /// # pollster::block_on(example()).unwrap();
    /// ```
    ///
    /// # Errors
    /// As [`FencedObjects::open`].
    pub async fn open_fenced_store(
        self,
        store: Arc<dyn ::object_store::ObjectStore>,
        prefix: &str,
    ) -> Result<FencedObjects> {
        Ok(FencedObjects::over(self.link_to(store, prefix).await?))
    }
}

/// The resource that a URL's path ends with, and what stands before it as the place: so that the
/// probe is written beside it, where the caller may write.
pub(crate) fn destination(url: StoreUrl) -> Result<(ObjectOptions, Place, ResourceName)> {
    let (options, mut place) = parsed(url)?;
    let key = std::mem::take(&mut place.prefix);
    if key.is_empty() {
        return Err(Error::invalid(
            "destination names no object; expected the key after the bucket",
        )
        .with("bucket", &place.bucket));
    }
    let (prefix, name) = key.rsplit_once('/').unwrap_or(("", &key));
    prefix.clone_into(&mut place.prefix);
    Ok((options, place, ResourceName::new(name)?))
}

#[async_trait]
impl FencedStore for FencedObjects {
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written> {
        self.strict.put(resource, body, fence).await
    }

    async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        self.strict.get(resource).await
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        self.strict.raise(resource, fence).await
    }

    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        self.strict.delete(resource, fence).await
    }

    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        self.strict.rebind(resource, fence).await
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        let link = self.strict.link();
        let conditions = match probe::conditions(link).await {
            Ok(()) => Finding::new(
                Severity::Good,
                "conditional writes",
                "If-None-Match and If-Match are honoured, and a read sees the write before it",
            ),
            Err(error) => Finding::bad("conditional writes", &error),
        };
        Ok(vec![conditions])
    }
}

impl fmt::Debug for FencedObjects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedObjects")
            .field("link", self.strict.link())
            .finish_non_exhaustive()
    }
}
