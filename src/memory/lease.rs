//! The reference lock engine: one record per name, in shards under mutexes.
//!
//! Every method is one locked section of one shard, so that it is one atomic step (L3, L8), and
//! every future is ready at its first poll.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher as _;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use super::locked;
use crate::clock::{Clock, Tick, unix_micros};
use crate::error::{Error, Result};
use crate::fence::{HolderTag, hex};
use crate::lease::{
    AcquireRequest, Attempt, Contention, Durability, Expiry, Finding, Grant, HolderId, HolderState,
    LeaseInfo, LeaseRef, LeaseStore, LockState, Pruned, Release, Renewal, Severity, StoreProfile,
    Ttl, Watch,
};
use crate::name::LockName;
use crate::random;
use crate::token::{FencingToken, check_jump};

/// Enough that two threads with different names rarely meet; each costs one mutex and two maps.
const SHARDS: usize = 64;

/// Locks in the memory of this process.
///
/// Clones share the data; a new store is a new realm (D0). [`Ttl::NONE`] is taken, for the store
/// and its holders die together.
#[derive(Clone)]
pub struct MemoryStore {
    shared: Arc<Shared>,
}

struct Shared {
    profile: StoreProfile,
    clock: Clock,
    hasher: RandomState,
    shards: [Shard; SHARDS],
}

/// Aligned, so that two cores do not fight over one cache line.
#[derive(Default)]
#[repr(align(128))]
struct Shard(Mutex<Table>);

#[derive(Default)]
struct Table {
    records: HashMap<LockName, Record>,
    /// What a name without a record has for its last token: at least the last token of every
    /// record that was pruned here, so that no name's tokens go down (L10).
    floor: Option<FencingToken>,
    /// One channel for each name that is being waited for, gone with its last waiter.
    watched: HashMap<LockName, watch::Sender<()>>,
}

struct Record {
    last_token: Option<FencingToken>,
    capacity: Option<u32>,
    holders: Vec<Holder>,
    /// When the last grant ended, or the record was made.
    idle_since: Tick,
}

struct Holder {
    id: HolderId,
    token: FencingToken,
    ttl: Ttl,
    expires: Tick,
    detached: bool,
    /// Given up with a linger time: it keeps others out and is nobody's, so that a renewal that
    /// was under way does not prolong it.
    released: bool,
    info: LeaseInfo,
}

impl MemoryStore {
    /// An empty store on the host's clock.
    #[must_use]
    pub fn new() -> Self {
        Self::with_clock(Clock::system())
    }

    /// An empty store on a clock that a test can move.
    #[must_use]
    pub fn with_clock(clock: Clock) -> Self {
        Self::build(clock, None)
    }

    /// An empty store whose tokens are all larger than `floor`: for a service that knows the
    /// tokens of its former life and guards storage that remembers them.
    #[must_use]
    pub fn starting_after(floor: FencingToken) -> Self {
        Self::build(Clock::system(), Some(floor))
    }

    fn build(clock: Clock, floor: Option<FencingToken>) -> Self {
        let mut profile = StoreProfile::new(
            "memory",
            hex(&random::id()),
            Durability::D0Memory,
            Expiry::Engine,
        );
        profile.wakes_waiters = true;
        profile.sees_dead_holders = true;
        let shard = || {
            Shard(Mutex::new(Table {
                floor,
                ..Table::default()
            }))
        };
        Self {
            shared: Arc::new(Shared {
                profile,
                clock,
                hasher: RandomState::new(),
                shards: std::array::from_fn(|_| shard()),
            }),
        }
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("realm", &self.shared.profile.realm)
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn table(&self, name: &LockName) -> MutexGuard<'_, Table> {
        let [first, ..] = &self.shards;
        let shards = u64::try_from(SHARDS).unwrap_or(1);
        let index = usize::try_from(self.hasher.hash_one(name) % shards).unwrap_or(0);
        locked(&self.shards.get(index).unwrap_or(first).0)
    }
}

