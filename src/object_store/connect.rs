//! The connection to a store: requests with a time limit, whose answers say what happened. Locks and
//! fenced objects reach the store only through it.
//!
//! The client retries nothing by itself: it would repeat a conditional write whose answer was lost,
//! and report its own success as somebody else's. Whoever calls recognises what is theirs by what
//! they wrote, and repeats the same request.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::object_store::path::Path;
use ::object_store::{
    Error as StoreError, GetOptions, GetResult, ObjectStore, ObjectStoreExt as _, PutMode,
    PutOptions, UpdateVersion,
};
use bytes::Bytes;
use futures_util::StreamExt as _;

use super::failure;
use crate::backoff::Backoff;
use crate::driver::within;
use crate::error::{Error, ErrorKind, Result};

/// How long a connection may take to be made.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// How long one request for a small object may take.
pub(super) const REQUEST_LIMIT: Duration = Duration::from_millis(2_500);

/// How many times a read is sent where the store answers that it cannot serve, or hangs up.
const READ_TRIES: u32 = 3;

/// Pauses between them.
const READ_PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(200));

/// The largest object that is read as a record, in bytes: a lock that 1,000 hold.
pub(super) const RECORD_MAX_BYTES: u64 = 8 << 20;

/// How many objects one listing yields at most.
const LIST_MAX: usize = 100_000;

/// The objects below one prefix of one bucket.
///
/// Clones share the connections.
#[derive(Clone)]
pub(super) struct Link {
    store: Arc<dyn ObjectStore>,
    /// What all keys begin with, without slashes at its ends; empty for the whole bucket.
    prefix: String,
    /// `s3://bucket`, for messages.
    shown: String,
}

/// One version of an object's content, as the store names it. Equal contents may have equal versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Version(UpdateVersion);

/// A small object as it was read.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) body: Bytes,
    pub(super) version: Version,
    /// When it was written, by the store's clock, in microseconds since the Unix epoch; many stores
    /// tell whole seconds.
    pub(super) modified_us: u64,
}

/// The answer to a conditional write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Swap {
    /// Written; this version is there now.
    Done(Version),
    /// The condition did not hold, or another conditional write was in flight: read again, and where
    /// nothing has changed, try again after a pause.
    Refused,
}

/// An object of a listing.
#[derive(Clone, Debug)]
pub(super) struct Listed {
    pub(super) path: Path,
}

impl Link {
    /// A link to a store of the caller's own.
    pub(super) fn new(store: Arc<dyn ObjectStore>, prefix: &str, shown: &str) -> Self {
        Self {
            store,
            prefix: prefix.trim_matches('/').to_owned(),
            shown: shown.to_owned(),
        }
    }

    /// The store itself, for what is not a small object.
    pub(super) fn store(&self) -> &dyn ObjectStore {
        self.store.as_ref()
    }

    /// The path of an object below the prefix.
    ///
    /// # Errors
    /// `Invalid` where a part of it is empty, `.` or `..`, or holds a control character.
    pub(super) fn path(&self, key: &str) -> Result<Path> {
        let full = match self.prefix.as_str() {
            "" => key.to_owned(),
            prefix => format!("{prefix}/{key}"),
        };
        // The client strips one slash at each end, so that two keys would be one.
        let slashed = key.starts_with('/') || key.ends_with('/');
        Path::parse(&full)
            .ok()
            // SeaweedFS takes a backslash for a slash.
            .filter(|path| !slashed && !full.contains('\\') && path.as_ref() == full)
            .ok_or_else(|| {
                Error::invalid(
                    "not an object's key; expected parts between single slashes, none of them empty, . or .., and no backslash or control character",
                )
                .with("key", format_args!("{key:?}"))
            })
    }

    /// The path that all objects are below.
    ///
    /// # Errors
    /// `Invalid` where that is the whole bucket.
    pub(super) fn below(&self) -> Result<Path> {
        Path::parse(&self.prefix)
            .ok()
            .filter(|path| !path.as_ref().is_empty())
            .ok_or_else(|| Error::invalid("expected a prefix, found a whole bucket"))
    }

    /// Reads a small object; `None` where there is none.
    ///
    /// # Errors
    /// `Unavailable` where the store does not serve, `Invalid` where there is no such bucket,
    /// `Corrupt` where the object is larger than any record.
    pub(super) async fn read(&self, path: &Path) -> Result<Option<Found>> {
        let reading = async {
            let mut backoff = Backoff::new(READ_PAUSE.0, READ_PAUSE.1);
            for _ in 1..READ_TRIES {
                match self.read_once(path).await {
                    Err(error) if error.kind() == ErrorKind::Unavailable => {
                        tracing::debug!(object = %path, %error, "not read; trying again");
                        tokio::time::sleep(backoff.next()).await;
                    }
                    answer => return answer,
                }
            }
            self.read_once(path).await
        };
        within(REQUEST_LIMIT, reading)
            .await
            .unwrap_or_else(|| {
                Err(Error::unavailable(
                    "the object store did not answer in time",
                ))
            })
            .map_err(|error| self.named(error))
    }

