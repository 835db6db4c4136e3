//! Fenced values: the value is a plain key, its watermark a key beside it, and one transaction
//! compares the watermark's revision and writes both (S2, S3).

use std::fmt;

use async_trait::async_trait;
use bytes::Bytes;
use etcd_client::{Client, Compare, CompareOp, KeyValue, Txn, TxnOp, TxnOpResponse, TxnResponse};
use serde::{Deserialize, Serialize};

use super::connect::{Link, read_within, write_within};
use super::keys::Keys;
use super::options::EtcdOptions;
use super::server;
use super::url::options as parsed;
use crate::backoff::Backoff;
use crate::body::Body;
use crate::clock::unix_micros;
use crate::driver::off_thread;
use crate::error::{Error, Result};
use crate::fence::{Fence, FencedStore, Fencing, Snapshot, Written};
use crate::lease::Finding;
use crate::name::ResourceName;
use crate::open::StoreUrl;
use crate::token::{Admission, FencingToken, Intent, Watermark, judge};

/// The largest value: 1 MiB. A server takes requests of 1.5 MiB at first.
pub const VALUE_MAX_BYTES: u64 = 1 << 20;

/// The pauses after a race for one watermark was lost.
const RACE: (std::time::Duration, std::time::Duration) = (
    std::time::Duration::from_millis(1),
    std::time::Duration::from_millis(40),
);

/// Fenced values in etcd. A resource's name is its key, exactly.
///
/// Cheap to make, with one connection of its own.
pub struct FencedEtcd {
    link: Link,
    keys: Keys,
}

/// What makes a transaction of your own a fenced one: see [`FencedEtcd::admit`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Admitted {
    /// To be added to the transaction's `when`.
    pub compares: Vec<Compare>,
    /// To be added to its `and_then`.
    pub operations: Vec<TxnOp>,
    /// True where this very write, by token and sequence, was applied before: it is not to be
    /// applied again.
    pub repeated: bool,
}

/// A watermark, as it is stored.
#[derive(Serialize, Deserialize)]
struct Stored {
    name: String,
    token: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    holder: Option<String>,
    #[serde(default)]
    seq: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    domain: Option<String>,
    /// The token of whoever wrote the value; `None` where it was deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    writer: Option<u64>,
}

/// A watermark as it was read; that of a resource without one has no parts.
#[derive(Default)]
struct Seen {
    at: i64,
    watermark: Option<Watermark>,
    writer: Option<FencingToken>,
}

/// What becomes of the value.
enum Change {
    Put(Bytes),
    Delete,
    Keep,
}

impl FencedEtcd {
    /// Opens fenced values by the URL of a cluster, as
    /// [`EtcdStore::open`](super::EtcdStore::open) does; `realm` and `restored` mean nothing here.
    ///
    /// # Errors
    /// `Invalid` for a URL or option that is wrong; `Unavailable` where no member can be reached.
    pub async fn open(url: &str) -> Result<Self> {
        let (options, place) = parsed(StoreUrl::parse(url)?)?;
        options.open_fenced_place(place).await
    }

    /// Opens fenced values over a client of your own.
    ///
    /// # Errors
    /// `Unavailable` where it does not answer.
    pub async fn from_client(client: Client) -> Result<Self> {
        EtcdOptions::default().open_fenced_client(client).await
    }

    pub(super) async fn start(options: &EtcdOptions, link: Link) -> Result<Self> {
        read_within(async {
            link.status().await?;
            link.hang_up().await;
            Ok(Self {
                link,
                keys: Keys::new(&options.prefix),
            })
        })
        .await
    }