impl Table {
    /// Tells the waiters of `name` that it may have become free, or will sooner than they heard.
    fn wake(&self, name: &LockName) {
        if let Some(changes) = self.watched.get(name) {
            changes.send_replace(());
        }
    }

    /// Makes the record where there was none; `change` sees no lapsed grants. A change that fails
    /// leaves no new record behind.
    fn change<T>(
        &mut self,
        name: &LockName,
        now: Tick,
        change: impl FnOnce(&mut Record) -> Result<T>,
    ) -> Result<T> {
        if let Some(record) = self.records.get_mut(name) {
            record.drop_lapsed(now);
            return change(record);
        }
        let mut record = Record {
            last_token: self.floor,
            capacity: None,
            holders: Vec::new(),
            idle_since: now,
        };
        let outcome = change(&mut record)?;
        self.records.insert(name.clone(), record);
        Ok(outcome)
    }
}

impl Record {
    fn drop_lapsed(&mut self, now: Tick) {
        for holder in self.holders.extract_if(.., |holder| holder.expires <= now) {
            self.idle_since = self.idle_since.max(holder.expires);
        }
    }

    /// Answers an acquire, and says whether waiters have to hear of it.
    fn acquire(&mut self, request: &AcquireRequest, now: Tick) -> Result<(Attempt, bool)> {
        if let (Some(capacity), false) = (self.capacity, self.holders.is_empty())
            && capacity != request.permits
        {
            return Err(Error::invalid(
                "the lock is held with another capacity; ask for the same number of permits, or wait until it is free",
            )
            .with("permits", request.permits)
            .with("capacity", capacity));
        }
        // The same request again: its answer was lost (L7).
        if let Some(holder) = self.good(&request.holder, None) {
            let sooner = holder.extend(request.ttl, now);
            let (token, ttl) = (holder.token, holder.ttl);
            return Ok((Attempt::Granted(Grant { token, ttl }), sooner));
        }
        let permits = usize::try_from(request.permits).unwrap_or(usize::MAX);
        if self.holders.len() >= permits {
            return Ok((Attempt::Held(self.contention(now)), false));
        }
        if let Some(above) = request.above {
            // One forged watermark must not use the tokens up (S11).
            check_jump(self.last_token, above, unix_micros())?;
        }
        let token = FencingToken::after(self.last_token.max(request.above))?;
        self.last_token = Some(token);
        self.capacity = Some(request.permits);
        self.holders.push(Holder {
            id: request.holder,
            token,
            ttl: request.ttl,
            expires: expiry(request.ttl, now),
            detached: request.detached,
            released: false,
            info: request.info.clone(),
        });
        let ttl = request.ttl;
        Ok((Attempt::Granted(Grant { token, ttl }), false))
    }

    /// The grant that `id` has and has not given up; of this token, where one is named.
    fn good(&mut self, id: &HolderId, token: Option<FencingToken>) -> Option<&mut Holder> {
        self.holders.iter_mut().find(|holder| {
            holder.id == *id && !holder.released && token.is_none_or(|t| t == holder.token)
        })
    }

    fn contention(&self, now: Tick) -> Contention {
        Contention {
            free_in: self
                .holders
                .iter()
                .filter_map(|holder| remaining(holder.expires, now))
                .min(),
            holder: self.holders.first().map(|holder| holder.info.clone()),
        }
    }

    fn state(&self, name: &LockName, now: Tick) -> LockState {
        let mut state = LockState::new(name.clone(), self.last_token);
        state.capacity = self.capacity;
        state.holders = self
            .holders
            .iter()
            .filter(|holder| holder.expires > now)
            .map(|holder| HolderState {
                token: holder.token,
                tag: HolderTag::of(&holder.id),
                ttl: holder.ttl,
                expires_in: remaining(holder.expires, now),
                info: holder.info.clone(),
            })
            .collect();
        state
    }
}

impl Holder {
    /// Gives it a whole TTL from now on; true where it now ends sooner than waiters were told.
    fn extend(&mut self, ttl: Ttl, now: Tick) -> bool {
        let expires = expiry(ttl, now);
        let sooner = expires < self.expires;
        self.ttl = ttl;
        self.expires = expires;
        sooner
    }
}

