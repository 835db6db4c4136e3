//! Locks and fenced values in the files of one host.

mod engine;
mod host;
mod lease;
mod live;
mod netfs;
mod options;
mod probe;
mod record;
mod records;
mod root;
mod safe;
mod slots;
mod watch;

pub use lease::FileStore;
pub use options::FileOptions;
