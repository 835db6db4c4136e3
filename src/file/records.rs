//! The record files, one for each lock name: opened and locked, read, written in place, created,
//! and mended.
//!
//! # The file
//!
//! | at | what | synced |
//! |---|---|---|
//! | 0 | the [`Reservation`], twice 4 KiB | before any token that it covers is told |
//! | 8 KiB | the [`State`], twice 4 KiB | never |
//! | 16 KiB | two regions of 8 MiB, with holes, for the state of a lock with many holders | never |
//!
//! The kernel keeps one page cache for all processes of a boot, so what one wrote all read, though
//! it be killed the next moment. Only a reboot can lose the state, and no holder survives that: a
//! record whose reservation is of another boot has no holder, and its next token follows the
//! reservation. This is what makes a grant cost microseconds and still be worth D2.
//!
//! # What is damage
//!
//! Files are created whole, so one that is short, empty or unreadable was damaged, and may have had
//! a holder: it is `Corrupt`, never a fresh record (L3, L10). In the boot of its reservation a
//! record has to have a good state of that boot. The first grant of a boot therefore writes a state
//! *before* the reservation: a process killed between the two leaves a record of the old boot.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::clock::unix_micros;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::hex;
use crate::file::host::Host;
use crate::file::record::{Reservation, State, encode};
use crate::file::root::{Floor, LOCK_WAIT_MAX, Root, names_in, replace_whole};
use crate::file::safe::{self, Opening, Sharing};
use crate::file::slots::{self, Medium, Slots, Stored, Sync};
use crate::name::LockName;
use crate::token::{FencingToken, check_jump};

const RESERVATION: Slots = Slots::new(*b"FLresrv1", 0, 4096);
const STATE: Slots = Slots::new(*b"FLstate1", 8_192, 4096);

/// The length of both pairs, and so the least length of a record.
const IMAGE_BYTES: usize = 16_384;

/// Where the two regions for long states begin.
const REGIONS_BASE: u64 = 16_384;

/// The length of a region: room for `PERMITS_MAX` holders with the longest infos.
const REGION_BYTES: u64 = 8 * 1024 * 1024;

/// How old a half-made file has to be before it is taken for a leftover.
const LEFTOVER_MIN_AGE_S: i64 = 3_600;

/// How often a record that is removed again and again is created.
const CREATE_TRIES_MAX: u32 = 100;

/// Whether an operation may wait and sync, or has to give up where it would.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// On a thread that must not block: page cache only.
    Inline,
    /// On a thread that may.
    Patient,
}

/// Why an operation stopped.
#[derive(Debug)]
pub(crate) enum Halt {
    /// It would have to wait. Nothing was done; do it again with [`Pace::Patient`].
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
    #[cfg(test)]
    pub(crate) faults: faults::Faults,
}

/// A record, read, whose kernel lock is held until this is dropped.
#[derive(Debug)]
pub(crate) struct Record<'a> {
    records: &'a Records,
    path: PathBuf,
    disk: Disk,
    reservation: Reservation,
    reservation_slots: slots::Record,
    state_slots: Stored,
    /// The region that the stored state lies in.
    region: Option<u64>,
    /// The reservation is of another boot.
    stale: bool,
    /// What is to be changed, and then [stored](Self::store).
    pub(crate) state: State,
}

/// What the state's slots hold.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Body {
    State(State),
    Elsewhere(Elsewhere),
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum BodyRef<'a> {
    State(&'a State),
}

/// Where a state is that does not fit in its slots.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Elsewhere {
    region: u64,
    bytes: u64,
    sha256: String,
}

/// The file of a record.
#[derive(Debug)]
struct Disk {
    file: File,
    #[cfg(test)]
    faults: faults::Faults,
}

impl Medium for Disk {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        Medium::read_at(&self.file, buffer, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        #[cfg(test)]
        self.faults.strike(&self.file, bytes, offset)?;
        Medium::write_at(&self.file, bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        #[cfg(test)]
        self.faults.strike_sync()?;
        Medium::sync(&self.file)
    }
}

/// Both pairs of a record, read at one go.
struct Image(Vec<u8>);

impl Image {
    fn read(disk: &Disk) -> io::Result<Self> {
        let mut bytes = vec![0; IMAGE_BYTES];
        let filled = disk.read_at(&mut bytes, 0)?;
        bytes.truncate(filled);
        Ok(Self(bytes))
    }
}

impl Medium for Image {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let mut rest = self.0.get(start..).unwrap_or_default();
        io::Read::read(&mut rest, buffer)
    }

