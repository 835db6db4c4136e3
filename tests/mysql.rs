//! The MySQL engines pass every case on a private MariaDB server and through a pool of the user's, and keep their
//! promises under faults.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]

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
