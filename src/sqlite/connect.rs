//! One connection: what it insists on before it is used.

use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use super::error::{Halt, is_missing_table};
use super::place::Place;
use super::sql::{META_READ, SCHEMA_VERSION, schema_sql};
use crate::disk::shown;
use crate::error::{Error, Result};

/// `PRAGMA synchronous`: a commit is synced before it is answered.
const SYNCHRONOUS_FULL: i64 = 2;

/// How many prepared statements a connection keeps.
const STATEMENTS: usize = 64;

/// What `fencelock_meta` says.
#[derive(Clone, Debug)]
pub(super) struct Meta {
    pub(super) version: i64,
    pub(super) realm: String,
    pub(super) floor: i64,
    pub(super) grants: i64,
}

impl Meta {
    pub(super) fn read(connection: &Connection) -> Result<Self, Halt> {
        let read = connection.prepare_cached(META_READ).and_then(|mut found| {
            found.query_row([], |row| {
                Ok(Self {
                    version: row.get(0)?,
                    realm: row.get(1)?,
                    floor: row.get(2)?,
                    grants: row.get(3)?,
                })
            })
        });
        match read {
            Err(rusqlite::Error::QueryReturnedNoRows) => {
                Err(Error::corrupt("the database has lost the identity of its locks").into())
            }
            read => Ok(read?),
        }
    }

    /// Fails where the tables are another version's.
    pub(super) fn check_version(&self) -> Result<()> {
        if self.version == SCHEMA_VERSION {
            return Ok(());
        }
        Err(
            Error::unsupported("the database's tables are of another version of fencelock")
                .with("found", self.version)
                .with("expected", SCHEMA_VERSION),
        )
    }
}

/// Opens the database, and sets and verifies what the promises rest on.
pub(super) fn connect(place: &Place) -> Result<Connection, Halt> {
    place.check_same()?;
    // Without CREATE: a file that is removed meanwhile must not come back empty. Without URI: a
    // path is a path. One thread at a time uses the connection.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX
        | OpenFlags::SQLITE_OPEN_NOFOLLOW;
    let connection = Connection::open_with_flags(place.path(), flags)?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    // Whoever waits does so above, with jitter and a limit for the whole operation.
    connection.busy_timeout(std::time::Duration::ZERO)?;
    let encoding: String = pragma(&connection, "PRAGMA encoding")?;
    if encoding != "UTF-8" {
        return Err(Error::unsupported(
            "the database stores text in another encoding than UTF-8, which changes some names; use another database",
        )
        .with("encoding", encoding)
        .into());
    }
    let journal: String = pragma(&connection, "PRAGMA journal_mode = WAL")?;
    if journal != "wal" {
        return Err(Error::unsupported(
            "the database cannot be put in WAL mode; use a local file system",
        )
        .with("journal_mode", journal)
        .into());
    }
    connection.execute_batch(
        "PRAGMA synchronous = FULL; PRAGMA fullfsync = ON; PRAGMA checkpoint_fullfsync = ON",
    )?;
    let synchronous: i64 = pragma(&connection, "PRAGMA synchronous")?;
    if synchronous != SYNCHRONOUS_FULL {
        return Err(Error::unsupported(
            "SQLite does not sync its commits, so a told token could be told again after power loss",
        )
        .with("synchronous", synchronous)
        .into());
    }
    // The connection and the path have to mean one file.
    place.check_same()?;
    Ok(connection)
}

/// Makes the tables where they are missing, and reads the identity of the data.
pub(super) fn set_up(connection: &mut Connection, create: bool) -> Result<Meta, Halt> {
    let present = |connection: &Connection| match connection.prepare(META_READ) {
        Ok(_) => Ok(true),
        Err(e) if is_missing_table(&e) => Ok(false),
        Err(e) => Err(Halt::from(e)),
    };
    if !present(connection)? {
        if !create {
            return Err(Error::invalid(
                "the database has no tables of fencelock; run what `fencelock schema sqlite` prints, or allow them to be created",
            )
            .into());
        }
        // One transaction of ours instead of the script's: it is rolled back where it fails.
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if !present(&transaction)? {
            let sql = schema_sql();
            let body = sql
                .replace("BEGIN IMMEDIATE;\n", "")
                .replace("COMMIT;\n", "");
            transaction.execute_batch(&body)?;
        }
        transaction.commit().map_err(super::error::at_commit)?;
    }
    let meta = Meta::read(connection)?;
    meta.check_version()?;
    Ok(meta)
}

/// The one value that a pragma answers.
pub(super) fn pragma<T: rusqlite::types::FromSql>(
    connection: &Connection,
    sql: &str,
) -> rusqlite::Result<T> {
    connection.query_row(sql, [], |row| row.get(0))
}

/// An error with the path that it is about.
pub(super) fn at(error: Error, place: &Place) -> Error {
    if error.to_string().contains("path=") {
        return error;
    }
    error.with("path", shown(place.path()))
}
