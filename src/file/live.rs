//! Liveness files: how the kernel tells that a holder's process is gone.
//!
//! Each store keeps an exclusive kernel lock on a file of its own for life, and its grants name
//! that file. The kernel unlocks it when the process ends, however it ends, so that a dead holder
//! is replaced at once: no process id is guessed about, in whatever namespace. A paused process
//! keeps the lock, and is replaced when its lease lapses.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{Mode, OFlags};

use crate::error::{Error, Result};
use crate::fence::{hex, unhex};
use crate::file::safe::{self, Opening};
use crate::random;

/// How often a new file is tried where others interfere.
const TRIES_MAX: u32 = 100;

/// The liveness files of a store's directory, and this store's own one.
#[derive(Debug)]
pub(crate) struct Live {
    dir: PathBuf,
    own: Mutex<Option<Own>>,
}

/// A liveness file that this process created and locked.
#[derive(Debug)]
struct Own {
    id: String,
    /// Holds the lock for as long as it is open.
    file: File,
    /// A forked child shares the lock, and must neither use nor remove it.
    pid: u32,
}

impl Live {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            own: Mutex::new(None),
        }
    }

    /// The id of this store's own liveness file, which is made on first use, and anew in a forked
    /// child or where somebody removed it.
    pub(crate) fn id(&self) -> Result<String> {
        let mut own = self.own();
        if let Some(own) = own.as_ref().filter(|own| own.is_usable()) {
            return Ok(own.id.clone());
        }
        let new = self.create()?;
        let id = new.id.clone();
        *own = Some(new);
        Ok(id)
    }

    /// Another descriptor of the lock on this store's own liveness file, for a process that is to
    /// count as the holder too. Such a lock belongs to the open file description, which duplicates
    /// share: it ends with the last of them.
    pub(crate) fn share(&self) -> Result<File> {
        let id = self.id()?;
        let own = self.own();
        let file = own.as_ref().filter(|own| own.id == id).map(|own| &own.file);
        file.ok_or_else(|| Error::unavailable("the liveness file was replaced meanwhile"))?
            .try_clone()
            .map_err(|e| safe::io_error(e, "a liveness file cannot be shared", &self.dir.join(&id)))
    }

    /// True while the store that made `id` lives. A file that is missing is a dead one's.
    ///
    /// # Errors
    /// Where that cannot be known; a doubt is never taken for death (L3).
    pub(crate) fn is_alive(&self, id: &str) -> Result<bool> {
        if let Some(own) = self.own().as_ref().filter(|own| own.id == id) {
            return Ok(own.is_linked());
        }
        is_locked(&self.dir, id)
    }

    /// Removes the files of the dead, and returns how many there were.
    pub(crate) fn reap(&self) -> Result<u64> {
        self.for_each_dead(|file, path| {
            // The lock is held from here on: whoever has just created this file and not yet locked
            // it fails to, and takes another name.
            if safe::is_still(file, path)? {
                std::fs::remove_file(path)
                    .map_err(|e| safe::io_error(e, "a liveness file cannot be removed", path))?;
            }
            Ok(())
        })
    }

    /// How many files of the dead there are.
    pub(crate) fn count_dead(&self) -> Result<u64> {
        self.for_each_dead(|_, _| Ok(()))
    }

    fn for_each_dead(&self, mut act: impl FnMut(&File, &Path) -> Result<()>) -> Result<u64> {
        let own = self.own().as_ref().map(|own| own.id.clone());
        let mut dead = 0;
        let entries = std::fs::read_dir(&self.dir)
            .map_err(|e| safe::io_error(e, "the liveness files cannot be listed", &self.dir))?;
        for entry in entries {
            let entry = entry
                .map_err(|e| safe::io_error(e, "the liveness files cannot be listed", &self.dir))?;
            let name = entry.file_name();
            let id = name.to_str().filter(|id| unhex::<16>(id).is_some());
            if id.is_none() || id == own.as_deref() {
                continue;
            }
            let path = entry.path();
            // What is gone by now, or was planted here, is not a dead holder's.
            let Ok(Some(file)) = safe::open(&path, Opening::OWN) else {
                continue;
            };
            if try_lock(file.try_lock(), &path)?.is_some() {
                act(&file, &path)?;
                dead += 1;
            }
        }
        Ok(dead)
    }

    fn create(&self) -> Result<Own> {
        for _ in 0..TRIES_MAX {
            let id = hex(&random::id());
            let path = self.dir.join(&id);
            let flags =
                OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR)
                .map(File::from)
                .map_err(|e| {
                    safe::io_error(e.into(), "a liveness file cannot be created", &path)
                })?;
            // Between creation and lock, a reaper may have taken it for a dead one's.
            if try_lock(file.try_lock(), &path)?.is_some() && safe::is_still(&file, &path)? {
                let pid = std::process::id();
                return Ok(Own { id, file, pid });
            }
        }
        Err(
            Error::unavailable("new liveness files are removed again and again; something else writes to their directory")
                .with("path", safe::shown(&self.dir)),
        )
    }

    fn own(&self) -> MutexGuard<'_, Option<Own>> {
        self.own.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        if let Some(own) = self.own().take()
            && own.pid == std::process::id()
        {
            // Removed while it is locked. Where that fails, it is reaped as a dead one's.
            let _ = std::fs::remove_file(self.dir.join(&own.id));
        }
    }
}

impl Own {
    fn is_usable(&self) -> bool {
        self.pid == std::process::id() && self.is_linked()
    }

    fn is_linked(&self) -> bool {
        self.file.metadata().is_ok_and(|found| found.nlink() > 0)
    }
}

/// True while somebody holds the lock of the liveness file `id` in `dir`.
pub(crate) fn is_locked(dir: &Path, id: &str) -> Result<bool> {
    let path = dir.join(id);
    let read = Opening {
        write: false,
        ..Opening::OWN
    };
    let Some(file) = safe::open(&path, read)? else {
        return Ok(false);
    };
    Ok(try_lock(file.try_lock_shared(), &path)?.is_none())
}

/// `Some` where the lock was taken, `None` where somebody holds it.
fn try_lock(tried: Result<(), TryLockError>, path: &Path) -> Result<Option<()>> {
    match tried {
        Ok(()) => Ok(Some(())),
        Err(TryLockError::WouldBlock) => Ok(None),
        // Interrupted before an answer: not known to be free.
        Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Interrupted => Ok(None),
        Err(TryLockError::Error(e)) => {
            Err(safe::io_error(e, "a liveness file cannot be locked", path))
        }
    }
}
