//! Fenced objects pass every case in memory, in moto and in SeaweedFS, and keep their promises under
//! faults.
//!
//! `FENCELOCK_TEST_SKIP=s3` leaves the servers' tests out, by name.

#![expect(clippy::unwrap_used, reason = "what tests share panics as they do")]

#[path = "object_store/conformance.rs"]
mod conformance;
#[path = "object_store/faults.rs"]
mod faults;
#[path = "object_store/faulty.rs"]
mod faulty;
#[path = "object_store/fence.rs"]
mod fence;
#[path = "object_store/lab.rs"]
mod lab;
#[path = "object_store/large.rs"]
mod large;
#[path = "object_store/open.rs"]
mod open;
#[path = "object_store/removal.rs"]
mod removal;
