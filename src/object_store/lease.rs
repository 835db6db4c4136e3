//! The lock engine: each change of a lock is one conditional write of its record.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ::object_store::ObjectStore;
use ::object_store::path::Path;
use async_trait::async_trait;
use futures_util::{StreamExt as _, stream};

use super::connect::{Link, Version};
use super::grant::Base;
use super::lock_options::Provider;
use super::observe::Observations;
use super::options::ObjectOptions;
use super::realm;
use super::record::Record;
use super::time::StoreClock;
use super::url::options as parsed;
use crate::clock::{Clock, Tick};
use crate::error::{Error, Result};
use crate::lease::{
    AcquireRequest, Attempt, Expiry, Finding, LeaseRef, LeaseStore, LockState, NoWatch,
    PERMITS_MAX, Pruned, Release, Renewal, StoreProfile, TokenSource, Ttl, Watch,
};
use crate::name::LockName;
use crate::open::StoreUrl;
use crate::token::FencingToken;

/// How many requests of one operation are under way at once.
pub(super) const AT_ONCE: usize = 32;

/// Pauses of a waiter between two looks: each is a request that is paid for.
const POLL: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(4));

/// How many records that this client left free it remembers. Those that it holds are always.
const FREE_MAX: usize = 4_096;

/// Locks in an object store.
///
/// Clones share the connections.
#[derive(Clone)]
pub struct BucketStore {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) link: Link,
    pub(super) profile: StoreProfile,
    pub(super) realm_is_given: bool,
    pub(super) clock: Clock,
    /// What is added to each TTL, for the store's clock.
    pub(super) margin: Duration,
    pub(super) time: StoreClock,
    pub(super) seen: Observations,
    /// The records that this client wrote last, as far as it knows.
    ours: Mutex<HashMap<LockName, Ours>>,
}

struct Ours {
    record: Record,
    version: Version,
    asked: Tick,
}

impl BucketStore {
    /// Opens the locks of a bucket, or of a prefix in it, by URL; the options are those of
    /// [`Locks::open`](crate::Locks::open), but for `ttl`. Credentials come from the environment.
    ///
    /// # Errors
    /// `Invalid` for a URL or option that is wrong, or a bucket that is not there; `Unsupported`
    /// where the store does not honour conditional writes; `Unavailable` where it cannot be
    /// reached, or refuses the credentials.
    pub async fn open(url: &str) -> Result<Self> {
        let (options, place) = parsed(StoreUrl::parse(url)?)?;
        options.open_locks_at(place).await
    }

    /// Opens locks with settings of your own: see [`ObjectOptions`].
    #[must_use]
    pub fn options() -> ObjectOptions {
        ObjectOptions::default()
    }

    /// Opens locks below `prefix` in a store of your own: see [`ObjectOptions::open_locks`].
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn from_store(store: Arc<dyn ObjectStore>, prefix: &str) -> Result<Self> {
        ObjectOptions::default().open_locks(store, prefix).await
    }

    pub(super) async fn start(
        options: &ObjectOptions,
        link: Link,
        provider: Provider,
    ) -> Result<Self> {
        let settings = &options.locks;
        let realm = match &options.realm {
            Some(realm) => realm.clone(),
            None => realm::find(&link).await?,
        };
        let expiry = if settings.observe {
            Expiry::Observation
        } else {
            Expiry::Engine
        };
        let mut profile = StoreProfile::new("bucket", realm, settings.durability(provider), expiry);
        profile.tokens = TokenSource::Clock;
        profile.poll = POLL;
        let clock = settings.clock.clone();
        Ok(Self {
            inner: Arc::new(Inner {
                link,
                profile,
                realm_is_given: options.realm.is_some(),
                clock: clock.clone(),
                margin: settings.margin,
                time: StoreClock::new(clock, settings.margin, settings.observe),
                seen: Observations::default(),
                ours: Mutex::default(),
            }),
        })
    }

    /// The same locks over another connection. For a store that nobody has used yet.
    pub(super) fn over(self, link: Link) -> Self {
        match Arc::try_unwrap(self.inner) {
            Ok(inner) => Self {
                inner: Arc::new(Inner { link, ..inner }),
            },
            Err(inner) => Self { inner },
        }
    }
}

