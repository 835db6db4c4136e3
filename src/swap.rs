//! Fenced values where the one atomic step is to replace what was read: judge it, replace it on the
//! condition that it is still there, and judge anew where it is not (S2).
//!
//! What is judged need not have been read now. What the process remembers admits as well, since the
//! condition then shows whether it still holds: a write takes one request instead of two. It
//! refuses nobody, and takes nothing for a repeat: for that, the store is asked.

use std::time::Duration;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::backoff::Backoff;
use crate::body::Body;
use crate::clock::unix_micros;
use crate::error::{Error, Result};
use crate::fence::{Fence, Snapshot, Written};
use crate::known::Known;
use crate::name::ResourceName;
use crate::token::{Admission, FencingToken, Intent, Watermark, judge};

/// The pauses after a race for one watermark was lost.
const RACE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(40));

/// A store that replaces on condition.
pub(crate) trait Swaps: Sync {
    /// One version of a resource: what a condition names, and what else a swap needs of it. That of
    /// a resource which is not there is the default.
    type Version: Clone + Send + Sync;

    /// The resources as our own swaps left them.
    fn known(&self) -> &Known<Seen<Self::Version>>;

    /// True where what is known of a resource suffices for this change.
    fn is_enough(&self, _: &Change) -> bool {
        true
    }

    /// The resource as it is.
    fn look(
        &self,
        resource: &ResourceName,
    ) -> impl Future<Output = Result<Seen<Self::Version>>> + Send;

    /// Replaces what was seen, or nothing.
    fn swap(
        &self,
        resource: &ResourceName,
        seen: &Seen<Self::Version>,
        next: Next<'_>,
    ) -> impl Future<Output = Result<Swapped<Self::Version>>> + Send;
}

/// A resource as it was read or written; one that was never shown a fence has no parts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen<V> {
    pub(crate) version: V,
    pub(crate) watermark: Option<Watermark>,
    /// The token of whoever wrote the value; `None` where there is none.
    pub(crate) writer: Option<FencingToken>,
}

/// What becomes of the value.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    Put(Bytes),
    Delete,
    Keep,
}

/// What a resource is to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Next<'a> {
    pub(crate) change: &'a Change,
    pub(crate) watermark: &'a Watermark,
    pub(crate) writer: Option<FencingToken>,
}

/// The answer to a swap.
#[derive(Debug)]
pub(crate) enum Swapped<V> {
    /// It was replaced: the new version, where it is known, and the value, where it was kept.
    Done(Option<V>, Option<Body>),
    /// There was something else, and nothing was replaced: what there was, where that is known.
    Moved(Option<Seen<V>>),
}

/// How an operation ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// This call applied it. The snapshot has the value where it was kept.
    Applied(Watermark, Snapshot),
    /// This very write had been applied before.
    Repeated(Watermark),
}

impl Outcome {
    pub(crate) fn written(self) -> Written {
        match self {
            Self::Applied(watermark, _) => Written::applied(watermark),
            Self::Repeated(watermark) => Written::repeated(watermark),
        }
    }

    /// What a raise read.
    pub(crate) fn raised(self) -> Result<Snapshot> {
        match self {
            Self::Applied(_, snapshot) => Ok(snapshot),
            Self::Repeated(_) => Err(Error::corrupt("a raise was taken for a repeated write")),
        }
    }
}

/// Judges and replaces, until what is replaced is what was judged.
pub(crate) async fn change<S: Swaps>(
    store: &S,
    resource: &ResourceName,
    fence: &Fence,
    intent: Intent,
    change: &Change,
) -> Result<Outcome> {
    let mut backoff = Backoff::new(RACE.0, RACE.1);
    let known = store.known();
    let remembered = known.recall(resource);
    let remembered = remembered.filter(|_| store.is_enough(change));
    let mut is_guess = remembered.is_some();
    let mut seen = match remembered {
        Some(seen) => seen,
        None => store.look(resource).await?,
    };
    loop {
        let watermark = match judge(seen.watermark.as_ref(), fence, intent, unix_micros()) {
            Ok(Admission::Apply(watermark)) => watermark,
            _ if is_guess => {
                seen = store.look(resource).await?;
                is_guess = false;
                continue;
            }
            Ok(Admission::Repeat(watermark)) => {
                // It was applied, whatever came after what was read here.
                return Ok(Outcome::Repeated(watermark));
            }
            Err(error) => return Err(error),
        };
        let writer = match change {
            Change::Put(_) => Some(watermark.token),
            Change::Delete => None,
            Change::Keep => seen.writer,
        };
        let next = Next {
            change,
            watermark: &watermark,
            writer,
        };
        match store.swap(resource, &seen, next).await {
            Ok(Swapped::Done(version, value)) => {
                let now = version.map(|version| Seen {
                    version,
                    watermark: Some(watermark.clone()),
                    writer,
                });
                match now {
                    Some(now) => known.remember(resource, now),
                    None => known.forget(resource),
                }
                let writer = writer.filter(|_| value.is_some());
                let snapshot = Snapshot::new(value, Some(watermark.clone()), writer);
                return Ok(Outcome::Applied(watermark, snapshot));
            }
            Ok(Swapped::Moved(now)) => {
                if !is_guess {
                    tokio::time::sleep(backoff.next()).await;
                }
                is_guess = false;
                seen = match now {
                    Some(seen) => seen,
                    None => store.look(resource).await?,
                };
            }
            Err(error) => {
                known.forget(resource);
                return Err(error);
            }
        }
    }
}

/// A watermark, as it is stored: ASCII JSON in one line.
#[derive(Serialize, Deserialize)]
pub(crate) struct Stored {
    /// The resource, so that what was copied from another is not taken for this one's.
    name: String,
    token: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    holder: Option<String>,
    #[serde(default)]
    seq: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    domain: Option<String>,
    /// The token of whoever wrote the value; `None` where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    writer: Option<u64>,
}

impl Stored {
    /// The text of a watermark. `name` is the resource, as the store spells it.
    pub(crate) fn encode(
        name: &str,
        watermark: &Watermark,
        writer: Option<FencingToken>,
    ) -> Result<String> {
        let stored = Self {
            name: name.to_owned(),
            token: watermark.token.get(),
            holder: watermark.holder.map(|holder| holder.to_string()),
            seq: watermark.seq,
            domain: watermark.domain.as_ref().map(ToString::to_string),
            writer: writer.map(FencingToken::get),
        };
        serde_json::to_string(&stored)
            .map_err(|e| Error::invalid("a watermark that cannot be written").with_source(e))
    }

    /// What such a text says; otherwise, `damaged` makes the error of what is wrong with it.
    pub(crate) fn decode<V>(
        text: &[u8],
        name: &str,
        version: V,
        damaged: impl Fn() -> Error,
    ) -> Result<Seen<V>> {
        let stored: Self = serde_json::from_slice(text).map_err(|e| damaged().with_source(e))?;
        if stored.name != name {
            return Err(damaged());
        }
        let wrong = |error: Error| damaged().with_source(error);
        let token = |number: u64| FencingToken::new(number).map_err(wrong);
        let holder = stored.holder.map(|text| text.parse().map_err(wrong));
        let domain = stored.domain.map(|text| text.parse().map_err(wrong));
        Ok(Seen {
            version,
            watermark: Some(Watermark {
                token: token(stored.token)?,
                holder: holder.transpose()?,
                seq: stored.seq,
                domain: domain.transpose()?,
            }),
            writer: stored.writer.map(token).transpose()?,
        })
    }
}
