//! Fenced objects ([`FencedObjects`]) in S3 and what speaks its language, in Google Cloud Storage and
//! Azure Blob Storage, or in any [`ObjectStore`](client::ObjectStore) of your own that honours
//! conditional writes.
//!
//! A resource is a pointer object that holds the watermark, and the value where that is small; a
//! large one is an object of its own that the pointer names. The pointer changes only by
//! compare-and-swap (`If-None-Match`, `If-Match`), so check and write are one step. What is promised
//! when, and what is not, is in `docs/storages/object_store.md`.
//!
//! Locks ([`BucketStore`]) are in the same stores: one record for each name, which changes in the same
//! way. A lease ends by the store's own timestamps; see `docs/backends/object_store.md`.
//!
//! ```no_run
//! # async fn example(guard: &fencelock::LockGuard) -> fencelock::Result<()> {
//! use fencelock::Fenced;
//! use fencelock::object_store::FencedObjects;
//! let store = Fenced::new(FencedObjects::open("s3://bucket/exports").await?);
//! store.put("payments/today.csv", "new data", guard).await?;
//! # Ok(()) }
//! ```

mod connect;
mod data;
mod erase;
mod failure;
mod fence;
mod grant;
mod lease;
mod lock_options;
mod observe;
mod operator;
mod options;
mod pointer;
mod probe;
mod realm;
mod record;
mod strict;
mod time;
mod url;

/// The client that this engine is built on: for stores of your own.
pub use ::object_store as client;

pub use data::VALUE_MAX_BYTES;
pub use fence::FencedObjects;
pub(crate) use fence::destination;
pub use lease::BucketStore;
pub use options::ObjectOptions;
pub use strict::INLINE_MAX_BYTES;
pub(crate) use url::options as url_options;
#[cfg(feature = "fuzzing")]
pub(crate) use {
    pointer::fuzz::pointer as fuzz_pointer, record::fuzz::lock as fuzz_lock,
    url::fuzz::url as fuzz_url,
};
