//! The fence file beside a plain file: its watermark, who wrote the value, and a change that was
//! announced and not yet recorded as done.
//!
//! A change of the plain file goes through three steps under the exclusive kernel lock:
//! 1. [announce](Sidecar::announce): the raised watermark and what is about to change, durably (S3).
//! 2. The change itself, one rename or unlink, and a sync of the directory.
//! 3. [record](Sidecar::record): the change is done.
//!
//! Whoever takes the lock next and finds an announcement asks the plain file whether the change
//! happened ([`State::settled`]). The change is never made up for: its caller may have been told
//! that it failed. The raise stands either way (S1).

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::body::Body;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::Snapshot;
use crate::file::place::{Place, Stamp};
use crate::file::safe::{self, Opening, Sharing, shown};
use crate::file::slots::{self, Slots, Stored, Sync};
use crate::file::temp;
use crate::token::{FencingToken, Watermark};

/// Two slots of one block each.
const SLOTS: Slots = Slots::new(*b"fl-fence", 0, 4096);

/// The version of the content.
const VERSION: u32 = 1;

/// How often creating and opening a fence file is tried while others remove it.
const TRIES_MAX: u32 = 100;

/// How a fence file is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    /// Refuse a fence file that another user owns.
    pub(crate) check_owner: bool,
    /// How long to wait for its kernel lock.
    pub(crate) lock_wait: Duration,
}

/// What a resource remembers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// The watermark; `None` where no fence was ever shown.
    pub(crate) watermark: Option<Watermark>,
    /// The content that the last fenced write left, and its token.
    value: Option<Written>,
    /// A change that was announced and not recorded.
    pending: Option<Pending>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Written {
    token: FencingToken,
    stamp: Stamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pending {
    change: Change,
    /// The sequence that the watermark gets once the change is done (S7).
    seq: u64,
}

/// A change of the plain file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub(crate) enum Change {
    /// The temporary file with this number and stamp takes its name.
    Put {
        /// The number in the temporary file's name.
        temp: u32,
        /// Its stamp, and so the plain file's once this is done.
        stamp: Stamp,
    },
    /// The plain file, whatever it holds, goes.
    Delete,
}

impl State {
    /// The state that the plain file's stamp, or its absence, leaves no doubt about.
    ///
    /// Where somebody without a fence changed the plain file meanwhile, nobody can tell whether the
    /// announced change happened before. It then counts as not happened: a repeat is applied
    /// again, and never acknowledged without having been (S10).
    fn settled(&self, found: Option<&Stamp>) -> Self {
        let Some(pending) = self.pending else {
            return self.clone();
        };
        let happened = match (pending.change, found) {
            (Change::Put { stamp, .. }, Some(found)) => stamp.is(found),
            (Change::Put { .. }, None) => false,
            (Change::Delete, found) => found.is_none(),
        };
        let mut settled = Self {
            pending: None,
            ..self.clone()
        };
        if happened {
            settled.apply(pending);
        }
        settled
    }

    fn apply(&mut self, done: Pending) {
        self.pending = None;
        if let Some(watermark) = &mut self.watermark {
            watermark.seq = done.seq;
            self.value = match done.change {
                Change::Put { stamp, .. } => Some(Written {
                    token: watermark.token,
                    stamp,
                }),
                Change::Delete => None,
            };
        }
    }

    /// The token of whoever wrote the content with this stamp, where that was a fenced write.
    fn writer(&self, found: &Stamp) -> Option<FencingToken> {
        self.value
            .filter(|value| value.stamp.is(found))
            .map(|value| value.token)
    }
}

/// What a look without the lock found.
#[derive(Debug)]
pub(crate) enum Peek<'a> {
    /// There is no fence file.
    Missing,
    /// A state with nothing to settle.
    Settled(Sidecar<'a>),
    /// A writer is at work or died, or the file is damaged: only the lock tells.
    Unclear,
}

/// An open fence file, locked but for [`Peek::Settled`].
#[derive(Debug)]
pub(crate) struct Sidecar<'a> {
    place: &'a Place,
    file: File,
    record: slots::Record,
    state: State,
}

