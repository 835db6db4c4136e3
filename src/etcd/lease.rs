//! The lock engine: each change of a lock is one transaction.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use etcd_client::{
    Client, Compare, CompareOp, DeleteOptions, GetOptions, PutOptions, Txn, TxnOp, TxnOpResponse,
};
use futures_util::{StreamExt as _, stream};

use super::connect::{Link, check_revision, lease_is_gone, read_within, write_within};
use super::failure::Failure;
use super::keys::Keys;
use super::options::EtcdOptions;
use super::record::{Holder, Record, Seen, SeenHolder, ttl_of, whole_secs};
use super::server;
use super::url::options as parsed;
use super::waiters::Waiters;
use crate::backoff::Backoff;
use crate::clock::unix_micros;
use crate::error::{Error, Result};
use crate::lease::{
    AcquireRequest, Attempt, Contention, Expiry, Finding, Grant, LeaseRef, LeaseStore, LockState,
    PERMITS_MAX, Pruned, Release, Renewal, StoreProfile, TokenSource, Ttl, Watch,
};
use crate::name::LockName;
use crate::open::StoreUrl;
use crate::token::{FencingToken, check_jump};

/// How many reads one transaction holds; a server takes 128 at first.
const BATCH: usize = 100;

/// How many requests of one operation are under way at once.
const AT_ONCE: usize = 64;

/// How many records are asked for in one request.
const PAGE: i64 = 500;

/// How many names a store remembers to have been free.
const HINTS_MAX: usize = 4_096;

/// Of how many holders a refused acquire asks when they lapse.
const LAPSES_ASKED_MAX: usize = 4;

/// The pauses after a race for one record was lost.
const RACE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(40));

/// Locks in etcd.
///
/// Clones share one connection, which is made when it is first needed, in the runtime where it is:
/// under [`Locks`](crate::Locks) that is fencelock's own.
#[derive(Clone)]
pub struct EtcdStore {
    inner: Arc<Inner>,
}

struct Inner {
    link: Arc<Link>,
    keys: Keys,
    profile: StoreProfile,
    least_ttl_secs: i64,
    waiters: Waiters,
    /// Names that were free, or ours, when they were last seen: their next grant begins with the
    /// transaction.
    hints: Mutex<HashMap<LockName, Hint>>,
}

/// What the record of a name was.
#[derive(Clone, Copy)]
struct Hint {
    at: i64,
    last: Option<FencingToken>,
}

/// An etcd lease that nothing is attached to yet. Given back when dropped unused.
struct Spare {
    link: Arc<Link>,
    id: i64,
    ttl_secs: i64,
    used: bool,
}

/// What becomes of a holder that is to have a whole TTL again.
enum Extended {
    Until(i64),
    /// It is not as it was read any more: look again.
    Changed,
}

/// What a look at a lock says of an acquire.
enum Verdict {
    Answer(Attempt),
    LookAgain,
    Free,
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

    async fn see(&self, name: &LockName) -> Result<Seen> {
        let answer = self
            .link
            .read(Txn::new().and_then(Seen::ops(&self.keys, name)))
            .await?;
        Seen::of(&self.keys, name, &mut answer.op_responses().into_iter())
    }

    /// A lease of at least this TTL that nothing is attached to.
    async fn spare(&self, ttl: Duration) -> Result<Spare> {
        let ttl_secs = whole_secs(ttl).max(self.least_ttl_secs);
        let (id, ttl_secs) = self.link.grant(ttl_secs).await?;
        Ok(Spare {
            link: Arc::clone(&self.link),
            id,
            ttl_secs,
            used: false,
        })
    }

