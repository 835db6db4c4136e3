//! A small record that is written in place and survives a torn write: two checksummed slots.
//!
//! # Why two slots hold the same
//!
//! With two slots written in turn, the older one is always a generation behind. If the newer one
//! is then found damaged, nobody can tell a torn write that was never acknowledged (going back is
//! right) from later damage to one that was (going back breaks S1 and L10). So each write fills
//! **both**: first the slot that is not the last write's first one, then a sync, then the other.
//! The slot that generation `g` goes to first is `g % 2`, its *home*.
//!
//! | found | how it came about | answer |
//! |---|---|---|
//! | two good slots, same generation | a finished write | it, `whole`: what was to be synced is durable |
//! | two good slots, `g` at home and `g - 1` | a crash between the two, before or after the sync | `g`, not whole |
//! | `g` at home, the other damaged | the mirror of `g` was torn or damaged; or `g + 1` was torn, and never acknowledged | `g`, not whole |
//! | `g` not at home, its home damaged | `g` is in the mirror, so it was written: later damage | `g`, not whole |
//! | both damaged, or good ones that no order of writes explains | more than one fault | `Corrupt` |
//! | no byte but zero | never written, or emptied by hand | [`Stored::Empty`] |
//!
//! So any one fault, a crash or damage to one slot, gives the newest acknowledged content. Going
//! back silently takes two: power is lost after the sync and before the mirror reaches the disk,
//! and the home slot then decays before anybody reads and [heals](Slots::heal) the pair.
//!
//! What is not whole may not be durable either: whoever is about to act on it heals it first.
//!
//! # Unsynced writes
//!
//! With [`Sync::None`] the content survives the death of any process, since the kernel has it, and
//! nothing more: after a power loss the pair may be older, or `Corrupt`. What must survive that
//! lives in a pair of its own, a multiple of 4096 bytes away, whose writes are all synced.
//!
//! The caller holds the file's kernel lock: shared to read, exclusive to write or heal.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result};
use crate::file::{faults, safe};

/// Magic (8), generation (8), payload length (4), all little-endian.
const HEADER_BYTES: usize = 20;
const SHA256_BYTES: usize = 32;

/// Bytes of a slot that are not payload.
pub(crate) const OVERHEAD_BYTES: usize = HEADER_BYTES + SHA256_BYTES;

/// What a pair is written to: a file, or in tests one that fails.
pub(crate) trait Medium {
    /// Reads at most `buffer.len()` bytes at `offset`; fewer only at the end.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes all bytes at `offset`.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Makes the content durable: fdatasync(2).
    fn sync(&self) -> io::Result<()>;
}

impl Medium for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut filled = 0;
        while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            let at = offset.saturating_add(u64::try_from(filled).unwrap_or(u64::MAX));
            match std::os::unix::fs::FileExt::read_at(self, rest, at) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(filled)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if let Err(error) = faults::step("write a slot") {
            // A failing write may have begun.
            self.write_all_at(bytes.get(..bytes.len() / 2).unwrap_or_default(), offset)?;
            return Err(error);
        }
        self.write_all_at(bytes, offset)
    }

    fn sync(&self) -> io::Result<()> {
        faults::step("sync the slots")?;
        self.sync_data()
    }
}

/// Whether a write is made durable before it returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sync {
    /// It survives the death of any process.
    None,
    /// It survives power loss.
    Data,
}

/// What a pair holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// Nothing but zeros: never written, or emptied. Files made by
    /// [`create_whole`](crate::file::safe::create_whole) with [`Slots::image`] are never so unless
    /// somebody truncated them.
    Empty,
    /// A record.
    Record(Record),
}

/// The newest content of a pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Counts the writes, from 1.
    pub(crate) generation: u64,
    /// The content.
    pub(crate) payload: Vec<u8>,
    /// Both slots hold it. Where not, [heal](Slots::heal) the pair before acting on it.
    pub(crate) whole: bool,
    /// The slots that do not hold it.
    missing: [bool; 2],
}