    /// What to add to a transaction of your own, so that it is refused where the fence is stale:
    /// it then writes only if the watermark is still the one that was judged here, and moves it up.
    /// Where the transaction does not succeed for that reason, admit again.
    ///
    /// Cancel safe: nothing is written here.
    ///
    /// # Errors
    /// As [`Fenced::put`](crate::Fenced::put).
    pub async fn admit(
        &self,
        resource: impl TryInto<ResourceName, Error = Error>,
        fence: impl Fencing,
    ) -> Result<Admitted> {
        let (resource, shown) = (resource.try_into()?, fence.to_fence()?);
        let admitted = async {
            let key = self.fence_key(&resource)?;
            let seen = self.see(&resource).await?;
            let (watermark, repeated) = admitted(&seen, &shown, Intent::Write)?;
            let writer = Some(watermark.token);
            let stored = Stored::of(&resource, &watermark, writer).encode()?;
            Ok(Admitted {
                compares: vec![unchanged(&key, &seen)],
                operations: vec![TxnOp::put(key, stored, None)],
                repeated,
            })
        };
        let admitted = read_within(admitted).await;
        if let Err(error) = &admitted
            && let Some(watermark) = error.watermark()
        {
            fence.refused(watermark);
        }
        admitted
    }

    fn fence_key(&self, resource: &ResourceName) -> Result<String> {
        if self.keys.owns(resource.as_str()) {
            return Err(Error::invalid(
                "the key is one of fencelock's own; choose another, or another prefix",
            )
            .with("key", format_args!("{resource:?}")));
        }
        Ok(self.keys.fence(resource))
    }

    async fn see(&self, resource: &ResourceName) -> Result<Seen> {
        let get = TxnOp::get(self.keys.fence(resource), None);
        let answer = self.link.read(Txn::new().and_then([get])).await?;
        Seen::of(resource, &kvs(answer.op_responses().into_iter().next())?)
    }

    /// Judges and applies: the transaction writes only what was judged (S2). Tells the watermark,
    /// whether this call applied it, and the value where it was kept.
    async fn change(
        &self,
        resource: &ResourceName,
        fence: &Fence,
        intent: Intent,
        change: Change,
    ) -> Result<(Watermark, bool, Snapshot)> {
        let key = self.fence_key(resource)?;
        let value = resource.as_str();
        let mut seen = self.see(resource).await?;
        let mut backoff = Backoff::new(RACE.0, RACE.1);
        loop {
            let (watermark, repeated) = admitted(&seen, fence, intent)?;
            let writer = match (&change, repeated) {
                (Change::Put(_), false) => Some(watermark.token),
                (Change::Delete, false) => None,
                _ => seen.writer,
            };
            let stored = Stored::of(resource, &watermark, writer).encode()?;
            let mut ops = vec![TxnOp::put(key.as_str(), stored, None)];
            ops.push(match (&change, repeated) {
                (Change::Put(bytes), false) => TxnOp::put(value, bytes.as_ref(), None),
                (Change::Delete, false) => TxnOp::delete(value, None),
                _ => TxnOp::get(value, None),
            });
            let txn = Txn::new()
                .when([unchanged(&key, &seen)])
                .and_then(ops)
                .or_else([TxnOp::get(key.as_str(), None)]);
            let answer = self.link.write(txn).await?;
            if answer.succeeded() {
                let snapshot = Snapshot::new(kept(&answer), Some(watermark.clone()), writer);
                return Ok((watermark, !repeated, snapshot));
            }
            seen = Seen::of(resource, &kvs(answer.op_responses().into_iter().next())?)?;
            tokio::time::sleep(backoff.next()).await;
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
        let (watermark, applied, _) = write_within(change).await?;
        Ok(if applied {
            Written::applied(watermark)
        } else {
            Written::repeated(watermark)
        })
    }
}

fn admitted(seen: &Seen, fence: &Fence, intent: Intent) -> Result<(Watermark, bool)> {
    Ok(
        match judge(seen.watermark.as_ref(), fence, intent, unix_micros())? {
            Admission::Apply(watermark) => (watermark, false),
            Admission::Repeat(watermark) => (watermark, true),
        },
    )
}

fn unchanged(key: &str, seen: &Seen) -> Compare {
    Compare::mod_revision(key, CompareOp::Equal, seen.at)
}

/// The value that a transaction read, where it read one.
fn kept(answer: &TxnResponse) -> Option<Body> {
    match answer.op_responses().into_iter().next_back() {
        Some(TxnOpResponse::Get(get)) => get.kvs().first().map(|kv| kv.value().to_vec().into()),
        _ => None,
    }
}

fn kvs(answer: Option<TxnOpResponse>) -> Result<Vec<KeyValue>> {
    match answer {
        Some(TxnOpResponse::Get(mut get)) => Ok(get.take_kvs()),
        _ => Err(Error::indeterminate(
            "the etcd server answered a transaction in part",
        )),
    }
}

impl Stored {
    fn of(resource: &ResourceName, watermark: &Watermark, writer: Option<FencingToken>) -> Self {
        Self {
            name: resource.as_str().to_owned(),
            token: watermark.token.get(),
            holder: watermark.holder.map(|holder| holder.to_string()),
            seq: watermark.seq,
            domain: watermark.domain.as_ref().map(ToString::to_string),
            writer: writer.map(FencingToken::get),
        }
    }