    fn write_at(&self, _: &[u8], _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn sync(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Records {
    pub(crate) fn new(root: Root, host: Host) -> Self {
        let dir = root.locks_dir();
        Self {
            root,
            host,
            dir,
            #[cfg(test)]
            faults: faults::Faults::default(),
        }
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
    pub(crate) fn open(&self, name: &LockName, pace: Pace) -> Result<Option<Record<'_>>, Halt> {
        let path = self.path(name);
        let Some(file) = self.open_locked(&path, pace)? else {
            // Only a store that still is the one we opened can say so.
            self.root.check_same()?;
            return Ok(None);
        };
        self.root.check_same()?;
        Ok(Some(self.read(name, path, file)?))
    }

    /// Opens, locks and reads a record, which is created where there is none.
    pub(crate) fn open_or_create(&self, name: &LockName, pace: Pace) -> Result<Record<'_>, Halt> {
        for _ in 0..CREATE_TRIES_MAX {
            if let Some(record) = self.open(name, pace)? {
                return Ok(record);
            }
            if pace == Pace::Inline {
                return Err(Halt::WouldWait);
            }
            let mut floor = self.root.lock_floor()?;
            let image = self.fresh(name, &mut floor)?;
            safe::create_whole(&self.path(name), &image)?;
        }
        Err(
            Error::unavailable("a record is removed again and again; something else deletes it")
                .with("path", safe::shown(&self.path(name)))
                .into(),
        )
    }

    /// Writes a damaged record anew: without holders, above `least`, above the store's floor, and
    /// so above every token that was ever told. Leaves one that is not damaged as it is.
    pub(crate) fn mend(&self, name: &LockName, least: FencingToken) -> Result<()> {
        let path = self.path(name);
        // The lock keeps out whoever opened the damaged file before it is replaced. A planted
        // symlink, pipe or directory cannot be locked, and nobody is granted anything on it.
        let _lock = safe::open_locked(&path, Opening::OWN, Sharing::Exclusive, LOCK_WAIT_MAX)
            .or_else(|e| {
                if e.kind() == ErrorKind::Corrupt {
                    Ok(None)
                } else {
                    Err(e)
                }
            })?;
        let mut floor = self.root.lock_floor()?;
        // Looked at again under the floor's lock, which two that mend at once cannot both hold.
        let damaged = match safe::open(&path, Opening::OWN) {
            Ok(None) => false,
            Ok(Some(file)) => self
                .read(name, path.clone(), file)
                .is_err_and(|e| e.kind() == ErrorKind::Corrupt),
            Err(e) => e.kind() == ErrorKind::Corrupt,
        };
        if damaged {
            check_jump(FencingToken::new(floor.get()).ok(), least, unix_micros())?;
            floor.raise(least.get())?;
            replace_whole(&path, &self.fresh(name, &mut floor)?)?;
        }
        Ok(())
    }

    /// The content of a new record, with a first reservation above the floor, which then covers it.
    fn fresh(&self, name: &LockName, floor: &mut Floor) -> Result<Vec<u8>> {
        let last = floor.get();
        let now = unix_micros();
        let mut state = State::new(name, &self.host, last, now);
        let reserved = last
            .saturating_add(state.take_step(&self.host))
            .min(FencingToken::MAX.get());
        floor.raise(reserved)?;
        let reservation = Reservation {
            name: name.as_str().to_owned(),
            boot: self.host.boot.clone(),
            reserved,
            made_unix_us: now,
        };
        let mut image = RESERVATION.image(&encode(&reservation)?)?;
        image.append(&mut STATE.image(&encode(&BodyRef::State(&state))?)?);
        Ok(image)
    }

    fn open_locked(&self, path: &Path, pace: Pace) -> Result<Option<File>, Halt> {
        if pace == Pace::Patient {
            return Ok(safe::open_locked(
                path,
                Opening::OWN,
                Sharing::Exclusive,
                LOCK_WAIT_MAX,
            )?);
        }
        let Some(file) = safe::open(path, Opening::OWN)? else {
            return Ok(None);
        };
        match file.try_lock() {
            Ok(()) if safe::is_still(&file, path)? => Ok(Some(file)),
            Ok(()) | Err(TryLockError::WouldBlock) => Err(Halt::WouldWait),
            Err(TryLockError::Error(_)) => Err(Halt::WouldWait),
        }
    }

    fn read(&self, name: &LockName, path: PathBuf, file: File) -> Result<Record<'_>> {
        let disk = Disk {
            file,
            #[cfg(test)]
            faults: self.faults.clone(),
        };
        let image = Image::read(&disk).map_err(|e| read_error(e, &path))?;
        if image.0.len() < IMAGE_BYTES {
            return Err(damaged(&path, "the record was cut short")
                .with("bytes", image.0.len())
                .with("expected_bytes", IMAGE_BYTES));
        }
        let reservation_slots = read_pair(RESERVATION, &image, &path, "reservation")?;
        let reservation: Reservation = parse(&reservation_slots.payload, &path)?;
        if !reservation.is_sound(name) {
            return Err(damaged(
                &path,
                "the record is of another lock, or its reservation makes no sense",
            ));
        }
        if reservation.boot.is_empty() == self.host.knows_boot() {
            return Err(Error::unsupported(
                "the record was written where the boot id can be read and is used where it cannot, or the other way round; mount /proc for all users of the store",
            )
            .with("path", safe::shown(&path)));
        }
        let stale = reservation.boot != self.host.boot;
        let mut record = Record {
            records: self,
            state: State::new(
                name,
                &self.host,
                reservation.reserved,
                reservation.made_unix_us,
            ),
            path,
            disk,
            reservation,
            reservation_slots,
            state_slots: Stored::Empty,
            region: None,
            stale,
        };
        if stale {
            record.state.used_unix_us = record.last_use(&image);
        } else {
            record.read_state(name, &image)?;
        }
        Ok(record)
    }
}

impl Record<'_> {
    /// Makes sure that `token` is reserved, durably: after this it may be granted.
    ///
    /// # Errors
    /// `WouldWait` where that takes a sync, and before anything is written.
    pub(crate) fn reserve(&mut self, token: FencingToken, pace: Pace) -> Result<(), Halt> {
        let covered = token.get() <= self.reservation.reserved;
        if covered && !self.stale && self.reservation_slots.whole {
            return Ok(());
        }
        if pace == Pace::Inline {
            return Err(Halt::WouldWait);
        }
        if self.stale {
            // See the module's documentation: a state of this boot comes first.
            let last = self.reservation.reserved;
            let used = self.state.used_unix_us;
            let fresh = State::new(&self.name()?, &self.records.host, last, used);
            self.write_state(&fresh)?;
        }
        // Written anew rather than healed: a sync that failed before may have dropped what it
        // could not write, and only a new write brings it back.
        let step = self.state.take_step(&self.records.host);
        let reserved = token
            .get()
            .saturating_add(step.saturating_sub(1))
            .min(FencingToken::MAX.get())
            .max(self.reservation.reserved);
        self.records.root.lock_floor()?.raise(reserved)?;
        let next = Reservation {
            boot: self.records.host.boot.clone(),
            reserved,
            made_unix_us: unix_micros(),
            name: self.reservation.name.clone(),
        };
        let last = Stored::Record(self.reservation_slots.clone());
        self.reservation_slots = RESERVATION
            .write(&self.disk, &last, encode(&next)?, Sync::Data)
            .map_err(|e| self.at(e))?;
        self.reservation = next;
        self.stale = false;
        Ok(())
    }

