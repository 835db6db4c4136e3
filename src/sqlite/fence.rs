//! The storage half: a check in the transaction of the user's own write, and values for scripts.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use rusqlite::functions::FunctionFlags;
use rusqlite::{Connection, OptionalExtension as _, Row, Transaction, params};

use super::connect::Meta;
use super::database::{Database, Lane, Step};
use super::error::{Halt, is_missing_table, is_overtaken};
use super::options::SqliteOptions;
use super::probe::probe;
use super::sql::{FENCE_READ, FENCE_WRITE, VALUE_DROP, VALUE_READ, VALUE_WRITE, WRITE_LOCK};
use crate::body::Body;
use crate::clock::unix_micros;
use crate::driver::off_thread;
use crate::error::{Error, Result};
use crate::fence::{Domain, Fence, FencedStore, Fencing, HolderTag, Snapshot, Written};
use crate::lease::Finding;
use crate::name::ResourceName;
use crate::sql::number::{sequence, signed, token};
use crate::token::{Admission, Intent, Watermark, judge};

/// The largest value that a [`FencedSqlite`] takes: 64 MiB. SQLite holds a value in memory.
pub const VALUE_MAX_BYTES: u64 = 64 << 20;

/// Admits a fence to `resource` within the caller's transaction, before the writes that it guards.
///
/// Takes SQLite's write lock, which stays with the transaction to its end, and raises the
/// resource's watermark with the commit or not at all: whoever comes later with a smaller token is
/// refused, and nobody writes in between (S2, S3). Call it before reading what the writes depend on,
/// and no update is lost (S6). The answer's `applied` is false where this very write, by its
/// sequence, was committed before (S7): leave it out then.
///
/// The tables have to be there, in the main database of the connection: open a
/// [`SqliteStore`](super::SqliteStore) or a [`FencedSqlite`] on it once, or run
/// [`schema_sql`](super::schema_sql).
///
/// ```
/// use fencelock::sqlite::{admit, rusqlite::Connection, schema_sql};
/// use fencelock::{ErrorKind, FencingToken};
///
/// let mut connection = Connection::open_in_memory()?;
/// connection.execute_batch(&schema_sql())?;
/// connection.execute_batch("CREATE TABLE payments (exported INTEGER)")?;
///
/// let transaction = connection.transaction()?;
/// admit(&transaction, "payments", FencingToken::new(34)?)?;
/// transaction.execute("UPDATE payments SET exported = 1", [])?;
/// transaction.commit()?;
///
/// let transaction = connection.transaction()?;
/// let refused = admit(&transaction, "payments", FencingToken::new(33)?).unwrap_err();
/// assert_eq!(refused.kind(), ErrorKind::Fenced);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Blocks for as long as the connection's busy timeout while another connection writes.
///
/// # Errors
/// `Fenced` where the token is stale, `DomainMismatch` where the resource is bound to another lock,
/// `Lost` where the guard knows that it lost its lock: **drop the transaction, which rolls it back.**
/// SQLite would let you commit what you write after an error. `Unavailable` where another connection
/// writes, or has written since this transaction first read: roll back and begin again, with
/// [`Immediate`](rusqlite::TransactionBehavior::Immediate). `Invalid` where SQLite has ended the
/// transaction already, and where the tables are missing.
pub fn admit(
    transaction: &Transaction<'_>,
    resource: impl TryInto<ResourceName, Error = Error>,
    fence: impl Fencing,
) -> Result<Written> {
    let (resource, shown) = (resource.try_into()?, fence.to_fence()?);
    if transaction.is_autocommit() {
        return Err(Error::invalid(
            "SQLite has ended this transaction, as after a full disk; begin another",
        ));
    }
    let done = admit_here(transaction, &resource, &shown);
    if let Err(error) = &done
        && let Some(watermark) = error.watermark()
    {
        fence.refused(watermark);
    }
    done
}

