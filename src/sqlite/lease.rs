//! The lock engine: each method is one transaction.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::params;

use super::database::{Database, Lane, Step};
use super::error::Halt;
use super::options::SqliteOptions;
use super::probe::probe;
use super::record::{Holder, Moment, Record, drop_holders, finite, note_use, now_unix_us};
use super::sql::{LOCK_FORGET, LOCKS_COUNT, LOCKS_IDLE, LOCKS_LIST, META_FLOOR, META_GRANTED};
use super::watch::SqliteWatch;
use crate::clock::unix_micros;
use crate::error::{Error, ErrorKind, Result};
use crate::lease::{
    AcquireRequest, Attempt, Contention, Durability, Expiry, Finding, Grant, LeaseRef, LeaseStore,
    LockState, Pruned, Release, Renewal, StoreProfile, Ttl, Watch,
};
use crate::name::LockName;
use crate::sql::number::signed;
use crate::token::{FencingToken, check_jump};

/// How long a renewal waits for the database at the most, and a sixth of the TTL where that is less:
/// it is sent at a third of the TTL, so that half is left for another try.
const RENEW_LIMIT: Duration = Duration::from_secs(1);

/// How many records one transaction looks at to remove the idle ones.
const PRUNE_BATCH: i64 = 500;

/// Locks of one host, in a SQLite database. See the [module](crate::sqlite) for how.
///
/// Any number of locks share three connections: for acquires, for renewals and releases, and for
/// waiters. Clones share them. After a fork, the child opens a store of its own.
#[derive(Clone)]
pub struct SqliteStore {
    database: Arc<Database>,
    profile: Arc<StoreProfile>,
}

impl SqliteStore {
    /// Opens the locks in the database at `path`, and makes the file and the tables where they are
    /// missing.
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// As [`SqliteOptions::open`].
    pub async fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::options().open(path).await
    }

    /// Options to open a store with.
    pub fn options() -> SqliteOptions {
        SqliteOptions::default()
    }

    pub(super) async fn open_with(path: &Path, options: SqliteOptions) -> Result<Self> {
        let database = Database::open(path, options).await?;
        let mut profile = StoreProfile::new(
            "sqlite",
            database.realm(),
            Durability::D2PowerLoss,
            Expiry::Host,
        );
        // By looking often, which costs one process little: only its first waiter of a name does.
        profile.wakes_waiters = true;
        Ok(Self {
            database,
            profile: Arc::new(profile),
        })
    }

    async fn write<T: Send + 'static>(
        &self,
        lane: Lane,
        work: impl Fn(&Step<'_>) -> Result<T, Halt> + Send + 'static,
    ) -> Result<T> {
        self.database
            .write(lane, self.database.busy_limit, work)
            .await
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore")
            .field("path", &self.database.place().path())
            .field("realm", &self.database.realm())
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl LeaseStore for SqliteStore {
    fn profile(&self) -> &StoreProfile {
        &self.profile
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        request.check_permits()?;
        finite(request.ttl)?;
        let request = request.clone();
        self.write(Lane::Ask, move |step| acquire(step, &request))
            .await
    }

    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        let shortest = leases.iter().filter_map(|(_, ttl)| ttl.duration()).min();
        let spare = shortest.map_or(RENEW_LIMIT, |ttl| (ttl / 6).min(RENEW_LIMIT));
        let limit = spare.min(self.database.busy_limit);
        let (batch, count) = (leases.to_vec(), leases.len());
        let done = self
            .database
            .write(Lane::Upkeep, limit, move |step| {
                batch
                    .iter()
                    .map(|(lease, ttl)| renew(step, lease, *ttl))
                    .collect::<Result<Vec<Renewal>, Halt>>()
            })
            .await;
        match done {
            Ok(answers) => answers,
            Err(error) => {
                let mut first = Some(error);
                (0..count)
                    .map(|_| {
                        Renewal::Unknown(first.take().unwrap_or_else(|| {
                            Error::indeterminate("the renewal's batch failed as a whole")
                        }))
                    })
                    .collect()
            }
        }
    }

    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        let lease = lease.clone();
        self.write(Lane::Upkeep, move |step| release(step, &lease, linger))
            .await
    }

    async fn watch(&self, name: &LockName) -> Result<Box<dyn Watch>> {
        Ok(Box::new(
            SqliteWatch::new(Arc::clone(&self.database), name.clone()).await,
        ))
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        let name = name.clone();
        self.database
            .read(Lane::Ask, move |step| inspect(step, &name))
            .await
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        let (prefix, after) = (prefix.to_owned(), after.cloned());
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        self.database
            .read(Lane::Ask, move |step| {
                list(step, &prefix, after.as_ref(), limit)
            })
            .await
    }

    async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        let name = name.clone();
        self.write(Lane::Ask, move |step| {
            let before = inspect(step, &name)?;
            if before.is_some() {
                drop_holders(step, &name)?;
                note_use(step, &name)?;
            }
            Ok(before)
        })
        .await
    }

    async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        mend: bool,
    ) -> Result<FencingToken> {
        let name = name.clone();
        self.write(Lane::Ask, move |step| raise_floor(step, &name, floor, mend))
            .await
    }

    async fn prune(&self, idle: Duration) -> Result<Pruned> {
        let mut pruned = Pruned::default();
        let mut after = Vec::new();
        loop {
            let from = after.clone();
            let (removed, last) = self
                .write(Lane::Ask, move |step| prune(step, idle, &from))
                .await?;
            pruned.removed += removed;
            match last {
                Some(last) => after = last,
                None => break,
            }
        }
        let count = |step: &Step<'_>| {
            Ok(step
                .prepare(LOCKS_COUNT)?
                .query_row([], |row| row.get::<_, i64>(0))?)
        };
        pruned.kept = self.database.read(Lane::Ask, count).await?.unsigned_abs();
        Ok(pruned)
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        probe(&self.database).await
    }
}

