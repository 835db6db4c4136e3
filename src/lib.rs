//! Distributed locks with fencing tokens, and storage that refuses a stale one.

pub mod body;
pub mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
pub mod error;
pub mod fence;
pub mod lease;
#[cfg(feature = "memory")]
pub mod memory;
pub mod name;
mod random;
pub mod token;

pub use error::{Error, ErrorKind, Result};
pub use fence::{Fence, Fenced, FencedStore, Fencing};
pub use lease::{LeaseStore, Ttl};
pub use name::{LockName, ResourceName};
pub use token::FencingToken;
