//! The storage half: a check in the transaction of the user's own write, and values for scripts.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use deadpool_postgres::Pool;
use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};

use super::database::{Database, Lane, Parameter};
use super::error::request_error;
use super::options::PostgresOptions;
use super::probe::probe;
use super::sql::{SCHEMA_DEFAULT, Schema};
use crate::body::Body;
use crate::error::{Error, Result};
use crate::fence::{Fence, FencedStore, Fencing, Snapshot, Written};
use crate::lease::Finding;
use crate::name::ResourceName;
use crate::sql::answer::{snapshot, written};
use crate::sql::shown::Shown;
use crate::sql::value::{self, READ_LIMIT_BYTES, limit, not_admitted};

/// The largest value that a [`FencedPostgres`] takes: 64 MiB. PostgreSQL holds a value and its
/// message in memory.
pub const VALUE_MAX_BYTES: u64 = value::MAX_BYTES;

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
    let [token, holder, domain, seq] = parameters(&shown);
    let name = resource.as_str().as_bytes();
    let parameters = [resource_parameter(&name), token, holder, domain, seq];
    let answer = transaction.query_typed_one(&sql, &parameters).await;
    match answer {
        Ok(row) => written(&row),
        Err(error) => Err(not_admitted(request_error(error, schema.as_str()), &fence)),
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
        let mut rows = self
            .database
            .query_within(Lane::Ask, &sql, parameters, limit(bytes))
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
        let bytes = value::read(body).await?;
        let (name, value) = (resource.as_str().as_bytes(), bytes.as_ref());
        let shown = Shown::of(fence);
        let [token, holder, domain, seq] = parameters(&shown);
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
            Some(row) => snapshot(&row, 0),
            None => Ok(Snapshot::new(None, None, None)),
        }
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let shown = Shown::of(fence);
        let [token, holder, domain, _] = parameters(&shown);
        let name = resource.as_str().as_bytes();
        let parameters = [resource_parameter(&name), token, holder, domain];
        match self.call("raise", &parameters, READ_LIMIT_BYTES).await? {
            Some(row) => snapshot(&row, 0),
            None => Err(Error::corrupt("PostgreSQL's answer to a raise has no row")),
        }
    }

    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let shown = Shown::of(fence);
        let [token, holder, domain, seq] = parameters(&shown);
        let name = resource.as_str().as_bytes();
        let parameters = [resource_parameter(&name), token, holder, domain, seq];
        self.change("delete", &parameters, 0).await
    }

    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let shown = Shown::of(fence);
        let [token, holder, domain, _] = parameters(&shown);
        let name = resource.as_str().as_bytes();
        let parameters = [resource_parameter(&name), token, holder, domain];
        self.change("rebind", &parameters, 0).await
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        probe(&self.database, None).await
    }
}

/// Token, holder, domain, sequence.
fn parameters(shown: &Shown) -> [Parameter<'_>; 4] {
    [
        (&shown.token, Type::INT8),
        (&shown.holder, Type::BYTEA),
        (&shown.domain, Type::TEXT),
        (&shown.seq, Type::INT8),
    ]
}

fn resource_parameter<'a>(name: &'a &'a [u8]) -> Parameter<'a> {
    (name, Type::BYTEA)
}
