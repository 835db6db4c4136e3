//! The redis engine passes every case on a private server, and keeps its promises under faults.
//!
//! `FENCELOCK_TEST_SKIP=redis` leaves these tests out, by name.
#![expect(
    clippy::panic,
    clippy::unwrap_used,
    reason = "what tests share panics as they do"
)]

#[path = "redis/conformance.rs"]
mod conformance;
#[path = "redis/faults.rs"]
mod faults;
#[path = "redis/fence.rs"]
mod fence;
#[path = "redis/lab.rs"]
mod lab;
#[path = "redis/servers.rs"]
mod servers;
#[path = "redis/storm.rs"]
mod storm;
#[path = "redis/waiting.rs"]
mod waiting;
