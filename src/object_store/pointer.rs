//! The pointer object of a resource: one line of JSON, and after it the value's bytes where they are
//! few.
//!
//! Every pointer that is ever written holds a nonce of its own. A store's ETag is often the
//! content's alone, so only this makes each version one that never comes back (no A-B-A), and it is
//! how a writer whose answer was lost finds its own write again.

use bytes::{BufMut as _, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::fence::{hex, unhex};
use crate::token::{FencingToken, Watermark};

/// What the first line says it is.
const KIND: &str = "pointer";

const FORMAT: u32 = 1;

/// How many pointers back one can see whether a write was applied: what a resource is written in the
/// time that a request has for its answer.
const TRAIL_MAX: usize = 128;

/// The first half of a pointer's nonce.
pub(super) type Mark = [u8; 8];

/// What a resource is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pointer {
    /// The object's whole key: a copy under another one is not taken for it.
    pub(super) key: String,
    pub(super) nonce: [u8; 16],
    /// How many pointers there were, with this one.
    pub(super) generation: u64,
    /// Marks of the pointers before it, the last one first.
    pub(super) trail: Vec<Mark>,
    /// The mark of the first of all, kept for good: what became of a create can always be told.
    pub(super) first: Mark,
    pub(super) watermark: Watermark,
    /// `None` where the resource was only raised, or is deleted.
    pub(super) value: Option<Value>,
    /// The data object that the value before this one was in: kept for readers that were on their
    /// way to it, removed by the next write.
    pub(super) before: Option<DataName>,
}

/// The value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Value {
    pub(super) writer: FencingToken,
    pub(super) size_bytes: u64,
    pub(super) place: ValuePlace,
}

/// Where the bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ValuePlace {
    /// In the pointer itself.
    Inline(Bytes),
    /// In an object beside it.
    Data(DataName),
}

/// The last part of a data object's key: the writer's token in 20 digits, and the nonce of its write.
/// Never used twice.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct DataName(String);

impl DataName {
    pub(super) fn new(token: FencingToken, nonce: &[u8; 16]) -> Self {
        Self(format!("{:020}-{}", token.get(), hex(nonce)))
    }

    /// `None` where it is not one of ours.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let name = Self(text.to_owned());
        let (_, nonce) = text.split_once('-')?;
        let again = Self::new(name.token()?, &unhex(nonce)?);
        (again == name).then_some(name)
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// The token of whoever wrote it.
    pub(super) fn token(&self) -> Option<FencingToken> {
        let (digits, _) = self.0.split_once('-')?;
        FencingToken::new(digits.parse().ok()?).ok()
    }
}

/// The first line. Tokens are text: they pass 2^53, which not every reader of JSON can hold.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    fencelock: String,
    format: u32,
    key: String,
    nonce: String,
    generation: u64,
    trail: Vec<String>,
    first: String,
    token: String,
    holder: Option<String>,
    seq: u64,
    domain: Option<String>,
    value: Option<ValueLine>,
    before: Option<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ValueLine {
    writer: String,
    size: u64,
    /// `null` where the bytes follow this line.
    data: Option<String>,
}

impl Pointer {
    pub(super) fn encode(&self) -> Result<Bytes> {
        let line = Line {
            fencelock: KIND.to_owned(),
            format: FORMAT,
            key: self.key.clone(),
            nonce: hex(&self.nonce),
            generation: self.generation,
            trail: self.trail.iter().map(|mark| hex(mark)).collect(),
            first: hex(&self.first),
            token: self.watermark.token.to_string(),
            holder: self.watermark.holder.map(|holder| holder.to_string()),
            seq: self.watermark.seq,
            domain: self.watermark.domain.as_ref().map(ToString::to_string),
            value: self.value.as_ref().map(|value| ValueLine {
                writer: value.writer.to_string(),
                size: value.size_bytes,
                data: match &value.place {
                    ValuePlace::Inline(_) => None,
                    ValuePlace::Data(name) => Some(name.0.clone()),
                },
            }),
            before: self.before.as_ref().map(|name| name.0.clone()),
        };
        let line = serde_json::to_vec(&line)
            .map_err(|e| Error::invalid("the pointer cannot be written").with_source(e))?;
        let mut body = BytesMut::from(line.as_slice());
        body.put_u8(b'\n');
        if let Some(Value {
            place: ValuePlace::Inline(bytes),
            ..
        }) = &self.value
        {
            body.extend_from_slice(bytes);
        }
        Ok(body.freeze())
    }

