//! The redis engine passes every case on a private server, and keeps its promises under faults.
//!
//! `FENCELOCK_TEST_SKIP=redis` leaves these tests out, by name.

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
#[path = "redis/waiting.rs"]
mod waiting;
