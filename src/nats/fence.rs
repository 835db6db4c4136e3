//! Fenced values: the value is the body of one message, its watermark a header of the same message,
//! and each change is one publish at the sequence that was judged (S2, S3).

use std::fmt;

use async_nats::{Client, HeaderMap, HeaderValue};
use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::bucket::Bucket;
use super::connect::{Link, Swap, read_within, write_within};
use super::options::NatsOptions;
use super::record::Stored;
use super::server;
use super::url::options as parsed;
use crate::backoff::Backoff;
use crate::body::Body;
use crate::clock::unix_micros;
use crate::driver::off_thread;
use crate::error::{Error, Result};
use crate::fence::{Fence, FencedStore, Snapshot, Written};
use crate::lease::Finding;
use crate::name::ResourceName;
use crate::open::StoreUrl;
use crate::token::{Admission, FencingToken, Intent, Watermark, judge};

/// The header that holds the watermark.
const WATERMARK: &str = "Fencelock-Watermark";

/// What a message has besides the value, at most: its headers.
const HEADERS_MAX_BYTES: usize = 2_048;

/// The pauses after a race for one watermark was lost.
const RACE: (std::time::Duration, std::time::Duration) = (
    std::time::Duration::from_millis(1),
    std::time::Duration::from_millis(40),
);

/// Fenced values in a JetStream key-value bucket.
///
/// Cheap to make, with one connection of its own. A value has at most what a message of the server
/// holds (`max_payload`, 1 MiB at first), less 2 KiB.
pub struct FencedNats {
    link: Link,
    bucket: Bucket,
}

/// A watermark, as it is stored: ASCII in one line.
#[derive(Serialize, Deserialize)]
struct StoredWatermark {
    /// The resource's name, encoded.
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

/// A resource as it was read; one that was never shown a fence has no parts.
#[derive(Default)]
struct Seen {
    at: u64,
    watermark: Option<Watermark>,
    value: Option<(Bytes, FencingToken)>,
}

/// What becomes of the value.
#[derive(Clone)]
enum Change {
    Put(Bytes),
    Delete,
    Keep,
}

impl FencedNats {
    /// Opens fenced values by the URL of the servers, as
    /// [`NatsStore::open`](super::NatsStore::open) does; `realm` means nothing here.
    ///
    /// # Errors
    /// As [`NatsStore::open`](super::NatsStore::open).
    pub async fn open(url: &str) -> Result<Self> {
        let (options, place) = parsed(StoreUrl::parse(url)?)?;
        options.open_fenced_place(place).await
    }

    /// Opens fenced values over a client of your own.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn from_client(client: Client) -> Result<Self> {
        NatsOptions::default().open_fenced_client(client).await
    }

    pub(super) async fn start(options: &NatsOptions, link: Link) -> Result<Self> {
        write_within(async {
            server::check(&link).await?;
            let (bucket, _) = Bucket::open(&link, options).await?;
            link.hang_up().await;
            Ok(Self { link, bucket })
        })
        .await
    }

    async fn see(&self, resource: &ResourceName) -> Result<Seen> {
        let subject = self.bucket.value(resource);
        match self.bucket.read(&self.link, &subject).await? {
            Some(stored) => Seen::of(resource, stored),
            None => {
                // Nothing is there, or the bucket is another one: with a value, its subject says so.
                self.bucket.clock(&self.link).await?;
                Ok(Seen::default())
            }
        }
    }

    /// Judges and applies: what is stored replaces only what was judged (S2). Tells whether this
    /// call applied it, and the resource after it.
    async fn change(
        &self,
        resource: &ResourceName,
        fence: &Fence,
        intent: Intent,
        change: Change,
    ) -> Result<(bool, Snapshot)> {
        let mut backoff = Backoff::new(RACE.0, RACE.1);
        let subject = self.bucket.value(resource);
        loop {
            let seen = self.see(resource).await?;
            let watermark = match judge(seen.watermark.as_ref(), fence, intent, unix_micros())? {
                Admission::Apply(watermark) => watermark,
                Admission::Repeat(watermark) => {
                    // It was applied, whatever came after what was read here.
                    return Ok((false, seen.snapshot(watermark)));
                }
            };
            let value = match &change {
                Change::Put(bytes) => Some((bytes.clone(), watermark.token)),
                Change::Delete => None,
                Change::Keep => seen.value,
            };
            let writer = value.as_ref().map(|(_, writer)| *writer);
            let stored = StoredWatermark::of(resource, &watermark, writer).encode()?;
            let mut headers = HeaderMap::new();
            headers.insert(WATERMARK, stored);
            let body = value
                .as_ref()
                .map_or_else(Bytes::new, |(bytes, _)| bytes.clone());
            let swap = self
                .link
                .swap(&self.bucket.stream, &subject, seen.at, headers, body);
            match swap.await? {
                Swap::Stored(at) => {
                    let now = Seen {
                        at,
                        watermark: None,
                        value,
                    };
                    return Ok((true, now.snapshot(watermark)));
                }
                Swap::Moved => tokio::time::sleep(backoff.next()).await,
            }
        }
    }

