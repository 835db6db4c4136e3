//! What an operator should know of the database, for `fencelock doctor`.

use super::database::{Database, Lane, get};
use crate::clock::unix_micros;
use crate::error::{ErrorKind, Result};
use crate::lease::{Durability, Finding, Severity};

/// A difference of the clocks that people should know of. It decides nothing.
const CLOCK_OFF_US: i64 = 5_000_000;

/// How many tables fencelock has.
const TABLES: i64 = 5;

/// Looks at the server.
pub(super) async fn probe(database: &Database) -> Result<Vec<Finding>> {
    let settings = database.settings().await?;
    let prefix = database.prefix.as_str();
    let sql = format!(
        "SELECT TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', UTC_TIMESTAMP(6)), \
         (SELECT COUNT(*) FROM `{prefix}_locks`), (SELECT COUNT(*) FROM `{prefix}_fences`), \
         (SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() \
         AND ENGINE = 'InnoDB' AND TABLE_NAME IN ('{prefix}_meta', '{prefix}_locks', \
         '{prefix}_holders', '{prefix}_fences', '{prefix}_values'))"
    );
    let row = database.one(Lane::Ask, &sql).await?;
    let mut findings = vec![Finding::new(Severity::Good, "server", settings.server())];
    let mut find = |severity, subject, detail: String| {
        findings.push(Finding::new(severity, subject, detail));
    };

    if settings.takes_no_writes() {
        find(
            Severity::Bad,
            "writes",
            "read_only is on: the server is a replica, or takes no writes now; connect to the primary"
                .to_owned(),
        );
    }
    if let Some(missing) = lacks(database).await? {
        find(Severity::Bad, "privileges", missing);
    }
    let value = |name| settings.get(name).unwrap_or("unknown");
    let flush = value("innodb_flush_log_at_trx_commit");
    match settings.durability() {
        Durability::D0Memory => find(
            Severity::Bad,
            "durability",
            format!(
                "innodb_flush_log_at_trx_commit={flush}: a crash of the server loses acknowledged grants, and tells their tokens again; set it to 1"
            ),
        ),
        Durability::D1ProcessCrash => find(
            Severity::Warning,
            "durability",
            format!(
                "innodb_flush_log_at_trx_commit={flush}, log_bin={}, sync_binlog={}: a power loss may lose acknowledged grants, and tell their tokens again; set innodb_flush_log_at_trx_commit=1 and sync_binlog=1",
                value("log_bin"),
                value("sync_binlog")
            ),
        ),
        _ => find(
            Severity::Good,
            "durability",
            format!(
                "innodb_flush_log_at_trx_commit={flush}, log_bin={}, sync_binlog={}: a told token survives power loss",
                value("log_bin"),
                value("sync_binlog")
            ),
        ),
    }
    if value("innodb_doublewrite") == "OFF" {
        find(
            Severity::Warning,
            "innodb_doublewrite",
            "off: a power loss can tear a page, and with it the rows of locks; turn it on unless the file system writes pages whole".to_owned(),
        );
    }
    if settings.has_several_writers() {
        find(
            Severity::Bad,
            "several primaries",
            "this server takes writes together with others (Galera, or a group with several primaries): two nodes can grant one lock, unless every client uses the same node; prefer a single primary".to_owned(),
        );
    } else {
        find(
            Severity::Good,
            "replication",
            "a replica follows later: a fail-over may lose the last grants and tell their tokens again; holders of equal tokens are then told apart by storage (S8)".to_owned(),
        );
    }
    if settings.is_on("log_bin") && value("binlog_format") == "STATEMENT" {
        find(
            Severity::Bad,
            "binlog_format",
            "STATEMENT: the server refuses fencelock's writes; set ROW or MIXED".to_owned(),
        );
    }
    let innodb: i64 = get(&row, 3)?;
    if innodb == TABLES {
        find(
            Severity::Good,
            "tables",
            "all are in InnoDB, whose transactions and row locks they need".to_owned(),
        );
    } else {
        find(
            Severity::Bad,
            "tables",
            format!(
                "only {innodb} of {TABLES} tables are in InnoDB: without its transactions and row locks one lock can be granted twice; ALTER TABLE … ENGINE=InnoDB"
            ),
        );
    }
    let off_us = get::<i64>(&row, 0)?.saturating_sub_unsigned(unix_micros());
    if off_us.abs() > CLOCK_OFF_US {
        find(
            Severity::Warning,
            "clock",
            format!(
                "the server's clock differs from this host's; leases go by the server's alone off_us={off_us}"
            ),
        );
    }
    find(
        Severity::Good,
        "waiters",
        "poll: these servers tell nobody of a change".to_owned(),
    );
    find(
        Severity::Good,
        "records",
        format!(
            "{} lock names and {} fenced resources are known",
            get::<i64>(&row, 1)?,
            get::<i64>(&row, 2)?
        ),
    );
    Ok(findings)
}

/// Why the user cannot lock, where it may only look. What is tried changes nothing.
async fn lacks(database: &Database) -> Result<Option<String>> {
    let prefix = database.prefix.as_str();
    let harmless = [
        format!("INSERT INTO `{prefix}_locks` SELECT * FROM `{prefix}_locks` WHERE FALSE"),
        format!("UPDATE `{prefix}_locks` SET name = name WHERE name = ''"),
        format!("DELETE FROM `{prefix}_locks` WHERE name = ''"),
        format!("CALL `{prefix}_check_version`()"),
    ];
    for sql in harmless {
        match database.query(Lane::Ask, &sql).await {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                return Ok(Some(error.to_string()));
            }
            // It takes no writes, which is said elsewhere.
            Err(error) if error.kind() == ErrorKind::Unavailable => return Ok(None),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}
