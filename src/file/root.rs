//! The directory of a store: its checks, its identity, and the floor below which no new record
//! starts.
//!
//! The file `store` holds the realm, 128 random bits, and the floor: the largest reservation that
//! any record ever made. It is raised, durably, *before* the reservation is made, so that a record
//! that was pruned, or deleted by hand, starts again above every token it ever told (L10).
//!
//! The file is locked to raise the floor and for nothing else, so that a process that is stopped
//! while it does so keeps out new names and new reservations only. It is made before the
//! directories, and so it was lost where they are there without it.

use std::fs::{DirBuilder, File, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::Tick;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::{hex, unhex};
use crate::file::record::encode;
use crate::file::remedy::damaged_identity;
use crate::file::safe::{self, Opening, Sharing};
use crate::file::slots::{Medium as _, Record, Slots, Stored, Sync};
use crate::netfs;
use crate::random;
use crate::token::FencingToken;

/// How long one operation waits for kernel locks altogether. Critical sections take microseconds,
/// or an fsync; longer is a process that was stopped inside one, or a disk that hangs. Less than
/// the limit of one request, so that the caller hears which file it is.
pub(crate) const WAIT_MAX: Duration = Duration::from_secs(3);

/// How often making the directory is tried where others remove it.
const MAKE_TRIES_MAX: u32 = 20;

const SLOTS: Slots = Slots::new(*b"FLstore1", 0, 4096);

/// Anybody may write here.
const MODE_OTHERS_WRITE: u32 = 0o002;

/// An open store directory.
#[derive(Debug)]
pub(crate) struct Root {
    dir: PathBuf,
    realm: String,
    /// `store` as it was opened. Kept open, so that no other file gets its inode number.
    opened: Option<File>,
}

/// What `store` holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    realm: String,
    floor: u64,
}

/// The locked `store` file. Closing it unlocks it.
pub(crate) struct Floor {
    file: File,
    path: PathBuf,
    slots: Record,
    identity: Identity,
}

impl Root {
    /// Checks `dir`, makes it and what belongs in it where they are missing, and reads its
    /// identity. With `mend`, a damaged or missing identity is made anew above that token and above
    /// what `readable` finds in the records.
    pub(crate) fn open(
        dir: &Path,
        allow_network: bool,
        mend: Option<FencingToken>,
        readable: impl Fn(&Path) -> Result<u64>,
    ) -> Result<Self> {
        make_dir(dir)?;
        // From here on, a change of the working directory does not move the store.
        let dir = std::fs::canonicalize(dir)
            .map_err(|e| safe::io_error(e, "the store's directory cannot be resolved", dir))?;
        netfs::refuse_network(&dir, allow_network)?;
        check_dir(&dir)?;
        let mut root = Self {
            dir,
            realm: String::new(),
            opened: None,
        };
        let (opened, identity) = match (root.open_or_create(), mend) {
            (Err(e), Some(least)) if e.kind() == ErrorKind::Corrupt => {
                root.make_parts()?;
                root.replace(least.get().max(readable(&root.locks_dir())?))?;
                root.open_or_create()?
            }
            (found, _) => found?,
        };
        root.make_parts()?;
        root.realm = identity.realm;
        root.opened = Some(opened);
        root.check_same()?;
        Ok(root)
    }

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(crate) fn realm(&self) -> &str {
        &self.realm
    }

    pub(crate) fn locks_dir(&self) -> PathBuf {
        self.dir.join("locks")
    }

    pub(crate) fn live_dir(&self) -> PathBuf {
        self.dir.join("live")
    }

    fn store_path(&self) -> PathBuf {
        self.dir.join("store")
    }

    /// Fails where the store is not the one that was opened: its tokens would then be told under
    /// the wrong realm (S9).
    pub(crate) fn check_same(&self) -> Result<()> {
        let path = self.store_path();
        match &self.opened {
            Some(opened) if safe::is_still(opened, &path)? => Ok(()),
            _ if path.symlink_metadata().is_ok() => Err(replaced(&path)),
            _ => Err(identity_missing(&path)),
        }
    }

    /// Locks `store`, whose floor is durable then. A record's lock may be held; none is taken while
    /// this one is held.
    pub(crate) fn lock_floor(&self, until: Tick) -> Result<Floor> {
        let floor = self
            .lock_existing(until)?
            .ok_or_else(|| identity_missing(&self.store_path()))?;
        if floor.identity.realm != self.realm {
            return Err(replaced(&floor.path));
        }
        Ok(floor)
    }

    /// Makes sure that the floor is at least `least`, durably, without the lock where it is so.
    pub(crate) fn raise(&self, least: u64, until: Tick) -> Result<()> {
        self.check_same()?;
        if let Some(opened) = &self.opened
            && let Ok((slots, identity)) = read_identity(opened, &self.store_path())
            && slots.whole
            && identity.floor >= least
        {
            return Ok(());
        }
        self.lock_floor(until)?.raise(least)
    }

