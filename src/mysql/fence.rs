//! The storage half: a check in the transaction of the user's own write, and values for scripts.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use mysql_async::prelude::Queryable as _;
use mysql_async::{Params, Pool, Row, Transaction, Value};

use super::database::{Database, get, no_row};
use super::error::request_error;
use super::lease::{signed, token};
use super::options::MysqlOptions;
use super::probe::probe;
use super::sql::{Argument, PREFIX_DEFAULT, Prefix};
use crate::body::Body;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::{Domain, Fence, FencedStore, Fencing, HolderTag, Snapshot, Written};
use crate::lease::Finding;
use crate::name::ResourceName;
use crate::token::Watermark;

/// The largest value that a [`FencedMysql`] takes: 64 MiB. The server's `max_allowed_packet` is often
/// smaller, and decides.
pub const VALUE_MAX_BYTES: u64 = 64 << 20;

/// How long a request of the storage may take, and how much longer for each MiB of the value. What
/// a read will bring is not known beforehand.
const REQUEST_LIMIT: Duration = Duration::from_secs(8);
const READ_LIMIT_BYTES: u64 = VALUE_MAX_BYTES / 8;
const REQUEST_LIMIT_PER_MIB: Duration = Duration::from_millis(300);

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
    let [token, holder, domain, seq] = shown.arguments();
    let sql = prefix.call(
        "admit_parts",
        &[resource.as_str().into(), token, holder, domain, seq],
    );
    match transaction.query_first::<Row, _>(sql).await {
        Ok(Some(row)) => written(&row),
        Ok(None) => Err(no_row()),
        Err(error) => {
            // The caller has not committed, so nothing can have been applied.
            let error = match request_error(error, &prefix) {
                error if error.kind() == ErrorKind::Indeterminate => {
                    error.into_kind(ErrorKind::Unavailable)
                }
                error => error,
            };
            if let Some(watermark) = error.watermark() {
                fence.refused(watermark);
            }
            Err(error)
        }
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

fn limit(bytes: u64) -> Duration {
    let mebibytes = u32::try_from(bytes >> 20).unwrap_or(u32::MAX);
    REQUEST_LIMIT + REQUEST_LIMIT_PER_MIB * mebibytes
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
        // Before the request: reading a body may take long, and may fail.
        let bytes = if body.in_memory() {
            body.into_bytes(VALUE_MAX_BYTES)?
        } else {
            blocking::unblock(move || body.into_bytes(VALUE_MAX_BYTES)).await?
        };
        let size = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let shown = Shown::of(fence);
        let [token, holder, domain, seq] = shown.arguments();
        let sql = self.database.prefix.call_with_places("put", 6);
        let parameters = [
            value(resource.as_str().into()),
            Value::Bytes(bytes.to_vec()),
            value(token),
            value(holder),
            value(domain),
            value(seq),
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
            Some(row) => snapshot(&row),
            None => Ok(Snapshot::new(None, None, None)),
        }
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let shown = Shown::of(fence);
        let [token, holder, domain, _] = shown.arguments();
        let arguments = [resource.as_str().into(), token, holder, domain];
        let row = self.call("raise", &arguments, READ_LIMIT_BYTES).await?;
        snapshot(&row.ok_or_else(no_row)?)
    }

    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let shown = Shown::of(fence);
        let [token, holder, domain, seq] = shown.arguments();
        let arguments = [resource.as_str().into(), token, holder, domain, seq];
        self.change("delete", &arguments).await
    }

    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let shown = Shown::of(fence);
        let [token, holder, domain, _] = shown.arguments();
        let arguments = [resource.as_str().into(), token, holder, domain];
        self.change("rebind", &arguments).await
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        probe(&self.database).await
    }
}

/// A fence as arguments of a call.
struct Shown {
    token: i64,
    holder: Option<HolderTag>,
    domain: Option<Domain>,
    seq: Option<i64>,
}

impl Shown {
    fn of(fence: &Fence) -> Self {
        Self {
            token: signed(fence.token()),
            holder: fence.holder(),
            domain: fence.domain().cloned(),
            seq: fence
                .seq()
                .map(|seq| i64::try_from(seq).unwrap_or(i64::MAX)),
        }
    }

    /// Token, holder, domain, sequence.
    fn arguments(&self) -> [Argument<'_>; 4] {
        let holder = self.holder.as_ref().map(|tag| tag.as_bytes().as_slice());
        [
            self.token.into(),
            holder.into(),
            self.domain.as_ref().map(Domain::as_str).into(),
            self.seq.into(),
        ]
    }
}

fn value(argument: Argument<'_>) -> Value {
    match argument {
        Argument::Bytes(bytes) => Value::Bytes(bytes.to_vec()),
        Argument::Number(number) => Value::Int(number),
        Argument::Null => Value::NULL,
    }
}

/// Columns `applied`, `token`, `holder`, `seq`, `domain`.
fn written(row: &Row) -> Result<Written> {
    let watermark = watermark(row)?
        .ok_or_else(|| Error::corrupt("MySQL's answer to a write has no watermark"))?;
    Ok(if get(row, 0)? {
        Written::applied(watermark)
    } else {
        Written::repeated(watermark)
    })
}

/// Columns `applied`, `token`, `holder`, `seq`, `domain`, `value`, `writer`.
fn snapshot(row: &Row) -> Result<Snapshot> {
    let value = get::<Option<Vec<u8>>>(row, 5)?.map(Body::from);
    let writer = get::<Option<i64>>(row, 6)?.map(token).transpose()?;
    Ok(Snapshot::new(value, watermark(row)?, writer))
}

/// Columns `token`, `holder`, `seq`, `domain`, after the first.
fn watermark(row: &Row) -> Result<Option<Watermark>> {
    let Some(number) = get::<Option<i64>>(row, 1)? else {
        return Ok(None);
    };
    let holder = match get::<Option<Vec<u8>>>(row, 2)? {
        Some(bytes) => {
            Some(HolderTag::from_bytes(bytes.try_into().map_err(|_| {
                Error::corrupt("a stored holder tag is not 16 bytes")
            })?))
        }
        None => None,
    };
    let domain = match get::<Option<Vec<u8>>>(row, 4)? {
        Some(bytes) => Some(
            std::str::from_utf8(&bytes)
                .ok()
                .and_then(|text| text.parse::<Domain>().ok())
                .ok_or_else(|| Error::corrupt("a stored lock domain is malformed"))?,
        ),
        None => None,
    };
    Ok(Some(Watermark {
        token: token(number)?,
        holder,
        seq: sequence(get::<i64>(row, 3)?)?,
        domain,
    }))
}

/// A sequence; one below 0 is damage, and as 0 it would let older writes of the holder pass (S7).
fn sequence(number: i64) -> Result<u64> {
    u64::try_from(number)
        .map_err(|_| Error::corrupt("a stored sequence is out of range").with("seq", number))
}
