//! The SQL that lives next to this file.

use crate::error::{Error, Result};
use crate::name::ResourceName;

/// The version of the tables. A change that an older client would not survive, or that needs a
/// migration, raises it.
pub(super) const SCHEMA_VERSION: i64 = 1;

pub(super) const META_READ: &str = include_str!("sql/meta_read.sql");
pub(super) const META_GRANTED: &str = include_str!("sql/meta_granted.sql");
pub(super) const META_FLOOR: &str = include_str!("sql/meta_floor.sql");
pub(super) const LOCK_READ: &str = include_str!("sql/lock_read.sql");
pub(super) const LOCK_WRITE: &str = include_str!("sql/lock_write.sql");
pub(super) const LOCK_USED: &str = include_str!("sql/lock_used.sql");
pub(super) const LOCK_FORGET: &str = include_str!("sql/lock_forget.sql");
pub(super) const LOCKS_IDLE: &str = include_str!("sql/locks_idle.sql");
pub(super) const LOCKS_COUNT: &str = include_str!("sql/locks_count.sql");
pub(super) const LOCKS_LIST: &str = include_str!("sql/locks_list.sql");
pub(super) const HOLDERS_READ: &str = include_str!("sql/holders_read.sql");
pub(super) const HOLDER_WRITE: &str = include_str!("sql/holder_write.sql");
pub(super) const HOLDER_DROP: &str = include_str!("sql/holder_drop.sql");
pub(super) const HOLDERS_DROP: &str = include_str!("sql/holders_drop.sql");
pub(super) const WRITE_LOCK: &str = include_str!("sql/write_lock.sql");
pub(super) const FENCE_READ: &str = include_str!("sql/fence_read.sql");
pub(super) const FENCE_WRITE: &str = include_str!("sql/fence_write.sql");
pub(super) const VALUE_READ: &str = include_str!("sql/value_read.sql");
pub(super) const VALUE_WRITE: &str = include_str!("sql/value_write.sql");
pub(super) const VALUE_DROP: &str = include_str!("sql/value_drop.sql");

/// The SQL that creates fencelock's tables and views, for whoever does it by hand. Running it again
/// is harmless.
///
/// ```
/// let connection = rusqlite::Connection::open_in_memory()?;
/// connection.execute_batch(&fencelock::sqlite::schema_sql())?;
/// connection.execute("INSERT INTO fencelock_admit (resource, token) VALUES ('payments', 34)", [])?;
/// # use fencelock::sqlite::rusqlite;
/// # Ok::<(), rusqlite::Error>(())
/// ```
#[must_use]
pub fn schema_sql() -> String {
    let schema = include_str!("schema.sql").replace("{version}", &SCHEMA_VERSION.to_string());
    format!("{schema}\n{}", include_str!("fence.sql"))
}

/// The SQL that guards `table`: a statement that changes it has to come from a connection that
/// shows a fence, and is refused where that is stale, whoever sends it. The watermark is that of
/// `resource`, the same that [`admit`](super::admit) moves.
///
/// A connection shows a fence through a function, `fencelock_fence()`: see [`show`](super::show).
/// Without it, no statement that changes the table can even be prepared.
///
/// ```
/// let sql = fencelock::sqlite::guard_sql("payments", "payments")?;
/// assert!(sql.contains("BEFORE INSERT ON \"payments\""));
/// # Ok::<(), fencelock::Error>(())
/// ```
///
/// # Errors
/// `Invalid` where a name is empty, or holds a NUL or a line break.
pub fn guard_sql(table: &str, resource: &str) -> Result<String> {
    let resource = ResourceName::new(resource)?;
    // The texts stand in a comment as well as in statements, so they must not end the line.
    let plain = |text: &str| !text.contains(['\0', '\n', '\r']);
    if !plain(resource.as_str()) {
        return Err(Error::invalid(
            "a resource named in SQL cannot hold a NUL or a line break",
        ));
    }
    if table.is_empty() || !plain(table) {
        return Err(
            Error::invalid("not a table name; expected a name without NUL and line break")
                .with("table", format_args!("{table:?}")),
        );
    }
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let resource = format!("'{}'", resource.as_str().replace('\'', "''"));
    let mut sql = include_str!("guard.sql").to_owned();
    for event in ["insert", "update", "delete"] {
        let trigger = quoted(&format!("fencelock_guard_{event}_{table}"));
        sql = sql.replace(&format!("{{{event}}}"), &trigger);
    }
    // A name may look like a placeholder, so the last one comes last.
    Ok(sql
        .split("{resource}")
        .map(|part| part.replace("{table}", &quoted(table)))
        .collect::<Vec<_>>()
        .join(&resource))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_placeholder_is_rendered() {
        let sql = schema_sql() + &guard_sql("t", "r").unwrap();
        assert!(!sql.contains(['{', '}']), "{sql}");
    }

    #[test]
    fn names_in_guard_sql_are_quoted() {
        let sql = guard_sql("a\"b", "it's").unwrap();
        assert!(sql.contains("ON \"a\"\"b\""), "{sql}");
        assert!(sql.contains("'it''s'"), "{sql}");
        for bad in ["", "a\nb", "a\0b"] {
            assert!(guard_sql(bad, "r").is_err(), "{bad:?}");
            assert!(guard_sql("t", bad).is_err(), "{bad:?}");
        }
    }
}