fn acquire(step: &Step<'_>, request: &AcquireRequest) -> Result<Attempt, Halt> {
    let name = &request.name;
    let mut record = match Record::read(step, name)? {
        Some(record) => record,
        None => Record::new(step)?,
    };
    let moment = Moment::of(step);
    record.keep_good(step, name, moment)?;
    let held = record.holders.len();
    if held > 0
        && let Some(capacity) = record.capacity
        && capacity != request.permits
    {
        return Err(Error::invalid(
            "the lock is held with another capacity; ask for the same number of permits, or wait until it is free",
        )
        .with("permits", request.permits)
        .with("capacity", capacity)
        .into());
    }
    let granted = |token| {
        Ok(Attempt::Granted(Grant {
            token,
            ttl: request.ttl,
        }))
    };
    if let Some(own) = record.holders.iter_mut().find(|h| h.is_of(&request.holder)) {
        own.extend(request.ttl, moment)?;
        own.store(step, name)?;
        note_use(step, name)?;
        return granted(own.token);
    }
    if held >= usize::try_from(request.permits).unwrap_or(usize::MAX) {
        let remaining = record.holders.iter().filter_map(|h| moment.remaining(h));
        return Ok(Attempt::Held(Contention {
            free_in: remaining.min(),
            holder: record.holders.first().map(Holder::info),
        }));
    }
    if let Some(above) = request.above {
        // A forged watermark must not use up the tokens of the lock (S11).
        check_jump(record.last, above, unix_micros())?;
    }
    let token = FencingToken::after(record.last.max(request.above))?;
    record.last = Some(token);
    record.capacity = Some(request.permits);
    record.store(step, name)?;
    let mut holder = Holder::new(request.holder, token, &request.info);
    holder.extend(request.ttl, moment)?;
    holder.store(step, name)?;
    step.prepare(META_GRANTED)?.execute([])?;
    granted(token)
}

fn renew(step: &Step<'_>, lease: &LeaseRef, ttl: Ttl) -> Result<Renewal, Halt> {
    let Some(mut record) = Record::read(step, &lease.name)? else {
        return Ok(Renewal::Lost);
    };
    let moment = Moment::of(step);
    record.see_good(moment);
    let Some(own) = record.find_mut(lease) else {
        return Ok(Renewal::Lost);
    };
    if let Err(error) = own.extend(ttl, moment) {
        // Its own mistake, which must not cost the other leases of the batch.
        return Ok(Renewal::Unknown(error));
    }
    own.store(step, &lease.name)?;
    note_use(step, &lease.name)?;
    Ok(Renewal::Renewed)
}

fn release(step: &Step<'_>, lease: &LeaseRef, linger: Duration) -> Result<Release, Halt> {
    let Some(mut record) = Record::read(step, &lease.name)? else {
        return Ok(Release::NotHeld);
    };
    let moment = Moment::of(step);
    record.keep_good(step, &lease.name, moment)?;
    let Some(own) = record.find_mut(lease) else {
        return Ok(Release::NotHeld);
    };
    if linger.is_zero() {
        own.drop_from(step, &lease.name)?;
    } else {
        own.linger(linger, moment);
        own.store(step, &lease.name)?;
    }
    note_use(step, &lease.name)?;
    Ok(Release::Released)
}

