//! The NATS engine passes every case on a private server, and keeps its promises under faults.
//!
//! `FENCELOCK_TEST_SKIP=nats` leaves these tests out, by name.

#![expect(
    clippy::panic,
    clippy::unwrap_used,
    reason = "what tests share panics as they do"
)]

#[path = "nats/access.rs"]
mod access;
#[path = "nats/bucket.rs"]
mod bucket;
#[path = "nats/cluster.rs"]
mod cluster;
#[path = "nats/conformance.rs"]
mod conformance;
#[path = "nats/faults.rs"]
mod faults;
#[path = "nats/fence.rs"]
mod fence;
#[path = "nats/lab.rs"]
mod lab;
#[path = "shared/network.rs"]
mod network;
#[path = "shared/swaps.rs"]
mod swaps;
#[path = "nats/waiting.rs"]
mod waiting;