    async fn acquire(&self, request: &AcquireRequest, ttl: Duration) -> Result<Attempt> {
        let name = &request.name;
        let mut seen = None;
        let mut base = match self.hint(name) {
            Some(hint) => hint,
            None => self.base(seen.insert(self.see(name).await?))?,
        };
        let mut lease: Option<Spare> = None;
        let mut backoff = Backoff::new(RACE.0, RACE.1);
        loop {
            if let Some(known) = &seen {
                match self.judge(request, ttl, known).await? {
                    Verdict::Answer(attempt) => return Ok(attempt),
                    Verdict::Free => {}
                    Verdict::LookAgain => {
                        tokio::time::sleep(backoff.next()).await;
                        base = self.base(seen.insert(self.see(name).await?))?;
                        continue;
                    }
                }
            }
            if let Some(above) = request.above {
                // One forged watermark must not use the tokens up (S11).
                check_jump(base.last, above, unix_micros())?;
            }
            let least = FencingToken::after(base.last.max(request.above))?;
            let spare = match &mut lease {
                Some(spare) => spare,
                None => lease.insert(self.spare(ttl).await?),
            };
            let txn = self.granting(request, base, seen.is_none(), least, spare)?;
            let known = self.link.revision();
            // From here on it may be in use, whatever becomes of this future.
            spare.used = true;
            let answer = match self.link.write(txn).await {
                Ok(answer) => answer,
                Err(failure) if lease_is_gone(&failure) => {
                    lease = None;
                    continue;
                }
                Err(failure) => return Err(failure.into()),
            };
            if answer.succeeded() {
                if let Err(error) = check_revision(known, answer.header()) {
                    // A token that may have been told before is not told.
                    spare.used = false;
                    return Err(error);
                }
                let at = answer.header().map_or(0, |header| header.revision());
                let token = minted(least, at)?;
                self.remember(
                    name,
                    Hint {
                        at,
                        last: Some(token),
                    },
                );
                let ttl = ttl_of(spare.ttl_secs)?;
                return Ok(Attempt::Granted(Grant { token, ttl }));
            }
            spare.used = false;
            if seen.is_some() {
                tokio::time::sleep(backoff.next()).await;
            }
            let now = Seen::of(&self.keys, name, &mut answer.op_responses().into_iter())?;
            base = self.base(seen.insert(now))?;
        }
    }

    fn base(&self, seen: &Seen) -> Result<Hint> {
        Ok(Hint {
            at: seen.at(),
            last: seen.last()?,
        })
    }

    /// What a look at the lock says, before anything is granted.
    async fn judge(&self, request: &AcquireRequest, ttl: Duration, seen: &Seen) -> Result<Verdict> {
        if let (Some(capacity), false) = (seen.capacity(), seen.holders.is_empty())
            && capacity != request.permits
        {
            return Err(Error::invalid(
                "the lock is held with another capacity; ask for the same number of permits, or wait until it is free",
            )
            .with("permits", request.permits)
            .with("capacity", capacity));
        }
        let own = seen.holders.iter().find(|seen| seen.id == request.holder);
        if let Some(own) = own
            && !own.holder.released
        {
            // The same request again: its answer was lost (L7).
            return Ok(match self.extend(own, ttl).await? {
                Extended::Changed => Verdict::LookAgain,
                Extended::Until(ttl_secs) => Verdict::Answer(Attempt::Granted(Grant {
                    token: own.token()?,
                    ttl: ttl_of(ttl_secs)?,
                })),
            });
        }
        let permits = usize::try_from(request.permits).unwrap_or(usize::MAX);
        // A holder that lingers has no second key.
        if seen.holders.len() >= permits || own.is_some() {
            self.forget(&request.name);
            return Ok(Verdict::Answer(Attempt::Held(self.contention(seen).await)));
        }
        Ok(Verdict::Free)
    }

    async fn contention(&self, seen: &Seen) -> Contention {
        let mut free_in = None;
        if seen.holders.len() <= LAPSES_ASKED_MAX {
            // Only a hint: that the lock is held is known already.
            let left = self.left(&seen.holders).await.unwrap_or_default();
            let lapses = seen.holders.iter().filter_map(|seen| {
                // Whole seconds, cut off; and the cluster looks for lapsed leases twice a second.
                // Who asks too early asks again and again.
                let left = *left.get(&seen.lease)? + Duration::from_secs(1);
                Some(left.min(seen.holder.ttl().ok()?.duration()?))
            });
            free_in = lapses.min();
        }
        Contention {
            free_in,
            holder: seen.holders.first().map(|seen| seen.holder.info()),
        }
    }

