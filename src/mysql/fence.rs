//! The storage half: a check in the transaction of the user's own write, and values for scripts.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use mysql_async::prelude::Queryable as _;
use mysql_async::{Params, Pool, Row, Transaction, Value};

use super::database::{Database, no_row};
use super::error::request_error;
use super::options::MysqlOptions;
use super::probe::probe;
use super::sql::{Argument, PREFIX_DEFAULT, Prefix};
use crate::body::Body;
use crate::error::{Error, Result};
use crate::fence::{Fence, FencedStore, Fencing, Snapshot, Written};
use crate::lease::Finding;
use crate::name::ResourceName;
use crate::sql::answer::{snapshot, written};
use crate::sql::shown::Shown;
use crate::sql::value::{self, READ_LIMIT_BYTES, limit, not_admitted};

/// The largest value that a [`FencedMysql`] takes: 64 MiB. The server's `max_allowed_packet` is often
/// smaller, and decides.
pub const VALUE_MAX_BYTES: u64 = value::MAX_BYTES;

/// Admits a fence to `resource` within the caller's transaction, before the writes that it guards.
///
/// The resource's watermark is one row. It stays locked until the transaction ends, and it is
/// raised with the commit or not at all: whoever comes later with a smaller token is refused, and
/// whoever comes at the same moment waits (S2, S3). Call it before reading what the writes depend
/// on, and no update is lost (S6): under `REPEATABLE READ`, which is the default, a transaction that
/// read before goes on seeing what it saw then, so admit first of all, and do not begin it `WITH
/// CONSISTENT SNAPSHOT`. The answer's `applied` is false where this very write, by its sequence, was
/// committed before (S7): leave it out then.
///
/// ```no_run
/// use fencelock::LockGuard;
/// use fencelock::mysql::admit;
/// use fencelock::mysql::mysql_async::{Conn, TxOpts, prelude::Queryable as _};
/// # async fn example(conn: &mut Conn, guard: &LockGuard) -> Result<(), Box<dyn std::error::Error>> {
/// let mut transaction = conn.start_transaction(TxOpts::default()).await?;
/// admit(&mut transaction, "payments", guard).await?;
/// transaction.query_drop("UPDATE payments SET exported = TRUE").await?;
/// transaction.commit().await?;
/// # Ok(()) }
/// ```
///
/// Cancel safety: nothing is kept unless the transaction commits.
///
/// # Errors
/// `Fenced` where the token is stale, `DomainMismatch` where the resource is bound to another lock,
/// `Lost` where the guard knows that it lost its lock. An error does not end a transaction in
/// MySQL: whatever it is, drop the transaction or roll it back, and it had and will have no effect.
pub async fn admit(
    transaction: &mut Transaction<'_>,
    resource: impl TryInto<ResourceName, Error = Error>,
    fence: impl Fencing,
) -> Result<Written> {
    admit_in(transaction, PREFIX_DEFAULT, resource, fence).await
}

/// [`admit`] with tables of another prefix.
///
/// # Errors
/// As [`admit`]; `Invalid` for a prefix that is not a plain lowercase identifier.
pub async fn admit_in(
    transaction: &mut Transaction<'_>,
    prefix: &str,
    resource: impl TryInto<ResourceName, Error = Error>,
    fence: impl Fencing,
) -> Result<Written> {
    let (prefix, resource) = (Prefix::new(prefix)?, resource.try_into()?);
    let shown = Shown::of(&fence.to_fence()?);
    let [token, holder, domain, seq] = arguments(&shown);
    let sql = prefix.call(
        "admit_parts",
        &[resource.as_str().into(), token, holder, domain, seq],
    );
    match transaction.query_first::<Row, _>(sql).await {
        Ok(Some(row)) => written(&row),
        Ok(None) => Err(no_row()),
        Err(error) => Err(not_admitted(request_error(error, &prefix), &fence)),
    }
}

/// Fenced values in a table of MySQL or MariaDB, for scripts and the command line.
///
/// A program that has tables of its own guards them with [`admit`] instead. The watermarks are the
/// same: a resource is one, however it is written.
#[derive(Clone)]
pub struct FencedMysql {
    database: Arc<Database>,
}

