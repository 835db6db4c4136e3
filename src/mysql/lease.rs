//! The lock engine: each method is one call of a procedure in the database.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use mysql_async::Pool;

use super::database::{Database, Lane, get};
use super::options::MysqlOptions;
use super::probe::probe;
use super::sql::Argument;
use crate::error::{Error, Result};
use crate::info;
use crate::lease::{
    AcquireRequest, Attempt, Durability, Expiry, Finding, LeaseRef, LeaseStore, LockState, NoWatch,
    Pruned, Release, Renewal, StoreProfile, Ttl, Watch,
};
use crate::name::LockName;
use crate::sql::answer::{self, attempt, in_micros, states};
use crate::sql::number::{signed, token};
use crate::sql::renewal::{self, Batches};
use crate::token::FencingToken;

/// How many records one request prunes at the most.
const PRUNE_BATCH: i64 = 1_000;

/// Locks in a MySQL or MariaDB database.
///
/// Any number of locks share at most three connections: two for acquires, one for renewals and
/// releases, so that neither holds up the other. They are made when they are needed and again when
/// they are lost. Clones share them. Waiters poll: these servers tell nobody of a change.
#[derive(Clone)]
pub struct MysqlStore {
    shared: Arc<Shared>,
}

struct Shared {
    database: Database,
    profile: StoreProfile,
}

impl MysqlStore {
    /// Opens the locks of the database that a URL names: [`connect`](Self::connect) with
    /// [`MysqlOptions::parse`].
    ///
    /// # Errors
    /// As those two.
    pub async fn open(url: &str) -> Result<Self> {
        Self::connect(MysqlOptions::parse(url)?).await
    }

    /// Opens the locks of a database, and creates the tables and procedures at the first use.
    ///
    /// Needs a tokio runtime with I/O and time. The connections that are made later belong to the
    /// runtime that asks for them, which is fencelock's own under [`Locks`](crate::Locks).
    ///
    /// ```no_run
    /// use fencelock::{Locks, mysql::{MysqlOptions, MysqlStore}};
    /// # async fn example() -> fencelock::Result<()> {
    /// let options = MysqlOptions::parse("mysql://app@localhost/app?prefix=locks")?;
    /// let locks = Locks::new(MysqlStore::connect(options).await?);
    /// # Ok(()) }
    /// ```
    ///
    /// Cancel safe: what was created stays, and the next opening goes on from there.
    ///
    /// # Errors
    /// `Invalid` for a wrong password, a missing database or a missing privilege; `Unavailable`
    /// where the server cannot be reached or takes no writes; `Unsupported` where the server is too
    /// old, takes writes together with others, or has tables of another version.
    pub async fn connect(options: MysqlOptions) -> Result<Self> {
        let store = Self::open_here(options, None).await?;
        store.shared.database.forget_connections();
        Ok(store)
    }

    /// Opens the locks of the database that `pool` leads to. Every request takes one of its
    /// connections for one statement.
    ///
    /// A pool that is used up by the work that the locks guard cannot renew them, and neither can
    /// one whose runtime is blocked, for that is where its connections live: leave it a connection,
    /// or give fencelock a URL. Its connections need autocommit, as they have where nothing else is
    /// said. An acquire waits for a row that another transaction keeps as long as their
    /// `innodb_lock_wait_timeout` says, and is then of unknown outcome.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn from_pool(pool: Pool, options: MysqlOptions) -> Result<Self> {
        Self::open_here(options, Some(pool)).await
    }

    /// Opens on the runtime where the store will be used.
    pub(crate) async fn open_here(options: MysqlOptions, pool: Option<Pool>) -> Result<Self> {
        let database = Database::new(&options, pool)?;
        let meta = database.open(options.create).await?;
        if meta.durability == Durability::D0Memory {
            tracing::warn!(
                "innodb_flush_log_at_trx_commit is 0: a crash of MySQL loses acknowledged grants, and tells their tokens again"
            );
        }
        let profile = StoreProfile::new("mysql", meta.realm, meta.durability, Expiry::Engine);
        Ok(Self {
            shared: Arc::new(Shared { database, profile }),
        })
    }

    pub(super) fn database(&self) -> &Database {
        &self.shared.database
    }
}

