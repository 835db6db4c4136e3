//! The lock engine: each change of a lock is one transaction.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::{Client, Compare, CompareOp, DeleteOptions, Txn, TxnOp, TxnOpResponse};
use futures_util::{StreamExt as _, stream};

use super::connect::{Link, read_within, write_within};
use super::grant::{Extended, Hint, revoke_later, unchanged};
use super::keys::Keys;
use super::options::EtcdOptions;
use super::record::{Seen, SeenHolder};
use super::server;
use super::url::options as parsed;
use super::waiters::Waiters;
use crate::error::{Error, Result};
use crate::lease::{
    AcquireRequest, Attempt, Expiry, Finding, LeaseRef, LeaseStore, LockState, Pruned, Release,
    Renewal, StoreProfile, TokenSource, Ttl, Watch,
};
use crate::name::LockName;
use crate::open::StoreUrl;
use crate::token::FencingToken;

/// How many reads one transaction holds; a server takes 128 at first.
pub(super) const BATCH: usize = 100;

/// How many requests of one operation are under way at once.
pub(super) const AT_ONCE: usize = 64;

/// How many names a store remembers to have been free.
const HINTS_MAX: usize = 4_096;

/// Locks in etcd.
///
/// Clones share one connection, which is made when it is first needed, in the runtime where it is:
/// under [`Locks`](crate::Locks) that is fencelock's own.
#[derive(Clone)]
pub struct EtcdStore {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) link: Arc<Link>,
    pub(super) keys: Keys,
    pub(super) profile: StoreProfile,
    pub(super) least_ttl_secs: i64,
    pub(super) waiters: Waiters,
    /// Names that are, or were last, held by this store: where it gave one up, the next grant begins
    /// with the transaction.
    pub(super) hints: Mutex<HashMap<LockName, Hint>>,
}

impl EtcdStore {
    /// Opens the locks of a cluster by its URL; the options are those of
    /// [`Locks::open`](crate::Locks::open), but for `ttl`.
    ///
    /// # Errors
    /// `Invalid` for a URL or option that is wrong; `Unavailable` where no member can be reached,
    /// or it refuses the user; `Corrupt` where the cluster was restored from a snapshot, and that
    /// was not accepted.
    pub async fn open(url: &str) -> Result<Self> {
        let (options, place) = parsed(StoreUrl::parse(url)?)?;
        options.open_place(place).await
    }

    /// Opens locks with settings and a client of your own: see [`EtcdOptions`].
    #[must_use]
    pub fn options() -> EtcdOptions {
        EtcdOptions::default()
    }

    /// Opens locks over a client of your own: see [`EtcdOptions::open_client`].
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn from_client(client: Client) -> Result<Self> {
        EtcdOptions::default().open_client(client).await
    }

    pub(super) async fn start(options: &EtcdOptions, link: Link) -> Result<Self> {
        read_within(async {
            let realm = link.identity.find(&link).await?;
            let (durability, least) =
                tokio::join!(server::durability(&link), server::least_ttl(&link));
            let least_ttl_secs = least?;
            let mut profile = StoreProfile::new("etcd", realm, durability, Expiry::Engine);
            profile.tokens = TokenSource::Revision;
            profile.wakes_waiters = true;
            profile.ttl_min = Duration::from_secs(u64::try_from(least_ttl_secs).unwrap_or(1));
            // The next connection is made where the first lock is asked for: a store that was
            // opened in the user's runtime must not have its renewals wait for that.
            link.hang_up().await;
            Ok(Self {
                inner: Arc::new(Inner {
                    link: Arc::new(link),
                    keys: Keys::new(&options.prefix),
                    profile,
                    least_ttl_secs,
                    waiters: Waiters::default(),
                    hints: Mutex::default(),
                }),
            })
        })
        .await
    }
}

impl Inner {
    fn key_of(&self, lease: &LeaseRef) -> String {
        format!(
            "{}{}",
            self.keys.holders(&lease.name),
            lease.holder.reveal()
        )
    }

    pub(super) async fn see(&self, name: &LockName) -> Result<Seen> {
        let answer = self
            .link
            .read(Txn::new().and_then(Seen::ops(&self.keys, name)))
            .await?;
        Seen::of(&self.keys, name, &mut answer.op_responses().into_iter())
    }

    /// The holder that a lease names, as it is now.
    async fn find(&self, lease: &LeaseRef) -> Result<Option<SeenHolder>> {
        let get = TxnOp::get(self.key_of(lease), None);
        let answer = self.link.read(Txn::new().and_then([get])).await?;
        self.found(lease, answer.op_responses().into_iter().next())
    }

    fn found(&self, lease: &LeaseRef, answer: Option<TxnOpResponse>) -> Result<Option<SeenHolder>> {
        let Some(TxnOpResponse::Get(get)) = answer else {
            return Err(Error::indeterminate(
                "the etcd server answered a transaction in part",
            ));
        };
        let Some(kv) = get.kvs().first() else {
            return Ok(None);
        };
        let seen = SeenHolder::of(kv, &self.keys.holders(&lease.name), &lease.name)?;
        Ok(seen.is(&lease.holder, lease.token).then_some(seen))
    }

    async fn renew_batch(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        let gets: Vec<TxnOp> = leases
            .iter()
            .map(|(lease, _)| TxnOp::get(self.key_of(lease), None))
            .collect();
        let answer = match self.link.read(Txn::new().and_then(gets)).await {
            Ok(answer) => answer,
            Err(failure) => return unknown(leases.len(), &failure.into()),
        };
        let mut answers = answer.op_responses().into_iter();
        let renewals = leases.iter().map(|(lease, ttl)| {
            let found = self.found(lease, answers.next());
            self.renew_one(lease, *ttl, found)
        });
        let renewals: Vec<_> = renewals.collect();
        stream::iter(renewals).buffered(AT_ONCE).collect().await
    }