    async fn read_once(&self, path: &Path) -> Result<Option<Found>> {
        match self.store.get_opts(path, GetOptions::default()).await {
            Ok(result) => collect(result, path).await.map(Some),
            Err(error @ StoreError::NotFound { .. }) if !failure::is_missing_bucket(&error) => {
                Ok(None)
            }
            Err(error) => Err(failure::reading(&error)),
        }
    }

    /// Writes an object where it still is what was `expected`: `None` where there was none.
    ///
    /// # Errors
    /// `Indeterminate` where it may have been written. Otherwise it was not: `Unavailable`, or
    /// `Invalid` where the store refuses the request as such, or `Unsupported` where it knows no
    /// conditions.
    pub(super) async fn swap(
        &self,
        path: &Path,
        body: Bytes,
        expected: Option<&Version>,
    ) -> Result<Swap> {
        let mode = match expected {
            None => PutMode::Create,
            Some(Version(version)) => PutMode::Update(version.clone()),
        };
        let put = self
            .store
            .put_opts(path, body.into(), PutOptions::from(mode));
        let answer = match within(REQUEST_LIMIT, put).await {
            None => Err(failure::silent(REQUEST_LIMIT)),
            Some(Ok(put)) => version_of(put.e_tag, put.version).map(Swap::Done),
            Some(Err(
                StoreError::AlreadyExists { .. }
                | StoreError::Precondition { .. }
                | StoreError::NotModified { .. },
            )) => Ok(Swap::Refused),
            Some(Err(error)) => Err(failure::writing(&error)),
        };
        answer.map_err(|error| self.named(error))
    }

    /// Removes an object. Removing what is not there is a success.
    ///
    /// # Errors
    /// `Indeterminate`, `Unavailable`.
    pub(super) async fn remove(&self, path: &Path) -> Result<()> {
        let answer = match within(REQUEST_LIMIT, self.store.delete(path)).await {
            None => Err(failure::silent(REQUEST_LIMIT)),
            Some(Ok(()) | Err(StoreError::NotFound { .. })) => Ok(()),
            Some(Err(error)) => Err(failure::writing(&error)),
        };
        answer.map_err(|error| self.named(error))
    }

    /// What there is below a path, in no order.
    ///
    /// # Errors
    /// `Unavailable` where the store does not serve or lists more than 100,000 objects.
    pub(super) async fn list(&self, below: &Path) -> Result<Vec<Listed>> {
        let mut stream = self.store.list(Some(below));
        let mut found = Vec::new();
        while let Some(next) = within(REQUEST_LIMIT, stream.next()).await.ok_or_else(|| {
            self.named(Error::unavailable("the object store did not list in time"))
        })? {
            let meta = next.map_err(|error| self.named(failure::reading(&error)))?;
            if found.len() >= LIST_MAX {
                return Err(self.named(Error::unavailable("there are too many objects to list")));
            }
            found.push(Listed {
                path: meta.location,
            });
        }
        Ok(found)
    }

    /// The error with the store's name.
    pub(super) fn named(&self, error: Error) -> Error {
        error.with("store", &self.shown)
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the client, which knows the credentials.
        f.debug_struct("Link")
            .field("store", &self.shown)
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

async fn collect(result: GetResult, path: &Path) -> Result<Found> {
    let meta = result.meta.clone();
    if meta.size > RECORD_MAX_BYTES {
        return Err(
            Error::corrupt("the object is not one that fencelock wrote: it is too large")
                .with("object", path)
                .with("bytes", meta.size),
        );
    }
    let body = result
        .bytes()
        .await
        .map_err(|error| failure::reading(&error))?;
    Ok(Found {
        body,
        version: version_of(meta.e_tag, meta.version)?,
        modified_us: u64::try_from(meta.last_modified.timestamp_micros()).unwrap_or(0),
    })
}

fn version_of(e_tag: Option<String>, version: Option<String>) -> Result<Version> {
    if e_tag.is_none() && version.is_none() {
        return Err(Error::unsupported(
            "the object store tells no versions (ETags), without which nothing can be fenced",
        ));
    }
    Ok(Version(UpdateVersion { e_tag, version }))
}
