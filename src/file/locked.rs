//! One record, locked: read, changed, and written in place.
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
//!
//! # How a record begins
//!
//! It is created with a reservation of 0, which means that no token was told. Only when it has its
//! name, and under its lock, does it take its first reservation from the store's floor. Taken before
//! that, a creator that was stopped in between could give the name to numbers that a record made,
//! used and pruned meanwhile had gone past (L10).

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::clock::{Tick, unix_micros};
use crate::error::{Error, ErrorKind, Result};
use crate::fence::hex;
use crate::file::live::is_locked;
use crate::file::record::{Entry, Reservation, State, encode};
use crate::file::records::{Halt, Pace, Records};
use crate::file::remedy::damaged_record;
use crate::file::safe;
use crate::file::slots::{self, Medium, Slots, Stored, Sync};
use crate::name::LockName;
use crate::token::FencingToken;

const RESERVATION: Slots = Slots::new(*b"FLresrv1", 0, 4096);
const STATE: Slots = Slots::new(*b"FLstate1", 8_192, 4096);

/// The length of both pairs, and so the least length of a record.
const IMAGE_BYTES: usize = 16_384;

/// Where the two regions for long states begin.
const REGIONS_BASE: u64 = 16_384;

/// The length of a region: room for `PERMITS_MAX` holders with the longest infos.
pub(crate) const REGION_BYTES: u64 = 8 * 1024 * 1024;

/// A record, read, whose kernel lock is held until this is dropped.
#[derive(Debug)]
pub(crate) struct LockedRecord<'a> {
    records: &'a Records,
    path: PathBuf,
    file: File,
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

/// Both pairs of a record, read at one go.
struct Image(Vec<u8>);