    async fn renew_one(
        &self,
        lease: &LeaseRef,
        ttl: Ttl,
        first: Result<Option<SeenHolder>>,
    ) -> Renewal {
        let Some(ttl) = ttl.duration() else {
            return Renewal::Unknown(endless());
        };
        let mut found = first;
        loop {
            let seen = match found {
                Ok(Some(seen)) => seen,
                Ok(None) => return Renewal::Lost,
                Err(error) => return Renewal::Unknown(error),
            };
            match self.extend(&seen, ttl).await {
                Ok(Extended::Until(_)) => return Renewal::Renewed,
                // Lapsed, or renewed by another client of the same holder: the key tells.
                Ok(Extended::Changed) => found = self.find(lease).await,
                Err(error) => return Renewal::Unknown(error),
            }
        }
    }

    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        if linger.is_zero() {
            return self.release_now(lease).await;
        }
        loop {
            let Some(seen) = self.find(lease).await? else {
                return Ok(Release::NotHeld);
            };
            let mut holder = seen.holder.clone();
            holder.released = true;
            let spare = self.spare(linger.min(Ttl::MAX)).await?;
            holder.ttl_secs = spare.ttl_secs;
            if let Extended::Until(_) = self.reattach(&seen, &holder, spare).await? {
                return Ok(Release::Released);
            }
        }
    }

    async fn release_now(&self, lease: &LeaseRef) -> Result<Release> {
        let key = self.key_of(lease);
        let deleting = |compare| {
            let with_before = DeleteOptions::new().with_prev_key();
            Txn::new()
                .when([compare])
                .and_then([TxnOp::delete(key.as_str(), Some(with_before))])
                .or_else([TxnOp::get(key.as_str(), None)])
        };
        let mut compare = match lease.token {
            // A key that was made in the revision of its token and not changed since is that
            // grant, and needs no look.
            Some(token) => Compare::mod_revision(
                key.as_str(),
                CompareOp::Equal,
                i64::try_from(token.get()).unwrap_or(i64::MAX),
            ),
            None => match self.find(lease).await? {
                Some(seen) => unchanged(&seen),
                None => return Ok(Release::NotHeld),
            },
        };
        loop {
            let answer = self.link.write(deleting(compare)).await?;
            let first = answer.op_responses().into_iter().next();
            match (answer.succeeded(), first) {
                (true, Some(TxnOpResponse::Delete(deleted))) => {
                    self.revoke_later(deleted.prev_kvs().iter().map(|kv| kv.lease()));
                    self.gave_up(&lease.name);
                    return Ok(Release::Released);
                }
                (_, first) => match self.found(lease, first)? {
                    Some(seen) => compare = unchanged(&seen),
                    None => return Ok(Release::NotHeld),
                },
            }
        }
    }

    /// Ends leases that nothing needs any more; they would lapse by themselves.
    pub(super) fn revoke_later(&self, leases: impl IntoIterator<Item = i64>) {
        for lease in leases {
            revoke_later(&self.link, lease);
        }
    }

    /// What the record of a name is that this store gave up last, unless somebody came since.
    pub(super) fn hint(&self, name: &LockName) -> Option<Hint> {
        locked(&self.hints)
            .get(name)
            .filter(|hint| hint.free)
            .copied()
    }

    pub(super) fn remember(&self, name: &LockName, hint: Hint) {
        let mut hints = locked(&self.hints);
        if hints.len() >= HINTS_MAX && !hints.contains_key(name) {
            hints.clear();
        }
        hints.insert(name.clone(), hint);
    }

    fn gave_up(&self, name: &LockName) {
        if let Some(hint) = locked(&self.hints).get_mut(name) {
            hint.free = true;
        }
    }

    pub(super) fn forget(&self, name: &LockName) {
        locked(&self.hints).remove(name);
    }
}

#[async_trait]
impl LeaseStore for EtcdStore {
    fn profile(&self) -> &StoreProfile {
        &self.inner.profile
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        request.check_permits()?;
        let ttl = request.ttl.duration().ok_or_else(endless)?;
        write_within(self.inner.acquire(request, ttl)).await
    }

    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        let batches = leases.chunks(BATCH).map(|batch| async {
            let renewed = async { Ok(self.inner.renew_batch(batch).await) };
            match write_within(renewed).await {
                Ok(answers) => answers,
                Err(error) => unknown(batch.len(), &error),
            }
        });
        let batches: Vec<_> = batches.collect();
        let answers: Vec<_> = stream::iter(batches).buffered(AT_ONCE).collect().await;
        answers.into_iter().flatten().collect()
    }

    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        write_within(self.inner.release(lease, linger)).await
    }

    async fn watch(&self, name: &LockName) -> Result<Box<dyn Watch>> {
        let key = self.inner.keys.holders(name);
        Ok(Box::new(self.inner.waiters.join(&self.inner.link, key)))
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
        read_within(server::findings(&self.inner.link)).await
    }
}

impl fmt::Debug for EtcdStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdStore")
            .field("realm", &self.inner.profile.realm)
            .finish_non_exhaustive()
    }
}

fn unknown(count: usize, error: &Error) -> Vec<Renewal> {
    (0..count)
        .map(|_| Renewal::Unknown(Error::new(error.kind(), error.to_string())))
        .collect()
}

fn endless() -> Error {
    Error::unsupported("etcd cannot see whether a holder lives; give the lock a TTL")
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The map is whole at every unlock, so a panic elsewhere does not spoil it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
