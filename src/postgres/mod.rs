//! Locks ([`PostgresStore`]) and fenced storage ([`admit`], [`FencedPostgres`]) in PostgreSQL.
//!
//! One row for each lock name holds the last token and the holders, so each operation is one call
//! of a function in the database: one round trip, one transaction, one locked row. The functions
//! live in a schema of their own, made on first use, or by hand from [`schema_sql`].
//!
//! ```no_run
//! use fencelock::Locks;
//! use fencelock::postgres::admit;
//! # async fn example(client: &mut fencelock::postgres::tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
//! let locks = Locks::open("postgres://app@localhost/app").await?;
//! let guard = locks.acquire("payment-export").await?;
//!
//! let transaction = client.transaction().await?;
//! admit(&transaction, "payments", &guard).await?; // refused if stale, and locked to the commit
//! transaction.execute("UPDATE payments SET exported = true", &[]).await?;
//! transaction.commit().await?;
//! # Ok(()) }
//! ```

mod connect;
mod database;
mod erase;
mod error;
mod fence;
mod lease;
mod listen;
mod options;
mod probe;
mod sql;
#[cfg(feature = "sqlx")]
pub mod sqlx;
mod tls;

pub use deadpool_postgres;
pub use fence::{FencedPostgres, VALUE_MAX_BYTES, admit, admit_in};
pub use lease::PostgresStore;
pub use options::PostgresOptions;
pub use sql::{SCHEMA_DEFAULT, guard_sql, schema_sql};
pub use tokio_postgres;

#[cfg(feature = "fuzzing")]
pub(crate) use database::fuzz::rows as fuzz_rows;