impl<'a> Sidecar<'a> {
    /// Reads the fence file without its lock, so that readers never keep a writer out.
    ///
    /// What is [settled](Peek::Settled) was so at that moment, since a writer's first effect is on
    /// the slots; whoever reads the plain file after it asks
    /// [`is_unchanged`](Self::is_unchanged) at the end.
    ///
    /// # Errors
    /// As [`safe::open`].
    pub(crate) fn peek(place: &'a Place, access: Access) -> Result<Peek<'a>> {
        let opening = Opening {
            write: false,
            check_owner: access.check_owner,
            ..Opening::OWN
        };
        let Some(file) = safe::open(&place.fence, opening)? else {
            return Ok(Peek::Missing);
        };
        match Self::load(place, file) {
            Ok(sidecar) if sidecar.is_settled() => Ok(Peek::Settled(sidecar)),
            // Damaged, perhaps: or in the middle of a write.
            Ok(_) | Err(_) => Ok(Peek::Unclear),
        }
    }

    /// Opens the fence file and locks it with other readers; `None` where there is none.
    ///
    /// # Errors
    /// As [`safe::open_locked`]; `Corrupt` where it is damaged.
    pub(crate) fn shared(place: &'a Place, access: Access) -> Result<Option<Self>> {
        Self::open(place, access, Sharing::Shared)
    }

    /// Opens the fence file, creating it where there is none, locks it alone, and settles what a
    /// dead writer left. From here on its state is durable, and nobody else changes the plain file.
    ///
    /// # Errors
    /// As [`shared`](Self::shared), and `Unavailable` where it cannot be written.
    pub(crate) fn exclusive(place: &'a Place, access: Access) -> Result<Self> {
        for _ in 0..TRIES_MAX {
            if let Some(mut sidecar) = Self::open(place, access, Sharing::Exclusive)? {
                sidecar.settle()?;
                return Ok(sidecar);
            }
            let empty = encode(&State::default(), place)?;
            safe::create_whole(&place.fence, &SLOTS.image(&empty)?)?;
        }
        Err(
            Error::unavailable("the fence file is removed again and again by something else")
                .with("path", shown(&place.fence)),
        )
    }

    fn open(place: &'a Place, access: Access, sharing: Sharing) -> Result<Option<Self>> {
        let opening = Opening {
            write: sharing == Sharing::Exclusive,
            check_owner: access.check_owner,
            ..Opening::OWN
        };
        safe::open_locked(
            &place.fence,
            opening,
            sharing,
            safe::within(access.lock_wait),
        )?
        .map(|file| Self::load(place, file))
        .transpose()
    }

    fn load(place: &'a Place, file: File) -> Result<Self> {
        let (record, state) = read(&file, &place.fence)?;
        Ok(Self {
            place,
            file,
            record,
            state,
        })
    }

    /// The state as the last writer left it.
    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    /// True where a dead writer left nothing to settle.
    pub(crate) fn is_settled(&self) -> bool {
        self.record.whole && self.state.pending.is_none()
    }

    /// True where no writer has begun anything since this was read.
    ///
    /// # Errors
    /// As [`safe::is_still`].
    pub(crate) fn is_unchanged(&self) -> Result<bool> {
        let same = matches!(SLOTS.read(&self.file), Ok(Stored::Record(now)) if now == self.record);
        Ok(same && safe::is_still(&self.file, &self.place.fence)?)
    }

    /// The value, the watermark and the writer as they are under this lock.
    ///
    /// # Errors
    /// As [`Place::open_data`].
    pub(crate) fn snapshot(&self) -> Result<Snapshot> {
        let file = self.place.open_data()?;
        let stamp = match &file {
            Some(file) => Some(Stamp::of(&safe::stat(file, &self.place.data)?)),
            None => None,
        };
        let state = self.state.settled(stamp.as_ref());
        let writer = stamp.and_then(|stamp| state.writer(&stamp));
        let value = file.map(Body::from_file).transpose()?;
        Ok(Snapshot::new(value, state.watermark, writer))
    }

    /// Makes `watermark` the watermark, durably, with no change of the plain file.
    ///
    /// # Errors
    /// `Unavailable` where it cannot be written; it may stand nevertheless.
    pub(crate) fn raise(&mut self, watermark: Watermark) -> Result<()> {
        if self.state.watermark.as_ref() == Some(&watermark) {
            return Ok(());
        }
        self.store(State {
            watermark: Some(watermark),
            ..self.state.clone()
        })
    }

    /// Announces `change` under `watermark`: its token counts from here on, its sequence from
    /// [`record`](Self::record) on.
    ///
    /// # Errors
    /// As [`raise`](Self::raise).
    pub(crate) fn announce(&mut self, watermark: &Watermark, change: Change) -> Result<()> {
        let seq_before = match &self.state.watermark {
            Some(before) if before.token == watermark.token => before.seq,
            _ => 0,
        };
        self.store(State {
            watermark: Some(Watermark {
                seq: seq_before,
                ..watermark.clone()
            }),
            value: self.state.value,
            pending: Some(Pending {
                change,
                seq: watermark.seq,
            }),
        })
    }

    /// Records that the announced change is done and durable.
    ///
    /// # Errors
    /// `Unavailable` where it cannot be written; the next lock settles it then.
    pub(crate) fn record(&mut self) -> Result<()> {
        let mut state = self.state.clone();
        if let Some(pending) = state.pending {
            state.apply(pending);
        }
        self.store(state)
    }

    /// Asks the plain file whether an announced change happened, and stores the answer.
    ///
    /// # Errors
    /// `Unavailable` where that cannot be made durable.
    pub(crate) fn settle(&mut self) -> Result<()> {
        let at = |e: Error| e.with("path", shown(&self.place.fence));
        SLOTS.heal(&self.file, &mut self.record).map_err(at)?;
        let Some(pending) = self.state.pending else {
            return Ok(());
        };
        // What the directory shows need not be durable, and is about to be acted on.
        safe::sync_dir(&self.place.dir)?;
        let found = self.place.look()?.map(|found| Stamp::of(&found));
        self.store(self.state.settled(found.as_ref()))?;
        if let Change::Put { temp, .. } = pending.change {
            temp::reclaim(&self.place.temp(temp));
        }
        Ok(())
    }

    fn store(&mut self, state: State) -> Result<()> {
        let at = |e: Error| e.with("path", shown(&self.place.fence));
        let payload = encode(&state, self.place).map_err(at)?;
        if self.record.generation == 1 {
            // Whoever created the file may have died before its name was durable.
            safe::sync_dir(&self.place.dir)?;
        }
        let last = Stored::Record(self.record.clone());
        self.record = SLOTS
            .write(&self.file, &last, payload, Sync::Data)
            .map_err(at)?;
        self.state = state;
        Ok(())
    }
}

/// Looks whether a fence file is sound, for whoever knows its path and not its resource.
///
/// # Errors
/// As [`Sidecar::shared`].
pub(crate) fn check(path: &Path, access: Access) -> Result<()> {
    let opening = Opening {
        write: false,
        check_owner: access.check_owner,
        ..Opening::OWN
    };
    let Some(file) = safe::open(path, opening)? else {
        return Ok(());
    };
    if read(&file, path).is_ok() {
        return Ok(());
    }
    // Damaged, or in the middle of a write.
    let until = safe::within(access.lock_wait);
    match safe::open_locked(path, opening, Sharing::Shared, until)? {
        Some(file) => read(&file, path).map(|_| ()),
        None => Ok(()),
    }
}

fn read(file: &File, path: &Path) -> Result<(slots::Record, State)> {
    let at = |e: Error| e.with("path", shown(path));
    let record = match SLOTS.read(file) {
        Ok(Stored::Record(record)) => record,
        // It is created whole, so an empty one was emptied.
        Ok(Stored::Empty) => return Err(at(damaged("it is empty"))),
        Err(e) if e.kind() == ErrorKind::Corrupt => {
            return Err(at(damaged("its checksums are wrong").with_source(e)));
        }
        Err(e) => return Err(at(e)),
    };
    let state = decode(&record.payload).map_err(at)?;
    Ok((record, state))
}

/// The content of a slot: JSON, so that `head -c 4096 .today.csv.fence` shows it to people.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stamped {
    version: u32,
    file: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    watermark: Option<StoredWatermark>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    value: Option<StoredValue>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pending: Option<StoredPending>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredWatermark {
    token: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    holder: Option<String>,
    seq: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    domain: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredValue {
    token: u64,
    stamp: Stamp,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredPending {
    change: Change,
    seq: u64,
}

fn encode(state: &State, place: &Place) -> Result<Vec<u8>> {
    let stored = Stamped {
        version: VERSION,
        file: place.file_name.clone(),
        watermark: state.watermark.as_ref().map(|w| StoredWatermark {
            token: w.token.get(),
            holder: w.holder.map(|holder| holder.to_string()),
            seq: w.seq,
            domain: w.domain.as_ref().map(|domain| domain.to_string()),
        }),
        value: state.value.map(|value| StoredValue {
            token: value.token.get(),
            stamp: value.stamp,
        }),
        pending: state.pending.map(|pending| StoredPending {
            change: pending.change,
            seq: pending.seq,
        }),
    };
    serde_json::to_vec(&stored)
        .map_err(|e| Error::invalid("a fence cannot be stored").with_source(e))
}

fn decode(payload: &[u8]) -> Result<State> {
    let unknown = |e: Box<dyn std::error::Error + Send + std::marker::Sync>| {
        damaged("its content is not understood; a newer fencelock may have written it")
            .with_source(e)
    };
    let stored: Stamped = serde_json::from_slice(payload).map_err(|e| unknown(e.into()))?;
    if stored.version != VERSION {
        return Err(unknown("unknown version".into()).with("version", stored.version));
    }
    let parse = |stored: Stamped| -> Result<State> {
        let watermark = match stored.watermark {
            Some(w) => Some(Watermark {
                token: FencingToken::new(w.token)?,
                holder: w.holder.map(|holder| holder.parse()).transpose()?,
                seq: w.seq,
                domain: w.domain.map(|domain| domain.parse()).transpose()?,
            }),
            None => None,
        };
        let value = match stored.value {
            Some(value) => Some(Written {
                token: FencingToken::new(value.token)?,
                stamp: value.stamp,
            }),
            None => None,
        };
        Ok(State {
            watermark,
            value,
            pending: stored.pending.map(|pending| Pending {
                change: pending.change,
                seq: pending.seq,
            }),
        })
    };
    parse(stored).map_err(|e| unknown(e.into()))
}

fn damaged(what: &str) -> Error {
    Error::corrupt(format!(
        "the fence file is damaged: {what}; nothing was read or written. The value itself is whole. \
         Stop all writers, remove the fence file, and raise the resource with a token larger than \
         any that was used"
    ))
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fence::{Domain, HolderTag};
    use crate::name::{LockName, ResourceName};

    fn stamp(inode: u64, mtime_ns: i64) -> Stamp {
        serde_json::from_value(serde_json::json!({
            "inode": inode, "bytes": 3, "mtime_s": 1_796_000_000, "mtime_ns": mtime_ns,
        }))
        .unwrap()
    }

    fn state(change: Option<Change>) -> State {
        let name = LockName::new(&"x".repeat(512)).unwrap();
        State {
            watermark: Some(Watermark {
                token: FencingToken::MAX,
                holder: Some(HolderTag::from_bytes([0xab; 16])),
                seq: 4,
                domain: Some(Domain::new("file", &"r".repeat(64), &name)),
            }),
            value: Some(Written {
                token: FencingToken::MIN,
                stamp: stamp(1, 1),
            }),
            pending: change.map(|change| Pending { change, seq: 5 }),
        }
    }

    #[test]
    fn the_longest_state_fits_and_round_trips() {
        let name = ResourceName::new(&"\u{1}".repeat(255)).unwrap();
        let place = Place::new(Path::new("/"), &name).unwrap();
        let longest = state(Some(Change::Put {
            temp: u32::MAX,
            stamp: stamp(u64::MAX, 999_999_999),
        }));
        for state in [State::default(), state(Some(Change::Delete)), longest] {
            let payload = encode(&state, &place).unwrap();
            assert!(
                payload.len() < SLOTS.payload_max_bytes() / 4 * 3,
                "{}",
                payload.len()
            );
            assert_eq!(decode(&payload).unwrap(), state);
        }
    }

    #[test]
    fn a_content_that_is_not_understood_is_corrupt() {
        for bad in [
            &b""[..],
            b"{}",
            b"null",
            br#"{"version":2,"file":"a"}"#,
            br#"{"version":1,"file":"a","more":1}"#,
            br#"{"version":1,"file":"a","watermark":{"token":0,"seq":0}}"#,
        ] {
            assert_eq!(decode(bad).unwrap_err().kind(), ErrorKind::Corrupt);
        }
    }

    #[test]
    fn a_put_happened_only_where_its_very_file_is_there() {
        let put = state(Some(Change::Put {
            temp: 0,
            stamp: stamp(2, 7),
        }));
        let seq_with = |found: Option<Stamp>| put.settled(found.as_ref()).watermark.unwrap().seq;
        assert_eq!(seq_with(Some(stamp(2, 7))), 5);
        assert_eq!(
            seq_with(Some(stamp(2, 0))),
            5,
            "a file system that keeps whole seconds"
        );
        assert_eq!(seq_with(Some(stamp(2, 8))), 4, "the inode was used again");
        assert_eq!(seq_with(Some(stamp(1, 1))), 4);
        assert_eq!(seq_with(None), 4);
        let writer = |found: Stamp| put.settled(Some(&found)).writer(&found);
        assert_eq!(writer(stamp(2, 7)), Some(FencingToken::MAX));
        assert_eq!(writer(stamp(1, 1)), Some(FencingToken::MIN));
        assert_eq!(writer(stamp(3, 1)), None);
    }

    #[test]
    fn a_delete_happened_only_where_nothing_is_there() {
        let delete = state(Some(Change::Delete));
        assert_eq!(delete.settled(None).watermark.unwrap().seq, 5);
        assert_eq!(delete.settled(Some(&stamp(1, 1))).watermark.unwrap().seq, 4);
    }
}
