//! The record files of a store: opened and locked, created, mended, and found.

use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use crate::clock::{Tick, unix_micros};
use crate::error::{Error, ErrorKind, Result};
use crate::file::locked::{self, LockedRecord};
use crate::file::record::{Reservation, State};
use crate::file::remedy::damaged_record;
use crate::file::root::{Root, WAIT_MAX, names_in, replace_whole};
use crate::file::safe::{self, Opening, Sharing};
use crate::host::Host;
use crate::name::LockName;
use crate::token::{FencingToken, check_jump};

/// How old a half-made file has to be before it is taken for a leftover.
const LEFTOVER_MIN_AGE_S: i64 = 3_600;

/// How often a record that is removed again and again is created.
const CREATE_TRIES_MAX: u32 = 100;

/// Whether an operation may wait and sync, or has to give up where it would.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// On a thread that must not block: page cache only.
    Inline,
    /// On a thread that may wait for kernel locks until this moment, and sync.
    Until(Tick),
}

impl Pace {
    /// The pace of an operation that begins now and whose caller can wait for it.
    pub(crate) fn patient() -> Self {
        Self::Until(safe::within(WAIT_MAX))
    }

    /// Until when to wait.
    ///
    /// # Errors
    /// `WouldWait` where that is not allowed.
    pub(crate) fn until(self) -> Result<Tick, Halt> {
        match self {
            Self::Inline => Err(Halt::WouldWait),
            Self::Until(until) => Ok(until),
        }
    }
}

/// Why an operation stopped.
#[derive(Debug)]
pub(crate) enum Halt {
    /// It would have to wait. Nothing was done; do it again with [`Pace::patient`].
    WouldWait,
    /// It failed.
    Failed(Error),
}

impl From<Error> for Halt {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// The record files of a store.
#[derive(Debug)]
pub(crate) struct Records {
    pub(crate) root: Root,
    pub(crate) host: Host,
    dir: PathBuf,
}

impl Records {
    pub(crate) fn new(root: Root, host: Host) -> Self {
        let dir = root.locks_dir();
        Self { root, host, dir }
    }

    pub(crate) fn path(&self, name: &LockName) -> PathBuf {
        self.dir.join(name.encoded())
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The file names of all records.
    pub(crate) fn keys(&self) -> Result<Vec<String>> {
        names_in(&self.dir)
    }

    /// Removes what processes that were killed left half made.
    pub(crate) fn sweep(&self) -> Result<()> {
        for dir in [self.root.dir(), &self.dir] {
            for leftover in leftovers(dir)? {
                // Somebody else may have removed it.
                let _ = std::fs::remove_file(leftover);
            }
        }
        Ok(())
    }

    /// Opens, locks and reads a record; `None` where there is none.
    pub(crate) fn open(
        &self,
        name: &LockName,
        pace: Pace,
    ) -> Result<Option<LockedRecord<'_>>, Halt> {
        let path = self.path(name);
        let opened = self
            .open_locked(&path, pace)
            .map_err(|halt| planted(halt, name, &path));
        let Some(file) = opened? else {
            // Only a store that still is the one we opened can say so.
            self.root.check_same()?;
            return Ok(None);
        };
        self.root.check_same()?;
        Ok(Some(LockedRecord::read(self, name, path, file)?))
    }

    /// Opens, locks and reads a record, which is created where there is none.
    pub(crate) fn open_or_create(
        &self,
        name: &LockName,
        pace: Pace,
    ) -> Result<LockedRecord<'_>, Halt> {
        for _ in 0..CREATE_TRIES_MAX {
            if let Some(mut record) = self.open(name, pace)? {
                record.begin(pace)?;
                return Ok(record);
            }
            pace.until()?;
            // The store's lock is not needed, since such a record has no token yet.
            safe::create_whole(&self.path(name), &self.fresh(name)?)?;
        }
        Err(
            Error::unavailable("a record is removed again and again; something else deletes it")
                .with("path", safe::shown(&self.path(name)))
                .into(),
        )
    }

    /// Refuses `least` for a record that does not exist yet, where it would be refused of a fresh
    /// one: so that none is made for it.
    pub(crate) fn check_first(&self, least: FencingToken, until: Tick) -> Result<()> {
        let floor = self.root.lock_floor(until)?;
        check_jump(FencingToken::new(floor.get()).ok(), least, unix_micros())
    }

    /// Writes a damaged record anew: without holders, above `least`, above the store's floor, and
    /// so above every token that was ever told. Leaves one that is not damaged as it is.
    pub(crate) fn mend(&self, name: &LockName, least: FencingToken, until: Tick) -> Result<()> {
        let path = self.path(name);
        // The lock keeps out whoever opened the damaged file before it is replaced. A planted
        // symlink, pipe or directory cannot be locked, and nobody is granted anything on it.
        let _lock =
            safe::open_locked(&path, Opening::OWN, Sharing::Exclusive, until).or_else(|e| {
                if e.kind() == ErrorKind::Corrupt {
                    Ok(None)
                } else {
                    Err(e)
                }
            })?;
        let mut floor = self.root.lock_floor(until)?;
        // Looked at again under the floor's lock, which two that mend at once cannot both hold.
        let damaged = match safe::open(&path, Opening::OWN) {
            Ok(None) => false,
            Ok(Some(file)) => LockedRecord::read(self, name, path.clone(), file)
                .is_err_and(|e| e.kind() == ErrorKind::Corrupt),
            Err(e) => e.kind() == ErrorKind::Corrupt,
        };
        if damaged {
            check_jump(FencingToken::new(floor.get()).ok(), least, unix_micros())?;
            floor.raise(least.get())?;
            replace_whole(&path, &self.fresh(name)?)?;
        }
        Ok(())
    }

