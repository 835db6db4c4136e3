//! Locks ([`RedisStore`]) and fenced values ([`FencedRedis`]) in Redis 6.0 or later, or Valkey.
//!
//! Each operation is one Lua script and one round trip. A lock is one hash, judged by the server's
//! clock; its token is minted in the script that grants, as the larger of the last token plus one
//! and the server's time in microseconds, so that tokens go on upwards where a failover, an
//! eviction or a flush lost the last one. What is promised when, and what is not, is in
//! `docs/backends/redis.md`.
//!
//! ```no_run
//! # async fn example() -> fencelock::Result<()> {
//! use fencelock::Locks;
//! let locks = Locks::open("redis://127.0.0.1:6379").await?;
//! let guard = locks.acquire("payment-export").await?;
//! # Ok(()) }
//! ```

mod answer;
mod connect;
mod erase;
mod fence;
mod lease;
mod options;
mod record;
mod scan;
mod script;
mod sentinel;
mod server;
mod url;
mod waiters;

/// The client that this engine is built on: for connections of your own.
pub use ::redis as client;

pub use crate::settings::Tls;
pub use fence::{FencedRedis, GUARD_LUA, VALUE_MAX_BYTES, fence_key, refusal};
pub use lease::RedisStore;
pub use options::RedisOptions;
pub(crate) use url::options as url_options;
#[cfg(feature = "fuzzing")]
pub(crate) use {fence::fuzz::watermark as fuzz_watermark, record::fuzz::record as fuzz_record};
