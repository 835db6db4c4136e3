//! Distributed locks whose every grant carries a fencing token, and storage that refuses a stale one.
//!
//! A lock cannot stop a holder that was paused past the end of its lease from waking up and writing
//! old data. A fencing token can, if the storage checks it in the same atomic step as the write.
//! This crate has both halves:
//!
//! - [`Locks`] over a [`LeaseStore`]: [`acquire`](Locks::acquire) yields a [`LockGuard`], which is
//!   renewed in the background on a thread of its own.
//! - [`Fenced`] over a [`FencedStore`]: [`put`](Fenced::put), [`raise`](Fenced::raise) and
//!   [`delete`](Fenced::delete) take the guard and refuse whoever is stale.
//!
//! ```
//! use fencelock::{ErrorKind, Fenced, Locks};
//! use fencelock::memory::{FencedMemory, MemoryStore};
//!
//! # async fn example() -> fencelock::Result<()> {
//! let locks = Locks::new(MemoryStore::new());
//! let store = Fenced::new(FencedMemory::new());
//!
//! let paused = locks.acquire("payment-export").await?;
//! let late = paused.fence(); // what the paused holder is about to write with
//! locks.break_lock("payment-export").await?; // its lease ends, and it does not know
//!
//! let guard = locks.acquire("payment-export").await?;
//! store.put("today.csv", "new", &guard).await?;
//!
//! let refused = store.put("today.csv", "old", late).await.unwrap_err();
//! assert_eq!(refused.kind(), ErrorKind::Fenced);
//! # Ok(()) }
//! # pollster::block_on(example()).unwrap();
//! ```
//!
//! # Features
//!
//! | Feature | Adds |
//! |---|---|
//! | `memory` (default) | [`mod@memory`]: locks and fenced values of one process |
//! | `file` (default) | [`mod@file`]: locks of one host, and fenced plain files |
//! | `redis` | `redis`: locks of many hosts and fenced values in Redis or Valkey; `redis-tls` over TLS |
//! | `postgres` | `postgres`: the same in PostgreSQL, and the check in your own transaction; `postgres-tls` over TLS |
//! | `mysql` | `mysql`: the same in MySQL or MariaDB, and the check in your own transaction; `mysql-tls` over TLS |
//! | `etcd` | `etcd`: the same in etcd; `etcd-tls` over TLS; needs `protoc` at build |
//! | `sqlx` | `postgres::sqlx`: the check in a transaction of sqlx |
//! | `http` | `http`: a tower layer that refuses stale clients, and what clients send |
//! | `sqlite` | `sqlite`: locks of one host in a SQLite database, and the check in your own transaction |
//! | `nats` | `nats`: the same in a NATS JetStream bucket, TLS included |
//! | `object_store` | `object_store`: locks and fenced objects in S3 and kin; `object_store-gcp`, `object_store-azure` in Google's and Microsoft's |
//! | `conformance` | `conformance`: the cases that every backend passes |
//!
//! # Where to read on
//!
//! [`docs::guarantees`] are numbered, and code and tests cite the numbers; [`docs::limitations`] is
//! what no lock can do; [`docs::observability`] lists metrics and events; `docs::writing_a_backend`
//! is for whoever brings a store of their own.

pub mod acquire;
#[cfg(feature = "_shared")]
#[cfg_attr(
    not(feature = "redis"),
    allow(dead_code, reason = "not every engine needs all")
)]
mod address;
mod backoff;
pub mod blocking;
pub mod body;
pub mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(any(feature = "file", feature = "sqlite"))]
mod disk;
pub mod docs;
mod driver;
pub mod error;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod fence;
mod fenced;
#[cfg(feature = "file")]
pub mod file;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod guard;
mod held;
#[cfg(any(feature = "file", feature = "sqlite"))]
mod host;
#[cfg(feature = "http")]
pub mod http;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod info;
mod keeper;
#[cfg(any(feature = "etcd", feature = "nats", feature = "object_store"))]
mod known;
pub mod lease;
mod locks;
#[cfg(feature = "memory")]
pub mod memory;
#[cfg(feature = "mysql")]
pub mod mysql;
pub mod name;
#[cfg(feature = "nats")]
pub mod nats;
#[cfg(any(feature = "file", feature = "sqlite"))]
mod netfs;
#[cfg(feature = "object_store")]
pub mod object_store;
pub mod open;
mod operation;
#[cfg(feature = "postgres")]
pub mod postgres;
mod queue;
mod random;
#[cfg(feature = "redis")]
pub mod redis;
mod runtime;
#[cfg(feature = "_shared")]
#[cfg_attr(
    not(all(feature = "redis-tls", feature = "etcd-tls", feature = "postgres")),
    allow(dead_code, unreachable_pub, reason = "not every engine needs all")
)]
mod settings;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub mod simulation;
#[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
mod sql;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(any(feature = "etcd", feature = "nats"))]
mod swap;
pub mod token;

pub use acquire::Acquire;
pub use error::{Error, ErrorKind, Result};
pub use fence::{Fence, Fenced, FencedStore, Fencing};
pub use guard::{Detached, LockGuard};
pub use held::LostReason;
pub use lease::{LeaseStore, Ttl};
pub use locks::{Locks, LocksBuilder};
pub use name::{LockName, ResourceName};
pub use token::FencingToken;

/// The README's program, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