fn admit_here(transaction: &Connection, resource: &ResourceName, fence: &Fence) -> Result<Written> {
    // A write first: it takes the write lock, or fails where what this transaction reads is not the
    // newest. Only then is the watermark read.
    let locked = transaction
        .prepare_cached(WRITE_LOCK)
        .and_then(|mut statement| statement.execute([]));
    locked.map_err(|error| {
        if is_missing_table(&error) {
            return Error::invalid(
                "the database has no tables of fencelock; run what `fencelock schema sqlite` prints",
            )
            .with_source(error);
        }
        if is_overtaken(&error) {
            return Error::unavailable(
                "another connection has written since this transaction first read; roll back, and begin again with BEGIN IMMEDIATE",
            )
            .with_source(error);
        }
        super::error::not_applied(error)
    })?;
    let admitted = Meta::read(transaction)
        .and_then(|meta| Ok(meta.check_version()?))
        .and_then(|()| decide(transaction, resource, fence, Intent::Write));
    match admitted {
        Ok(admission) => Ok(written(admission)),
        Err(Halt::Busy(error)) => Err(super::error::busy(error)),
        Err(Halt::Failed(error)) => Err(error),
    }
}

/// Shows a fence on a connection, as the function `fencelock_fence()` that the triggers of
/// [`guard_sql`](super::guard_sql) call. It stays until another is shown.
///
/// ```
/// use fencelock::FencingToken;
/// use fencelock::sqlite::{guard_sql, rusqlite::Connection, schema_sql, show};
///
/// let connection = Connection::open_in_memory()?;
/// connection.execute_batch(&schema_sql())?;
/// connection.execute_batch("CREATE TABLE payments (exported INTEGER)")?;
/// connection.execute_batch(&guard_sql("payments", "payments")?)?;
///
/// assert!(connection.execute("INSERT INTO payments VALUES (0)", []).is_err());
/// show(&connection, FencingToken::new(34)?)?;
/// connection.execute("INSERT INTO payments VALUES (0)", [])?;
/// show(&connection, FencingToken::new(33)?)?;
/// assert!(connection.execute("DELETE FROM payments", []).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// `Lost` where a guard knows that it lost its lock; `Unavailable` where SQLite refuses, as while
/// one of the connection's statements runs.
pub fn show(connection: &Connection, fence: impl Fencing) -> Result<()> {
    let fence = fence.to_fence()?;
    let text = match (fence.holder(), fence.domain()) {
        (None, None) => fence.token().to_string(),
        // One fence covers many statements.
        _ => fence.without_seq().to_string(),
    };
    // Harmless in any schema: it takes nothing and tells what its own connection shows.
    let flags = FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_INNOCUOUS;
    connection
        .create_scalar_function("fencelock_fence", 0, flags, move |_| Ok(text.clone()))
        .map_err(super::error::not_applied)
}

/// Fenced values in a table of SQLite, for scripts and the command line.
///
/// A program that has tables of its own guards them with [`admit`] instead. The watermarks are the
/// same: a resource is one, however it is written. Clones share the connections.
#[derive(Clone)]
pub struct FencedSqlite {
    database: Arc<Database>,
}

impl FencedSqlite {
    /// Opens the values in the database at `path`, and makes the file and the tables where they are
    /// missing.
    ///
    /// Cancel safe.
    ///
    /// # Errors
    /// As [`SqliteOptions::open`].
    pub async fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::options().open_fenced(path).await
    }

    /// Options to open a storage with.
    pub fn options() -> SqliteOptions {
        SqliteOptions::default()
    }

    pub(super) async fn open_with(path: &Path, options: SqliteOptions) -> Result<Self> {
        Ok(Self {
            database: Database::open(path, options).await?,
        })
    }

    async fn change<T: Send + 'static>(
        &self,
        work: impl Fn(&Step<'_>) -> Result<T, Halt> + Send + 'static,
    ) -> Result<T> {
        self.database
            .write(Lane::Ask, self.database.busy_limit, work)
            .await
    }
}

