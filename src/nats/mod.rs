//! Locks ([`NatsStore`]) and fenced values ([`FencedNats`]) in a JetStream key-value bucket.
//!
//! A lock's record is one message, and each change of it is one publish that the server takes only
//! at the sequence that was read (a compare-and-swap): reads decide nothing. The token is the
//! sequence that the server gives to the granting message, or the record's last token plus one where
//! that is larger; the record is never deleted. A grant lapses by the clock of the server that leads
//! the bucket, which stamps every message: stamps of a former leader are made anew before they
//! count. What is promised when, and what is not, is in `docs/backends/nats.md`.
//!
//! ```no_run
//! # async fn example() -> fencelock::Result<()> {
//! use fencelock::Locks;
//! let locks = Locks::open("nats://10.0.0.1,10.0.0.2,10.0.0.3?replicas=3&insecure=true").await?;
//! let guard = locks.acquire("payment-export").await?;
//! # Ok(()) }
//! ```

mod bucket;
mod connect;
mod erase;
mod failure;
mod fence;
mod grant;
mod lease;
mod operator;
mod options;
mod record;
mod server;
mod url;
mod waiters;

/// The client that this engine is built on: for clients of your own.
pub use async_nats as client;

pub use crate::settings::Tls;
pub use fence::FencedNats;
pub use lease::NatsStore;
pub use options::NatsOptions;
pub(crate) use url::options as url_options;
#[cfg(feature = "fuzzing")]
pub(crate) use {
    bucket::fuzz::stream as fuzz_stream, fence::fuzz::watermark as fuzz_watermark,
    record::fuzz::answer as fuzz_answer, record::fuzz::record as fuzz_record,
};