    /// Takes the next `count` numbers for one record: those above the first that is returned, up to
    /// the second. No other record gets them, and the floor is at the second, durably.
    pub(crate) fn take(&self, count: u64, until: Tick) -> Result<(u64, u64)> {
        let mut floor = self.lock_floor(until)?;
        let last = floor.get();
        let reserved = last.saturating_add(count).min(FencingToken::MAX.get());
        floor.raise(reserved)?;
        Ok((last, reserved))
    }

    /// `store`, open for reading, and what it holds.
    fn open_or_create(&self) -> Result<(File, Identity)> {
        let path = self.store_path();
        let until = safe::within(WAIT_MAX);
        loop {
            if let Some(found) = self.open_existing(until)? {
                return Ok(found);
            }
            if self.has_locks_dir()? {
                // Another process may have made both in the meantime, `store` first.
                return self
                    .open_existing(until)?
                    .ok_or_else(|| identity_missing(&path));
            }
            let image = SLOTS.image(&encode(&Identity::new(0))?)?;
            // Of many processes that start at once, one creates it and all read that one.
            safe::create_whole(&path, &image)?;
        }
    }

    /// Reads `store` without its lock: its realm never changes, and a floor that is being raised
    /// does not matter to whoever opens.
    fn open_existing(&self, until: Tick) -> Result<Option<(File, Identity)>> {
        let path = self.store_path();
        let read = Opening {
            write: false,
            ..Opening::OWN
        };
        match safe::open(&path, read) {
            Ok(None) => return Ok(None),
            Ok(Some(file)) => {
                if let Ok((_, identity)) = read_identity(&file, &path) {
                    return Ok(Some((file, identity)));
                }
            }
            // Told again below, in the words for a store.
            Err(_) => {}
        }
        // Damaged, or read while it was written twice: only the lock tells.
        let Some(floor) = self.lock_existing(until)? else {
            return Ok(None);
        };
        // Opened again: closing the one that is locked has to unlock it.
        let opened = safe::open(&path, read)?.ok_or_else(|| identity_missing(&path))?;
        Ok(Some((opened, floor.identity)))
    }

    fn lock_existing(&self, until: Tick) -> Result<Option<Floor>> {
        let path = self.store_path();
        let damaged = || damaged(&path);
        let opened = safe::open_locked(&path, Opening::OWN, Sharing::Exclusive, until);
        let file = match opened {
            Ok(None) => return Ok(None),
            Ok(Some(file)) => file,
            Err(e) if e.kind() == ErrorKind::Corrupt => return Err(damaged().with_source(e)),
            Err(e) => return Err(e),
        };
        let (mut slots, identity) = read_identity(&file, &path)?;
        SLOTS
            .heal(&file, &mut slots)
            .map_err(|e| e.with("path", safe::shown(&path)))?;
        Ok(Some(Floor {
            file,
            path,
            slots,
            identity,
        }))
    }

    /// Puts a new identity in the place of a damaged one. Two that do so at once agree on the last.
    fn replace(&self, floor: u64) -> Result<()> {
        let path = self.store_path();
        let image = SLOTS.image(&encode(&Identity::new(floor))?)?;
        replace_whole(&path, &image)
    }

    fn has_locks_dir(&self) -> Result<bool> {
        let dir = self.locks_dir();
        match dir.symlink_metadata() {
            Ok(_) => check_dir(&dir).map(|()| true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(safe::io_error(
                e,
                "the store's directory cannot be looked at",
                &dir,
            )),
        }
    }

    /// Makes the directories of a store whose identity is there.
    fn make_parts(&self) -> Result<()> {
        if !self.has_locks_dir()? {
            // Whoever made the identity may have died before its name was durable.
            safe::sync_dir(&self.dir)?;
        }
        for part in [self.locks_dir(), self.live_dir()] {
            // Not its parents: a store that is removed meanwhile must not come back without its
            // identity.
            let made = DirBuilder::new().mode(0o700).create(&part);
            if let Err(e) = made
                && part.symlink_metadata().is_err()
            {
                return Err(safe::io_error(
                    e,
                    "a directory of the store cannot be made",
                    &part,
                ));
            }
            check_dir(&part)?;
        }
        Ok(())
    }
}

impl Identity {
    fn new(floor: u64) -> Self {
        Self {
            realm: hex(&random::id()),
            floor,
        }
    }
}

impl Floor {
    /// The floor.
    pub(crate) fn get(&self) -> u64 {
        self.identity.floor
    }

    /// Raises the floor to at least `least`, durably.
    pub(crate) fn raise(&mut self, least: u64) -> Result<()> {
        if least <= self.identity.floor {
            return Ok(());
        }
        let next = Identity {
            floor: least,
            ..self.identity.clone()
        };
        if self.slots.generation == 1 {
            // Whoever created the file may have died before its name was durable.
            safe::sync_dir(&safe::parent(&self.path))?;
        }
        let last = Stored::Record(self.slots.clone());
        self.slots = SLOTS
            .write(&self.file, &last, encode(&next)?, Sync::Data)
            .map_err(|e| e.with("path", safe::shown(&self.path)))?;
        self.identity = next;
        Ok(())
    }

