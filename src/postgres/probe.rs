//! What an operator should know of the database, for `fencelock doctor`.

use super::database::{Database, Lane, get};
use crate::clock::unix_micros;
use crate::error::Result;
use crate::lease::{Finding, Severity, StoreProfile};

/// A difference of the clocks that people should know of. It decides nothing.
const CLOCK_OFF_US: i64 = 5_000_000;

/// Looks at the server. `profile` is that of the lock engine, where it is that which is probed.
pub(super) async fn probe(
    database: &Database,
    profile: Option<&StoreProfile>,
) -> Result<Vec<Finding>> {
    let schema = database.schema.as_str();
    let sql = format!(
        "SELECT current_setting('server_version'), current_setting('fsync') = 'on', \
         current_setting('full_page_writes') = 'on', current_setting('synchronous_commit'), \
         current_setting('synchronous_standby_names'), pg_is_in_recovery(), \
         current_setting('default_transaction_read_only') = 'on', \
         (extract(epoch FROM clock_timestamp()) * 1000000)::bigint, \
         (SELECT count(*) FROM \"{0}\".locks), (SELECT count(*) FROM \"{0}\".fences), \
         (SELECT bool_and(has_table_privilege('\"{0}\".' || of, may)) \
          FROM unnest(ARRAY['meta', 'locks', 'fences', 'kv']) of, \
          unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) may)",
        schema
    );
    let row = database.one(Lane::Ask, &sql, &[]).await?;
    let mut findings = vec![Finding::new(
        Severity::Good,
        "server",
        format!("PostgreSQL {}", get::<&str>(&row, 0)?),
    )];
    let mut find = |severity, subject, detail: String| {
        findings.push(Finding::new(severity, subject, detail));
    };

    if get(&row, 5)? || get(&row, 6)? {
        find(
            Severity::Bad,
            "writes",
            "the server takes no writes: it is a standby, or default_transaction_read_only is on; connect to the primary".to_owned(),
        );
    }
    if !get::<bool>(&row, 10)? {
        find(
            Severity::Bad,
            "privileges",
            format!(
                "the user may not read and write all tables, so it cannot lock; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} to it"
            ),
        );
    }
    let (fsync, full_pages): (bool, bool) = (get(&row, 1)?, get(&row, 2)?);
    if fsync && full_pages {
        find(
            Severity::Good,
            "durability",
            "fsync and full_page_writes are on: a told token survives power loss".to_owned(),
        );
    } else {
        find(
            Severity::Warning,
            "durability",
            "fsync or full_page_writes is off: after a power loss tokens may be told again; turn both on".to_owned(),
        );
    }
    if get::<&str>(&row, 3)? == "off" {
        find(
            Severity::Warning,
            "synchronous_commit",
            "off by default: fencelock's own transactions turn it on, but a transaction of yours that calls admit() may be lost together with its watermark after it was acknowledged".to_owned(),
        );
    }
    let standbys: &str = get(&row, 4)?;
    find(
        Severity::Good,
        "replication",
        if standbys.is_empty() {
            "no synchronous standby: a fail-over may lose the last grants and tell their tokens again; holders of equal tokens are then told apart by storage (S8)".to_owned()
        } else {
            format!("commits wait for {standbys}")
        },
    );
    let off_us = get::<i64>(&row, 7)?.saturating_sub_unsigned(unix_micros());
    if off_us.abs() > CLOCK_OFF_US {
        find(
            Severity::Warning,
            "clock",
            format!(
                "the server's clock differs from this host's; leases go by the server's alone off_us={off_us}"
            ),
        );
    }
    if let Some(profile) = profile {
        find(
            Severity::Good,
            "waiters",
            if profile.wakes_waiters {
                "woken by LISTEN and NOTIFY".to_owned()
            } else {
                "poll: notifications are off, or do not arrive, as behind a pooler in transaction mode".to_owned()
            },
        );
    }
    find(
        Severity::Good,
        "records",
        format!(
            "{} lock names and {} fenced resources are known",
            get::<i64>(&row, 8)?,
            get::<i64>(&row, 9)?
        ),
    );
    Ok(findings)
}