/// Where in a file a pair lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slots {
    magic: [u8; 8],
    base: u64,
    stride_bytes: u32,
}

impl Slots {
    /// Slots of `stride_bytes` each at `base`. The magic tells formats apart.
    pub(crate) const fn new(magic: [u8; 8], base: u64, stride_bytes: u32) -> Self {
        Self {
            magic,
            base,
            stride_bytes,
        }
    }

    /// The longest payload.
    pub(crate) fn payload_max_bytes(&self) -> usize {
        self.stride().saturating_sub(OVERHEAD_BYTES)
    }

    /// The bytes of a fresh pair that holds `payload` as generation 1 in both slots: what belongs
    /// at `base` of a new file. All of its blocks are written, so that later writes in place need
    /// no new space.
    ///
    /// # Errors
    /// `Invalid` where the payload is too long.
    pub(crate) fn image(&self, payload: &[u8]) -> Result<Vec<u8>> {
        let mut slot = self.encode(1, payload)?;
        slot.resize(self.stride(), 0);
        let mut both = slot.clone();
        both.append(&mut slot);
        Ok(both)
    }

    /// Reads the newest content. Changes nothing.
    ///
    /// # Errors
    /// `Corrupt` as the table above says; `Unavailable` where the medium cannot be read. The
    /// caller adds the path.
    pub(crate) fn read(&self, medium: &impl Medium) -> Result<Stored> {
        let first = self.read_slot(medium, 0)?;
        let second = self.read_slot(medium, 1)?;
        let (newest, missing) = match (first, second) {
            (Slot::Zero, Slot::Zero) => return Ok(Stored::Empty),
            (Slot::Good(a, p), Slot::Good(b, q)) if a == b && p == q => ((a, p), [false, false]),
            (Slot::Good(a, p), Slot::Good(b, _)) if a == b.saturating_add(1) && home(a) == 0 => {
                ((a, p), [false, true])
            }
            (Slot::Good(a, _), Slot::Good(b, q)) if b == a.saturating_add(1) && home(b) == 1 => {
                ((b, q), [true, false])
            }
            (Slot::Good(..), Slot::Good(..)) => {
                return Err(Error::corrupt(
                    "two generations of a record are there that no order of writes explains",
                ));
            }
            (Slot::Good(a, p), _) => ((a, p), [false, true]),
            (_, Slot::Good(b, q)) => ((b, q), [true, false]),
            _ => return Err(Error::corrupt("both copies of a record are damaged")),
        };
        let (generation, payload) = newest;
        Ok(Stored::Record(Record {
            generation,
            payload,
            whole: missing == [false, false],
            missing,
        }))
    }

    /// Makes both slots hold `record`, synced. Does nothing where they do.
    ///
    /// # Errors
    /// Where the medium fails; the record is still what a read finds.
    pub(crate) fn heal(&self, medium: &impl Medium, record: &mut Record) -> Result<()> {
        if record.whole {
            return Ok(());
        }
        let bytes = self.encode(record.generation, &record.payload)?;
        for (index, missing) in (0_u64..).zip(record.missing) {
            if missing {
                medium
                    .write_at(&bytes, self.offset(index))
                    .map_err(write_error)?;
            }
        }
        medium.sync().map_err(write_error)?;
        record.whole = true;
        record.missing = [false, false];
        Ok(())
    }