impl Image {
    fn read(file: &File) -> io::Result<Self> {
        let mut bytes = vec![0; IMAGE_BYTES];
        let filled = Medium::read_at(file, &mut bytes, 0)?;
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

impl<'a> LockedRecord<'a> {
    /// Reads the record of `name` from a file whose lock is held.
    pub(crate) fn read(
        records: &'a Records,
        name: &LockName,
        path: PathBuf,
        file: File,
    ) -> Result<Self> {
        let image = Image::read(&file).map_err(|e| read_error(e, &path))?;
        if image.0.len() < IMAGE_BYTES {
            return Err(
                damaged_record(Some(name), &path, "the record was cut short")
                    .with("bytes", image.0.len())
                    .with("expected_bytes", IMAGE_BYTES),
            );
        }
        let site = Site { name, path: &path };
        let reservation_slots = read_pair(RESERVATION, &image, site, "reservation")?;
        let reservation: Reservation = parse(&reservation_slots.payload, site)?;
        if !reservation.is_sound(name) {
            return Err(
                site.damaged("the record is of another lock, or its reservation makes no sense")
            );
        }
        if reservation.boot.is_empty() == records.host.knows_boot() {
            return Err(Error::unsupported(
                "the record was written where the boot id can be read and is used where it cannot, or the other way round; mount /proc for all users of the store",
            )
            .with("path", safe::shown(&path)));
        }
        let stale = reservation.boot != records.host.boot;
        let mut record = Self {
            records,
            state: State::new(
                name,
                &records.host,
                reservation.reserved,
                reservation.made_unix_us,
            ),
            path,
            file,
            reservation,
            reservation_slots,
            state_slots: Stored::Empty,
            region: None,
            stale,
        };
        if !record.has_begun() {
            // Whatever a process killed in `begin` left in the state, nothing was told.
        } else if stale {
            record.state.used_unix_us = record.look_back(&image)?;
        } else {
            record.read_state(name, &image)?;
        }
        Ok(record)
    }

    /// Gives a new record its first reservation, above every token that the store ever told.
    ///
    /// # Errors
    /// `WouldWait` where the record is new and that is not allowed.
    pub(crate) fn begin(&mut self, pace: Pace) -> Result<(), Halt> {
        if self.has_begun() {
            return Ok(());
        }
        let until = pace.until()?;
        let now = unix_micros();
        let mut state = State::new(&self.name()?, &self.records.host, 0, now);
        let step = state.take_step(&self.records.host);
        // Unlocked before anything of this record is written.
        (state.last, self.reservation.reserved) = self.records.root.take(step, until)?;
        self.reservation.boot.clone_from(&self.records.host.boot);
        self.reservation.made_unix_us = now;
        let begun = self
            .write_state(&state)
            .and_then(|()| self.write_reservation());
        if let Err(e) = begun {
            self.reservation.reserved = 0;
            return Err(e.into());
        }
        self.state = state;
        self.stale = false;
        Ok(())
    }

    /// Makes sure that `token` is reserved, durably: after this it may be granted.
    ///
    /// # Errors
    /// `WouldWait` where that takes a sync, and before anything is written.
    pub(crate) fn reserve(&mut self, token: FencingToken, pace: Pace) -> Result<(), Halt> {
        let covered = token.get() <= self.reservation.reserved;
        if covered && !self.stale && self.reservation_slots.whole {
            return Ok(());
        }
        let until = pace.until()?;
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
        self.records.root.raise(reserved, until)?;
        let next = Reservation {
            boot: self.records.host.boot.clone(),
            reserved,
            made_unix_us: unix_micros(),
            name: self.reservation.name.clone(),
        };
        let last = std::mem::replace(&mut self.reservation, next);
        if let Err(e) = self.write_reservation() {
            self.reservation = last;
            return Err(e.into());
        }
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
            let found = STATE.read(&self.file).map(|found| generation(&found));
            if !found.is_ok_and(|found| found == before) {
                return written.map_err(|e| e.into_kind(ErrorKind::Indeterminate));
            }
        }
        written?;
        self.state = state;
        Ok(())
    }

    /// What changes whenever the record does.
    pub(crate) fn version(&self) -> (u64, u64) {
        // A record that was removed and made again begins with a larger token.
        (self.state.last, generation(&self.state_slots))
    }

    /// Removes the record, whose lock is held: whoever waits for it finds another file or none.
    pub(crate) fn remove(self, until: Tick) -> Result<()> {
        // Raised before each reservation; raised again, since what follows relies on it.
        self.records.root.raise(self.reservation.reserved, until)?;
        std::fs::remove_file(&self.path)
            .map_err(|e| safe::io_error(e, "an idle record cannot be removed", &self.path))
    }

    fn has_begun(&self) -> bool {
        self.reservation.reserved > 0
    }

    fn write_reservation(&mut self) -> Result<()> {
        let last = Stored::Record(self.reservation_slots.clone());
        let payload = encode(&self.reservation)?;
        self.reservation_slots = RESERVATION
            .write(&self.file, &last, payload, Sync::Data)
            .map_err(|e| self.at(e))?;
        Ok(())
    }

    fn name(&self) -> Result<LockName> {
        LockName::new(&self.reservation.name)
    }

    fn read_state(&mut self, name: &LockName, image: &Image) -> Result<()> {
        let path = self.path.clone();
        let site = Site { name, path: &path };
        let found = read_pair(STATE, image, site, "state")?;
        let (state, region) = match parse(&found.payload, site)? {
            Body::State(state) => (state, None),
            Body::Elsewhere(elsewhere) => {
                let json = self.read_region(&elsewhere, site)?;
                (parse(&json, site)?, Some(elsewhere.region))
            }
        };
        let of_this_boot = state.boot == self.records.host.boot;
        if !of_this_boot || !state.is_sound(name) || state.last > self.reservation.reserved {
            return Err(site.damaged("the record's state makes no sense"));
        }
        self.state_slots = Stored::Record(found);
        self.state = state;
        self.region = region;
        Ok(())
    }

    fn read_region(&self, elsewhere: &Elsewhere, site: Site<'_>) -> Result<Vec<u8>> {
        let broken = || site.damaged("the record's list of holders is damaged");
        if elsewhere.region > 1 || elsewhere.bytes > REGION_BYTES {
            return Err(broken());
        }
        let mut json = vec![0; usize::try_from(elsewhere.bytes).unwrap_or(usize::MAX)];
        let filled = Medium::read_at(&self.file, &mut json, region_offset(elsewhere.region))
            .map_err(|e| read_error(e, site.path))?;
        json.truncate(filled);
        if hex(&Sha256::digest(&json)) != elsewhere.sha256 {
            return Err(broken());
        }
        Ok(json)
    }

    /// When a record of an earlier boot was used last, as far as can be told.
    ///
    /// # Errors
    /// `Unsupported` where one of its holders lives: then there was no reboot. Some containers are
    /// given a boot id of their own (systemd-nspawn(1) does so), and those who differ on the boot
    /// cannot share a store.
    fn look_back(&self, image: &Image) -> Result<u64> {
        let made = self.reservation.made_unix_us;
        let name = self.name()?;
        let site = Site {
            name: &name,
            path: &self.path,
        };
        // What a power loss did to the state does not matter.
        let Ok(Stored::Record(found)) = STATE.read(image) else {
            return Ok(made);
        };
        let state = match serde_json::from_slice(&found.payload) {
            Ok(Body::State(state)) => Some(state),
            Ok(Body::Elsewhere(elsewhere)) => self
                .read_region(&elsewhere, site)
                .ok()
                .and_then(|json| serde_json::from_slice(&json).ok()),
            Err(_) => None,
        };
        let Some(state) = state else {
            return Ok(made);
        };
        if state.is_sound(&name) {
            for id in state.holders.iter().filter_map(Entry::live) {
                if is_locked(&self.records.root.live_dir(), id)? {
                    return Err(Error::unsupported(
                        "the record is of another boot, and yet its holder lives; use one store only where all processes see the same boot id",
                    )
                    .with("path", safe::shown(&self.path)));
                }
            }
        }
        Ok(state.used_unix_us.max(made))
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
            Medium::write_at(&self.file, &json, region_offset(free))
                .map_err(|e| safe::io_error(e, "a record cannot be written", &self.path))?;
            payload = encode(&Body::Elsewhere(Elsewhere {
                region: free,
                bytes,
                sha256: hex(&Sha256::digest(&json)),
            }))?;
            region = Some(free);
        }
        let written = STATE
            .write(&self.file, &self.state_slots, payload, Sync::None)
            .map_err(|e| self.at(e))?;
        self.state_slots = Stored::Record(written);
        self.region = region;
        Ok(())
    }