impl FencedMysql {
    /// Opens the values of the database that a URL names: [`connect`](Self::connect) with
    /// [`MysqlOptions::parse`].
    ///
    /// # Errors
    /// As those two.
    pub async fn open(url: &str) -> Result<Self> {
        Self::connect(MysqlOptions::parse(url)?).await
    }

    /// Opens the values of a database, and creates the tables and procedures at the first use.
    ///
    /// # Errors
    /// As [`MysqlStore::connect`](super::MysqlStore::connect).
    pub async fn connect(options: MysqlOptions) -> Result<Self> {
        let fenced = Self::open_here(options, None).await?;
        fenced.database.forget_connections();
        Ok(fenced)
    }

    /// Opens the values of the database that `pool` leads to.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn from_pool(pool: Pool, options: MysqlOptions) -> Result<Self> {
        Self::open_here(options, Some(pool)).await
    }

    /// Opens on the runtime where the storage will be used.
    pub(crate) async fn open_here(options: MysqlOptions, pool: Option<Pool>) -> Result<Self> {
        let database = Database::new(&options, pool)?;
        database.open(options.create).await?;
        Ok(Self {
            database: Arc::new(database),
        })
    }

    async fn call(
        &self,
        procedure: &str,
        arguments: &[Argument<'_>],
        bytes: u64,
    ) -> Result<Option<Row>> {
        let sql = self.database.prefix.call(procedure, arguments);
        let mut rows = self.database.query_within(&sql, limit(bytes)).await?;
        Ok(rows.pop())
    }

    async fn change(&self, procedure: &str, arguments: &[Argument<'_>]) -> Result<Written> {
        let row = self.call(procedure, arguments, 0).await?;
        written(&row.ok_or_else(no_row)?)
    }
}

impl fmt::Debug for FencedMysql {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedMysql")
            .field("prefix", &self.database.prefix.as_str())
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl FencedStore for FencedMysql {
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written> {
        let bytes = value::read(body).await?;
        let size = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let shown = Shown::of(fence);
        let [token, holder, domain, seq] = arguments(&shown);
        let sql = self.database.prefix.call_with_places("put", 6);
        let parameters = [
            parameter(resource.as_str().into()),
            Value::Bytes(bytes.to_vec()),
            parameter(token),
            parameter(holder),
            parameter(domain),
            parameter(seq),
        ];
        let parameters = Params::Positional(parameters.into());
        let mut rows = self
            .database
            .prepared_within(&sql, parameters, limit(size))
            .await?;
        written(&rows.pop().ok_or_else(no_row)?)
    }

    async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        let arguments = [resource.as_str().into()];
        match self.call("get", &arguments, READ_LIMIT_BYTES).await? {
            Some(row) => snapshot(&row, 1),
            None => Ok(Snapshot::new(None, None, None)),
        }
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let shown = Shown::of(fence);
        let [token, holder, domain, _] = arguments(&shown);
        let arguments = [resource.as_str().into(), token, holder, domain];
        let row = self.call("raise", &arguments, READ_LIMIT_BYTES).await?;
        snapshot(&row.ok_or_else(no_row)?, 1)
    }

    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let shown = Shown::of(fence);
        let [token, holder, domain, seq] = arguments(&shown);
        let arguments = [resource.as_str().into(), token, holder, domain, seq];
        self.change("delete", &arguments).await
    }

    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let shown = Shown::of(fence);
        let [token, holder, domain, _] = arguments(&shown);
        let arguments = [resource.as_str().into(), token, holder, domain];
        self.change("rebind", &arguments).await
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        probe(&self.database).await
    }
}

/// Token, holder, domain, sequence.
fn arguments(shown: &Shown) -> [Argument<'_>; 4] {
    [
        shown.token.into(),
        shown.holder.as_deref().into(),
        shown.domain.as_deref().into(),
        shown.seq.into(),
    ]
}

fn parameter(argument: Argument<'_>) -> Value {
    match argument {
        Argument::Bytes(bytes) => Value::Bytes(bytes.to_vec()),
        Argument::Number(number) => Value::Int(number),
        Argument::Null => Value::NULL,
    }
}