    /// Replaces `last`, which was read or written under the lock that is still held, by `payload`,
    /// and returns the new record.
    ///
    /// # Errors
    /// `Invalid` where the payload is too long, and nothing was tried. Else the medium failed: a
    /// read then finds either what was there before or the new content, never anything else; with
    /// [`Sync::Data`] the new content may not be durable, and such a read finds it not whole.
    pub(crate) fn write(
        &self,
        medium: &impl Medium,
        last: &Stored,
        payload: Vec<u8>,
        sync: Sync,
    ) -> Result<Record> {
        let before = match last {
            Stored::Empty => 0,
            Stored::Record(record) => {
                // The first slot to be written must not be the only good one.
                self.heal(medium, &mut record.clone())?;
                record.generation
            }
        };
        let generation = before
            .checked_add(1)
            .ok_or_else(|| Error::corrupt("the generations of a record are used up"))?;
        let bytes = self.encode(generation, &payload)?;
        let first = home(generation);
        medium
            .write_at(&bytes, self.offset(first))
            .map_err(write_error)?;
        if sync == Sync::Data {
            medium.sync().map_err(write_error)?;
        }
        medium
            .write_at(&bytes, self.offset(1 - first))
            .map_err(write_error)?;
        Ok(Record {
            generation,
            payload,
            whole: true,
            missing: [false, false],
        })
    }

    fn read_slot(&self, medium: &impl Medium, index: u64) -> Result<Slot> {
        let mut bytes = vec![0; self.stride()];
        let filled = medium
            .read_at(&mut bytes, self.offset(index))
            .map_err(|e| Error::unavailable("a record cannot be read").with_source(e))?;
        bytes.truncate(filled);
        Ok(self.decode(&bytes))
    }

    fn encode(&self, generation: u64, payload: &[u8]) -> Result<Vec<u8>> {
        let too_long = || {
            Error::invalid("the content of a record is too long")
                .with("bytes", payload.len())
                .with("limit_bytes", self.payload_max_bytes())
        };
        if payload.len() > self.payload_max_bytes() {
            return Err(too_long());
        }
        let length = u32::try_from(payload.len()).map_err(|_| too_long())?;
        let mut bytes = Vec::with_capacity(OVERHEAD_BYTES + payload.len());
        bytes.extend_from_slice(&self.magic);
        bytes.extend_from_slice(&generation.to_le_bytes());
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(payload);
        let sum = Sha256::digest(&bytes);
        bytes.extend_from_slice(&sum);
        Ok(bytes)
    }

    fn decode(&self, bytes: &[u8]) -> Slot {
        if bytes.iter().all(|b| *b == 0) {
            return Slot::Zero;
        }
        self.decode_good(bytes).unwrap_or(Slot::Bad)
    }

    fn decode_good(&self, bytes: &[u8]) -> Option<Slot> {
        let (magic, rest) = bytes.split_first_chunk::<8>()?;
        let (generation, rest) = rest.split_first_chunk::<8>()?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let (payload, rest) = rest.split_at_checked(length)?;
        let (sum, _) = rest.split_first_chunk::<SHA256_BYTES>()?;
        let summed = bytes.get(..HEADER_BYTES.checked_add(length)?)?;
        let generation = u64::from_le_bytes(*generation);
        let good = *magic == self.magic && generation > 0 && Sha256::digest(summed)[..] == sum[..];
        good.then(|| Slot::Good(generation, payload.to_vec()))
    }

    fn offset(&self, index: u64) -> u64 {
        self.base
            .saturating_add(index.saturating_mul(u64::from(self.stride_bytes)))
    }

    fn stride(&self) -> usize {
        usize::try_from(self.stride_bytes).unwrap_or(usize::MAX)
    }
}

/// One slot as it was found.
enum Slot {
    Zero,
    Bad,
    Good(u64, Vec<u8>),
}

/// The slot that a generation is written to first.
fn home(generation: u64) -> u64 {
    generation % 2
}

