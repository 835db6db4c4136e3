//! The lock engine: each change of a lock is one publish at the sequence that was read.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_nats::Client;
use async_trait::async_trait;
use futures_util::{StreamExt as _, stream};

use super::bucket::Bucket;
use super::connect::{Link, collect_within, overdue, read_within, write_within};
use super::grant::Known;
use super::options::NatsOptions;
use super::server;
use super::url::options as parsed;
use super::waiters::Waiters;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::lease::{
    AcquireRequest, Attempt, Durability, Expiry, Finding, HolderId, LeaseRef, LeaseStore,
    LockState, Pruned, Release, Renewal, StoreProfile, TokenSource, Ttl, Watch,
};
use crate::name::LockName;
use crate::open::StoreUrl;
use crate::token::FencingToken;

/// How many requests of one operation are under way at once.
pub(super) const AT_ONCE: usize = 64;

/// How many names, and how many doubts, a store remembers.
const KNOWN_MAX: usize = 4_096;

/// Locks in a JetStream key-value bucket.
///
/// Clones share one connection, which is made when it is first needed, in the runtime where it is:
/// under [`Locks`](crate::Locks) that is fencelock's own.
#[derive(Clone)]
pub struct NatsStore {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) link: Arc<Link>,
    pub(super) bucket: Bucket,
    pub(super) profile: StoreProfile,
    /// Ours: for how long a holder's own belief lasts. It decides nothing but what may be tried
    /// without a look.
    pub(super) clock: Clock,
    waiters: Waiters,
    /// Records that this store wrote last, as far as it knows.
    known: Mutex<HashMap<LockName, Known>>,
    /// The sequences that unanswered grants were to replace. While such a sequence is the record's,
    /// the grant may still come.
    doubts: Mutex<HashMap<HolderId, u64>>,
}

impl NatsStore {
    /// Opens the locks of a bucket by the URL of its servers; the options are those of
    /// [`Locks::open`](crate::Locks::open), but for `ttl`. Makes the bucket where there is none.
    ///
    /// # Errors
    /// `Invalid` for a URL or option that is wrong; `Unavailable` where no server can be reached,
    /// or it refuses the user; `Unsupported` without JetStream, where the user may not do what is
    /// needed, or where the bucket would lose records.
    pub async fn open(url: &str) -> Result<Self> {
        let (options, place) = parsed(StoreUrl::parse(url)?)?;
        options.open_place(place).await
    }

    /// Opens locks with settings and a client of your own: see [`NatsOptions`].
    #[must_use]
    pub fn options() -> NatsOptions {
        NatsOptions::default()
    }

    /// Opens locks over a client of your own: see [`NatsOptions::open_client`].
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn from_client(client: Client) -> Result<Self> {
        NatsOptions::default().open_client(client).await
    }

    pub(super) async fn start(options: &NatsOptions, link: Link) -> Result<Self> {
        write_within(async {
            server::check(&link).await?;
            let (bucket, _) = Bucket::open(&link, options).await?;
            let realm = options.realm.as_deref().unwrap_or(bucket.realm());
            // A server writes a message before it acknowledges it, and syncs it later.
            let durability = Durability::D1ProcessCrash;
            let mut profile = StoreProfile::new("nats", realm, durability, Expiry::Engine);
            profile.tokens = TokenSource::Revision;
            profile.wakes_waiters = true;
            // The next connection is made where the first lock is asked for: a store that was
            // opened in the user's runtime must not have its renewals wait for that.
            link.hang_up().await;
            Ok(Self {
                inner: Arc::new(Inner {
                    link: Arc::new(link),
                    bucket,
                    profile,
                    clock: Clock::system(),
                    waiters: Waiters::default(),
                    known: Mutex::default(),
                    doubts: Mutex::default(),
                }),
            })
        })
        .await
    }
}

impl Inner {
    pub(super) fn known(&self, name: &LockName) -> Option<Known> {
        locked(&self.known).get(name).cloned()
    }