    async fn write(
        &self,
        resource: &ResourceName,
        fence: &Fence,
        intent: Intent,
        change: Change,
    ) -> Result<Written> {
        let change = self.change(resource, fence, intent, change);
        let (applied, snapshot) = write_within(change).await?;
        let watermark = snapshot.watermark.ok_or_else(|| corrupt(resource))?;
        Ok(if applied {
            Written::applied(watermark)
        } else {
            Written::repeated(watermark)
        })
    }

    /// How large a value may be, in bytes.
    async fn value_max(&self) -> Result<u64> {
        let (_, max_payload) = self.link.greeting().await?;
        let left = max_payload.saturating_sub(HEADERS_MAX_BYTES);
        Ok(u64::try_from(left).unwrap_or(u64::MAX))
    }
}

impl StoredWatermark {
    fn of(resource: &ResourceName, watermark: &Watermark, writer: Option<FencingToken>) -> Self {
        Self {
            name: resource.encoded(),
            token: watermark.token.get(),
            holder: watermark.holder.map(|holder| holder.to_string()),
            seq: watermark.seq,
            domain: watermark.domain.as_ref().map(ToString::to_string),
            writer: writer.map(FencingToken::get),
        }
    }

    fn encode(&self) -> Result<HeaderValue> {
        let unfit = || Error::invalid("a watermark that cannot be written");
        let text = serde_json::to_string(self).map_err(|e| unfit().with_source(e))?;
        text.parse()
            .map_err(|e: async_nats::header::ParseHeaderValueError| unfit().with_source(e))
    }
}

impl Seen {
    fn of(resource: &ResourceName, stored: Stored) -> Result<Self> {
        let damaged = |error: Error| corrupt(resource).with_source(error);
        let text = stored.header(WATERMARK).ok_or_else(|| corrupt(resource))?;
        let watermark: StoredWatermark =
            serde_json::from_str(text).map_err(|e| corrupt(resource).with_source(e))?;
        if watermark.name != resource.encoded() {
            return Err(corrupt(resource));
        }
        let token = |number: u64| FencingToken::new(number).map_err(damaged);
        let holder = watermark.holder.map(|text| text.parse().map_err(damaged));
        let domain = watermark.domain.map(|text| text.parse().map_err(damaged));
        let writer = watermark.writer.map(token).transpose()?;
        Ok(Self {
            at: stored.at,
            watermark: Some(Watermark {
                token: token(watermark.token)?,
                holder: holder.transpose()?,
                seq: watermark.seq,
                domain: domain.transpose()?,
            }),
            value: writer.map(|writer| (Bytes::from(stored.body), writer)),
        })
    }

    fn snapshot(self, watermark: Watermark) -> Snapshot {
        let (value, writer) = self.value.unzip();
        Snapshot::new(value.map(Body::from), Some(watermark), writer)
    }
}

fn corrupt(resource: &ResourceName) -> Error {
    Error::corrupt(
        "the message of the resource in NATS has no sound watermark: somebody else wrote it, or it is damaged; nothing is written to it until it is deleted",
    )
    .with("resource", format_args!("{resource:?}"))
}

#[async_trait]
impl FencedStore for FencedNats {
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written> {
        // Before anything is judged: reading a body may take long, and may fail.
        let limit = read_within(self.value_max()).await?;
        let bytes = if body.in_memory() {
            body.into_bytes(limit)?
        } else {
            off_thread(move || body.into_bytes(limit)).await??
        };
        self.write(resource, fence, Intent::Write, Change::Put(bytes))
            .await
    }

    async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        let mut seen = read_within(self.see(resource)).await?;
        Ok(match seen.watermark.take() {
            Some(watermark) => seen.snapshot(watermark),
            None => Snapshot::new(None, None, None),
        })
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let change = self.change(resource, fence, Intent::Raise, Change::Keep);
        let (_, snapshot) = write_within(change).await?;
        Ok(snapshot)
    }

    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        self.write(resource, fence, Intent::Write, Change::Delete)
            .await
    }

    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        self.write(resource, fence, Intent::Rebind, Change::Keep)
            .await
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        read_within(server::findings(&self.link, &self.bucket)).await
    }
}

impl fmt::Debug for FencedNats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedNats")
            .field("bucket", &self.bucket)
            .finish_non_exhaustive()
    }
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;