    /// Stores the state. Reserve its last token first.
    ///
    /// # Errors
    /// `Unavailable` where nothing was stored, `Indeterminate` where it may have been.
    pub(crate) fn store(&mut self) -> Result<()> {
        let mut state = self.state.clone();
        state.used_unix_us = unix_micros();
        let before = generation(&self.state_slots);
        let written = self.write_state(&state);
        if written.is_err() {
            // The first slot may have been written and the second not: then a read finds it.
            let found = STATE.read(&self.disk).map(|found| generation(&found));
            if !found.is_ok_and(|found| found == before) {
                return written.map_err(|e| e.into_kind(ErrorKind::Indeterminate));
            }
        }
        written?;
        self.state = state;
        Ok(())
    }

    /// What changes whenever the record does.
    pub(crate) fn version(&self) -> Result<(u64, u64)> {
        let inode = safe::stat(&self.disk.file, &self.path)?.ino();
        Ok((inode, generation(&self.state_slots)))
    }

    /// Removes the record, whose lock is held: whoever waits for it finds another file or none.
    pub(crate) fn remove(self) -> Result<()> {
        // Raised before each reservation; raised again, since what follows relies on it.
        self.records
            .root
            .lock_floor()?
            .raise(self.reservation.reserved)?;
        std::fs::remove_file(&self.path)
            .map_err(|e| safe::io_error(e, "an idle record cannot be removed", &self.path))
    }