    /// How long it takes to sync the file, by the given clock.
    pub(crate) fn time_sync(&self, clock: &crate::clock::Clock) -> Result<Duration> {
        let start = clock.now();
        self.file
            .write_at(&[0], SLOTS_END)
            .and_then(|()| self.file.sync())
            .map_err(|e| safe::io_error(e, "the store cannot be synced", &self.path))?;
        Ok(clock.now().since(start))
    }
}

/// What an open `store` holds.
fn read_identity(file: &File, path: &Path) -> Result<(Record, Identity)> {
    let damaged = || damaged(path);
    let slots = match SLOTS.read(file) {
        Ok(Stored::Record(record)) => record,
        Ok(Stored::Empty) => return Err(damaged()),
        Err(e) if e.kind() == ErrorKind::Corrupt => return Err(damaged().with_source(e)),
        Err(e) => return Err(e.with("path", safe::shown(path))),
    };
    let identity = Identity::parse(&slots.payload).ok_or_else(damaged)?;
    Ok((slots, identity))
}

impl Identity {
    /// `None` where it cannot be right.
    fn parse(json: &[u8]) -> Option<Self> {
        let identity: Self = serde_json::from_slice(json).ok()?;
        let sound =
            unhex::<16>(&identity.realm).is_some() && identity.floor <= FencingToken::MAX.get();
        sound.then_some(identity)
    }
}

/// Where a byte may be written to time a sync.
const SLOTS_END: u64 = 8_192;

/// The names of the files in `dir` that do not begin with a dot, as the files that are being
/// created do.
pub(crate) fn names_in(dir: &Path) -> Result<Vec<String>> {
    let fail = |e| safe::io_error(e, "a directory cannot be listed", dir);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(fail)? {
        // A name that is not UTF-8 is not one of ours.
        if let Ok(name) = entry.map_err(fail)?.file_name().into_string()
            && !name.starts_with('.')
        {
            names.push(name);
        }
    }
    Ok(names)
}

/// Puts `content` in the place of whatever file `path` names, whole and durable.
pub(crate) fn replace_whole(path: &Path, content: &[u8]) -> Result<()> {
    let dir = safe::parent(path);
    let temp = dir.join(format!(".{}.mended", hex(&random::id())));
    safe::create_whole(&temp, content)?;
    std::fs::rename(&temp, path).map_err(|e| {
        let _ = std::fs::remove_file(&temp);
        safe::io_error(
            e,
            "a damaged file cannot be replaced; move it away by hand",
            path,
        )
    })?;
    safe::sync_dir(&dir)
}

fn make_dir(dir: &Path) -> Result<()> {
    let mut tries = 0;
    loop {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
        match made {
            Ok(()) => return Ok(()),
            // Others create and remove it at the same time.
            Err(e) if e.kind() == io::ErrorKind::NotFound && tries < MAKE_TRIES_MAX => tries += 1,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Err(not_a_directory(dir).with_source(e));
            }
            Err(e) => {
                let there = dir.ancestors().find(|dir| dir.is_dir());
                let error = safe::io_error(e, "the store's directory cannot be made", dir);
                return Err(match there {
                    Some(there) => error.with("existing", safe::shown(there)),
                    None => error,
                });
            }
        }
    }
}

fn check_dir(dir: &Path) -> Result<()> {
    let found = std::fs::symlink_metadata(dir)
        .map_err(|e| safe::io_error(e, "the store's directory cannot be looked at", dir))?;
    if !found.is_dir() {
        return Err(not_a_directory(dir));
    }
    let user = rustix::process::geteuid().as_raw();
    if found.uid() != user {
        return Err(Error::invalid(
            "the store's directory belongs to another user, who could replace its records; use one of your own",
        )
        .with("owner_uid", found.uid())
        .with("expected_uid", user)
        .with("path", safe::shown(dir)));
    }
    if writable_by_others(&found) {
        return Err(Error::invalid(
            "anybody may delete or plant files in the store's directory; run chmod o-w on it, or use another",
        )
        .with("mode", format_args!("{:o}", found.mode() & 0o7777))
        .with("path", safe::shown(dir)));
    }
    let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    rustix::fs::access(dir, access).map_err(|e| {
        Error::invalid(
            "the store's directory is not writable; use another, or give this user access with chown or chmod",
        )
        .with("path", safe::shown(dir))
        .with_source(io::Error::from(e))
    })
}

fn writable_by_others(found: &Metadata) -> bool {
    found.mode() & MODE_OTHERS_WRITE != 0
}

fn not_a_directory(dir: &Path) -> Error {
    Error::invalid("expected a directory for the store, found something else")
        .with("path", safe::shown(dir))
}

fn damaged(path: &Path) -> Error {
    damaged_identity(path, "the store's identity is damaged")
}

fn identity_missing(path: &Path) -> Error {
    damaged_identity(
        path,
        "the store's identity is missing, and the directory of its records is there",
    )
}

fn replaced(path: &Path) -> Error {
    Error::unavailable("the store was replaced since it was opened; open it again")
        .with("path", safe::shown(path))
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;

#[cfg(test)]
mod tests;