    /// The one step that grants (L3, L8): nobody has come since the record was read, and there is
    /// room; record and holder are written in the revision that is the token.
    fn granting(
        &self,
        request: &AcquireRequest,
        base: Hint,
        guessed: bool,
        least: FencingToken,
        spare: &Spare,
    ) -> Result<Txn> {
        let name = &request.name;
        let (record_key, holders) = (self.keys.record(name), self.keys.holders(name));
        let own = format!("{holders}{}", request.holder.reveal());
        let mut compares = vec![
            Compare::mod_revision(record_key.as_str(), CompareOp::Equal, base.at),
            // The key's own revision is the token.
            Compare::create_revision(own.as_str(), CompareOp::Equal, 0),
        ];
        if guessed {
            // Of no key at all, every revision is 0.
            compares.push(Compare::create_revision(holders, CompareOp::Equal, 0).with_prefix());
        }
        let record = Record {
            name: name.as_str().to_owned(),
            last: least.get(),
            granted: true,
            permits: request.permits,
        };
        let holder = Holder::new(request, least, spare.ttl_secs).encode()?;
        let attached = PutOptions::new().with_lease(spare.id);
        Ok(Txn::new()
            .when(compares)
            .and_then([
                TxnOp::put(record_key, record.encode()?, None),
                TxnOp::put(own, holder, Some(attached)),
            ])
            .or_else(Seen::ops(&self.keys, name)))
    }

    /// Gives a holder, as it was read, a whole TTL from now on.
    async fn extend(&self, seen: &SeenHolder, ttl: Duration) -> Result<Extended> {
        let ttl_secs = whole_secs(ttl).max(self.least_ttl_secs);
        if seen.holder.ttl_secs == ttl_secs {
            return match self.link.keep_alive(seen.lease).await {
                Ok(()) => Ok(Extended::Until(ttl_secs)),
                Err(failure) if lease_is_gone(&failure) => Ok(Extended::Changed),
                Err(failure) => Err(failure.into()),
            };
        }
        // A lease's TTL is fixed, so that another one takes its place; the key stays, and with it
        // the token.
        let mut holder = seen.holder.clone();
        let spare = self.spare(ttl).await?;
        holder.ttl_secs = spare.ttl_secs;
        self.reattach(seen, &holder, spare).await
    }

