//! Locks and fenced values in the files of one host.

mod netfs;
mod safe;
mod slots;
