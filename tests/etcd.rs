//! The etcd engine passes every case on a private server, and keeps its promises under faults.
//!
//! `FENCELOCK_TEST_SKIP=etcd` leaves these tests out, by name.

#![expect(
    clippy::panic,
    clippy::unwrap_used,
    reason = "what tests share panics as they do"
)]

#[path = "etcd/conformance.rs"]
mod conformance;
#[path = "etcd/faults.rs"]
mod faults;
#[path = "etcd/fence.rs"]
mod fence;
#[path = "etcd/lab.rs"]
mod lab;
#[path = "shared/network.rs"]
mod network;
#[path = "etcd/restore.rs"]
mod restore;
#[path = "shared/swaps.rs"]
mod swaps;
#[path = "etcd/tls.rs"]
mod tls;
#[path = "etcd/waiting.rs"]
mod waiting;
