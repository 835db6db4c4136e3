//! Removing what a trial left beside a database.

use std::path::Path;

use super::options::SqliteOptions;
use crate::disk::io_error;
use crate::error::{Error, Result};

/// What SQLite keeps beside a database, and the database itself, which goes last.
const ENDINGS: [&str; 4] = ["-journal", "-shm", "-wal", ""];

impl SqliteOptions {
    /// Removes the database at `path`, whose file has to be named after `mark`, as a trial's is. It is
    /// not opened.
    pub(crate) fn erase(path: &Path, mark: &str) -> Result<()> {
        let name = format!("{mark}.db");
        if path.file_name().is_none_or(|found| *found != *name) {
            return Err(Error::invalid("the database is not a trial's own")
                .with("path", crate::disk::shown(path)));
        }
        for ending in ENDINGS {
            let file = path.with_file_name(format!("{name}{ending}"));
            match std::fs::remove_file(&file) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(io_error(error, "the database cannot be removed", &file));
                }
            }
        }
        Ok(())
    }
}
