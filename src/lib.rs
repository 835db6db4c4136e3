//! Distributed locks with fencing tokens, and storage that refuses a stale one.

pub mod body;
pub mod clock;
pub mod error;
pub mod fence;
#[cfg(feature = "file")]
pub mod file;
pub mod lease;
pub mod name;
mod random;
pub mod token;

pub use error::{Error, ErrorKind, Result};
pub use fence::{Fence, Fenced, FencedStore, Fencing};
pub use lease::{LeaseStore, Ttl};
pub use name::{LockName, ResourceName};
pub use token::FencingToken;
