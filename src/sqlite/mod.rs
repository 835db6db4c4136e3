//! Locks ([`SqliteStore`]) and fenced storage ([`admit`], [`FencedSqlite`]) of one host, in a SQLite
//! database.
//!
//! A few tables beside your own hold a row for each lock name, with its last token, and a row for
//! each grant. Every operation is one transaction that takes SQLite's write lock at its beginning
//! (`BEGIN IMMEDIATE`), in WAL mode with `synchronous=FULL`: what was told survives power loss.
//!
//! ```
//! # let dir = tempfile::tempdir().unwrap();
//! # let path = dir.path().join("app.db");
//! # pollster::block_on(async {
//! use fencelock::Locks;
//! use fencelock::sqlite::{SqliteStore, admit, rusqlite};
//!
//! let locks = Locks::new(SqliteStore::open(&path).await?);
//! let guard = locks.acquire("payment-export").await?;
//!
//! let mut connection = rusqlite::Connection::open(&path)?; // yours
//! connection.execute("CREATE TABLE payments (exported INTEGER)", [])?;
//! let transaction = connection.transaction()?;
//! admit(&transaction, "payments", &guard)?; // refused if stale, and nobody else until the commit
//! transaction.execute("UPDATE payments SET exported = 1", [])?;
//! transaction.commit()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # }).unwrap();
//! ```

mod connect;
mod database;
mod erase;
mod error;
mod fence;
mod lease;
mod options;
mod place;
mod probe;
mod record;
mod sql;
mod watch;

pub use fence::{FencedSqlite, VALUE_MAX_BYTES, admit, show};
pub use lease::SqliteStore;
pub use options::SqliteOptions;
#[cfg(feature = "fuzzing")]
pub(crate) use record::fuzz::rows as fuzz_rows;
pub use rusqlite;
pub use sql::{guard_sql, schema_sql};
