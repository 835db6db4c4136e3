//! Locks ([`EtcdStore`]) and fenced values ([`FencedEtcd`]) in etcd 3.4 or later.
//!
//! A grant is one transaction: it compares the name's record with what was read, and writes the
//! record and the holder's own key, which is attached to an etcd lease. The holder's grant is good
//! exactly as long as that key exists, so that the cluster decides when it lapses. The token is the
//! larger of the transaction's revision and the record's last token plus one; the record is never
//! deleted. What is promised when, and what is not, is in `docs/backends/etcd.md`.
//!
//! Building this engine needs `protobuf-compiler` and `libprotobuf-dev`.
//!
//! ```no_run
//! # async fn example() -> fencelock::Result<()> {
//! use fencelock::Locks;
//! let locks = Locks::open("etcd://10.0.0.1,10.0.0.2,10.0.0.3?insecure=true").await?;
//! let guard = locks.acquire("payment-export").await?;
//! # Ok(()) }
//! ```

mod connect;
mod erase;
mod failure;
mod fence;
mod grant;
mod keys;
mod lease;
mod operator;
mod options;
mod record;
mod server;
mod url;
mod waiters;

/// The client that this engine is built on: for clients of your own.
pub use etcd_client as client;

pub use crate::settings::Tls;
pub use fence::{Admitted, FencedEtcd, VALUE_MAX_BYTES};
pub use lease::EtcdStore;
pub use options::EtcdOptions;
pub(crate) use url::options as url_options;
#[cfg(feature = "fuzzing")]
pub(crate) use {
    fence::fuzz::watermark as fuzz_watermark, record::fuzz::record as fuzz_record,
    server::fuzz::realm as fuzz_realm,
};