fn write_error(error: io::Error) -> Error {
    let (_, advice) = safe::explain(&error);
    Error::unavailable(format!("a record cannot be written: {advice}")).with_source(error)
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::error::ErrorKind;

    const STRIDE: u32 = 96;
    const BASE: u64 = 16;
    const SLOTS: Slots = Slots::new(*b"flktest1", BASE, STRIDE);

    /// A disk with a write cache. The cut strikes in the middle of a write or at a sync.
    #[derive(Clone, Default)]
    struct Disk {
        durable: Vec<u8>,
        /// Writes that the cache has and the platter need not have.
        pending: RefCell<Vec<(u64, Vec<u8>)>>,
        synced: RefCell<Vec<(u64, Vec<u8>)>>,
        /// Operations until the fault; the faulty write keeps this many bytes.
        fault: RefCell<Option<(usize, usize)>>,
    }

    fn patch(image: &mut Vec<u8>, at: u64, bytes: &[u8]) {
        let at = usize::try_from(at).unwrap();
        if image.len() < at + bytes.len() {
            image.resize(at + bytes.len(), 0);
        }
        image[at..at + bytes.len()].copy_from_slice(bytes);
    }

    impl Disk {
        fn holding(payload: &[u8]) -> Self {
            let mut durable = vec![0; usize::try_from(BASE).unwrap()];
            durable.extend(SLOTS.image(payload).unwrap());
            Self {
                durable,
                ..Self::default()
            }
        }

        fn platter(&self) -> Vec<u8> {
            let mut image = self.durable.clone();
            for (at, bytes) in self.synced.borrow().iter() {
                patch(&mut image, *at, bytes);
            }
            image
        }

        /// What processes see while the power stays on.
        fn cache(&self) -> Vec<u8> {
            let mut image = self.platter();
            for (at, bytes) in self.pending.borrow().iter() {
                patch(&mut image, *at, bytes);
            }
            image
        }

        /// Everything that may be there after a power loss: of each pending write nothing, a part
        /// or all, independently.
        fn after_power_loss(&self) -> Vec<Vec<u8>> {
            let mut images = vec![self.platter()];
            for (at, bytes) in self.pending.borrow().iter() {
                images = images
                    .iter()
                    .flat_map(|image| {
                        [0, 1, 9, 21, bytes.len().saturating_sub(1), bytes.len()].map(|kept| {
                            let mut next = image.clone();
                            patch(&mut next, *at, &bytes[..kept.min(bytes.len())]);
                            next
                        })
                    })
                    .collect();
            }
            images
        }

        fn strikes(&self) -> Option<usize> {
            let mut fault = self.fault.borrow_mut();
            match fault.as_mut() {
                Some((0, kept)) => Some(*kept),
                Some((left, _)) => {
                    *left -= 1;
                    None
                }
                None => None,
            }
        }
    }

    impl Medium for Disk {
        fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
            let image = self.cache();
            let rest = image.get(usize::try_from(offset).unwrap()..).unwrap_or(&[]);
            let n = rest.len().min(buffer.len());
            buffer[..n].copy_from_slice(&rest[..n]);
            Ok(n)
        }

        fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
            let strikes = self.strikes();
            let kept = strikes.unwrap_or(bytes.len()).min(bytes.len());
            self.pending
                .borrow_mut()
                .push((offset, bytes[..kept].to_vec()));
            match strikes {
                Some(_) => Err(Errno::NOSPC.into()),
                None => Ok(()),
            }
        }

        fn sync(&self) -> io::Result<()> {
            if self.strikes().is_some() {
                return Err(Errno::IO.into());
            }
            let done = std::mem::take(&mut *self.pending.borrow_mut());
            self.synced.borrow_mut().extend(done);
            Ok(())
        }
    }

    use rustix::io::Errno;

    fn of(image: Vec<u8>) -> Disk {
        Disk {
            durable: image,
            ..Disk::default()
        }
    }

    fn record(disk: &Disk) -> Record {
        match SLOTS.read(disk).unwrap() {
            Stored::Record(record) => record,
            Stored::Empty => panic!("expected a record"),
        }
    }

    fn write(disk: &Disk, payload: &[u8], sync: Sync) -> Result<Record> {
        let last = SLOTS.read(disk)?;
        SLOTS.write(disk, &last, payload.to_vec(), sync)
    }

    #[test]
    fn what_is_written_is_read_and_generations_count() {
        let disk = Disk::holding(b"one");
        assert_eq!(record(&disk).generation, 1);
        for (generation, payload) in [(2, &b"two"[..]), (3, b""), (4, &[0xff; 44])] {
            write(&disk, payload, Sync::Data).unwrap();
            let found = record(&disk);
            assert_eq!(
                (found.generation, &found.payload[..], found.whole),
                (generation, payload, true)
            );
        }
        assert_eq!(
            write(&disk, &[0; 45], Sync::Data).unwrap_err().kind(),
            ErrorKind::Invalid
        );
    }

    #[test]
    fn a_file_that_was_never_written_is_empty_and_takes_a_first_record() {
        for image in [vec![], vec![0; 7], vec![0; 500]] {
            let disk = of(image);
            assert_eq!(SLOTS.read(&disk).unwrap(), Stored::Empty);
            write(&disk, b"first", Sync::Data).unwrap();
            assert_eq!(record(&disk).payload, b"first");
        }
    }

    /// Pairs as acknowledged synced writes leave them, of both parities.
    fn acknowledged() -> impl Iterator<Item = Vec<u8>> {
        (1..=3).map(|writes| {
            let disk = Disk::holding(b"old");
            for n in 1..=writes {
                let payload = if n == writes {
                    &b"newest"[..]
                } else {
                    b"older"
                };
                write(&disk, payload, Sync::Data).unwrap();
            }
            disk.cache()
        })
    }

    #[test]
    fn a_flipped_byte_anywhere_never_brings_an_older_record_back() {
        for image in acknowledged() {
            for at in 0..image.len() {
                for flip in [0x01, 0x80, 0xff] {
                    let mut damaged = image.clone();
                    damaged[at] ^= flip;
                    assert_eq!(record(&of(damaged)).payload, b"newest", "at {at}");
                }
            }
        }
    }

    #[test]
    fn a_zeroed_or_foreign_slot_never_brings_an_older_record_back() {
        for image in acknowledged() {
            let stride = usize::try_from(STRIDE).unwrap();
            for (slot, fill) in [(0, 0), (1, 0), (0, 0xa5), (1, 0xa5)] {
                let mut damaged = image.clone();
                let at = usize::try_from(BASE).unwrap() + slot * stride;
                damaged[at..at + stride].fill(fill);
                let mut found = record(&of(damaged.clone()));
                assert_eq!((&found.payload[..], found.whole), (&b"newest"[..], false));
                let disk = of(damaged);
                SLOTS.heal(&disk, &mut found).unwrap();
                assert!(record(&disk).whole);
            }
        }
    }

    #[test]
    fn a_file_cut_short_anywhere_is_newest_or_corrupt_and_empty_only_without_a_byte_of_it() {
        for image in acknowledged() {
            for len in 0..image.len() {
                let disk = of(image[..len].to_vec());
                match SLOTS.read(&disk) {
                    Ok(Stored::Record(found)) => assert_eq!(found.payload, b"newest", "{len}"),
                    Ok(Stored::Empty) => assert!(len <= usize::try_from(BASE).unwrap(), "{len}"),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{len}"),
                }
            }
        }
    }

    #[test]
    fn damage_to_both_slots_is_corrupt() {
        for mut image in acknowledged() {
            let base = usize::try_from(BASE).unwrap();
            image[base + 10] ^= 1;
            image[base + 10 + usize::try_from(STRIDE).unwrap()] ^= 1;
            assert_eq!(
                SLOTS.read(&of(image)).unwrap_err().kind(),
                ErrorKind::Corrupt
            );
        }
    }

    #[test]
    fn slots_that_no_order_of_writes_explains_are_corrupt() {
        let slot = |generation, payload: &[u8]| {
            let mut bytes = SLOTS.encode(generation, payload).unwrap();
            bytes.resize(usize::try_from(STRIDE).unwrap(), 0);
            bytes
        };
        // Generation 3 is at home in slot 1, generation 4 in slot 0.
        for (first, second) in [
            (slot(3, b"a"), slot(3, b"b")),
            (slot(3, b"a"), slot(2, b"b")),
            (slot(5, b"a"), slot(2, b"b")),
            (slot(2, b"a"), slot(9, b"b")),
        ] {
            let image = [vec![0; 16], first, second].concat();
            assert_eq!(
                SLOTS.read(&of(image)).unwrap_err().kind(),
                ErrorKind::Corrupt
            );
        }
    }

    /// Runs three writes with a fault at each operation and each length of the torn write.
    fn for_each_fault(sync: Sync, mut check: impl FnMut(&Disk, &[u8], &[u8])) {
        let payloads: [&[u8]; 4] = [b"p0", b"p1-longer", b"p2", b"p3-longest of all"];
        for strike in 0..9 {
            for kept in 0..80 {
                let disk = Disk::holding(payloads[0]);
                *disk.fault.borrow_mut() = Some((strike, kept));
                for pair in payloads.windows(2) {
                    if write(&disk, pair[1], sync).is_err() {
                        check(&disk, pair[0], pair[1]);
                        break;
                    }
                }
            }
        }
    }

    #[test]
    fn a_failed_write_leaves_the_record_before_it_or_the_new_one() {
        for sync in [Sync::None, Sync::Data] {
            let mut failures = 0;
            for_each_fault(sync, |disk, before, after| {
                failures += 1;
                *disk.fault.borrow_mut() = None;
                let found = record(disk);
                assert!(found.payload == before || found.payload == after);
                write(disk, b"next", sync).unwrap();
                assert_eq!(record(disk).payload, b"next");
            });
            assert!(failures > 300);
        }
    }

    #[test]
    fn after_a_power_loss_the_last_acknowledged_record_is_there_or_the_one_being_written() {
        let mut images = 0;
        for_each_fault(Sync::Data, |disk, before, after| {
            for image in disk.after_power_loss() {
                images += 1;
                let disk = of(image);
                let found = record(&disk);
                assert!(found.payload == before || found.payload == after);
            }
        });
        assert!(images > 1_000);
    }

    #[test]
    fn a_whole_record_is_durable_and_so_is_a_healed_one() {
        for_each_fault(Sync::Data, |disk, before, _| {
            *disk.fault.borrow_mut() = None;
            let mut found = record(disk);
            if found.whole && found.payload == before {
                return;
            }
            SLOTS.heal(disk, &mut found).unwrap();
            for image in disk.after_power_loss() {
                assert_eq!(record(&of(image)).payload, found.payload);
            }
        });
    }

    #[test]
    fn a_crash_while_healing_loses_nothing() {
        for image in acknowledged() {
            for slot in 0..2 {
                let mut damaged = image.clone();
                damaged
                    [usize::try_from(BASE).unwrap() + slot * usize::try_from(STRIDE).unwrap()] ^= 1;
                for kept in 0..80 {
                    let disk = of(damaged.clone());
                    *disk.fault.borrow_mut() = Some((0, kept));
                    assert!(write(&disk, b"next", Sync::Data).is_err());
                    for image in disk.after_power_loss() {
                        assert_eq!(record(&of(image)).payload, b"newest");
                    }
                }
            }
        }
    }

    #[test]
    fn a_real_file_holds_a_record() {
        let file = tempfile::tempfile().unwrap();
        write_file(&file, b"one");
        write_file(&file, b"two");
        match SLOTS.read(&file).unwrap() {
            Stored::Record(found) => {
                assert_eq!((found.generation, &found.payload[..]), (2, &b"two"[..]));
            }
            Stored::Empty => panic!("expected a record"),
        }
    }

    fn write_file(file: &File, payload: &[u8]) {
        let last = SLOTS.read(file).unwrap();
        SLOTS
            .write(file, &last, payload.to_vec(), Sync::Data)
            .unwrap();
    }
}