fn expiry(ttl: Ttl, now: Tick) -> Tick {
    ttl.duration().map_or(Tick::NEVER, |ttl| now.after(ttl))
}

fn remaining(expires: Tick, now: Tick) -> Option<Duration> {
    (expires != Tick::NEVER).then(|| expires.since(now))
}

/// Nobody would ever see the end of a grant that outlives its process and does not lapse.
fn check_detached(detached: bool, ttl: Ttl) -> Result<()> {
    if detached && ttl == Ttl::NONE {
        return Err(Error::invalid(
            "a detached grant needs an expiry; give it a TTL",
        ));
    }
    Ok(())
}

fn check_request(request: &AcquireRequest) -> Result<()> {
    request.check_permits()?;
    check_detached(request.detached, request.ttl)
}

#[async_trait]
impl LeaseStore for MemoryStore {
    fn profile(&self) -> &StoreProfile {
        &self.shared.profile
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        check_request(request)?;
        let mut table = self.shared.table(&request.name);
        // Read under the lock: two grants in this order see two ticks in this order.
        let now = self.shared.clock.now();
        let (attempt, wake) =
            table.change(&request.name, now, |record| record.acquire(request, now))?;
        if wake {
            table.wake(&request.name);
        }
        Ok(attempt)
    }

    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        leases
            .iter()
            .map(|(lease, ttl)| self.renew_one(lease, *ttl))
            .collect()
    }

    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        let mut table = self.shared.table(&lease.name);
        let now = self.shared.clock.now();
        let Some(record) = table.records.get_mut(&lease.name) else {
            return Ok(Release::NotHeld);
        };
        record.drop_lapsed(now);
        let Some(holder) = record.good(&lease.holder, lease.token) else {
            return Ok(Release::NotHeld);
        };
        holder.released = true;
        holder.expires = now.after(linger);
        record.drop_lapsed(now);
        table.wake(&lease.name);
        Ok(Release::Released)
    }

    async fn watch(&self, name: &LockName) -> Result<Box<dyn Watch>> {
        let mut table = self.shared.table(name);
        let changes = match table.watched.get(name) {
            Some(sender) => sender.subscribe(),
            None => {
                let (sender, receiver) = watch::channel(());
                table.watched.insert(name.clone(), sender);
                receiver
            }
        };
        Ok(Box::new(MemoryWatch {
            shared: Arc::clone(&self.shared),
            name: name.clone(),
            changes: Some(changes),
        }))
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        Ok(self.state(name))
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        let mut names: Vec<LockName> = Vec::new();
        for shard in &self.shared.shards {
            let table = locked(&shard.0);
            let wanted = table.records.keys().filter(|name| {
                name.as_str().starts_with(prefix) && after.is_none_or(|after| *name > after)
            });
            names.extend(wanted.cloned());
        }
        names.sort_unstable();
        // A name that is pruned in between is left out, and does not use up the limit.
        Ok(names
            .iter()
            .filter_map(|name| self.state(name))
            .take(limit)
            .collect())
    }

    async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        let mut table = self.shared.table(name);
        let now = self.shared.clock.now();
        let Some(record) = table.records.get_mut(name) else {
            return Ok(None);
        };
        record.drop_lapsed(now);
        let before = record.state(name, now);
        if !record.holders.is_empty() {
            record.holders.clear();
            record.idle_since = now;
        }
        table.wake(name);
        Ok(Some(before))
    }

    async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        _mend: bool,
    ) -> Result<FencingToken> {
        let now = self.shared.clock.now();
        self.shared.table(name).change(name, now, |record| {
            check_jump(record.last_token, floor, unix_micros())?;
            let last = record.last_token.map_or(floor, |last| last.max(floor));
            record.last_token = Some(last);
            Ok(last)
        })
    }

    async fn prune(&self, idle: Duration) -> Result<Pruned> {
        let mut pruned = Pruned::default();
        for shard in &self.shared.shards {
            let mut table = locked(&shard.0);
            let now = self.shared.clock.now();
            let mut floor = table.floor;
            table.records.retain(|_, record| {
                record.drop_lapsed(now);
                let keep = !record.holders.is_empty() || now.since(record.idle_since) < idle;
                if keep {
                    pruned.kept += 1;
                } else {
                    floor = floor.max(record.last_token);
                    pruned.removed += 1;
                }
                keep
            });
            table.floor = floor;
        }
        Ok(pruned)
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        let names: usize = self
            .shared
            .shards
            .iter()
            .map(|shard| locked(&shard.0).records.len())
            .sum();
        Ok(vec![
            Finding::new(
                Severity::Warning,
                "durability",
                "locks and tokens live in this process only and end with it; its next life is another realm",
            ),
            Finding::new(
                Severity::Good,
                "records",
                format!("{names} names are known"),
            ),
        ])
    }
}

