//! What went wrong with a path of this host, in the same words for every engine that keeps files.

use std::io;
use std::path::Path;

use rustix::io::Errno;

use crate::error::{Error, ErrorKind};

/// An error of the file system as ours: `Invalid` where the path itself is at fault, else
/// `Unavailable`, which says that nothing was applied. A caller who has gone past the effect makes
/// it `Indeterminate`.
///
/// `doing` says what cannot be done; what to do about it is added here.
pub(crate) fn io_error(error: io::Error, doing: &str, path: &Path) -> Error {
    let (kind, advice) = explain(&error);
    Error::new(kind, format!("{doing}: {advice}"))
        .with("path", shown(path))
        .with_source(error)
}

/// An error of opening a place that was named by the user. Where the place is at fault and not the
/// disk, it is `Invalid`: trying again would not help.
pub(crate) fn while_opening(error: Error) -> Error {
    let errno = std::error::Error::source(&error)
        .and_then(|source| source.downcast_ref::<io::Error>())
        .and_then(Errno::from_io_error);
    match errno {
        Some(Errno::NOENT | Errno::ACCESS | Errno::PERM | Errno::ROFS | Errno::NOTDIR) => {
            error.into_kind(ErrorKind::Invalid)
        }
        _ => error,
    }
}

/// The kind and the advice of an [`io_error`], where the path is not at hand.
pub(crate) fn explain(error: &io::Error) -> (ErrorKind, &'static str) {
    use ErrorKind::{Invalid, Unavailable};
    match Errno::from_io_error(error) {
        Some(Errno::NOSPC) => (Unavailable, "the disk is full; free some space"),
        Some(Errno::DQUOT) => (Unavailable, "the disk quota is used up; free some space"),
        Some(Errno::ACCESS | Errno::PERM) => (
            Unavailable,
            "permission denied; give this user access with chown or chmod",
        ),
        Some(Errno::ROFS) => (
            Unavailable,
            "the file system is read-only; remount it, or use another",
        ),
        Some(Errno::IO) => (Unavailable, "the disk failed; look at the system log"),
        Some(Errno::NOENT) => (Unavailable, "there is no such file or directory; create it"),
        Some(Errno::MFILE | Errno::NFILE) => {
            (Unavailable, "too many files are open; raise the limit")
        }
        Some(Errno::FBIG) => (Unavailable, "the file would exceed a size limit"),
        Some(Errno::NAMETOOLONG) => (Invalid, "the name is too long; choose a shorter one"),
        Some(Errno::NOTDIR) => (Invalid, "a component of the path is not a directory"),
        Some(Errno::LOOP) => (Invalid, "a component of the path is a symbolic link"),
        _ => (Unavailable, "the file system refused"),
    }
}

/// A path for a message: quoted, with control characters escaped, so that a name cannot forge a
/// line of a log.
pub(crate) fn shown(path: &Path) -> String {
    format!("{path:?}")
}

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
/// Gives `temp` the name `path`, which nothing may have.
pub(crate) fn rename_new(temp: &Path, path: &Path) -> rustix::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    match renameat_with(CWD, temp, CWD, path, RenameFlags::NOREPLACE) {
        // Old kernels and some network file systems do not know the flag.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => link_new(temp, path),
        result => result,
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
/// Gives `temp` the name `path`, which nothing may have.
pub(crate) fn rename_new(temp: &Path, path: &Path) -> rustix::io::Result<()> {
    link_new(temp, path)
}

/// For a moment the file has two names, and another process that opens it now is told so; the
/// rename is preferred for that reason.
fn link_new(temp: &Path, path: &Path) -> rustix::io::Result<()> {
    rustix::fs::link(temp, path)?;
    rustix::fs::unlink(temp)
}