impl fmt::Debug for FencedSqlite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencedSqlite")
            .field("path", &self.database.place().path())
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl FencedStore for FencedSqlite {
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written> {
        // Before the transaction: reading a body may take long, and may fail.
        let bytes = if body.in_memory() {
            body.into_bytes(VALUE_MAX_BYTES)?
        } else {
            off_thread(move || body.into_bytes(VALUE_MAX_BYTES)).await??
        };
        let (resource, fence) = (resource.clone(), fence.clone());
        self.change(move |step| {
            let admission = decide(step.connection(), &resource, &fence, Intent::Write)?;
            if matches!(admission, Admission::Apply(_)) {
                step.prepare(VALUE_WRITE)?.execute(params![
                    resource.as_str().as_bytes(),
                    bytes.as_ref(),
                    signed(fence.token()),
                ])?;
            }
            Ok(written(admission))
        })
        .await
    }

    async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        let resource = resource.clone();
        self.database
            .read(Lane::Look, move |step| {
                snapshot(step, &resource, watermark(step.connection(), &resource)?)
            })
            .await
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        let (resource, fence) = (resource.clone(), fence.clone());
        self.change(move |step| {
            let admission = decide(step.connection(), &resource, &fence, Intent::Raise)?;
            let (Admission::Apply(watermark) | Admission::Repeat(watermark)) = admission;
            snapshot(step, &resource, Some(watermark))
        })
        .await
    }

    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let (resource, fence) = (resource.clone(), fence.clone());
        self.change(move |step| {
            let admission = decide(step.connection(), &resource, &fence, Intent::Write)?;
            if matches!(admission, Admission::Apply(_)) {
                step.prepare(VALUE_DROP)?
                    .execute([resource.as_str().as_bytes()])?;
            }
            Ok(written(admission))
        })
        .await
    }

    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        let (resource, fence) = (resource.clone(), fence.clone());
        self.change(move |step| {
            let admission = decide(step.connection(), &resource, &fence, Intent::Rebind)?;
            Ok(written(admission))
        })
        .await
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        probe(&self.database).await
    }
}

/// Judges, and stores the new watermark, with the write lock held.
fn decide(
    transaction: &Connection,
    resource: &ResourceName,
    fence: &Fence,
    intent: Intent,
) -> Result<Admission, Halt> {
    let current = watermark(transaction, resource)?;
    let admission = judge(current.as_ref(), fence, intent, unix_micros())?;
    let (Admission::Apply(next) | Admission::Repeat(next)) = &admission;
    transaction.prepare_cached(FENCE_WRITE)?.execute(params![
        resource.as_str().as_bytes(),
        signed(next.token),
        next.holder.map(|holder| holder.to_string()),
        i64::try_from(next.seq).unwrap_or(i64::MAX),
        next.domain.as_ref().map(Domain::as_str),
    ])?;
    Ok(admission)
}

fn watermark(transaction: &Connection, resource: &ResourceName) -> Result<Option<Watermark>, Halt> {
    let mut statement = transaction.prepare_cached(FENCE_READ)?;
    let mut rows = statement.query([resource.as_str().as_bytes()])?;
    rows.next()?.map(watermark_of).transpose()
}

/// Columns `token`, `holder`, `seq`, `domain`.
pub(super) fn watermark_of(row: &Row<'_>) -> Result<Watermark, Halt> {
    let (number, seq) = (row.get(0)?, row.get::<_, i64>(2)?);
    let (holder, domain): (Option<String>, Option<String>) = (row.get(1)?, row.get(3)?);
    let holder = holder
        .map(|text| text.parse::<HolderTag>())
        .transpose()
        .map_err(|e| Error::corrupt("a stored holder tag is malformed").with_source(e))?;
    let domain = domain
        .map(|text| text.parse::<Domain>())
        .transpose()
        .map_err(|e| Error::corrupt("a stored lock domain is malformed").with_source(e))?;
    Ok(Watermark {
        token: token(number)?,
        holder,
        seq: sequence(seq)?,
        domain,
    })
}

fn snapshot(
    step: &Step<'_>,
    resource: &ResourceName,
    watermark: Option<Watermark>,
) -> Result<Snapshot, Halt> {
    let found = step
        .prepare(VALUE_READ)?
        .query_row([resource.as_str().as_bytes()], |row| {
            Ok((row.get::<_, Vec<u8>>(0)?, row.get::<_, i64>(1)?))
        })
        .optional()?;
    Ok(match found {
        Some((value, writer)) => {
            Snapshot::new(Some(Body::from(value)), watermark, Some(token(writer)?))
        }
        None => Snapshot::new(None, watermark, None),
    })
}

fn written(admission: Admission) -> Written {
    match admission {
        Admission::Apply(watermark) => Written::applied(watermark),
        Admission::Repeat(watermark) => Written::repeated(watermark),
    }
}
