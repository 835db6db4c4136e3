//! The storage half: a check in the transaction of the user's own write, and values for scripts.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use deadpool_postgres::Pool;
use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};

use super::database::{Database, Lane, Parameter, get};
use super::error::request_error;
use super::lease::{signed, token};
use super::options::PostgresOptions;
use super::probe::probe;
use super::sql::{SCHEMA_DEFAULT, Schema};
use crate::body::Body;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::{Domain, Fence, FencedStore, Fencing, HolderTag, Snapshot, Written};
use crate::lease::Finding;
use crate::name::ResourceName;
use crate::token::Watermark;

/// The largest value that a [`FencedPostgres`] takes: 64 MiB. PostgreSQL holds a value and its
/// message in memory.
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
/// on, and no update is lost (S6). The answer's `applied` is false where this very write, by its
/// sequence, was committed before (S7): leave it out then.
///
/// ```no_run
/// use fencelock::LockGuard;
/// use fencelock::postgres::{admit, tokio_postgres::{Client, Error}};
/// # async fn example(client: &mut Client, guard: &LockGuard) -> Result<(), Box<dyn std::error::Error>> {
/// let transaction = client.transaction().await?;
/// admit(&transaction, "payments", guard).await?;
/// transaction.execute("UPDATE payments SET exported = true", &[]).await?;
/// transaction.commit().await?;
/// # Ok(()) }
/// ```
///
/// Cancel safety: nothing is kept unless the transaction commits.
///
/// # Errors
/// `Fenced` where the token is stale, `DomainMismatch` where the resource is bound to another lock,
/// `Lost` where the guard knows that it lost its lock. Whatever the error, the transaction can only
/// be rolled back, so it had and will have no effect.
pub async fn admit(
    transaction: &Transaction<'_>,
    resource: impl TryInto<ResourceName, Error = Error>,
    fence: impl Fencing,
) -> Result<Written> {
    admit_in(transaction, SCHEMA_DEFAULT, resource, fence).await
}

