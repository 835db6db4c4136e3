//! Distributed locks with fencing tokens, and storage that refuses a stale one.

pub mod acquire;
mod backoff;
pub mod blocking;
pub mod body;
pub mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod docs;
mod driver;
pub mod error;
pub mod fence;
#[cfg(feature = "file")]
pub mod file;
mod guard;
mod held;
mod keeper;
pub mod lease;
mod locks;
#[cfg(feature = "memory")]
pub mod memory;
pub mod name;
pub mod open;
#[cfg(feature = "postgres")]
pub mod postgres;
mod queue;
mod random;
pub mod token;

pub use acquire::Acquire;
pub use error::{Error, ErrorKind, Result};
pub use fence::{Fence, Fenced, FencedStore, Fencing};
pub use guard::{Detached, LockGuard};
pub use held::LostReason;
pub use lease::{LeaseStore, Ttl};
pub use locks::{Locks, LocksBuilder};
pub use name::{LockName, ResourceName};
pub use token::FencingToken;