    /// Reads the object at `key`.
    ///
    /// # Errors
    /// `Corrupt` where it is no pointer, or another key's.
    pub(super) fn decode(body: &Bytes, key: &str) -> Result<Self> {
        let damaged = |what: &str| {
            Error::corrupt(format!(
                "the object is not a pointer of this resource: {what}"
            ))
            .with("key", format_args!("{key:?}"))
        };
        let end = body
            .iter()
            .position(|byte| *byte == b'\n')
            .ok_or_else(|| damaged("something else was written there; choose another key"))?;
        let line: Line = serde_json::from_slice(body.get(..end).unwrap_or_default())
            .map_err(|_| damaged("something else was written there; choose another key"))?;
        if line.fencelock != KIND || line.format != FORMAT {
            return Err(damaged("it has a format that this version does not know"));
        }
        if line.key != key {
            return Err(damaged("it is a copy of another key's"));
        }
        let bad = |what: &str| damaged(&format!("its {what} is illegible"));
        let name = |text: String| DataName::parse(&text).ok_or_else(|| bad("data object"));
        let rest = body.slice(end.saturating_add(1)..);
        let value = match line.value {
            None => None,
            Some(ValueLine { writer, size, data }) => Some(Value {
                writer: writer.parse().map_err(|_| bad("writer"))?,
                size_bytes: size,
                place: match data {
                    Some(data) => ValuePlace::Data(name(data)?),
                    None => ValuePlace::Inline(rest.clone()),
                },
            }),
        };
        let inline = match &value {
            Some(Value {
                place: ValuePlace::Inline(_),
                size_bytes,
                ..
            }) => *size_bytes,
            _ => 0,
        };
        if u64::try_from(rest.len()).ok() != Some(inline) {
            return Err(bad("length"));
        }
        Ok(Self {
            key: line.key,
            nonce: unhex(&line.nonce).ok_or_else(|| bad("nonce"))?,
            generation: line.generation,
            trail: line
                .trail
                .iter()
                .map(|mark| unhex(mark).ok_or_else(|| bad("trail")))
                .collect::<Result<_>>()?,
            first: unhex(&line.first).ok_or_else(|| bad("first mark"))?,
            watermark: Watermark {
                token: line.token.parse().map_err(|_| bad("token"))?,
                holder: line
                    .holder
                    .map(|text| text.parse())
                    .transpose()
                    .map_err(|_| bad("holder"))?,
                seq: line.seq,
                domain: line
                    .domain
                    .map(|text| text.parse())
                    .transpose()
                    .map_err(|_| bad("domain"))?,
            },
            value,
            before: line.before.map(name).transpose()?,
        })
    }

    /// The trail of the next pointer.
    pub(super) fn next_trail(&self) -> Vec<Mark> {
        std::iter::once(mark(&self.nonce))
            .chain(self.trail.iter().copied())
            .take(TRAIL_MAX)
            .collect()
    }

    /// Whether `earlier`, which is not this one, was ever what this pointer's place held; `None`
    /// where it is too long ago to say.
    pub(super) fn follows(&self, earlier: &Self) -> Option<bool> {
        if earlier.generation == 1 {
            return Some(self.first == mark(&earlier.nonce) && self.nonce != earlier.nonce);
        }
        // It would have been the pointer of its generation.
        let back = self.generation.checked_sub(earlier.generation)?;
        match usize::try_from(back).ok()?.checked_sub(1) {
            None => Some(false),
            Some(at) => Some(*self.trail.get(at)? == mark(&earlier.nonce)),
        }
    }