    /// The content of a new record, which has no reservation until it [begins](LockedRecord::begin).
    fn fresh(&self, name: &LockName) -> Result<Vec<u8>> {
        let now = unix_micros();
        let reservation = Reservation {
            name: name.as_str().to_owned(),
            boot: self.host.boot.clone(),
            reserved: 0,
            made_unix_us: now,
        };
        locked::image(&reservation, &State::new(name, &self.host, 0, now))
    }

    fn open_locked(&self, path: &Path, pace: Pace) -> Result<Option<File>, Halt> {
        if let Pace::Until(until) = pace {
            return Ok(safe::open_locked(
                path,
                Opening::OWN,
                Sharing::Exclusive,
                until,
            )?);
        }
        match safe::open(path, Opening::OWN)? {
            Some(file) => lock_at_once(file, path).map(Some),
            None => Ok(None),
        }
    }
}

/// Locks a file that was just opened, unless somebody else has or the path names another by now.
pub(crate) fn lock_at_once(file: File, path: &Path) -> Result<File, Halt> {
    match file.try_lock() {
        Ok(()) if safe::is_still(&file, path)? => Ok(file),
        Ok(()) | Err(TryLockError::WouldBlock) => Err(Halt::WouldWait),
        // Whoever may wait tries again, and says what it was.
        Err(TryLockError::Error(_)) => Err(Halt::WouldWait),
    }
}

/// The largest token that any record in `dir` counts as told, damaged ones left out: what a store
/// whose identity is lost has to start above.
pub(crate) fn highest_readable(dir: &Path) -> Result<u64> {
    let mut highest = 0;
    for key in names_in(dir)? {
        let path = dir.join(key);
        let read = Opening {
            write: false,
            ..Opening::OWN
        };
        let Ok(Some(file)) = safe::open(&path, read) else {
            continue;
        };
        if let Some(reservation) = locked::reservation_in(&file) {
            highest = reservation
                .reserved
                .min(FencingToken::MAX.get())
                .max(highest);
        }
    }
    Ok(highest)
}

/// The lock that the record `key` in `dir` is of, for a file name that does not tell; `None` where
/// there is no such file.
///
/// # Errors
/// `Corrupt` where the record does not tell it either.
pub(crate) fn name_within(dir: &Path, key: &str, until: Tick) -> Result<Option<LockName>> {
    let path = dir.join(key);
    let unknown = |what| damaged_record(None, &path, what);
    let refused = |e: Error| match e.kind() {
        ErrorKind::Corrupt => unknown("something else is in a record's place").with_source(e),
        _ => e,
    };
    let Some(file) = safe::open(&path, Opening::OWN).map_err(refused)? else {
        return Ok(None);
    };
    if let Some(name) = locked::name_in(&file, key) {
        return Ok(Some(name));
    }
    // It may have been read in the middle of a write.
    let locked = safe::open_locked(&path, Opening::OWN, Sharing::Shared, until).map_err(refused)?;
    let Some(file) = locked else {
        return Ok(None);
    };
    match locked::name_in(&file, key) {
        Some(name) => Ok(Some(name)),
        None => Err(unknown("the record is damaged, or of another lock")),
    }
}

/// The error of something that is not a record of ours in a record's place. Another user's file
/// keeps its own words: it has to be given back, not mended.
fn planted(halt: Halt, name: &LockName, path: &Path) -> Halt {
    let user = rustix::process::geteuid().as_raw();
    let foreign = || std::fs::symlink_metadata(path).is_ok_and(|f| f.is_file() && f.uid() != user);
    match halt {
        Halt::Failed(e) if e.kind() == ErrorKind::Corrupt && !foreign() => {
            let what = "something else is in a record's place";
            damaged_record(Some(name), path, what).with_source(e).into()
        }
        Halt::Failed(e) if e.kind() != ErrorKind::Unsupported => {
            e.with("lock", format_args!("{name:?}")).into()
        }
        halt => halt,
    }
}

/// Files that were to be given their name long ago, and never were.
fn leftovers(dir: &Path) -> Result<Vec<PathBuf>> {
    let fail = |e| safe::io_error(e, "a directory cannot be listed", dir);
    let now_s = i64::try_from(unix_micros() / 1_000_000).unwrap_or(i64::MAX);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let is_temporary = path.file_name().is_some_and(|name| {
            let name = name.as_encoded_bytes();
            name.starts_with(b".") && (name.ends_with(b".tmp") || name.ends_with(b".mended"))
        });
        if is_temporary
            && let Ok(found_there) = std::fs::symlink_metadata(&path)
            && now_s.saturating_sub(found_there.mtime()) > LEFTOVER_MIN_AGE_S
            && is_abandoned(&path)
        {
            found.push(path);
        }
    }
    Ok(found)
}

/// True where nobody holds the lock that a file's writer takes.
fn is_abandoned(path: &Path) -> bool {
    safe::open(path, Opening::OWN)
        .is_ok_and(|file| file.is_some_and(|file| file.try_lock().is_ok()))
}