impl fmt::Debug for MysqlStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MysqlStore")
            .field("prefix", &self.database().prefix.as_str())
            .field("realm", &self.shared.profile.realm)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl LeaseStore for MysqlStore {
    fn profile(&self) -> &StoreProfile {
        &self.shared.profile
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        request.check_permits()?;
        let info = info::to_bytes(&request.info);
        let arguments = [
            self.shared.profile.realm.as_str().into(),
            request.name.as_str().into(),
            request.holder.as_bytes().as_slice().into(),
            millis(request.ttl)?.into(),
            i64::from(request.permits).into(),
            request.above.map(signed).into(),
            info.as_slice().into(),
        ];
        let row = self
            .database()
            .call_one(Lane::Ask, "acquire", &arguments)
            .await?;
        attempt(&row, request.permits)
    }

    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        renewal::renew(self, leases).await
    }

    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        let arguments = [
            lease.name.as_str().into(),
            lease.holder.as_bytes().as_slice().into(),
            lease.token.map(signed).into(),
            in_micros(linger).into(),
        ];
        let row = self
            .database()
            .call_one(Lane::Upkeep, "release", &arguments)
            .await?;
        Ok(if get(&row, 0)? {
            Release::Released
        } else {
            Release::NotHeld
        })
    }

    async fn watch(&self, _: &LockName) -> Result<Box<dyn Watch>> {
        Ok(Box::new(NoWatch))
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        let rows = self
            .database()
            .call(Lane::Ask, "inspect", &[name.as_str().into()])
            .await?;
        Ok(states(&rows)?.pop())
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        let arguments = [
            prefix.into(),
            after.map(LockName::as_str).into(),
            i64::try_from(limit).unwrap_or(i64::MAX).into(),
        ];
        let rows = self.database().call(Lane::Ask, "list", &arguments).await?;
        states(&rows)
    }

    async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        let rows = self
            .database()
            .call(Lane::Ask, "break_lock", &[name.as_str().into()])
            .await?;
        Ok(states(&rows)?.pop())
    }

    async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        _mend: bool,
    ) -> Result<FencingToken> {
        let arguments = [name.as_str().into(), signed(floor).into()];
        let row = self
            .database()
            .call_one(Lane::Ask, "raise_floor", &arguments)
            .await?;
        token(get(&row, 0)?)
    }

    async fn prune(&self, idle: Duration) -> Result<Pruned> {
        let arguments = [in_micros(idle).into(), PRUNE_BATCH.into()];
        let mut pruned = Pruned::default();
        loop {
            let row = self
                .database()
                .call_one(Lane::Ask, "prune", &arguments)
                .await?;
            let removed: i64 = get(&row, 0)?;
            pruned.removed += removed.unsigned_abs();
            pruned.kept = get::<i64>(&row, 1)?.unsigned_abs();
            if removed < PRUNE_BATCH {
                return Ok(pruned);
            }
        }
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        probe(self.database()).await
    }
}

#[async_trait]
impl Batches for MysqlStore {
    const BUSY: &'static str = "another transaction keeps the lock's row locked; look for it with SHOW ENGINE INNODB STATUS";

    async fn renew_batch(&self, batch: &[&(LeaseRef, Ttl)]) -> Result<Vec<Option<Renewal>>> {
        // Everybody locks rows in the order of names, so that no two batches wait for each other.
        let mut order: Vec<usize> = (0..batch.len()).collect();
        order.sort_by_key(|i| batch.get(*i).map(|(lease, _)| lease.name.as_str()));
        let mut packed = Vec::new();
        for (lease, ttl) in order.iter().filter_map(|i| batch.get(*i)) {
            let name = lease.name.as_str().as_bytes();
            let length = u16::try_from(name.len()).unwrap_or(u16::MAX);
            packed.extend(length.to_be_bytes());
            packed.extend(name);
            packed.extend(lease.holder.as_bytes());
            packed.extend(lease.token.map_or(0, signed).to_be_bytes());
            packed.extend(millis(*ttl)?.to_be_bytes());
        }
        let row = self
            .database()
            .call_one(Lane::Upkeep, "renew", &[Argument::Bytes(packed.as_slice())])
            .await?;
        let letters: String = get(&row, 0)?;
        if letters.len() != batch.len() {
            return Err(Error::corrupt(
                "MySQL's answer to a renewal has another number of leases; are fencelock's procedures those of this version?",
            )
            .with("found", letters.len())
            .with("expected", batch.len()));
        }
        let mut answers: Vec<Option<Renewal>> = batch.iter().map(|_| None).collect();
        for (i, letter) in order.into_iter().zip(letters.chars()) {
            if let Some(answer) = answers.get_mut(i) {
                *answer = match letter {
                    'r' => Some(Renewal::Renewed),
                    'l' => Some(Renewal::Lost),
                    _ => None,
                };
            }
        }
        Ok(answers)
    }
}

fn millis(ttl: Ttl) -> Result<i64> {
    answer::millis(ttl).ok_or_else(|| {
        Error::unsupported(
            "a lock in MySQL needs an expiry, for the server cannot see that its holder died; give a TTL",
        )
    })
}
