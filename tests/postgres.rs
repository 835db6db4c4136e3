//! The PostgreSQL engines pass every case on a private server and behind PgBouncer, and keep their
//! promises under faults.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]

#[path = "sql/lab.rs"]
mod common;
#[path = "postgres/conformance.rs"]
mod conformance;
#[path = "postgres/faults.rs"]
mod faults;
#[path = "postgres/fence.rs"]
mod fence;
#[path = "postgres/lab.rs"]
mod lab;
#[path = "postgres/operation.rs"]
mod operation;
#[cfg(feature = "sqlx")]
#[path = "postgres/sqlx.rs"]
mod sqlx;

// The cases of both servers.
#[path = "sql/faults.rs"]
mod sql_faults;
#[path = "sql/fence.rs"]
mod sql_fence;
#[path = "sql/operation.rs"]
mod sql_operation;
