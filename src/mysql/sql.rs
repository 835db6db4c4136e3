//! The SQL that lives next to this file, rendered for a prefix whose form is validated first, and
//! calls of its procedures.

use std::fmt::Write as _;

use crate::error::{Error, Result};
use crate::fence::hex;

/// What the names of the tables and procedures begin with where nothing else is said.
pub const PREFIX_DEFAULT: &str = "fencelock";

/// The version of the tables and procedures. A change that an older client would not survive, or
/// that needs a migration, raises it.
pub(super) const SCHEMA_VERSION: i32 = 1;

const PARTS: [&str; 4] = [
    include_str!("schema.sql"),
    include_str!("lease.sql"),
    include_str!("fence.sql"),
    include_str!("done.sql"),
];

const GUARD: &str = include_str!("guard.sql");

/// Both servers refuse longer identifiers.
const IDENTIFIER_MAX_BYTES: usize = 64;

/// The longest of what follows the prefix: `_need_transaction`.
const PREFIX_MAX_BYTES: usize = IDENTIFIER_MAX_BYTES - 17;

/// The longest of what follows a table's name in that of a trigger.
const TRIGGER_SUFFIX_BYTES: usize = 8;

/// The prefix of tables and procedures: a plain lowercase identifier, so that it can stand in SQL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Prefix(String);

/// A value in a call. Bytes go as hexadecimal digits and numbers as digits, so whatever they hold,
/// they are one value: no escaping depends on a mode or a character set of the session.
#[derive(Clone, Copy, Debug)]
pub(super) enum Argument<'a> {
    Bytes(&'a [u8]),
    Number(i64),
    Null,
}

impl<'a> From<&'a [u8]> for Argument<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self::Bytes(bytes)
    }
}

impl<'a> From<&'a str> for Argument<'a> {
    fn from(text: &'a str) -> Self {
        Self::Bytes(text.as_bytes())
    }
}

impl From<i64> for Argument<'_> {
    fn from(number: i64) -> Self {
        Self::Number(number)
    }
}