    pub(super) fn remember(&self, name: &LockName, known: Known) {
        let mut all = locked(&self.known);
        if all.len() < KNOWN_MAX || all.contains_key(name) {
            all.insert(name.clone(), known);
        }
    }

    pub(super) fn forget(&self, name: &LockName) {
        locked(&self.known).remove(name);
    }

    pub(super) fn doubt(&self, holder: HolderId, at: u64) {
        let mut doubts = locked(&self.doubts);
        if doubts.len() >= KNOWN_MAX {
            doubts.clear();
        }
        doubts.insert(holder, at);
    }

    pub(super) fn doubted(&self, holder: &HolderId) -> Option<u64> {
        locked(&self.doubts).get(holder).copied()
    }

    pub(super) fn settle(&self, holder: &HolderId) {
        locked(&self.doubts).remove(holder);
    }
}

#[async_trait]
impl LeaseStore for NatsStore {
    fn profile(&self) -> &StoreProfile {
        &self.inner.profile
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        request.check_permits()?;
        let ttl = whole_millis(request.ttl)?;
        write_within(self.inner.acquire(request, ttl)).await
    }

    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        // All grants of one name are in one record, and are renewed by one publish.
        let mut names: HashMap<&LockName, Vec<usize>> = HashMap::new();
        for (index, (lease, _)) in leases.iter().enumerate() {
            names.entry(&lease.name).or_default().push(index);
        }
        let renewals = names.into_values().map(|indices| async move {
            let batch: Vec<&(LeaseRef, Ttl)> = indices
                .iter()
                .filter_map(|index| leases.get(*index))
                .collect();
            let answers = match write_within(self.inner.renew_batch(&batch)).await {
                Ok(answers) => answers,
                Err(error) => unknown(batch.len(), &error),
            };
            indices.into_iter().zip(answers).collect::<Vec<_>>()
        });
        // All on one connection, without waiting for each other's answers.
        let renewals: Vec<_> = renewals.collect();
        let answered = collect_within(stream::iter(renewals).buffer_unordered(AT_ONCE)).await;
        let mut answers = unknown(leases.len(), &overdue());
        for (index, answer) in answered.into_iter().flatten() {
            if let Some(slot) = answers.get_mut(index) {
                *slot = answer;
            }
        }
        answers
    }

    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        write_within(self.inner.release(lease, linger)).await
    }

    async fn watch(&self, name: &LockName) -> Result<Box<dyn Watch>> {
        let subject = self.inner.bucket.freed(name);
        let watch = self.inner.waiters.join(&self.inner.link, subject);
        Ok(Box::new(watch.await))
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        read_within(self.inner.inspect(name)).await
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        read_within(self.inner.list(prefix, after, limit)).await
    }

    async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        write_within(self.inner.break_lock(name)).await
    }

    async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken> {
        write_within(self.inner.raise_floor(name, floor, mend)).await
    }

    async fn prune(&self, _: Duration) -> Result<Pruned> {
        read_within(self.inner.prune()).await
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        read_within(server::findings(&self.inner.link, &self.inner.bucket)).await
    }
}

impl fmt::Debug for NatsStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsStore")
            .field("realm", &self.inner.profile.realm)
            .finish_non_exhaustive()
    }
}

fn unknown(count: usize, error: &Error) -> Vec<Renewal> {
    (0..count)
        .map(|_| Renewal::Unknown(Error::new(error.kind(), error.to_string())))
        .collect()
}

/// What a record holds of a TTL: rounded up.
pub(super) fn whole_millis(ttl: Ttl) -> Result<Duration> {
    ttl.as_millis().map(Duration::from_millis).ok_or_else(|| {
        Error::unsupported("NATS cannot see whether a holder lives; give the lock a TTL")
    })
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The map is whole at every unlock, so a panic elsewhere does not spoil it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
