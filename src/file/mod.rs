//! Locks and fenced values in the files of one host.
//!
//! [`FileStore`] keeps a record for each lock name and changes it in place under its kernel lock
//! (flock(2)). Its tokens survive power loss: they are reserved ahead, and a reservation is synced
//! before any token that it covers is told. Who holds a lock is kept in the page cache only, which
//! all processes of a boot share and which no process takes with it when it is killed.
//!
//! A grant is tied to a file that its process keeps locked, so that the kernel tells when the
//! process ends, and the next holder need not wait for the TTL.
//!
//! ```
//! # let dir = tempfile::tempdir().unwrap();
//! # pollster::block_on(async {
//! use fencelock::file::FileStore;
//! use fencelock::lease::{AcquireRequest, Attempt, LeaseStore as _};
//! use fencelock::Ttl;
//!
//! let store = FileStore::open(dir.path())?;
//! let request = AcquireRequest::new("payment-export".parse()?, Ttl::DEFAULT);
//! match store.acquire(&request).await? {
//!     Attempt::Granted(grant) => println!("token {}", grant.token),
//!     Attempt::Held(by) => println!("held for {:?} more", by.free_in),
//! }
//! # Ok::<(), fencelock::Error>(())
//! # }).unwrap();
//! ```
//!
//! [`FencedFiles`] keeps plain files that refuse a stale token.

mod doctor;
mod engine;
mod faults;
mod fence;
mod lease;
mod live;
mod locked;
mod options;
mod place;
mod probe;
mod record;
mod records;
mod remedy;
mod root;
mod safe;
mod sidecar;
mod slots;
mod temp;
mod watch;

pub use fence::{FencedFiles, FencedFilesOptions};
pub use lease::FileStore;
pub use options::FileOptions;
#[cfg(feature = "fuzzing")]
pub(crate) use {
    locked::fuzz::record as fuzz_record, root::fuzz::identity as fuzz_identity,
    sidecar::fuzz::places as fuzz_places, sidecar::fuzz::sidecar as fuzz_sidecar,
    slots::fuzz::slots as fuzz_slots,
};