impl<'a, T: Into<Self>> From<Option<T>> for Argument<'a> {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

impl Prefix {
    pub(super) fn new(name: &str) -> Result<Self> {
        let plain = name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
        let starts_well = !name.starts_with(|c: char| c.is_ascii_digit());
        if name.is_empty() || name.len() > PREFIX_MAX_BYTES || !plain || !starts_well {
            return Err(Error::invalid(format!(
                "not a prefix of tables; expected 1 to {PREFIX_MAX_BYTES} lowercase letters, digits and _, not beginning with a digit"
            ))
            .with("prefix", format_args!("{name:?}")));
        }
        Ok(Self(name.to_owned()))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// ``CALL `prefix_procedure`(…)``: every operation is one such call.
    pub(super) fn call(&self, procedure: &str, arguments: &[Argument<'_>]) -> String {
        let mut sql = format!("CALL `{}_{procedure}`(", self.0);
        for (i, argument) in arguments.iter().enumerate() {
            if i > 0 {
                sql.push(',');
            }
            // Writing into a String cannot fail.
            let _ = match argument {
                Argument::Bytes(bytes) => write!(sql, "X'{}'", hex(bytes)),
                Argument::Number(number) => write!(sql, "{number}"),
                Argument::Null => write!(sql, "NULL"),
            };
        }
        sql.push(')');
        sql
    }

    /// The same with places for values that are sent beside the statement.
    pub(super) fn call_with_places(&self, procedure: &str, places: usize) -> String {
        format!(
            "CALL `{}_{procedure}`({})",
            self.0,
            vec!["?"; places].join(",")
        )
    }

    /// The whole layout as a script for the command line client.
    pub(super) fn create_sql(&self) -> String {
        // MySQL has no OR REPLACE, and cannot do without the procedure for a moment; MariaDB takes
        // what is in `/*M!`, and leaves what is in `/*!80000`.
        let make = format!("CREATE PROCEDURE `{}_", self.0);
        let mut sql = String::new();
        for line in self.render(&PARTS.join("\n")).lines() {
            let name = line
                .strip_prefix(make.as_str())
                .and_then(|rest| rest.split_once('`'));
            match name {
                Some((name, rest)) => {
                    let name = format!("`{}_{name}`", self.0);
                    // Writing into a String cannot fail.
                    let _ = writeln!(
                        sql,
                        "/*!80000 DROP PROCEDURE IF EXISTS {name} */ /*M! DO 0 */\n//\n\
                         CREATE /*M! OR REPLACE */ PROCEDURE {name}{rest}"
                    );
                }
                None => {
                    sql.push_str(line);
                    sql.push('\n');
                }
            }
        }
        sql
    }

    /// The same, statement by statement.
    pub(super) fn create_statements(&self) -> Vec<String> {
        statements(&self.create_sql())
    }

    fn render(&self, sql: &str) -> String {
        sql.replace("{prefix}", &self.0)
            .replace("{version}", &SCHEMA_VERSION.to_string())
    }
}

impl Default for Prefix {
    fn default() -> Self {
        Self(PREFIX_DEFAULT.to_owned())
    }
}

/// The statements of a script, which end with a line `//`; DELIMITER is for the client alone.
fn statements(script: &str) -> Vec<String> {
    let mut statements = Vec::new();
    let mut statement = String::new();
    for line in script.lines() {
        if line == "//" {
            statements.push(std::mem::take(&mut statement));
        } else if !line.starts_with("DELIMITER ") && !line.starts_with("--") {
            statement.push_str(line);
            statement.push('\n');
        }
    }
    statements
}

/// The SQL that creates fencelock's tables and procedures, for a database whose administrator does
/// it by hand: a script for the clients `mysql` and `mariadb`. Running it again is harmless.
///
/// Who uses the locks then needs `GRANT SELECT, INSERT, UPDATE, DELETE, EXECUTE` on the database, or
/// on these tables and procedures.
///
/// ```
/// let sql = fencelock::mysql::schema_sql("fencelock")?;
/// assert!(sql.contains("CREATE TABLE IF NOT EXISTS `fencelock_locks`"));
/// assert!(fencelock::mysql::schema_sql("x`; DROP").is_err());
/// # Ok::<(), fencelock::Error>(())
/// ```
///
/// # Errors
/// `Invalid` where `prefix` is not a plain lowercase identifier.
pub fn schema_sql(prefix: &str) -> Result<String> {
    Ok(Prefix::new(prefix)?.create_sql())
}

/// The SQL of triggers that guard `table`, in the same database as fencelock's own: a statement that
/// changes its rows has to show a fence, and is refused where that is stale, whoever sends it. The
/// watermark is that of `resource`, the same that [`admit`](super::admit) moves.
///
/// The fence is shown as the session variable `@fencelock_fence`, as a token or in the text form of
/// [`Fence`](crate::Fence). `TRUNCATE` and the cascades of foreign keys do not come by triggers.
///
/// ```
/// let sql = fencelock::mysql::guard_sql("fencelock", "payments", "payments")?;
/// assert!(sql.contains("BEFORE UPDATE ON `payments` FOR EACH ROW"));
/// # Ok::<(), fencelock::Error>(())
/// ```
///
/// # Errors
/// `Invalid` where a name is empty, too long, or holds what cannot stand in SQL.
pub fn guard_sql(prefix: &str, table: &str, resource: &str) -> Result<String> {
    let prefix = Prefix::new(prefix)?;
    let resource = crate::ResourceName::new(resource)?;
    let longest = IDENTIFIER_MAX_BYTES - TRIGGER_SUFFIX_BYTES;
    if table.is_empty()
        || table.len() > longest
        || table.contains(|c: char| c.is_control() || ".{}".contains(c))
    {
        return Err(Error::invalid(format!(
            "not a table name; expected the name of a table in the database of fencelock's tables, 1 to {longest} bytes, without its database"
        ))
        .with("table", format_args!("{table:?}")));
    }
    // The text stands in a comment as well as in the statement, so it must not end the line.
    if resource.as_str().contains(char::is_control) {
        return Err(Error::invalid(
            "a resource named in SQL cannot hold control characters",
        ));
    }
    let quoted = |suffix: &str| format!("`{}{suffix}`", table.replace('`', "``"));
    Ok(prefix
        .render(GUARD)
        .replace("{insert}", &quoted("_fence_i"))
        .replace("{update}", &quoted("_fence_u"))
        .replace("{delete}", &quoted("_fence_d"))
        .replace(
            "{literal}",
            &format!("X'{}'", hex(resource.as_str().as_bytes())),
        )
        .replace("{table}", &quoted(""))
        .replace("{resource}", resource.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_a_plain_identifier() {
        for good in ["fencelock", "_x", "a1", &"x".repeat(47)] {
            assert!(Prefix::new(good).is_ok(), "{good}");
        }
        for bad in ["", "A", "1a", "a-b", "a`b", "a b", "ä", &"x".repeat(48)] {
            assert!(Prefix::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_placeholder_is_rendered_and_every_identifier_is_short_enough() {
        let longest = "x".repeat(PREFIX_MAX_BYTES);
        let sql = schema_sql(&longest).unwrap() + &guard_sql(&longest, "t", "r").unwrap();
        assert!(!sql.contains('{') || !sql.contains("{p"), "{sql}");
        for left in [
            "{prefix}",
            "{version}",
            "{table}",
            "{resource}",
            "{literal}",
        ] {
            assert!(!sql.contains(left), "{left}");
        }
        for name in sql.split('`').skip(1).step_by(2) {
            assert!(name.len() <= IDENTIFIER_MAX_BYTES, "{name}");
        }
    }

    #[test]
    fn names_in_guard_sql_are_quoted() {
        let sql = guard_sql("fencelock", "a`b", "it's here").unwrap();
        assert!(sql.contains("ON `a``b` FOR EACH ROW"), "{sql}");
        assert!(sql.contains("X'697427732068657265'"), "{sql}");
        for bad in ["", "a.b", "a\nb", "{resource}", &"x".repeat(57)] {
            assert!(guard_sql("fencelock", bad, "r").is_err(), "{bad:?}");
        }
        assert!(guard_sql("fencelock", "t", "r\n; DROP").is_err());
    }

    #[test]
    fn whatever_a_value_holds_it_is_one_value() {
        let prefix = Prefix::default();
        let name = "a'b\\\0`é";
        let sql = prefix.call("x", &[name.into(), 7.into(), None::<i64>.into()]);
        assert_eq!(sql, "CALL `fencelock_x`(X'6127625c0060c3a9',7,NULL)");
    }

    #[test]
    fn each_statement_is_sent_alone_and_without_what_is_for_the_client() {
        let statements = Prefix::default().create_statements();
        assert!(statements.len() > 60, "{}", statements.len());
        for statement in statements {
            assert!(!statement.contains("DELIMITER"), "{statement}");
            assert!(!statement.trim().is_empty());
        }
    }
}
