//! Locks ([`MemoryStore`]) and fenced values ([`FencedMemory`]) of one process.
//!
//! The reference for both backend traits: what the others do with a server, this does under a
//! mutex. It serves tests and the locks that a process keeps for its own clients. Nothing outlives
//! the process, so each new store is another realm, and a resource bound to the old one refuses
//! the new tokens (S9) until it is rebound.
//!
//! ```
//! use fencelock::lease::{AcquireRequest, Attempt, LeaseStore as _, Ttl};
//! use fencelock::memory::MemoryStore;
//! # async fn example() -> fencelock::Result<()> {
//! let store = MemoryStore::new();
//! let request = AcquireRequest::new("payment-export".parse()?, Ttl::DEFAULT);
//! assert!(matches!(store.acquire(&request).await?, Attempt::Granted(_)));
//! let another = AcquireRequest::new("payment-export".parse()?, Ttl::DEFAULT);
//! assert!(matches!(store.acquire(&another).await?, Attempt::Held(_)));
//! # Ok(()) }
//! # pollster::block_on(example()).unwrap();
//! ```

mod fence;
mod lease;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use fence::{FencedMemory, VALUE_MAX_BYTES};
pub use lease::MemoryStore;

/// Locks a mutex whose sections cannot leave half a change behind: they compute first and assign
/// last, so a panic between leaves the old state, and poisoning would only spread the panic.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
