//! The database's file: what may stand at its path, and whether it still does.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::disk::{io_error, rename_new, shown, while_opening};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::hex;
use crate::{netfs, random};

/// Anybody may write.
const OTHERS_WRITE: u32 = 0o002;

/// The path of a database, and the file that was found there.
///
/// The file is only ever looked at. Opening and closing it beside SQLite would drop SQLite's locks,
/// which belong to the process and the file and not to a descriptor (fcntl(2)).
#[derive(Clone, Debug)]
pub(super) struct Place {
    path: PathBuf,
    dev: u64,
    ino: u64,
}

impl Place {
    /// Checks what is at `path`, and makes an empty file there where nothing is.
    pub(super) fn open(path: &Path, create: bool, allow_network: bool) -> Result<Self> {
        let name = path.file_name().ok_or_else(|| {
            Error::invalid("the path of the database has no file name").with("path", shown(path))
        })?;
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        // From here on, a change of the working directory does not move the database.
        let dir = std::fs::canonicalize(dir)
            .map_err(|e| io_error(e, "the database's directory cannot be resolved", dir))
            .map_err(while_opening)?;
        netfs::refuse_network(&dir, allow_network)?;
        let path = dir.join(name);
        if look(&path)?.is_none() {
            if !create {
                return Err(Error::invalid(
                    "there is no such database; create it, or allow it to be created",
                )
                .with("path", shown(&path)));
            }
            make(&dir, &path).map_err(while_opening)?;
        }
        let Some((dev, ino)) = look(&path)? else {
            return Err(gone(&path));
        };
        Ok(Self { path, dev, ino })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn dir(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// The file that SQLite keeps beside the database, by its ending.
    pub(super) fn beside(&self, ending: &str) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(ending);
        path.into()
    }

    /// The file's permissions.
    pub(super) fn mode(&self) -> Result<u32> {
        std::fs::symlink_metadata(&self.path)
            .map(|found| found.mode() & 0o7777)
            .map_err(|e| io_error(e, "the database cannot be looked at", &self.path))
    }

    /// Fails where the path names another file than the one that was opened: what is written to a
    /// file without a name is lost, and another file's tokens are another realm's (S9).
    pub(super) fn check_same(&self) -> Result<()> {
        match look(&self.path)? {
            Some((dev, ino)) if (dev, ino) == (self.dev, self.ino) => Ok(()),
            Some(_) => Err(Error::corrupt(
                "another file has taken the place of the database since it was opened; end all who use it, see to it that no token is told again, and open it anew",
            )
            .with("path", shown(&self.path))),
            None => Err(gone(&self.path)),
        }
    }
}

fn gone(path: &Path) -> Error {
    Error::corrupt("the database was removed since it was opened; restore it, or open a new one")
        .with("path", shown(path))
}

/// The identity of the file at `path`, where it may be a database; `None` where nothing is there.
fn look(path: &Path) -> Result<Option<(u64, u64)>> {
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => {
            return Err(while_opening(io_error(
                e,
                "the database cannot be looked at",
                path,
            )));
        }
    };
    let refuse = |what: &str| Err(Error::new(ErrorKind::Invalid, what).with("path", shown(path)));
    let kind = found.file_type();
    if kind.is_symlink() {
        return refuse("expected a regular file, found a symbolic link; name its target instead");
    }
    if !kind.is_file() {
        return refuse("expected a regular file, found a directory, a pipe, a socket or a device");
    }
    // Each name has a write-ahead log of its own, and the two would damage the database.
    if found.nlink() > 1 {
        return refuse("the database has several hard links; remove all but one");
    }
    if found.mode() & OTHERS_WRITE != 0 {
        return refuse("anybody may write to the database; run chmod o-w on it");
    }
    Ok(Some((found.dev(), found.ino())))
}

/// Makes an empty file, for its owner only: it will hold what lets a holder renew. An empty file is
/// an empty database. It is closed before it has its name, so that no lock of SQLite's is dropped.
fn make(dir: &Path, path: &Path) -> Result<()> {
    let temp = dir.join(format!(".{}.fence.tmp", hex(&random::id())));
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(&temp, flags, Mode::RUSR | Mode::WUSR)
        .map(drop)
        .map_err(|e| io_error(e.into(), "the database cannot be created", path))?;
    match rename_new(&temp, path) {
        Ok(()) => Ok(()),
        Err(error) => {
            // The name is random and ours; where even this fails, it is an empty leftover.
            let _ = std::fs::remove_file(&temp);
            if error == rustix::io::Errno::EXIST {
                return Ok(());
            }
            Err(io_error(
                error.into(),
                "the database cannot be created",
                path,
            ))
        }
    }
}
