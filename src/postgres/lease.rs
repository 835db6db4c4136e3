//! The lock engine: each method is one call of a function in the database.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use deadpool_postgres::Pool;
use tokio_postgres::types::Type;

use super::database::{Database, Lane, get};
use super::listen::Listener;
use super::options::{Listen, PostgresOptions};
use super::probe::probe;
use crate::error::{Error, Result};
use crate::info;
use crate::lease::{
    AcquireRequest, Attempt, Expiry, Finding, LeaseRef, LeaseStore, LockState, NoWatch, Pruned,
    Release, Renewal, StoreProfile, Ttl, Watch,
};
use crate::name::LockName;
use crate::sql::answer::{self, attempt, in_micros, states};
use crate::sql::number::{signed, token};
use crate::sql::renewal::{self, Batches};
use crate::token::FencingToken;

/// How many records one request prunes at the most.
const PRUNE_BATCH: i64 = 1_000;

/// Locks in a PostgreSQL database.
///
/// Any number of locks share at most three connections: one for acquires, one for renewals and
/// releases, so that neither holds up the other, and one that hears of releases. They are made
/// when they are needed and again when they are lost. Clones share them.
#[derive(Clone)]
pub struct PostgresStore {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub(super) database: Database,
    profile: StoreProfile,
    /// `None` where notifications do not arrive: behind a pooler that shares connections.
    listener: Option<Arc<Listener>>,
}

impl PostgresStore {
    /// Opens the locks of the database that a URL names: [`connect`](Self::connect) with
    /// [`PostgresOptions::parse`].
    ///
    /// # Errors
    /// As those two.
    pub async fn open(url: &str) -> Result<Self> {
        Self::connect(PostgresOptions::parse(url)?).await
    }

    /// Opens the locks of a database, and creates the schema at the first use.
    ///
    /// Needs a tokio runtime with I/O and time. The connections that are made later belong to the
    /// runtime that asks for them, which is fencelock's own under [`Locks`](crate::Locks).
    ///
    /// ```no_run
    /// use fencelock::{Locks, postgres::{PostgresOptions, PostgresStore}};
    /// # async fn example() -> fencelock::Result<()> {
    /// let options = PostgresOptions::parse("postgres://app@localhost/app?schema=locks")?;
    /// let locks = Locks::new(PostgresStore::connect(options).await?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// `Invalid` for a wrong password, a missing database or a missing privilege; `Unavailable`
    /// where the server cannot be reached or takes no writes; `Unsupported` where the schema is of
    /// another version.
    pub async fn connect(options: PostgresOptions) -> Result<Self> {
        let store = Self::open_here(options, None).await?;
        store.shared.database.forget_connections().await;
        if let Some(listener) = &store.shared.listener {
            listener.forget_connection();
        }
        Ok(store)
    }