impl Inner {
    /// Where the record of a name is.
    pub(super) fn path_of(&self, name: &LockName) -> Result<Path> {
        self.link.path(&format!("lock/{}", name.encoded()))
    }

    /// Notes a record that was written, and asked for at `asked`.
    pub(super) fn wrote(&self, name: &LockName, record: Record, version: Version, asked: Tick) {
        self.seen.note(name, &record, self.clock.now());
        let mut ours = locked(&self.ours);
        if ours.len() >= FREE_MAX && record.holders.is_empty() && !ours.contains_key(name) {
            ours.retain(|_, ours| !ours.record.holders.is_empty());
        }
        let written = Ours {
            record,
            version,
            asked,
        };
        ours.insert(name.clone(), written);
    }

    pub(super) fn forget(&self, name: &LockName) {
        locked(&self.ours).remove(name);
    }

    /// Forgets what this client wrote, where something else is there now.
    pub(super) fn forget_unless(&self, name: &LockName, version: &Version) {
        let mut ours = locked(&self.ours);
        if ours.get(name).is_some_and(|ours| ours.version != *version) {
            ours.remove(name);
        }
    }

    /// What this client wrote last, where that is known and `suits`.
    pub(super) fn remembered(
        &self,
        name: &LockName,
        suits: impl FnOnce(&Record, Tick) -> bool,
    ) -> Option<Base> {
        let ours = locked(&self.ours);
        let ours = ours.get(name)?;
        suits(&ours.record, ours.asked).then(|| Base {
            record: ours.record.clone(),
            version: Some(ours.version.clone()),
            noted_us: None,
        })
    }
}

#[async_trait]
impl LeaseStore for BucketStore {
    fn profile(&self) -> &StoreProfile {
        &self.inner.profile
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        if !(1..=PERMITS_MAX).contains(&request.permits) {
            return Err(Error::invalid(format!(
                "permits are out of range; expected 1 to {PERMITS_MAX}"
            ))
            .with("permits", request.permits));
        }
        let ttl_ms = request.ttl.as_millis().ok_or_else(endless)?;
        self.inner
            .acquire(request, Duration::from_millis(ttl_ms))
            .await
    }

    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        // All leases of one name go with one write.
        let mut names: HashMap<&LockName, Vec<(usize, LeaseRef, Duration)>> = HashMap::new();
        let mut answers = Vec::with_capacity(leases.len());
        for (at, (lease, ttl)) in leases.iter().enumerate() {
            answers.push(Renewal::Unknown(endless()));
            if let Some(ttl) = ttl.duration() {
                let of_name = names.entry(&lease.name).or_default();
                of_name.push((at, lease.clone(), ttl));
            }
        }
        let renewals = names.into_iter().map(|(name, of_name)| async move {
            let (places, leases): (Vec<_>, Vec<_>) = of_name
                .into_iter()
                .map(|(at, lease, ttl)| (at, (lease, ttl)))
                .unzip();
            let answers = self.inner.renew(name, &leases).await;
            places.into_iter().zip(answers).collect::<Vec<_>>()
        });
        let renewals: Vec<_> = renewals.collect();
        let mut done = stream::iter(renewals).buffer_unordered(AT_ONCE);
        while let Some(renewed) = done.next().await {
            for (at, answer) in renewed {
                if let Some(place) = answers.get_mut(at) {
                    *place = answer;
                }
            }
        }
        drop(done);
        answers
    }

    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        self.inner.release(lease, linger).await
    }

    async fn watch(&self, _: &LockName) -> Result<Box<dyn Watch>> {
        Ok(Box::new(NoWatch))
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        self.inner.inspect(name).await
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        self.inner.list(prefix, after, limit).await
    }

    async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        self.inner.break_lock(name).await
    }

    async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken> {
        self.inner.raise_floor(name, floor, mend).await
    }

    async fn prune(&self, _: Duration) -> Result<Pruned> {
        self.inner.prune().await
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        Ok(self.inner.findings().await)
    }
}

impl fmt::Debug for BucketStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BucketStore")
            .field("link", &self.inner.link)
            .field("realm", &self.inner.profile.realm)
            .finish_non_exhaustive()
    }
}

fn endless() -> Error {
    Error::unsupported("an object store cannot see whether a holder lives; give the lock a TTL")
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The map is whole at every unlock, so a panic elsewhere does not spoil it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
