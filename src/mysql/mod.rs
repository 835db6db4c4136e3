//! Locks ([`MysqlStore`]) and fenced storage ([`admit`], [`FencedMysql`]) in MySQL or MariaDB.
//!
//! One row for each lock name holds the last token, and whatever happens to the lock happens while
//! that row is locked: each operation is one call of a procedure in the database, which is one round
//! trip and one transaction. The tables and procedures are made on first use, or by hand from
//! [`schema_sql`].
//!
//! ```no_run
//! use fencelock::Locks;
//! use fencelock::mysql::admit;
//! use fencelock::mysql::mysql_async::{Conn, TxOpts, prelude::Queryable as _};
//! # async fn example(conn: &mut Conn) -> Result<(), Box<dyn std::error::Error>> {
//! let locks = Locks::open("mysql://app@localhost/app").await?;
//! let guard = locks.acquire("payment-export").await?;
//!
//! let mut transaction = conn.start_transaction(TxOpts::default()).await?;
//! admit(&mut transaction, "payments", &guard).await?; // refused if stale, and locked to the commit
//! transaction.query_drop("UPDATE payments SET exported = TRUE").await?;
//! transaction.commit().await?;
//! # Ok(()) }
//! ```

mod connect;
mod database;
mod erase;
mod error;
mod fence;
mod lease;
mod options;
mod probe;
mod sql;
mod tls;

pub use fence::{FencedMysql, VALUE_MAX_BYTES, admit, admit_in};
pub use lease::MysqlStore;
pub use mysql_async;
pub use options::MysqlOptions;
pub use sql::{PREFIX_DEFAULT, guard_sql, schema_sql};

#[cfg(feature = "fuzzing")]
pub(crate) use database::fuzz::rows as fuzz_rows;
