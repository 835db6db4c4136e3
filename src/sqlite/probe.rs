//! What an operator should know of the database, for `fencelock doctor`.

use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use super::connect::pragma;
use super::database::{Database, Lane, Step};
use super::error::Halt;
use super::place::Place;
use crate::disk::io_error;
use crate::error::Result;
use crate::lease::{Finding, Severity};
use crate::netfs::{self, FileSystem};

/// A write-ahead log of this size is one that somebody keeps from being emptied.
const LOG_LARGE_BYTES: u64 = 256 << 20;

/// SQLite before this version can, rarely, damage a database whose log is begun anew by one
/// connection while another one writes: <https://sqlite.org/wal.html#walresetbug>.
const LOG_BEGINS_ANEW_SAFELY: i32 = 3_051_003;

/// Earlier versions with the same correction.
const ALSO_SAFE: [i32; 2] = [3_044_006, 3_050_007];

const OTHERS_READ: u32 = 0o004;
const GROUP_WRITES: u32 = 0o020;
const STICKY_AND_OTHERS_WRITE: u32 = 0o1002;
const OTHERS_WRITE: u32 = 0o002;

/// Looks at the file, the connection's settings and the tables.
pub(super) async fn probe(database: &Arc<Database>) -> Result<Vec<Finding>> {
    let knows_boot = database.host.knows_boot();
    let place = database.place().clone();
    let mut findings = database
        .read(Lane::Ask, move |step| findings(step, &place))
        .await?;
    findings.push(if knows_boot {
        Finding::new(Severity::Good, "boot id", "a reboot is noticed, and ends all grants")
    } else {
        Finding::new(
            Severity::Warning,
            "boot id",
            "this system does not tell one boot from another: after a reboot, grants may last for as long as they had left",
        )
    });
    Ok(findings)
}

fn findings(step: &Step<'_>, place: &Place) -> Result<Vec<Finding>, Halt> {
    let connection = step.connection();
    let version = rusqlite::version_number();
    let safe = version >= LOG_BEGINS_ANEW_SAFELY || ALSO_SAFE.contains(&version);
    let journal: String = pragma(connection, "PRAGMA journal_mode")?;
    let synchronous: i64 = pragma(connection, "PRAGMA synchronous")?;
    let mut found = vec![
        if safe {
            Finding::new(
                Severity::Good,
                "library",
                format!("SQLite {}", rusqlite::version()),
            )
        } else {
            Finding::new(
                Severity::Warning,
                "library",
                format!(
                    "SQLite {}: can, rarely, damage a database in WAL mode; build with 3.51.3 or later, in every program that writes to this file",
                    rusqlite::version()
                ),
            )
        },
        if journal == "wal" && synchronous >= 2 {
            Finding::new(
                Severity::Good,
                "durability",
                "WAL with synchronous=FULL: a told token survives power loss",
            )
        } else {
            Finding::new(
                Severity::Bad,
                "durability",
                format!(
                    "journal_mode={journal} synchronous={synchronous}: a told token may be told again after power loss"
                ),
            )
        },
        or_bad("file system", file_system(place)),
        or_bad("permissions", permissions(place)),
        or_bad("write-ahead log", log(place)),
    ];
    found.push(integrity(step)?);
    let (locks, fences): (i64, i64) = connection.query_row(
        "SELECT (SELECT count(*) FROM main.fencelock_locks), (SELECT count(*) FROM main.fencelock_fences)",
        [],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )?;
    found.push(Finding::new(
        Severity::Good,
        "records",
        format!("{locks} lock names and {fences} fenced resources are known"),
    ));
    Ok(found)
}

fn or_bad(subject: &'static str, found: Result<Finding>) -> Finding {
    found.unwrap_or_else(|error| Finding::bad(subject, &error))
}

fn file_system(place: &Place) -> Result<Finding> {
    let finding = |severity, detail: String| Finding::new(severity, "file system", detail);
    Ok(match netfs::kind_of(place.dir())? {
        FileSystem::Network(kind) => finding(
            Severity::Bad,
            format!("{kind}: its locks and shared memory need not reach other clients, which damages the database; use a local file system"),
        ),
        _ if netfs::is_volatile(place.dir())? => finding(
            Severity::Warning,
            "tmpfs: all is lost at a reboot, and the store's realm with it (D1 only); use a disk where storage outlives the boot".to_owned(),
        ),
        FileSystem::Local => finding(Severity::Good, "local".to_owned()),
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        FileSystem::Unknown => finding(
            Severity::Warning,
            "its kind cannot be asked for here; make sure that it is local".to_owned(),
        ),
    })
}

fn permissions(place: &Place) -> Result<Finding> {
    let mode = place.mode()?;
    let dir = std::fs::symlink_metadata(place.dir())
        .map_err(|e| {
            io_error(
                e,
                "the database's directory cannot be looked at",
                place.dir(),
            )
        })?
        .mode()
        & 0o7777;
    let finding = |severity, what: &str| {
        Finding::new(
            severity,
            "permissions",
            format!("{mode:o} in a directory of {dir:o}{what}"),
        )
    };
    Ok(if dir & STICKY_AND_OTHERS_WRITE == OTHERS_WRITE {
        finding(
            Severity::Bad,
            ": anybody may put another file in the database's place; run chmod o-w on the directory",
        )
    } else if mode & OTHERS_READ != 0 {
        finding(
            Severity::Warning,
            ": anybody who may enter the directory can read the holder ids, which renew and release; run chmod o-r on the database",
        )
    } else if mode & GROUP_WRITES != 0 {
        finding(Severity::Warning, ": the whole group may take any lock")
    } else {
        finding(Severity::Good, "")
    })
}

fn log(place: &Place) -> Result<Finding> {
    let path = place.beside("-wal");
    let bytes = match std::fs::symlink_metadata(&path) {
        Ok(found) => found.len(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => 0,
        Err(e) => {
            return Err(io_error(
                e,
                "the write-ahead log cannot be looked at",
                &path,
            ));
        }
    };
    Ok(if bytes >= LOG_LARGE_BYTES {
        Finding::new(
            Severity::Warning,
            "write-ahead log",
            format!(
                "{bytes} bytes: a connection that never ends its read keeps it from being emptied"
            ),
        )
    } else {
        Finding::new(Severity::Good, "write-ahead log", format!("{bytes} bytes"))
    })
}

/// Of our own tables: the whole database may be large.
fn integrity(step: &Step<'_>) -> Result<Finding, Halt> {
    for table in ["meta", "locks", "holders", "fences"] {
        let said: String = pragma(
            step.connection(),
            &format!("PRAGMA main.quick_check('fencelock_{table}')"),
        )?;
        if said != "ok" {
            return Ok(Finding::new(
                Severity::Bad,
                "integrity",
                format!("fencelock_{table}: {said}"),
            ));
        }
    }
    Ok(Finding::new(
        Severity::Good,
        "integrity",
        "quick_check of the tables of locks and watermarks is ok",
    ))
}