    /// The data object that holds the value.
    pub(super) fn data(&self) -> Option<&DataName> {
        match &self.value.as_ref()?.place {
            ValuePlace::Data(name) => Some(name),
            ValuePlace::Inline(_) => None,
        }
    }
}

/// The mark of a nonce.
pub(super) fn mark(nonce: &[u8; 16]) -> Mark {
    let [a, b, c, d, e, f, g, h, ..] = *nonce;
    [a, b, c, d, e, f, g, h]
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fence::{Domain, HolderTag};
    use proptest::prelude::*;

    fn pointer(value: Option<ValuePlace>) -> Pointer {
        let token = FencingToken::MAX;
        Pointer {
            key: "exports/Größe \"π\".csv".to_owned(),
            nonce: [7; 16],
            generation: 3,
            trail: vec![[6; 8], [5; 8]],
            first: [5; 8],
            watermark: Watermark {
                token,
                holder: Some(HolderTag::from_bytes([3; 16])),
                seq: 9,
                domain: Some(Domain::new("s3", "r", &"a".parse().unwrap())),
            },
            value: value.map(|place| Value {
                writer: token,
                size_bytes: 5,
                place,
            }),
            before: Some(DataName::new(token, &[1; 16])),
        }
    }

    #[test]
    fn a_pointer_round_trips() {
        let inline = ValuePlace::Inline(Bytes::from_static(b"a\n\0\xffb"));
        let data = ValuePlace::Data(DataName::new(FencingToken::MIN, &[2; 16]));
        for value in [None, Some(inline), Some(data)] {
            let pointer = pointer(value);
            let body = pointer.encode().unwrap();
            assert_eq!(Pointer::decode(&body, &pointer.key).unwrap(), pointer);
            let other = Pointer::decode(&body, "another").unwrap_err();
            assert!(other.to_string().contains("copy of another"), "{other}");
        }
    }

    #[test]
    fn a_trail_tells_which_pointers_there_were() {
        let mut now = pointer(None);
        (now.generation, now.nonce, now.trail) = (1, [1; 16], Vec::new());
        now.first = mark(&now.nonce);
        let first = now.clone();
        for generation in 2..=200 {
            let nonce = [u8::try_from(generation).unwrap(); 16];
            (now.trail, now.nonce, now.generation) = (now.next_trail(), nonce, generation);
        }
        assert_eq!(now.trail.len(), TRAIL_MAX);
        let was = |generation: u8, nonce: u8| {
            let mut was = now.clone();
            (was.generation, was.nonce) = (u64::from(generation), [nonce; 16]);
            was
        };
        assert_eq!(now.follows(&was(199, 199)), Some(true));
        assert_eq!(now.follows(&was(72, 72)), Some(true), "as far as it goes");
        assert_eq!(now.follows(&was(71, 71)), None, "too long ago");
        assert_eq!(now.follows(&was(150, 250)), Some(false));
        assert_eq!(now.follows(&was(200, 250)), Some(false));
        assert_eq!(
            now.follows(&first),
            Some(true),
            "a create is never too long ago"
        );
        assert_eq!(now.follows(&was(1, 250)), Some(false));
    }

    #[test]
    fn every_cut_and_every_addition_is_corrupt() {
        let inline = ValuePlace::Inline(Bytes::from_static(b"bytes"));
        let pointer = pointer(Some(inline));
        let body = pointer.encode().unwrap();
        for end in 0..body.len() {
            assert!(
                Pointer::decode(&body.slice(..end), &pointer.key).is_err(),
                "{end}"
            );
        }
        let longer: Bytes = [body.as_ref(), b"x"].concat().into();
        assert!(Pointer::decode(&longer, &pointer.key).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in any::<Vec<u8>>(), name in any::<String>()) {
            let _ = Pointer::decode(&bytes.into(), "k");
            if let Some(parsed) = DataName::parse(&name) {
                prop_assert!(parsed.token().is_some());
            }
        }
    }
}
