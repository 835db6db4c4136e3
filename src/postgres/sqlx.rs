//! [`admit`] for a transaction of sqlx.
//!
//! The same functions of the same schema as [`postgres::admit`](super::admit), so that programs on
//! either driver, and the functions for other languages, move one watermark. The schema is made by
//! whoever opens locks or values first, or by hand from [`schema_sql`](super::schema_sql).
//!
//! ```no_run
//! use fencelock::LockGuard;
//! use fencelock::postgres::sqlx::{admit, sqlx};
//! # async fn example(pool: &sqlx::PgPool, guard: &LockGuard) -> Result<(), Box<dyn std::error::Error>> {
//! let mut transaction = pool.begin().await?;
//! admit(&mut transaction, "payments", guard).await?; // refused if stale, and locked to the commit
//! sqlx::query("UPDATE payments SET exported = true").execute(&mut *transaction).await?;
//! transaction.commit().await?;
//! # Ok(()) }
//! ```

pub use ::sqlx;

use ::sqlx::postgres::{PgDatabaseError, PgRow, PgSeverity};
use ::sqlx::{AssertSqlSafe, Postgres, Row as _, Transaction};
use tokio_postgres::error::SqlState;

use super::error::{own_refusal_of, state_refusal};
use super::fence::admit_sql;
use super::sql::{SCHEMA_DEFAULT, Schema};
use crate::error::{Error, Result};
use crate::fence::{Fencing, Written};
use crate::name::ResourceName;
use crate::sql::answer::{columns, written};
use crate::sql::shown::Shown;

/// Admits a fence to `resource` within the caller's transaction, before the writes that it guards.
///
/// The resource's watermark is one row. It stays locked until the transaction ends, and it is
/// raised with the commit or not at all: whoever comes later with a smaller token is refused, and
/// whoever comes at the same moment waits (S2, S3). Call it before reading what the writes depend
/// on, and no update is lost (S6). The answer's `applied` is false where this very write, by its
/// sequence, was committed before (S7): leave it out then.
///
/// It takes a transaction, and no plain connection: there the row would be unlocked before the
/// write came. The statement is not kept prepared, so that a pooler in transaction mode may stand
/// between; **your own statements** need `query(…).persistent(false)` there.
///
/// Cancel safety: nothing is kept unless the transaction commits. **Roll it back where this future
/// was dropped**: the fence may not have been judged at all.
///
/// # Errors
/// `Fenced` where the token is stale, `DomainMismatch` where the resource is bound to another lock,
/// `Lost` where the guard knows that it lost its lock. Whatever the server's refusal, the
/// transaction can only be rolled back, so it had and will have no effect; after an `Invalid`
/// name or a `Lost`, which the server has not heard of, roll it back yourself.
pub async fn admit(
    transaction: &mut Transaction<'_, Postgres>,
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
    transaction: &mut Transaction<'_, Postgres>,
    schema: &str,
    resource: impl TryInto<ResourceName, Error = Error>,
    fence: impl Fencing,
) -> Result<Written> {
    let (schema, resource) = (Schema::new(schema)?, resource.try_into()?);
    let shown = Shown::of(&fence.to_fence()?);
    // Safe: the schema is a validated identifier, and all else are parameters.
    let answer = ::sqlx::query(AssertSqlSafe(admit_sql(&schema)))
        .bind(resource.as_str().as_bytes())
        .bind(shown.token)
        .bind(shown.holder)
        .bind(shown.domain)
        .bind(shown.seq)
        .persistent(false)
        .fetch_one(&mut **transaction)
        .await;
    match answer {
        Ok(row) => written(&row),
        Err(error) => {
            let error = refusal(error, schema.as_str());
            if let Some(watermark) = error.watermark() {
                fence.refused(watermark);
            }
            Err(error)
        }
    }
}

/// The caller has not committed, so nothing can have been applied, whatever went wrong.
fn refusal(error: ::sqlx::Error, schema: &str) -> Error {
    let Some(db) = error
        .as_database_error()
        .and_then(|error| error.try_downcast_ref::<PgDatabaseError>())
    else {
        return Error::unavailable("the connection to PostgreSQL was lost before the answer came")
            .with_source(error);
    };
    if let Some(refusal) = own_refusal_of(db.code(), db.message(), db.detail()) {
        return refusal;
    }
    if matches!(db.severity(), PgSeverity::Fatal | PgSeverity::Panic) {
        return Error::unavailable("PostgreSQL ended the session before the answer came")
            .with_source(error);
    }
    state_refusal(&SqlState::from_code(db.code()), schema).with_source(error)
}

columns!(PgRow, get);

/// A column of an answer.
fn get<'r, T: ::sqlx::Decode<'r, Postgres> + ::sqlx::Type<Postgres>>(
    row: &'r PgRow,
    i: usize,
) -> Result<T> {
    row.try_get(i).map_err(|error| {
        Error::corrupt("PostgreSQL's answer to a write is not as expected").with_source(error)
    })
}
