//! The MySQL engines pass every case on a private MariaDB server and through a pool of the user's, and keep their
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
#[path = "mysql/conformance.rs"]
mod conformance;
#[path = "mysql/faults.rs"]
mod faults;
#[path = "mysql/fence.rs"]
mod fence;
#[path = "mysql/lab.rs"]
mod lab;
#[path = "mysql/operation.rs"]
mod operation;

// The cases of both servers.
#[path = "sql/faults.rs"]
mod sql_faults;
#[path = "sql/fence.rs"]
mod sql_fence;
#[path = "sql/operation.rs"]
mod sql_operation;