    fn at(&self, error: Error) -> Error {
        error.with("path", safe::shown(&self.path))
    }
}

/// The content of a new record.
pub(crate) fn image(reservation: &Reservation, state: &State) -> Result<Vec<u8>> {
    let mut image = RESERVATION.image(&encode(reservation)?)?;
    image.append(&mut STATE.image(&encode(&BodyRef::State(state))?)?);
    Ok(image)
}

/// The reservation of a record that is not locked; `None` where it cannot be read.
pub(crate) fn reservation_in(file: &File) -> Option<Reservation> {
    match RESERVATION.read(file) {
        Ok(Stored::Record(found)) => serde_json::from_slice(&found.payload).ok(),
        _ => None,
    }
}

/// The name in a record whose file is called `key`, though one of its parts may be damaged. The key
/// is the name's hash, so that what is found need not be trusted, nor the record be locked.
pub(crate) fn name_in(file: &File, key: &str) -> Option<LockName> {
    let of_reservation = reservation_in(file).map(|reservation| reservation.name);
    let of_state = match STATE.read(file) {
        Ok(Stored::Record(found)) => match serde_json::from_slice(&found.payload) {
            Ok(Body::State(state)) => Some(state.name),
            _ => None,
        },
        _ => None,
    };
    [of_reservation, of_state]
        .into_iter()
        .flatten()
        .filter_map(|name| LockName::new(&name).ok())
        .find(|name| name.encoded() == key)
}

/// Which record is being read, for messages.
#[derive(Clone, Copy)]
struct Site<'a> {
    name: &'a LockName,
    path: &'a Path,
}

impl Site<'_> {
    fn damaged(self, what: &str) -> Error {
        damaged_record(Some(self.name), self.path, what)
    }
}

fn read_pair(
    pair: Slots,
    disk: &impl Medium,
    site: Site<'_>,
    what: &'static str,
) -> Result<slots::Record> {
    match pair.read(disk) {
        Ok(Stored::Record(record)) => Ok(record),
        Ok(Stored::Empty) => Err(site
            .damaged("a part of the record was emptied")
            .with("part", what)),
        Err(e) if e.kind() == ErrorKind::Corrupt => Err(site
            .damaged("the record is damaged")
            .with("part", what)
            .with_source(e)),
        Err(e) => Err(e.with("path", safe::shown(site.path))),
    }
}

fn parse<T: for<'de> Deserialize<'de>>(json: &[u8], site: Site<'_>) -> Result<T> {
    serde_json::from_slice(json).map_err(|e| {
        site.damaged("the record is not one of this version")
            .with_source(e)
    })
}

fn read_error(error: io::Error, path: &Path) -> Error {
    safe::io_error(error, "a record cannot be read", path)
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

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;