    fn encode(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self)
            .map_err(|e| Error::invalid("a watermark that cannot be written").with_source(e))
    }
}

impl Seen {
    fn of(resource: &ResourceName, kvs: &[KeyValue]) -> Result<Self> {
        let Some(kv) = kvs.first() else {
            return Ok(Self::default());
        };
        Self::read(resource, kv.value(), kv.mod_revision())
    }

    fn read(resource: &ResourceName, value: &[u8], at: i64) -> Result<Self> {
        let corrupt = || {
            Error::corrupt(
                "the watermark of the resource in etcd is damaged; nothing is written to it until its key is repaired",
            )
            .with("resource", format_args!("{resource:?}"))
        };
        let stored: Stored = serde_json::from_slice(value).map_err(|e| corrupt().with_source(e))?;
        if stored.name != resource.as_str() {
            return Err(corrupt());
        }
        let damaged = |error: Error| corrupt().with_source(error);
        let token = |number: u64| FencingToken::new(number).map_err(damaged);
        let holder = stored.holder.map(|text| text.parse().map_err(damaged));
        let domain = stored.domain.map(|text| text.parse().map_err(damaged));
        Ok(Self {
            at,
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

#[async_trait]
impl FencedStore for FencedEtcd {
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written> {
        // Before anything is judged: reading a body may take long, and may fail.
        let bytes = if body.in_memory() {
            body.into_bytes(VALUE_MAX_BYTES)?
        } else {
            off_thread(move || body.into_bytes(VALUE_MAX_BYTES)).await??
        };
        self.write(resource, fence, Intent::Write, Change::Put(bytes))
            .await
    }

    async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        read_within(async {
            let ops = [
                TxnOp::get(resource.as_str(), None),
                TxnOp::get(self.fence_key(resource)?, None),
            ];
            let answer = self.link.read(Txn::new().and_then(ops)).await?;
            let mut answers = answer.op_responses().into_iter();
            let value = kvs(answers.next())?;
            let seen = Seen::of(resource, &kvs(answers.next())?)?;
            let value = value.first().map(|kv| kv.value().to_vec().into());
            let writer = seen.writer.filter(|_| value.is_some());
            Ok(Snapshot::new(value, seen.watermark, writer))
        })
        .await
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let change = self.change(resource, fence, Intent::Raise, Change::Keep);
        let (_, _, mut snapshot) = write_within(change).await?;
        if snapshot.value.is_none() {
            snapshot.writer = None;
        }
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
        read_within(server::findings(&self.link)).await
    }
}

impl fmt::Debug for FencedEtcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedEtcd")
            .field("keys", &self.keys)
            .finish_non_exhaustive()
    }
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;
