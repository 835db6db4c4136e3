//! Locks and fenced values in the files of one host.

mod doctor;
mod faults;
mod fence;
mod netfs;
mod place;
mod safe;
mod sidecar;
mod slots;
mod temp;

pub use fence::{FencedFiles, FencedFilesOptions};
