//! Fenced values: the value is the body of one message, its watermark a header of the same message,
//! and each change is one publish at the sequence that was judged (S2, S3).

use std::fmt;

use async_nats::header::ParseHeaderValueError;
use async_nats::{Client, HeaderMap, HeaderValue};
use async_trait::async_trait;
use bytes::Bytes;

use super::bucket::Bucket;
use super::connect::{Link, Publish, Swap, read_within, write_within};
use super::options::NatsOptions;
use super::record::Stored as Message;
use super::server;
use super::url::options as parsed;
use crate::body::Body;
use crate::driver::off_thread;
use crate::error::{Error, Result};
use crate::fence::{Fence, FencedStore, Snapshot, Written};
use crate::known::Known;
use crate::lease::Finding;
use crate::name::ResourceName;
use crate::open::StoreUrl;
use crate::swap::{self, Change, Next, Outcome, Stored, Swapped, Swaps};
use crate::token::Intent;

/// The header that holds the watermark.
const WATERMARK: &str = "Fencelock-Watermark";

/// What a message has besides the value, at most: its headers.
const HEADERS_MAX_BYTES: usize = 2_048;

/// A resource that was seen.
type Seen = swap::Seen<Version>;

/// Fenced values in a JetStream key-value bucket.
///
/// Cheap to make, with one connection of its own. A value has at most what a message of the server
/// holds (`max_payload`, 1 MiB at first), less 2 KiB.
pub struct FencedNats {
    link: Link,
    bucket: Bucket,
    known: Known<Seen>,
}

/// One version of a resource.
#[derive(Clone, Debug, Default)]
pub(crate) struct Version {
    at: u64,
    /// The connection that it was written on, where it is remembered. It counts on no other: a
    /// server that lost what it had acknowledged tells its sequences again, with other content,
    /// and breaks its connections first.
    on: Option<u64>,
    /// The value, where there is one; not where it is remembered.
    value: Option<Bytes>,
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
            Ok(Self {
                link,
                bucket,
                known: Known::new(),
            })
        })
        .await
    }

    async fn write(
        &self,
        resource: &ResourceName,
        fence: &Fence,
        intent: Intent,
        change: Change,
    ) -> Result<Written> {
        write_within(swap::change(self, resource, fence, intent, &change))
            .await
            .map(Outcome::written)
    }

    /// How large a value may be, in bytes.
    async fn value_max(&self) -> Result<u64> {
        let (_, max_payload) = self.link.greeting().await?;
        let left = max_payload.saturating_sub(HEADERS_MAX_BYTES);
        Ok(u64::try_from(left).unwrap_or(u64::MAX))
    }
}

impl Swaps for FencedNats {
    type Version = Version;

    fn known(&self) -> &Known<Seen> {
        &self.known
    }

    fn is_enough(&self, change: &Change) -> bool {
        match change {
            Change::Put(_) | Change::Delete => true,
            // What is kept is published once more, and is too much to remember.
            Change::Keep => false,
        }
    }

    async fn look(&self, resource: &ResourceName) -> Result<Seen> {
        let subject = self.bucket.value(resource);
        match self.bucket.read(&self.link, &subject).await? {
            Some(message) => seen(resource, message),
            None => {
                // Nothing is there, or the bucket is another one: with a value, its subject says so.
                self.bucket.clock(&self.link).await?;
                Ok(Seen::default())
            }
        }
    }

    async fn swap(
        &self,
        resource: &ResourceName,
        judged: &Seen,
        next: Next<'_>,
    ) -> Result<Swapped<Version>> {
        let value = match next.change {
            Change::Put(bytes) => Some(bytes.clone()),
            Change::Delete => None,
            Change::Keep => judged.version.value.clone(),
        };
        let mut headers = HeaderMap::new();
        let text = Stored::encode(&resource.encoded(), next.watermark, next.writer)?;
        let text: HeaderValue = text.parse().map_err(|e: ParseHeaderValueError| {
            Error::invalid("a watermark that cannot be written").with_source(e)
        })?;
        headers.insert(WATERMARK, text);
        let publish = Publish {
            stream: &self.bucket.stream,
            subject: &self.bucket.value(resource),
            expected: judged.version.at,
            only_on: judged.version.on,
            headers,
            body: value.clone().unwrap_or_default(),
        };
        Ok(match self.link.swap_on(publish).await? {
            (Swap::Stored(at), on) => {
                let version = Version {
                    at,
                    on: Some(on),
                    value: None,
                };
                Swapped::Done(Some(version), value.map(Body::from))
            }
            (Swap::Moved, _) => Swapped::Moved(None),
        })
    }
}

fn seen(resource: &ResourceName, message: Message) -> Result<Seen> {
    let text = message.header(WATERMARK).ok_or_else(|| corrupt(resource))?;
    let version = Version {
        at: message.at,
        on: None,
        value: None,
    };
    let corrupt = || corrupt(resource);
    let mut seen = Stored::decode(text.as_bytes(), &resource.encoded(), version, corrupt)?;
    seen.version.value = seen.writer.map(|_| Bytes::from(message.body));
    Ok(seen)
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
        let seen = read_within(self.look(resource)).await?;
        let value = seen.version.value.map(Body::from);
        Ok(Snapshot::new(value, seen.watermark, seen.writer))
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let (intent, change) = (Intent::Raise, Change::Keep);
        write_within(swap::change(self, resource, fence, intent, &change))
            .await?
            .raised()
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