    fn name(&self) -> Result<LockName> {
        LockName::new(&self.reservation.name)
    }

    fn read_state(&mut self, name: &LockName, image: &Image) -> Result<()> {
        let found = read_pair(STATE, image, &self.path, "state")?;
        let (state, region) = match parse(&found.payload, &self.path)? {
            Body::State(state) => (state, None),
            Body::Elsewhere(elsewhere) => {
                let json = self.read_region(&elsewhere)?;
                (parse(&json, &self.path)?, Some(elsewhere.region))
            }
        };
        let of_this_boot = state.boot == self.records.host.boot;
        if !of_this_boot || !state.is_sound(name) || state.last > self.reservation.reserved {
            return Err(damaged(&self.path, "the record's state makes no sense"));
        }
        self.state_slots = Stored::Record(found);
        self.state = state;
        self.region = region;
        Ok(())
    }

    fn read_region(&self, elsewhere: &Elsewhere) -> Result<Vec<u8>> {
        let broken = || damaged(&self.path, "the record's list of holders is damaged");
        if elsewhere.region > 1 || elsewhere.bytes > REGION_BYTES {
            return Err(broken());
        }
        let mut json = vec![0; usize::try_from(elsewhere.bytes).unwrap_or(usize::MAX)];
        let filled = Medium::read_at(&self.disk, &mut json, region_offset(elsewhere.region))
            .map_err(|e| read_error(e, &self.path))?;
        json.truncate(filled);
        if hex(&Sha256::digest(&json)) != elsewhere.sha256 {
            return Err(broken());
        }
        Ok(json)
    }

    /// When a record of an earlier boot was used last, as far as can be told.
    fn last_use(&self, image: &Image) -> u64 {
        let made = self.reservation.made_unix_us;
        match STATE.read(image) {
            Ok(Stored::Record(found)) => match serde_json::from_slice(&found.payload) {
                Ok(Body::State(state)) => state.used_unix_us.max(made),
                _ => made,
            },
            _ => made,
        }
    }

    fn write_state(&mut self, state: &State) -> Result<()> {
        let mut payload = encode(&BodyRef::State(state))?;
        let mut region = None;
        if payload.len() > STATE.payload_max_bytes() {
            // The region that is not in use: until the slots name it, the old state stays whole.
            let free = self.region.map_or(0, |used| 1 - used.min(1));
            let json = encode(state)?;
            let bytes = u64::try_from(json.len()).unwrap_or(u64::MAX);
            if bytes > REGION_BYTES {
                return Err(Error::invalid(
                    "the lock has more holders, or longer labels, than its record can hold",
                )
                .with("bytes", bytes)
                .with("limit_bytes", REGION_BYTES));
            }
            self.disk
                .write_at(&json, region_offset(free))
                .map_err(|e| safe::io_error(e, "a record cannot be written", &self.path))?;
            payload = encode(&Body::Elsewhere(Elsewhere {
                region: free,
                bytes,
                sha256: hex(&Sha256::digest(&json)),
            }))?;
            region = Some(free);
        }
        let written = STATE
            .write(&self.disk, &self.state_slots, payload, Sync::None)
            .map_err(|e| self.at(e))?;
        self.state_slots = Stored::Record(written);
        self.region = region;
        Ok(())
    }

