//! Locks and fenced values in the files of one host.

mod doctor;
mod engine;
mod faults;
mod fence;
mod host;
mod lease;
mod live;
mod netfs;
mod options;
mod place;
mod probe;
mod record;
mod records;
mod root;
mod safe;
mod sidecar;
mod slots;
mod temp;
mod watch;

pub use fence::{FencedFiles, FencedFilesOptions};
pub use lease::FileStore;
pub use options::FileOptions;
