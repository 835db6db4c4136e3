//! What fuzzing asks of two slots.

use std::cell::RefCell;
use std::io;

use super::{Medium, Slots, Stored, Sync};

const SLOTS: Slots = Slots::new(*b"flkfuzz1", 0, 128);

/// A file in memory.
struct Memory(RefCell<Vec<u8>>);

impl Medium for Memory {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let bytes = self.0.borrow();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let mut rest = bytes.get(start..).unwrap_or_default();
        io::Read::read(&mut rest, buffer)
    }

    fn write_at(&self, written: &[u8], offset: u64) -> io::Result<()> {
        let mut bytes = self.0.borrow_mut();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let end = start.saturating_add(written.len());
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        if let Some(place) = bytes.get_mut(start..end) {
            place.copy_from_slice(written);
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// The input is an image; and its first line, an image's damage: pairs of a place and what its byte
/// is changed by, after as many writes of the second line as there are pairs.
pub(crate) fn slots(bytes: &[u8]) {
    any_image(bytes);
    let (damage, payload) = crate::fuzzing::split_line(bytes);
    damaged_image(damage, payload);
}

fn any_image(image: &[u8]) {
    let memory = Memory(RefCell::new(image.to_vec()));
    let read = SLOTS.read(&memory);
    crate::fuzzing::assert_corrupt(&read);
    let Ok(Stored::Record(mut record)) = read else {
        return;
    };
    // Healing changes nothing but what is missing, and a write goes on from there.
    assert!(SLOTS.heal(&memory, &mut record).is_ok());
    assert!(record.whole);
    let found = Stored::Record(record.clone());
    assert!(matches!(SLOTS.read(&memory), Ok(again) if again == found));
    if let Ok(next) = SLOTS.write(&memory, &found, b"next".to_vec(), Sync::Data) {
        assert!(next.generation > record.generation);
        assert!(matches!(SLOTS.read(&memory), Ok(Stored::Record(again)) if again == next));
    }
}

/// Whatever is done to a record that was written whole, a reader finds its last content or finds it
/// damaged, and never an earlier one (S1, L10).
fn damaged_image(damage: &[u8], payload: &[u8]) {
    let Ok(image) = SLOTS.image(b"first") else {
        return;
    };
    let memory = Memory(RefCell::new(image));
    let mut last = match SLOTS.read(&memory) {
        Ok(stored) => stored,
        Err(_) => Stored::Empty,
    };
    for n in 0..damage.len().min(8) {
        let mut content = payload.to_vec();
        content.extend_from_slice(n.to_string().as_bytes());
        match SLOTS.write(&memory, &last, content, Sync::Data) {
            Ok(record) => last = Stored::Record(record),
            Err(_) => return,
        }
    }
    for pair in damage.chunks_exact(2) {
        if let [at, change] = *pair
            && let Some(byte) = memory.0.borrow_mut().get_mut(usize::from(at))
        {
            *byte ^= change;
        }
    }
    let read = SLOTS.read(&memory);
    crate::fuzzing::assert_corrupt(&read);
    if let (Ok(Stored::Record(found)), Stored::Record(last)) = (read, last) {
        assert_eq!(found.payload, last.payload);
        assert_eq!(found.generation, last.generation);
    }
}
