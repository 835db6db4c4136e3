//! Fenced objects ([`FencedObjects`]) in S3 and what speaks its language, in Google Cloud Storage and
//! Azure Blob Storage, or in any [`ObjectStore`](client::ObjectStore) of your own that honours
//! conditional writes.
//!
//! A resource is a pointer object that holds the watermark, and the value where that is small; a
//! large one is an object of its own that the pointer names. The pointer changes only by
//! compare-and-swap (`If-None-Match`, `If-Match`), so check and write are one step. What is promised
//! when, and what is not, is in `docs/storages/object_store.md`.
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
mod failure;
mod grant;
mod lease;
mod observe;
mod operator;
mod options;
mod probe;
mod realm;
mod record;
mod settings;
mod time;
mod url;

/// The client that this engine is built on: for stores of your own.
pub use ::object_store as client;

pub use lease::BucketStore;
pub use options::ObjectOptions;
pub(crate) use url::options as url_options;