    /// Attaches a holder's key to another lease, unless it has changed.
    async fn reattach(
        &self,
        seen: &SeenHolder,
        holder: &Holder,
        mut spare: Spare,
    ) -> Result<Extended> {
        let attached = PutOptions::new().with_lease(spare.id);
        let txn = Txn::new().when([unchanged(seen)]).and_then([TxnOp::put(
            seen.key.as_slice(),
            holder.encode()?,
            Some(attached),
        )]);
        spare.used = true;
        match self.link.write(txn).await {
            Ok(answer) if answer.succeeded() => {
                self.revoke_later([seen.lease]);
                Ok(Extended::Until(spare.ttl_secs))
            }
            Ok(_) => {
                spare.used = false;
                Ok(Extended::Changed)
            }
            Err(failure) if lease_is_gone(&failure) => Ok(Extended::Changed),
            Err(failure) => Err(failure.into()),
        }
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
                    return Ok(Release::Released);
                }
                (_, first) => match self.found(lease, first)? {
                    Some(seen) => compare = unchanged(&seen),
                    None => return Ok(Release::NotHeld),
                },
            }
        }
    }

    async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        let record = TxnOp::get(self.keys.record(name), None);
        let all = DeleteOptions::new().with_prefix().with_prev_key();
        let holders = TxnOp::delete(self.keys.holders(name), Some(all));
        let answer = self
            .link
            .write(Txn::new().and_then([record, holders]))
            .await?;
        let mut answers = answer.op_responses().into_iter();
        let (Some(TxnOpResponse::Get(record)), Some(TxnOpResponse::Delete(deleted))) =
            (answers.next(), answers.next())
        else {
            return Err(Error::indeterminate(
                "the etcd server answered a transaction in part",
            ));
        };
        // It is broken by now, whatever can be read of it.
        let seen = Seen::of_parts(&self.keys, name, record.kvs(), deleted.prev_kvs())?;
        if seen.record.is_none() && seen.holders.is_empty() {
            return Ok(None);
        }
        let left = self.left(&seen.holders).await.unwrap_or_default();
        self.revoke_later(seen.holders.iter().map(|seen| seen.lease));
        let state = seen.state(name, |lease| left.get(&lease).copied())?;
        Ok(Some(state))
    }

    /// How long the leases of holders have left, in whole seconds.
    async fn left(&self, holders: &[SeenHolder]) -> Result<HashMap<i64, Duration>> {
        let asked = holders.iter().map(|seen| async move {
            let answer = self.link.time_to_live(seen.lease).await?;
            let secs = u64::try_from(answer.ttl()).unwrap_or(0);
            Ok::<_, Failure>((seen.lease, Duration::from_secs(secs)))
        });
        let asked: Vec<_> = asked.collect();
        let answers: Vec<_> = stream::iter(asked).buffered(AT_ONCE).collect().await;
        let mut left = HashMap::with_capacity(answers.len());
        for answer in answers {
            let (lease, duration) = answer?;
            left.insert(lease, duration);
        }
        Ok(left)
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        let seen = self.see(name).await?;
        if seen.record.is_none() {
            return Ok(None);
        }
        let left = self.left(&seen.holders).await?;
        let state = seen.state(name, |lease| left.get(&lease).copied())?;
        Ok(Some(state))
    }

    /// The names of all records, in their own order.
    async fn names(&self) -> Result<Vec<LockName>> {
        let prefix = self.keys.records();
        // No key of ours holds a byte above the slash's successor here.
        let end = format!("{}0", prefix.trim_end_matches('/'));
        let mut names = Vec::new();
        let mut from = prefix.into_bytes();
        loop {
            let options = GetOptions::new().with_range(end.as_str()).with_limit(PAGE);
            let get = TxnOp::get(from.as_slice(), Some(options));
            let answer = self.link.read(Txn::new().and_then([get])).await?;
            let Some(TxnOpResponse::Get(page)) = answer.op_responses().into_iter().next() else {
                break;
            };
            for kv in page.kvs() {
                match serde_json::from_slice::<Record>(kv.value()) {
                    Ok(record) => names.push(LockName::new(&record.name)?),
                    Err(error) => tracing::warn!(
                        key = %String::from_utf8_lossy(kv.key()), %error,
                        "the record of a lock is damaged, and left out of the list"
                    ),
                }
            }
            match page.kvs().last() {
                Some(last) if page.more() => {
                    from = last.key().to_vec();
                    from.push(0);
                }
                _ => break,
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        let mut names = self.names().await?;
        names.retain(|name| {
            name.as_str().starts_with(prefix) && after.is_none_or(|after| name > after)
        });
        names.truncate(limit);
        let mut states = Vec::with_capacity(names.len());
        for batch in names.chunks(BATCH / 2) {
            let ops: Vec<TxnOp> = batch
                .iter()
                .flat_map(|name| Seen::ops(&self.keys, name))
                .collect();
            let answer = self.link.read(Txn::new().and_then(ops)).await?;
            let mut answers = answer.op_responses().into_iter();
            let seen = batch
                .iter()
                .map(|name| Seen::of(&self.keys, name, &mut answers))
                .collect::<Result<Vec<_>>>()?;
            let holders: Vec<SeenHolder> =
                seen.iter().flat_map(|seen| seen.holders.clone()).collect();
            let left = self.left(&holders).await?;
            for (name, seen) in batch.iter().zip(seen) {
                states.push(seen.state(name, |lease| left.get(&lease).copied())?);
            }
        }
        Ok(states)
    }

    async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken> {
        let key = self.keys.record(name);
        loop {
            let ops = Seen::ops(&self.keys, name);
            let answer = self.link.read(Txn::new().and_then(ops)).await?;
            let mut answers = answer.op_responses().into_iter();
            let (base, permits, damaged) = match Seen::of(&self.keys, name, &mut answers) {
                Ok(seen) => (self.base(&seen)?, seen.capacity(), false),
                Err(_) if mend => (
                    Hint {
                        at: written_at(&answer.op_responses()),
                        last: None,
                    },
                    None,
                    true,
                ),
                Err(error) => return Err(error),
            };
            check_jump(base.last, floor, unix_micros())?;
            if let Some(last) = base.last
                && last >= floor
            {
                return Ok(last);
            }
            let record = Record {
                name: name.as_str().to_owned(),
                // A damaged record may have been a grant's.
                last: if damaged {
                    minted(floor, base.at)?.get()
                } else {
                    floor.get()
                },
                granted: false,
                permits: permits.unwrap_or(0),
            };
            let last = FencingToken::new(record.last)?;
            let mut ops = vec![TxnOp::put(key.as_str(), record.encode()?, None)];
            if damaged {
                let all = DeleteOptions::new().with_prefix();
                ops.push(TxnOp::delete(self.keys.holders(name), Some(all)));
            }
            let compare = Compare::mod_revision(key.as_str(), CompareOp::Equal, base.at);
            let txn = Txn::new().when([compare]).and_then(ops);
            if self.link.write(txn).await?.succeeded() {
                return Ok(last);
            }
        }
    }

    /// Records are the floors of their names' tokens, and stay: see `docs/backends/etcd.md`.
    async fn prune(&self) -> Result<Pruned> {
        let options = GetOptions::new().with_prefix().with_count_only();
        let get = TxnOp::get(self.keys.records(), Some(options));
        let answer = self.link.read(Txn::new().and_then([get])).await?;
        let kept = match answer.op_responses().into_iter().next() {
            Some(TxnOpResponse::Get(get)) => u64::try_from(get.count()).unwrap_or(0),
            _ => 0,
        };
        Ok(Pruned { removed: 0, kept })
    }

    /// Ends leases that nothing needs any more; they would lapse by themselves.
    fn revoke_later(&self, leases: impl IntoIterator<Item = i64>) {
        for lease in leases {
            revoke_later(&self.link, lease);
        }
    }

    fn hint(&self, name: &LockName) -> Option<Hint> {
        locked(&self.hints).get(name).copied()
    }

    fn remember(&self, name: &LockName, hint: Hint) {
        let mut hints = locked(&self.hints);
        if hints.len() >= HINTS_MAX && !hints.contains_key(name) {
            hints.clear();
        }
        hints.insert(name.clone(), hint);
    }

    fn forget(&self, name: &LockName) {
        locked(&self.hints).remove(name);
    }
}

impl Drop for Spare {
    fn drop(&mut self) {
        if !self.used {
            revoke_later(&self.link, self.id);
        }
    }
}

fn revoke_later(link: &Arc<Link>, lease: i64) {
    // Outside of a runtime it is left to lapse.
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        let link = Arc::clone(link);
        runtime.spawn(async move { link.revoke(lease).await.is_ok() });
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The map is whole at every unlock, so a panic elsewhere does not spoil it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The token of what a transaction of this revision granted.
fn minted(least: FencingToken, revision: i64) -> Result<FencingToken> {
    let revision = u64::try_from(revision).unwrap_or(0);
    FencingToken::new(least.get().max(revision))
}

fn unchanged(seen: &SeenHolder) -> Compare {
    Compare::mod_revision(seen.key.as_slice(), CompareOp::Equal, seen.at)
}

/// Where the record that is first among the answers was written.
fn written_at(answers: &[TxnOpResponse]) -> i64 {
    match answers.first() {
        Some(TxnOpResponse::Get(get)) => get.kvs().first().map_or(0, |kv| kv.mod_revision()),
        _ => 0,
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

#[async_trait]
impl LeaseStore for EtcdStore {
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