    /// Opens the locks of the database that `pool` leads to. Every request takes one of its
    /// connections for one statement; waiters poll, for no connection of the pool is kept to
    /// listen.
    ///
    /// A pool that is used up by the work that the locks guard cannot renew them, and neither can
    /// one whose runtime is blocked, for that is where its connections live: leave it a connection,
    /// or give fencelock a URL. A standby that was not waited for is noticed only on connections of
    /// our own.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn from_pool(pool: Pool, options: PostgresOptions) -> Result<Self> {
        Self::open_here(options, Some(pool)).await
    }

    /// Opens on the runtime where the store will be used.
    pub(crate) async fn open_here(options: PostgresOptions, pool: Option<Pool>) -> Result<Self> {
        let pooled = pool.is_some();
        let database = Database::new(&options, pool)?;
        let meta = database.open(options.create).await?;
        let listener = match (&options.target, options.listen, pooled) {
            (None, _, _) | (_, Listen::Never, _) | (_, _, true) => None,
            (Some(target), listen, false) => {
                let listener = Listener::new(target.clone(), options.schema.clone());
                if listener.hears(&database).await? {
                    Some(listener)
                } else if listen == Listen::Always {
                    return Err(Error::unsupported(
                        "notifications do not arrive: a pooler shares the connection between clients; connect to PostgreSQL itself, use session pooling, or set listen=false",
                    ));
                } else {
                    tracing::info!("notifications do not arrive, as behind a pooler; waiters poll");
                    None
                }
            }
        };
        let mut profile =
            StoreProfile::new("postgres", meta.realm, meta.durability, Expiry::Engine);
        profile.wakes_waiters = listener.is_some();
        Ok(Self {
            shared: Arc::new(Shared {
                database,
                profile,
                listener,
            }),
        })
    }

    fn database(&self) -> &Database {
        &self.shared.database
    }

    fn call(&self, function: &str, arguments: usize) -> String {
        self.database().schema.call(function, arguments)
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore")
            .field("schema", &self.database().schema.as_str())
            .field("realm", &self.shared.profile.realm)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl LeaseStore for PostgresStore {
    fn profile(&self) -> &StoreProfile {
        &self.shared.profile
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        request.check_permits()?;
        let ttl_ms = millis(request.ttl)?;
        let permits = i32::try_from(request.permits).unwrap_or(i32::MAX);
        let above = request.above.map(signed);
        let info = info::to_bytes(&request.info);
        let row = self
            .database()
            .one(
                Lane::Ask,
                &self.call("acquire", 7),
                &[
                    (&self.shared.profile.realm, Type::TEXT),
                    (&request.name.as_str().as_bytes(), Type::BYTEA),
                    (&request.holder.as_bytes().as_slice(), Type::BYTEA),
                    (&ttl_ms, Type::INT8),
                    (&permits, Type::INT4),
                    (&above, Type::INT8),
                    (&info, Type::BYTEA),
                ],
            )
            .await?;
        attempt(&row, request.permits)
    }

    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        renewal::renew(self, leases).await
    }

    async fn release(&self, lease: &LeaseRef, linger: Duration) -> Result<Release> {
        let token = lease.token.map(signed);
        let linger = in_micros(linger);
        let row = self
            .database()
            .one(
                Lane::Upkeep,
                &self.call("release", 4),
                &[
                    (&lease.name.as_str().as_bytes(), Type::BYTEA),
                    (&lease.holder.as_bytes().as_slice(), Type::BYTEA),
                    (&token, Type::INT8),
                    (&linger, Type::INT8),
                ],
            )
            .await?;
        Ok(if get(&row, 0)? {
            Release::Released
        } else {
            Release::NotHeld
        })
    }

    async fn watch(&self, name: &LockName) -> Result<Box<dyn Watch>> {
        Ok(match &self.shared.listener {
            Some(listener) => Box::new(listener.watch(name).await),
            None => Box::new(NoWatch),
        })
    }

    async fn inspect(&self, name: &LockName) -> Result<Option<LockState>> {
        let rows = self
            .database()
            .query(
                Lane::Ask,
                &self.call("inspect", 1),
                &[(&name.as_str().as_bytes(), Type::BYTEA)],
            )
            .await?;
        Ok(states(&rows)?.pop())
    }

    async fn list(
        &self,
        prefix: &str,
        after: Option<&LockName>,
        limit: usize,
    ) -> Result<Vec<LockState>> {
        let after = after.map(|name| name.as_str().as_bytes());
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let rows = self
            .database()
            .query(
                Lane::Ask,
                &self.call("list", 3),
                &[
                    (&prefix.as_bytes(), Type::BYTEA),
                    (&after, Type::BYTEA),
                    (&limit, Type::INT8),
                ],
            )
            .await?;
        states(&rows)
    }

    async fn break_lock(&self, name: &LockName) -> Result<Option<LockState>> {
        let rows = self
            .database()
            .query(
                Lane::Ask,
                &self.call("break_lock", 1),
                &[(&name.as_str().as_bytes(), Type::BYTEA)],
            )
            .await?;
        Ok(states(&rows)?.pop())
    }

    async fn raise_floor(
        &self,
        name: &LockName,
        floor: FencingToken,
        _mend: bool,
    ) -> Result<FencingToken> {
        let row = self
            .database()
            .one(
                Lane::Ask,
                &self.call("raise_floor", 2),
                &[
                    (&name.as_str().as_bytes(), Type::BYTEA),
                    (&signed(floor), Type::INT8),
                ],
            )
            .await?;
        token(get(&row, 0)?)
    }

    async fn prune(&self, idle: Duration) -> Result<Pruned> {
        let idle = in_micros(idle);
        let mut pruned = Pruned::default();
        loop {
            let row = self
                .database()
                .one(
                    Lane::Ask,
                    &self.call("prune", 2),
                    &[(&idle, Type::INT8), (&PRUNE_BATCH, Type::INT8)],
                )
                .await?;
            let removed: i64 = get(&row, 0)?;
            pruned.removed += removed.unsigned_abs();
            if removed < PRUNE_BATCH {
                break;
            }
        }
        let sql = format!(
            "SELECT count(*) FROM \"{}\".locks",
            self.database().schema.as_str()
        );
        let row = self.database().one(Lane::Ask, &sql, &[]).await?;
        pruned.kept = get::<i64>(&row, 0)?.unsigned_abs();
        Ok(pruned)
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        probe(self.database(), Some(&self.shared.profile)).await
    }
}

#[async_trait]
impl Batches for PostgresStore {
    const BUSY: &'static str =
        "another transaction keeps the lock's row locked; look for it in pg_locks";

    async fn renew_batch(&self, batch: &[&(LeaseRef, Ttl)]) -> Result<Vec<Option<Renewal>>> {
        let mut names = Vec::with_capacity(batch.len());
        let mut holders = Vec::with_capacity(batch.len());
        let mut tokens = Vec::with_capacity(batch.len());
        let mut ttls = Vec::with_capacity(batch.len());
        for (lease, ttl) in batch {
            names.push(lease.name.as_str().as_bytes());
            holders.push(lease.holder.as_bytes().as_slice());
            tokens.push(lease.token.map(signed));
            ttls.push(millis(*ttl)?);
        }
        let row = self
            .database()
            .one(
                Lane::Upkeep,
                &self.call("renew", 4),
                &[
                    (&names, Type::BYTEA_ARRAY),
                    (&holders, Type::BYTEA_ARRAY),
                    (&tokens, Type::INT8_ARRAY),
                    (&ttls, Type::INT8_ARRAY),
                ],
            )
            .await?;
        let words: Vec<&str> = get(&row, 0)?;
        Ok(words.into_iter().map(renewal_of).collect())
    }
}

fn renewal_of(word: &str) -> Option<Renewal> {
    match word {
        "renewed" => Some(Renewal::Renewed),
        "lost" => Some(Renewal::Lost),
        _ => None,
    }
}

fn millis(ttl: Ttl) -> Result<i64> {
    answer::millis(ttl).ok_or_else(|| {
        Error::unsupported(
            "a lock in PostgreSQL needs an expiry, for the server cannot see that its holder died; give a TTL",
        )
    })
}