    fn at(&self, error: Error) -> Error {
        error.with("path", safe::shown(&self.path))
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
        if let Ok(Stored::Record(found)) = RESERVATION.read(&file)
            && let Ok(reservation) = serde_json::from_slice::<Reservation>(&found.payload)
        {
            highest = reservation
                .reserved
                .min(FencingToken::MAX.get())
                .max(highest);
        }
    }
    Ok(highest)
}

/// The lock name that a record is of, for a file name that does not tell.
pub(crate) fn name_within(path: &Path) -> Result<Option<LockName>> {
    let Some(file) = safe::open_locked(path, Opening::OWN, Sharing::Shared, LOCK_WAIT_MAX)? else {
        return Ok(None);
    };
    let found = read_pair(RESERVATION, &file, path, "reservation")?;
    let reservation: Reservation = parse(&found.payload, path)?;
    LockName::new(&reservation.name).map(Some)
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
            name.starts_with(b".") && (name.ends_with(b".new") || name.ends_with(b".mended"))
        });
        if is_temporary
            && let Ok(found_there) = std::fs::symlink_metadata(&path)
            && now_s.saturating_sub(found_there.mtime()) > LEFTOVER_MIN_AGE_S
        {
            found.push(path);
        }
    }
    Ok(found)
}

fn read_pair(
    pair: Slots,
    disk: &impl Medium,
    path: &Path,
    what: &'static str,
) -> Result<slots::Record> {
    match pair.read(disk) {
        Ok(Stored::Record(record)) => Ok(record),
        Ok(Stored::Empty) => {
            Err(damaged(path, "a part of the record was emptied").with("part", what))
        }
        Err(e) if e.kind() == ErrorKind::Corrupt => Err(damaged(path, "the record is damaged")
            .with("part", what)
            .with_source(e)),
        Err(e) => Err(e.with("path", safe::shown(path))),
    }
}

fn parse<T: for<'de> Deserialize<'de>>(json: &[u8], path: &Path) -> Result<T> {
    serde_json::from_slice(json)
        .map_err(|e| damaged(path, "the record is not one of this version").with_source(e))
}

fn read_error(error: io::Error, path: &Path) -> Error {
    safe::io_error(error, "a record cannot be read", path)
}

fn damaged(path: &Path, what: &str) -> Error {
    Error::corrupt(format!(
        "{what}; nothing is granted until it is mended (`fencelock repair`)"
    ))
    .with("path", safe::shown(path))
}

fn generation(stored: &Stored) -> u64 {
    match stored {
        Stored::Empty => 0,
        Stored::Record(record) => record.generation,
    }
}

fn region_offset(region: u64) -> u64 {
    REGIONS_BASE.saturating_add(region.saturating_mul(REGION_BYTES))
}

/// A disk that fails on request.
#[cfg(test)]
pub(crate) mod faults {
    use std::fs::File;
    use std::io;
    use std::os::unix::fs::FileExt as _;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Fails writes and syncs from the n-th on; a failing write leaves half of its bytes.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct Faults {
        /// Operations until the disk is full; 0 for never.
        countdown: Arc<AtomicU64>,
        count: Arc<AtomicU64>,
    }

    impl Faults {
        pub(crate) fn fail_from(&self, nth: u64) {
            self.countdown.store(nth, Ordering::SeqCst);
            self.count.store(0, Ordering::SeqCst);
        }

        pub(crate) fn heal(&self) {
            self.fail_from(0);
        }

        pub(crate) fn struck(&self) -> bool {
            let limit = self.countdown.load(Ordering::SeqCst);
            limit > 0 && self.count.load(Ordering::SeqCst) >= limit
        }

        pub(super) fn strike(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
            self.strike_sync().inspect_err(|_| {
                file.write_all_at(&bytes[..bytes.len() / 2], offset)
                    .unwrap();
            })
        }

        pub(super) fn strike_sync(&self) -> io::Result<()> {
            self.count.fetch_add(1, Ordering::SeqCst);
            if self.struck() {
                return Err(rustix::io::Errno::NOSPC.into());
            }
            Ok(())
        }
    }
}