/// [`admit`] in a schema of another name.
///
/// # Errors
/// As [`admit`]; `Invalid` for a schema that is not a plain lowercase identifier.
pub async fn admit_in(
    transaction: &Transaction<'_>,
    schema: &str,
    resource: impl TryInto<ResourceName, Error = Error>,
    fence: impl Fencing,
) -> Result<Written> {
    let (schema, resource) = (Schema::new(schema)?, resource.try_into()?);
    let shown = Shown::of(&fence.to_fence()?);
    let sql = admit_sql(&schema);
    let [token, holder, domain, seq] = shown.parameters();
    let name = resource.as_str().as_bytes();
    let parameters = [resource_parameter(&name), token, holder, domain, seq];
    let answer = transaction.query_typed_one(&sql, &parameters).await;
    match answer {
        Ok(row) => written(&row),
        Err(error) => {
            // The caller has not committed, so nothing can have been applied.
            let error = match request_error(error, schema.as_str()) {
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

/// Columns `applied`, `token`, `holder`, `seq`, `domain`.
pub(super) fn admit_sql(schema: &Schema) -> String {
    format!(
        "SELECT j.applied, (j.fence).token, (j.fence).holder, (j.fence).seq, (j.fence).domain \
         FROM \"{}\".judge($1, $2, $3, $4, $5, 'write') AS j",
        schema.as_str()
    )
}

/// Fenced values in a table of PostgreSQL, for scripts and the command line.
///
/// A program that has tables of its own guards them with [`admit`] instead. The watermarks are the
/// same: a resource is one, however it is written.
#[derive(Clone)]
pub struct FencedPostgres {
    database: Arc<Database>,
}

impl FencedPostgres {
    /// Opens the values of the database that a URL names: [`connect`](Self::connect) with
    /// [`PostgresOptions::parse`].
    ///
    /// # Errors
    /// As those two.
    pub async fn open(url: &str) -> Result<Self> {
        Self::connect(PostgresOptions::parse(url)?).await
    }

    /// Opens the values of a database, and creates the schema at the first use.
    ///
    /// # Errors
    /// As [`PostgresStore::connect`](super::PostgresStore::connect).
    pub async fn connect(options: PostgresOptions) -> Result<Self> {
        let fenced = Self::open_here(options, None).await?;
        fenced.database.forget_connections().await;
        Ok(fenced)
    }

    /// Opens the values of the database that `pool` leads to.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn from_pool(pool: Pool, options: PostgresOptions) -> Result<Self> {
        Self::open_here(options, Some(pool)).await
    }

    /// Opens on the runtime where the storage will be used.
    pub(crate) async fn open_here(options: PostgresOptions, pool: Option<Pool>) -> Result<Self> {
        let database = Database::new(&options, pool)?;
        database.open(options.create).await?;
        Ok(Self {
            database: Arc::new(database),
        })
    }

    async fn call(
        &self,
        function: &str,
        parameters: &[Parameter<'_>],
        bytes: u64,
    ) -> Result<Option<Row>> {
        let sql = self.database.schema.call(function, parameters.len());
        let mebibytes = u32::try_from(bytes >> 20).unwrap_or(u32::MAX);
        let limit = REQUEST_LIMIT + REQUEST_LIMIT_PER_MIB * mebibytes;
        let mut rows = self
            .database
            .query_within(Lane::Ask, &sql, parameters, limit)
            .await?;
        Ok(rows.pop())
    }

    async fn change(
        &self,
        function: &str,
        parameters: &[Parameter<'_>],
        bytes: u64,
    ) -> Result<Written> {
        match self.call(function, parameters, bytes).await? {
            Some(row) => written(&row),
            None => Err(Error::corrupt("PostgreSQL's answer to a write has no row")),
        }
    }
}

impl fmt::Debug for FencedPostgres {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedPostgres")
            .field("schema", &self.database.schema.as_str())
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl FencedStore for FencedPostgres {
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written> {
        // Before the request: reading a body may take long, and may fail.
        let bytes = if body.in_memory() {
            body.into_bytes(VALUE_MAX_BYTES)?
        } else {
            blocking::unblock(move || body.into_bytes(VALUE_MAX_BYTES)).await?
        };
        let (name, value) = (resource.as_str().as_bytes(), bytes.as_ref());
        let shown = Shown::of(fence);
        let [token, holder, domain, seq] = shown.parameters();
        let parameters = [
            resource_parameter(&name),
            (&value, Type::BYTEA),
            token,
            holder,
            domain,
            seq,
        ];
        let size = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        self.change("put", &parameters, size).await
    }

    async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        let name = resource.as_str().as_bytes();
        match self
            .call("get", &[resource_parameter(&name)], READ_LIMIT_BYTES)
            .await?
        {
            Some(row) => snapshot(&row),
            None => Ok(Snapshot::new(None, None, None)),
        }
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let shown = Shown::of(fence);
        let [token, holder, domain, _] = shown.parameters();
        let name = resource.as_str().as_bytes();
        let parameters = [resource_parameter(&name), token, holder, domain];
        match self.call("raise", &parameters, READ_LIMIT_BYTES).await? {
            Some(row) => snapshot(&row),
            None => Err(Error::corrupt("PostgreSQL's answer to a raise has no row")),
        }
    }

    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let shown = Shown::of(fence);
        let [token, holder, domain, seq] = shown.parameters();
        let name = resource.as_str().as_bytes();
        let parameters = [resource_parameter(&name), token, holder, domain, seq];
        self.change("delete", &parameters, 0).await
    }

    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let shown = Shown::of(fence);
        let [token, holder, domain, _] = shown.parameters();
        let name = resource.as_str().as_bytes();
        let parameters = [resource_parameter(&name), token, holder, domain];
        self.change("rebind", &parameters, 0).await
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        probe(&self.database, None).await
    }
}

/// A fence as parameters of a statement.
pub(super) struct Shown {
    pub(super) token: i64,
    pub(super) holder: Option<Vec<u8>>,
    pub(super) domain: Option<String>,
    pub(super) seq: Option<i64>,
}

impl Shown {
    pub(super) fn of(fence: &Fence) -> Self {
        Self {
            token: signed(fence.token()),
            holder: fence.holder().map(|tag| tag.as_bytes().to_vec()),
            domain: fence.domain().map(|domain| domain.as_str().to_owned()),
            seq: fence
                .seq()
                .map(|seq| i64::try_from(seq).unwrap_or(i64::MAX)),
        }
    }

    /// Token, holder, domain, sequence.
    fn parameters(&self) -> [Parameter<'_>; 4] {
        [
            (&self.token, Type::INT8),
            (&self.holder, Type::BYTEA),
            (&self.domain, Type::TEXT),
            (&self.seq, Type::INT8),
        ]
    }
}

fn resource_parameter<'a>(name: &'a &'a [u8]) -> Parameter<'a> {
    (name, Type::BYTEA)
}

/// Columns `applied`, `token`, `holder`, `seq`, `domain`.
fn written(row: &Row) -> Result<Written> {
    let watermark = watermark(row, 1)?
        .ok_or_else(|| Error::corrupt("PostgreSQL's answer to a write has no watermark"))?;
    Ok(if get(row, 0)? {
        Written::applied(watermark)
    } else {
        Written::repeated(watermark)
    })
}

/// Columns `token`, `holder`, `seq`, `domain`, `value`, `writer`.
fn snapshot(row: &Row) -> Result<Snapshot> {
    let value = get::<Option<Vec<u8>>>(row, 4)?.map(Body::from);
    let writer = get::<Option<i64>>(row, 5)?.map(token).transpose()?;
    Ok(Snapshot::new(value, watermark(row, 0)?, writer))
}

/// Columns `token`, `holder`, `seq`, `domain` from `first` on.
fn watermark(row: &Row, first: usize) -> Result<Option<Watermark>> {
    let Some(number) = get::<Option<i64>>(row, first)? else {
        return Ok(None);
    };
    watermark_of(
        number,
        get(row, first + 1)?,
        get(row, first + 2)?,
        get(row, first + 3)?,
    )
    .map(Some)
}

/// A watermark as the columns say it.
pub(super) fn watermark_of(
    number: i64,
    holder: Option<&[u8]>,
    seq: i64,
    domain: Option<&str>,
) -> Result<Watermark> {
    let tag = |bytes: &[u8]| {
        let bytes = bytes.try_into();
        bytes
            .map(HolderTag::from_bytes)
            .map_err(|_| Error::corrupt("a stored holder tag is not 16 bytes"))
    };
    let lock = |text: &str| {
        text.parse::<Domain>()
            .map_err(|error| Error::corrupt("a stored lock domain is malformed").with_source(error))
    };
    Ok(Watermark {
        token: token(number)?,
        holder: holder.map(tag).transpose()?,
        seq: sequence(seq)?,
        domain: domain.map(lock).transpose()?,
    })
}

/// A sequence; one below 0 is damage, and as 0 it would let older writes of the holder pass (S7).
fn sequence(number: i64) -> Result<u64> {
    u64::try_from(number)
        .map_err(|_| Error::corrupt("a stored sequence is out of range").with("seq", number))
}
