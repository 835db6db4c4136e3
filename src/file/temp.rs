//! The temporary file that a new value is streamed to before it takes its name.
//!
//! Its writer holds its kernel lock from creation on, and its names are few: `.NAME.0.fence.tmp`,
//! then 1, 2, … where several writers stream at once. Each writer looks at all of these names, and
//! removes a file whose lock is free, since its writer is dead. So what killed writers leave behind
//! is bounded and goes with the next write, without anyone scanning a directory.

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use crate::body::Body;
use crate::error::{Error, ErrorKind, Result};
use crate::file::faults;
use crate::file::place::{Place, Stamp};
use crate::file::safe::{self, Opening, io_error, shown};

/// The most writers that stream to one file at once. Few, since each write looks at all names.
const WRITERS_MAX: u32 = 128;

/// How often a name is tried while others remove what they take for a leftover.
const TRIES_MAX: u32 = 100;

/// A new value that has no name yet. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct Temp {
    file: File,
    path: PathBuf,
    number: u32,
    published: bool,
}

impl Temp {
    /// A new empty file beside the plain one, locked, with a mode that shows no more than the plain
    /// one does.
    ///
    /// # Errors
    /// As [`io_error`], and `Unavailable` where all names are in use.
    pub(crate) fn create(place: &Place) -> Result<Self> {
        let mode = place
            .look()?
            .map_or(0o666, |found| found.permissions().mode() & 0o777);
        for number in 0..WRITERS_MAX {
            let path = place.temp(number);
            for _ in 0..TRIES_MAX {
                match create_locked(&path, mode)? {
                    Created::Ours(file) => {
                        sweep(place, number);
                        return Ok(Self {
                            file,
                            path,
                            number,
                            published: false,
                        });
                    }
                    Created::Lost => {}
                    Created::Exists => {
                        if !reclaim(&path) {
                            break;
                        }
                    }
                }
            }
        }
        Err(
            Error::unavailable("too many writers stream to one file; try later")
                .with("path", shown(&place.data)),
        )
    }

    /// Streams `body` into the file, gives it the mode of the plain one, and makes it durable.
    ///
    /// # Errors
    /// As [`io_error`], and `Invalid` where the body ends before its length.
    pub(crate) fn fill(&mut self, body: Body, place: &Place) -> Result<()> {
        let mut out = Stepped(&self.file);
        body.copy_to(&mut out).map_err(|e| {
            if e.kind() == io::ErrorKind::UnexpectedEof {
                Error::invalid("the body's file became shorter while it was read").with_source(e)
            } else {
                io_error(e, "a value cannot be written", &self.path)
            }
        })?;
        if let Some(found) = place.look()? {
            // The umask has narrowed the mode at creation; an existing file keeps its own.
            let mode = std::fs::Permissions::from_mode(found.permissions().mode() & 0o777);
            self.file
                .set_permissions(mode)
                .map_err(|e| io_error(e, "a file cannot be given its mode", &self.path))?;
        }
        faults::step("sync the value")
            .and_then(|()| self.file.sync_all())
            .map_err(|e| io_error(e, "a value cannot be made durable", &self.path))
    }

    /// The stamp that the plain file will have.
    ///
    /// # Errors
    /// `Unavailable` where the file has lost its name.
    pub(crate) fn stamp(&self) -> Result<Stamp> {
        if !safe::is_still(&self.file, &self.path)? {
            return Err(Error::unavailable(
                "the temporary file of a value was removed by something else; try again",
            )
            .with("path", shown(&self.path)));
        }
        Ok(Stamp::of(&safe::stat(&self.file, &self.path)?))
    }

    /// The number in the name.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Takes the name of the plain file, in one step.
    ///
    /// # Errors
    /// As [`io_error`], and the plain file is as it was; `Indeterminate` where that cannot be told.
    pub(crate) fn publish(mut self, place: &Place, stamp: &Stamp) -> Result<()> {
        let renamed =
            faults::step("rename").and_then(|()| std::fs::rename(&self.path, &place.data));
        let Err(error) = renamed else {
            self.published = true;
            return Ok(());
        };
        let error = io_error(error, "a value cannot take its name", &place.data);
        // Asked rather than believed: what counts is which file has the name now.
        match place.look() {
            Ok(Some(found)) if stamp.is(&Stamp::of(&found)) => {
                self.published = true;
                Ok(())
            }
            // Nothing, another file, or something that is no file.
            Ok(_) => Err(error),
            Err(e) if e.kind() == ErrorKind::Invalid => Err(error),
            Err(_) => Err(error.into_kind(ErrorKind::Indeterminate)),
        }
    }
}

impl Drop for Temp {
    fn drop(&mut self) {
        if !self.published && safe::is_still(&self.file, &self.path).unwrap_or(false) {
            // Where this fails, the next writer finds the leftover.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes what dead writers left under other numbers than this one; the smaller ones were looked
/// at to find it.
fn sweep(place: &Place, number: u32) {
    for other in number.saturating_add(1)..WRITERS_MAX {
        let path = place.temp(other);
        if path.symlink_metadata().is_ok() {
            reclaim(&path);
        }
    }
}

/// Removes the leftover of a dead writer. False where its writer lives, or it is not ours to
/// remove.
pub(crate) fn reclaim(path: &Path) -> bool {
    let opening = Opening {
        write: false,
        ..Opening::OWN
    };
    match safe::open(path, opening) {
        Ok(Some(file)) => {
            file.try_lock().is_ok()
                && safe::is_still(&file, path).unwrap_or(false)
                && std::fs::remove_file(path).is_ok()
        }
        Ok(None) => true,
        Err(_) => false,
    }
}

/// True where a temporary file's writer is dead.
pub(crate) fn is_leftover(path: &Path) -> bool {
    let opening = Opening {
        write: false,
        ..Opening::OWN
    };
    matches!(safe::open(path, opening), Ok(Some(file)) if file.try_lock_shared().is_ok())
}

enum Created {
    Ours(File),
    /// A file has the name.
    Exists,
    /// Another writer took ours for a leftover before it was locked.
    Lost,
}

fn create_locked(path: &Path, mode: u32) -> Result<Created> {
    let opened = faults::step("create a temporary file").and_then(|()| {
        // Exclusive creation never follows a symlink, and std closes on exec.
        let mut new = OpenOptions::new();
        match new
            .read(true)
            .write(true)
            .create_new(true)
            .mode(mode | 0o600)
            .open(path)
        {
            Ok(file) => Ok(Some(file)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(None),
            Err(e) => Err(e),
        }
    });
    let Some(file) = opened.map_err(|e| io_error(e, "a temporary file cannot be created", path))?
    else {
        return Ok(Created::Exists);
    };
    match file.try_lock() {
        Ok(()) if safe::is_still(&file, path)? => Ok(Created::Ours(file)),
        Ok(()) | Err(TryLockError::WouldBlock) => Ok(Created::Lost),
        Err(TryLockError::Error(e)) => Err(io_error(e, "a file cannot be locked", path)),
    }
}

/// A file whose writes tests can let fail.
struct Stepped<'a>(&'a File);

impl io::Write for Stepped<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        faults::step("write the value")?;
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
