//! Locks in object stores pass every case in memory, on moto and on SeaweedFS, and keep their
//! promises under faults.

#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking"
)]

#[path = "object_store_lease/conformance.rs"]
mod conformance;
#[path = "object_store_lease/damage.rs"]
mod damage;
#[path = "object_store_lease/faults.rs"]
mod faults;
#[path = "object_store_lease/lab.rs"]
mod lab;
#[path = "object_store_lease/time.rs"]
mod time;
#[path = "object_store_lease/trips.rs"]
mod trips;
