//! Fenced values: the value is a plain key, its watermark a key beside it, and one transaction
//! compares the watermark's revision and writes both (S2, S3).

use std::fmt;

use async_trait::async_trait;
use etcd_client::{Client, Compare, CompareOp, KeyValue, Txn, TxnOp, TxnOpResponse, TxnResponse};

use super::connect::{Link, read_within, write_within};
use super::keys::Keys;
use super::options::EtcdOptions;
use super::server;
use super::url::options as parsed;
use crate::body::Body;
use crate::clock::unix_micros;
use crate::driver::off_thread;
use crate::error::{Error, Result};
use crate::fence::{Fence, FencedStore, Fencing, Snapshot, Written};
use crate::known::Known;
use crate::lease::Finding;
use crate::name::ResourceName;
use crate::open::StoreUrl;
use crate::swap::{self, Change, Next, Outcome, Stored, Swapped, Swaps};
use crate::token::{Admission, Intent, judge};

/// The largest value: 1 MiB. A server takes requests of 1.5 MiB at first.
pub const VALUE_MAX_BYTES: u64 = 1 << 20;

/// A watermark that was seen.
type Seen = swap::Seen<Version>;

/// Fenced values in etcd. A resource's name is its key, exactly.
///
/// Cheap to make, with one connection of its own.
pub struct FencedEtcd {
    link: Link,
    keys: Keys,
    known: Known<Seen>,
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

/// One version of a watermark: a condition names both, since a cluster that was restored from a
/// snapshot tells its revisions again, with other content.
#[derive(Clone, Debug, Default)]
pub(crate) struct Version {
    at: i64,
    text: Vec<u8>,
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
                known: Known::new(),
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
            let seen = self.look(&resource).await?;
            let said = judge(
                seen.watermark.as_ref(),
                &shown,
                Intent::Write,
                unix_micros(),
            )?;
            let (watermark, repeated) = match said {
                Admission::Apply(watermark) => (watermark, false),
                Admission::Repeat(watermark) => (watermark, true),
            };
            let writer = Some(watermark.token);
            let stored = Stored::encode(resource.as_str(), &watermark, writer)?;
            Ok(Admitted {
                compares: unchanged(&key, &seen.version),
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

    async fn change(
        &self,
        resource: &ResourceName,
        fence: &Fence,
        intent: Intent,
        change: Change,
    ) -> Result<Outcome> {
        self.fence_key(resource)?;
        write_within(swap::change(self, resource, fence, intent, &change)).await
    }

    async fn write(
        &self,
        resource: &ResourceName,
        fence: &Fence,
        intent: Intent,
        change: Change,
    ) -> Result<Written> {
        self.change(resource, fence, intent, change)
            .await
            .map(Outcome::written)
    }
}

impl Swaps for FencedEtcd {
    type Version = Version;

    fn known(&self) -> &Known<Seen> {
        &self.known
    }

    async fn look(&self, resource: &ResourceName) -> Result<Seen> {
        let get = TxnOp::get(self.keys.fence(resource), None);
        let answer = self.link.read(Txn::new().and_then([get])).await?;
        seen(resource, &kvs(answer.op_responses().into_iter().next())?)
    }

    /// The transaction writes only over what was judged, and tells otherwise what there is.
    async fn swap(
        &self,
        resource: &ResourceName,
        judged: &Seen,
        next: Next<'_>,
    ) -> Result<Swapped<Version>> {
        let key = self.keys.fence(resource);
        let text = Stored::encode(resource.as_str(), next.watermark, next.writer)?;
        let value = resource.as_str();
        let ops = [
            TxnOp::put(key.as_str(), text.as_str(), None),
            match next.change {
                Change::Put(bytes) => TxnOp::put(value, bytes.as_ref(), None),
                Change::Delete => TxnOp::delete(value, None),
                Change::Keep => TxnOp::get(value, None),
            },
        ];
        let txn = Txn::new()
            .when(unchanged(&key, &judged.version))
            .and_then(ops)
            .or_else([TxnOp::get(key, None)]);
        let answer = self.link.write(txn).await?;
        if !answer.succeeded() {
            let now = seen(resource, &kvs(answer.op_responses().into_iter().next())?)?;
            return Ok(Swapped::Moved(Some(now)));
        }
        let version = answer.header().map(|header| Version {
            at: header.revision(),
            text: text.into_bytes(),
        });
        Ok(Swapped::Done(version, kept(&answer)))
    }
}

fn unchanged(key: &str, version: &Version) -> Vec<Compare> {
    let mut all = vec![Compare::mod_revision(key, CompareOp::Equal, version.at)];
    // The value of a key that is not there equals nothing.
    if version.at != 0 {
        all.push(Compare::value(key, CompareOp::Equal, version.text.clone()));
    }
    all
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

fn seen(resource: &ResourceName, kvs: &[KeyValue]) -> Result<Seen> {
    match kvs.first() {
        Some(kv) => read(resource, kv.value(), kv.mod_revision()),
        None => Ok(Seen::default()),
    }
}

fn read(resource: &ResourceName, text: &[u8], at: i64) -> Result<Seen> {
    let version = Version {
        at,
        text: text.to_vec(),
    };
    Stored::decode(text, resource.as_str(), version, || {
        Error::corrupt(
            "the watermark of the resource in etcd is damaged; nothing is written to it until its key is repaired",
        )
        .with("resource", format_args!("{resource:?}"))
    })
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
            let seen = seen(resource, &kvs(answers.next())?)?;
            let value = value.first().map(|kv| kv.value().to_vec().into());
            let writer = seen.writer.filter(|_| value.is_some());
            Ok(Snapshot::new(value, seen.watermark, writer))
        })
        .await
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        self.change(resource, fence, Intent::Raise, Change::Keep)
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