fn inspect(step: &Step<'_>, name: &LockName) -> Result<Option<LockState>, Halt> {
    let Some(mut record) = Record::read(step, name)? else {
        return Ok(None);
    };
    let moment = Moment::of(step);
    record.see_good(moment);
    Ok(Some(record.show(name, moment)))
}

fn list(
    step: &Step<'_>,
    prefix: &str,
    after: Option<&LockName>,
    limit: i64,
) -> Result<Vec<LockState>, Halt> {
    let mut statement = step.prepare(LOCKS_LIST)?;
    let after = after.map(|name| name.as_str().as_bytes());
    let mut rows = statement.query(params![prefix.as_bytes(), after, limit])?;
    let mut states = Vec::new();
    while let Some(row) = rows.next()? {
        let bytes: Vec<u8> = row.get(0)?;
        let Ok(name) = String::from_utf8(bytes)
            .map_err(drop)
            .and_then(|name| LockName::new(&name).map_err(drop))
        else {
            return Err(Error::corrupt("a stored lock name is not UTF-8").into());
        };
        match inspect(step, &name) {
            Ok(state) => states.extend(state),
            // Only its own rows: a database that is damaged fails as a whole.
            Err(Halt::Failed(error)) if is_of_a_row(&error) => {
                let mut state = LockState::new(name, None);
                state.damage = Some(error.to_string());
                states.push(state);
            }
            Err(halt) => return Err(halt),
        }
    }
    Ok(states)
}

/// True for damage within rows that SQLite itself can read.
fn is_of_a_row(error: &Error) -> bool {
    let from_sqlite = std::error::Error::source(error)
        .and_then(|source| source.downcast_ref::<rusqlite::Error>())
        .is_some_and(|source| source.sqlite_error().is_some());
    error.kind() == ErrorKind::Corrupt && !from_sqlite
}

fn raise_floor(
    step: &Step<'_>,
    name: &LockName,
    floor: FencingToken,
    mend: bool,
) -> Result<FencingToken, Halt> {
    let mut record = match Record::read(step, name) {
        Err(Halt::Failed(error)) if mend && is_of_a_row(&error) => {
            drop_holders(step, name)?;
            Record::read(step, name)?
        }
        read => read?,
    }
    .map_or_else(|| Record::new(step), Ok)?;
    check_jump(record.last, floor, unix_micros())?;
    let last = record.last.map_or(floor, |last| last.max(floor));
    record.last = Some(last);
    record.store(step, name)?;
    Ok(last)
}

/// Removes the idle ones of a batch of names after `after`. In the same transaction their last
/// tokens become the floor of all new names (L10). Returns how many, and the last name that was
/// looked at, where more may follow.
fn prune(step: &Step<'_>, idle: Duration, after: &[u8]) -> Result<(u64, Option<Vec<u8>>), Halt> {
    let idle_us = i64::try_from(idle.as_micros()).unwrap_or(i64::MAX);
    let names: Vec<Vec<u8>> = step
        .prepare(LOCKS_IDLE)?
        .query_map(
            params![now_unix_us().saturating_sub(idle_us), after, PRUNE_BATCH],
            |row| row.get(0),
        )?
        .collect::<rusqlite::Result<_>>()?;
    let mut removed = 0;
    for name in &names {
        let record = match Record::read_row(step, name) {
            Ok(Some(record)) => record,
            Ok(None) => continue,
            // What cannot be understood is evidence, and stays for whoever mends it.
            Err(Halt::Failed(error)) if is_of_a_row(&error) => continue,
            Err(halt) => return Err(halt),
        };
        let is_idle = record.idle_for(Moment::of(step));
        if is_idle.is_none_or(|for_so_long| for_so_long < idle) {
            continue;
        }
        step.prepare(META_FLOOR)?
            .execute([record.last.map_or(0, signed)])?;
        step.prepare(super::sql::HOLDERS_DROP)?.execute([name])?;
        step.prepare(LOCK_FORGET)?.execute([name])?;
        removed += 1;
    }
    let more = i64::try_from(names.len()).is_ok_and(|n| n == PRUNE_BATCH);
    Ok((removed, names.into_iter().next_back().filter(|_| more)))
}

#[cfg(all(test, target_os = "linux"))]
mod tests;
