//! The SQLite engines pass every case, and keep their promises under faults.

#![cfg(target_os = "linux")]
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test fails by panicking, and children talk on their standard output"
)]

#[path = "sqlite/conformance.rs"]
mod conformance;
#[path = "sqlite/fence.rs"]
mod fence;
#[path = "sqlite/guide.rs"]
mod guide;
#[path = "sqlite/lab.rs"]
mod lab;
#[path = "sqlite/opening.rs"]
mod opening;
#[path = "sqlite/processes.rs"]
mod processes;