impl MemoryStore {
    fn renew_one(&self, lease: &LeaseRef, ttl: Ttl) -> Renewal {
        let mut table = self.shared.table(&lease.name);
        let now = self.shared.clock.now();
        let Some(record) = table.records.get_mut(&lease.name) else {
            return Renewal::Lost;
        };
        record.drop_lapsed(now);
        let Some(holder) = record.good(&lease.holder, lease.token) else {
            return Renewal::Lost;
        };
        if let Err(error) = check_detached(holder.detached, ttl) {
            return Renewal::Unknown(error);
        }
        if holder.ttl == Ttl::NONE && ttl == Ttl::NONE {
            return Renewal::StillHeld;
        }
        if holder.extend(ttl, now) {
            table.wake(&lease.name);
        }
        Renewal::Renewed
    }

    fn state(&self, name: &LockName) -> Option<LockState> {
        let table = self.shared.table(name);
        let now = self.shared.clock.now();
        table
            .records
            .get(name)
            .map(|record| record.state(name, now))
    }
}

struct MemoryWatch {
    shared: Arc<Shared>,
    name: LockName,
    /// `None` only while it is dropped.
    changes: Option<watch::Receiver<()>>,
}

#[async_trait]
impl Watch for MemoryWatch {
    async fn changed(&mut self) {
        // The channel counts versions, so a change between two calls is seen by the second.
        if let Some(changes) = &mut self.changes
            && changes.changed().await.is_ok()
        {
            return;
        }
        std::future::pending::<()>().await;
    }
}

impl Drop for MemoryWatch {
    fn drop(&mut self) {
        let mut table = self.shared.table(&self.name);
        // Under the lock, as receivers are made: of two waiters that leave at once, the second
        // sees that it is the last.
        self.changes = None;
        if let Some(sender) = table.watched.get(&self.name)
            && sender.receiver_count() == 0
        {
            table.watched.remove(&self.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watched(store: &MemoryStore) -> usize {
        let shards = store.shared.shards.iter();
        shards.map(|shard| locked(&shard.0).watched.len()).sum()
    }

    #[test]
    fn the_last_waiter_of_a_name_takes_its_channel_along() {
        let store = MemoryStore::new();
        let name = "a".parse().unwrap();
        let first = pollster::block_on(store.watch(&name)).unwrap();
        let second = pollster::block_on(store.watch(&name)).unwrap();
        drop(first);
        assert_eq!(watched(&store), 1);
        drop(second);
        assert_eq!(watched(&store), 0);
    }

    #[test]
    fn a_failed_acquire_leaves_no_record() {
        let store = MemoryStore::starting_after(FencingToken::MAX);
        let request = AcquireRequest::new("a".parse().unwrap(), Ttl::DEFAULT);
        pollster::block_on(store.acquire(&request)).unwrap_err();
        let state = pollster::block_on(store.inspect(&request.name)).unwrap();
        assert_eq!(state, None);
    }

    #[test]
    fn a_detached_grant_needs_an_end() {
        let store = MemoryStore::new();
        let mut request = AcquireRequest::new("a".parse().unwrap(), Ttl::NONE);
        request.detached = true;
        pollster::block_on(store.acquire(&request)).unwrap_err();
        request.detached = false;
        pollster::block_on(store.acquire(&request)).unwrap();
    }
}
