//! What the server's errors mean for the caller.

use std::error::Error as _;
use std::io;

use tokio_postgres::error::{DbError, Severity, SqlState};

use super::connect::Target;
use crate::error::{Error, ErrorKind};
use crate::token::FencingToken;

/// A pooler that takes no `options` at the start says so with this state; a server that does not
/// know one of them, with the other.
pub(super) fn startup_parameter_refused(error: &tokio_postgres::Error) -> bool {
    error.as_db_error().is_some_and(|e| {
        (*e.code() == SqlState::PROTOCOL_VIOLATION
            || *e.code() == SqlState::UNDEFINED_OBJECT
            || *e.code() == SqlState::INVALID_PARAMETER_VALUE)
            && e.message().contains("parameter")
    })
}

/// An error before anything was sent: nothing was applied. A pool's target is not known.
pub(super) fn connect_error(error: tokio_postgres::Error, target: Option<&Target>) -> Error {
    let refusal = connect_refusal(&error);
    let refusal = match target {
        Some(target) => refusal
            .with("server", target)
            .with("user", target.user())
            .with("database", target.database()),
        None => refusal,
    };
    refusal.with_source(error)
}

fn connect_refusal(error: &tokio_postgres::Error) -> Error {
    let Some(db) = error.as_db_error() else {
        let io = error
            .source()
            .and_then(|e| e.downcast_ref::<io::Error>())
            .map(io::Error::kind);
        // This is how rustls says that it does not trust the server.
        if io == Some(io::ErrorKind::InvalidData) {
            return Error::invalid(
                "the TLS handshake with PostgreSQL failed: its certificate is not trusted, or not for this name; see sslrootcert",
            );
        }
        return if error.is_closed() || io.is_some() {
            Error::unavailable("the PostgreSQL server cannot be reached")
        } else {
            Error::invalid("no connection to PostgreSQL can be made with these settings")
        };
    };
    match db.code() {
        &SqlState::INVALID_PASSWORD | &SqlState::INVALID_AUTHORIZATION_SPECIFICATION => {
            Error::invalid(
                "PostgreSQL refused the user or the password; check the URL, PGPASSWORD and pg_hba.conf",
            )
        }
        &SqlState::INVALID_CATALOG_NAME => {
            Error::invalid("there is no such database; create it, or correct the URL")
        }
        &SqlState::TOO_MANY_CONNECTIONS => Error::unavailable(
            "PostgreSQL has no connection free; raise max_connections, or put a pooler before it",
        ),
        &SqlState::INSUFFICIENT_PRIVILEGE => Error::invalid(
            "the user may not connect to the database; GRANT CONNECT ON DATABASE to it",
        ),
        _ => Error::unavailable("PostgreSQL does not take connections now"),
    }
}

/// An error after a request was sent.
pub(super) fn request_error(error: tokio_postgres::Error, schema: &str) -> Error {
    let Some(db) = error.as_db_error() else {
        return Error::indeterminate(
            "the connection to PostgreSQL was lost before the answer came",
        )
        .with_source(error);
    };
    if let Some(refusal) = own_refusal(db) {
        return refusal;
    }
    // A session that dies may die after its commit. An ordinary error has rolled back.
    if ends_session(db) {
        return Error::indeterminate("PostgreSQL ended the session before the answer came")
            .with_source(error);
    }
    state_refusal(db.code(), schema).with_source(error)
}

/// An error of the server that rolled the request back, by its SQLSTATE.
pub(super) fn state_refusal(state: &SqlState, schema: &str) -> Error {
    match state {
        &SqlState::READ_ONLY_SQL_TRANSACTION => Error::unavailable(
            "this PostgreSQL server takes no writes: a standby, or default_transaction_read_only; connect to the primary",
        ),
        &SqlState::INSUFFICIENT_PRIVILEGE => Error::invalid(format!(
            "the user may not do this; GRANT USAGE ON SCHEMA {schema}, and GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema}, to it (creating the schema needs CREATE on the database)"
        )),
        &SqlState::UNDEFINED_TABLE
        | &SqlState::UNDEFINED_FUNCTION
        | &SqlState::UNDEFINED_OBJECT
        | &SqlState::INVALID_SCHEMA_NAME => Error::corrupt(
            "fencelock's tables or functions are missing; run the SQL of its schema, which leaves data as it is",
        )
        .with("schema", schema),
        &SqlState::LOCK_NOT_AVAILABLE => Error::unavailable(
            "another transaction keeps the row locked; look for it in pg_locks",
        ),
        &SqlState::QUERY_CANCELED => {
            Error::unavailable("PostgreSQL cancelled the request, and applied nothing")
        }
        &SqlState::T_R_SERIALIZATION_FAILURE | &SqlState::T_R_DEADLOCK_DETECTED => {
            Error::unavailable("the request met another one, and was rolled back")
        }
        _ => Error::unavailable("PostgreSQL refused the request, and applied nothing"),
    }
}

/// The parsed field is the one that is not translated; a pooler may leave it out.
fn ends_session(db: &DbError) -> bool {
    match db.parsed_severity() {
        Some(severity) => matches!(severity, Severity::Fatal | Severity::Panic),
        None => db.severity() != "ERROR",
    }
}

/// The refusals that fencelock's own functions raise, `FL…`: no cause is attached, for the message
/// says all, and the server's says it again.
pub(super) fn own_refusal(db: &DbError) -> Option<Error> {
    own_refusal_of(db.code().code(), db.message(), db.detail())
}

/// [`own_refusal`] from the parts of an error, whichever driver brought it.
pub(super) fn own_refusal_of(code: &str, message: &str, detail: Option<&str>) -> Option<Error> {
    if !code.starts_with("FL") {
        return None;
    }
    let detail = detail.unwrap_or_default();
    let message = match detail {
        "" => message.to_owned(),
        detail => format!("{message} {detail}"),
    };
    let kind = match code {
        "FL001" => {
            if let (Some(token), Some(watermark)) =
                (field(detail, "token"), field(detail, "watermark"))
            {
                return Some(Error::fenced(token, watermark, message));
            }
            ErrorKind::Fenced
        }
        "FL002" => ErrorKind::DomainMismatch,
        "FL003" | "FL009" => ErrorKind::Invalid,
        "FL004" => ErrorKind::Exhausted,
        "FL005" | "FL006" => ErrorKind::Unsupported,
        _ => ErrorKind::Corrupt,
    };
    Some(Error::new(kind, message))
}

fn field(detail: &str, key: &str) -> Option<FencingToken> {
    detail
        .split(' ')
        .find_map(|part| part.strip_prefix(key)?.strip_prefix('='))
        .and_then(|number| number.parse().ok())
}
