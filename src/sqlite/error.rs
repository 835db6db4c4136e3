//! What SQLite's errors mean for the caller.

use rusqlite::ErrorCode;
use rusqlite::ffi;

use crate::error::Error;

/// Why an attempt stopped.
#[derive(Debug)]
pub(super) enum Halt {
    /// Somebody else has the lock that it needs; nothing was applied, and it may be tried again.
    Busy(rusqlite::Error),
    /// It failed.
    Failed(Error),
}

impl From<Error> for Halt {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Within a transaction that was not committed.
impl From<rusqlite::Error> for Halt {
    fn from(error: rusqlite::Error) -> Self {
        if is_busy(&error) {
            Self::Busy(error)
        } else {
            Self::Failed(not_applied(error))
        }
    }
}

/// True where another connection has a lock that is needed.
pub(super) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(
            ErrorCode::DatabaseBusy
                | ErrorCode::DatabaseLocked
                | ErrorCode::FileLockingProtocolFailed
        )
    )
}

/// True where the transaction has read what is not the newest any more, so that it cannot write.
pub(super) fn is_overtaken(error: &rusqlite::Error) -> bool {
    error
        .sqlite_error()
        .is_some_and(|e| e.extended_code == ffi::SQLITE_BUSY_SNAPSHOT)
}

/// True where a table is not there.
pub(super) fn is_missing_table(error: &rusqlite::Error) -> bool {
    error.to_string().contains("no such table: main.fencelock_")
}

/// An error before the commit: nothing was applied.
pub(super) fn not_applied(error: rusqlite::Error) -> Error {
    use ErrorCode::{
        CannotOpen, ConstraintViolation, DatabaseCorrupt, DiskFull, NotADatabase, OutOfMemory,
        PermissionDenied, ReadOnly, SystemIoFailure, TooBig,
    };
    let what = match error.sqlite_error_code() {
        _ if is_busy(&error) => return busy(error),
        _ if is_missing_table(&error) => Error::corrupt(
            "the tables of fencelock are missing from the database; restore them, or run what `fencelock schema sqlite` prints",
        ),
        Some(DiskFull) => Error::unavailable("the disk is full; free some space"),
        Some(ReadOnly) => Error::unavailable(
            "the database cannot be written; give this user access to the file and to its directory, or remount the file system",
        ),
        Some(CannotOpen | PermissionDenied) => Error::unavailable(
            "the database or its write-ahead log cannot be opened; give this user access to the file and to its directory",
        ),
        Some(NotADatabase) => {
            Error::corrupt("the file is not a SQLite database, or its beginning is damaged")
        }
        Some(DatabaseCorrupt) => Error::corrupt(
            "the database is damaged; restore it, or save what can be read with `sqlite3 FILE .recover`",
        ),
        Some(ConstraintViolation) => {
            Error::corrupt("what is stored cannot be right: a constraint of the database refused")
        }
        Some(SystemIoFailure) => Error::unavailable("the disk failed; look at the system log"),
        Some(OutOfMemory) => Error::unavailable("SQLite got no memory"),
        Some(TooBig) => Error::invalid("the value is larger than SQLite takes"),
        Some(_) => Error::unavailable("SQLite failed before anything was applied"),
        None => Error::corrupt("the database holds what fencelock does not write"),
    };
    what.with_source(error)
}

/// An error of the commit itself.
pub(super) fn at_commit(error: rusqlite::Error) -> Halt {
    match error.sqlite_error_code() {
        // The writes before the last one failed, and the last one is what makes them count.
        Some(ErrorCode::DiskFull | ErrorCode::ReadOnly) => Halt::Failed(not_applied(error)),
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            Halt::Failed(not_applied(error))
        }
        _ if is_busy(&error) => Halt::Busy(error),
        _ => Halt::Failed(
            Error::indeterminate(
                "the commit failed, and may take effect after a crash all the same; look at the system log",
            )
            .with_source(error),
        ),
    }
}

/// Others kept a lock for longer than we wait.
pub(super) fn busy(error: rusqlite::Error) -> Error {
    Error::unavailable(
        "another connection keeps the database locked; look for a program with an open transaction, with fuser or lsof",
    )
    .with_source(error)
}
