//! The SQL that lives next to this file, rendered for a schema whose name is validated first.

use crate::error::{Error, Result};

/// The schema where nothing else is said.
pub const SCHEMA_DEFAULT: &str = "fencelock";

/// The version of the tables and functions. A change that an older client would not survive, or
/// that needs a migration, raises it.
pub(super) const SCHEMA_VERSION: i32 = 1;

const PARTS: [&str; 3] = [
    include_str!("schema.sql"),
    include_str!("lease.sql"),
    include_str!("fence.sql"),
];

const GUARD: &str = include_str!("guard.sql");

/// PostgreSQL cuts longer identifiers, and two names must not become one.
const IDENTIFIER_MAX_BYTES: usize = 63;

/// The name of a schema: a plain lowercase identifier, so that it can stand in SQL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Schema(String);

impl Schema {
    pub(super) fn new(name: &str) -> Result<Self> {
        let plain = name
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
        let starts_well =
            !name.starts_with(|c: char| c.is_ascii_digit()) && !name.starts_with("pg_");
        if name.is_empty() || name.len() > IDENTIFIER_MAX_BYTES || !plain || !starts_well {
            return Err(Error::invalid(format!(
                "not a schema name; expected 1 to {IDENTIFIER_MAX_BYTES} lowercase letters, digits and _, beginning with neither a digit nor pg_"
            ))
            .with("schema", format_args!("{name:?}")));
        }
        Ok(Self(name.to_owned()))
    }

    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// `SELECT * FROM "schema".function($1, …)`: every operation is one such call.
    pub(super) fn call(&self, function: &str, arguments: usize) -> String {
        let places: Vec<String> = (1..=arguments).map(|i| format!("${i}")).collect();
        format!(
            "SELECT * FROM \"{}\".{function}({})",
            self.0,
            places.join(", ")
        )
    }

    /// The whole layout, in one transaction that can be repeated.
    pub(super) fn create_sql(&self) -> String {
        let mut sql = PARTS.join("\n");
        sql.push_str("\nCOMMIT;\n");
        sql.replace("{schema}", &self.0)
            .replace("{version}", &SCHEMA_VERSION.to_string())
    }
}

impl Default for Schema {
    fn default() -> Self {
        Self(SCHEMA_DEFAULT.to_owned())
    }
}

/// The SQL that creates fencelock's tables and functions in `schema`, for a database whose
/// administrator does it by hand. Running it again is harmless.
///
/// Who uses the locks then needs `GRANT USAGE ON SCHEMA`, and
/// `GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA`.
///
/// ```
/// let sql = fencelock::postgres::schema_sql("fencelock")?;
/// assert!(sql.contains("CREATE SCHEMA IF NOT EXISTS \"fencelock\""));
/// assert!(fencelock::postgres::schema_sql("x\"; DROP").is_err());
/// # Ok::<(), fencelock::Error>(())
/// ```
///
/// # Errors
/// `Invalid` where `schema` is not a plain lowercase identifier.
pub fn schema_sql(schema: &str) -> Result<String> {
    Ok(Schema::new(schema)?.create_sql())
}

/// The SQL that guards `table` (`name` or `schema.name`): a statement that changes it has to show
/// a fence, and is refused where that is stale, whoever sends it. The watermark is that of
/// `resource`, the same that [`admit`](super::admit) moves.
///
/// The fence is shown as the setting `fencelock.fence` of the session or the transaction, as a
/// token or in the text form of [`Fence`](crate::Fence). Any program on libpq can be given it from
/// outside: `PGOPTIONS="-c fencelock.fence=$FENCELOCK_FENCE"`.
///
/// ```
/// let sql = fencelock::postgres::guard_sql("fencelock", "billing.payments", "payments")?;
/// assert!(sql.contains("ON \"billing\".\"payments\""));
/// # Ok::<(), fencelock::Error>(())
/// ```
///
/// # Errors
/// `Invalid` where a name is empty, too long, or holds a NUL.
pub fn guard_sql(schema: &str, table: &str, resource: &str) -> Result<String> {
    let schema = Schema::new(schema)?;
    let resource = crate::ResourceName::new(resource)?;
    if resource.as_str().contains('\0') {
        return Err(Error::invalid("a resource named in SQL cannot hold a NUL"));
    }
    let parts: Vec<&str> = table.split('.').collect();
    let good = |part: &&str| {
        !part.is_empty() && part.len() <= IDENTIFIER_MAX_BYTES && !part.contains(['\0', '\n', '\r'])
    };
    if parts.len() > 2 || !parts.iter().all(good) {
        return Err(
            Error::invalid("not a table name; expected name or schema.name")
                .with("table", format_args!("{table:?}")),
        );
    }
    let table: Vec<String> = parts
        .iter()
        .map(|part| format!("\"{}\"", part.replace('"', "\"\"")))
        .collect();
    // The text stands in a comment as well as in the statement, so it must not end the line.
    if resource.as_str().contains(['\n', '\r']) {
        return Err(Error::invalid(
            "a resource named in SQL cannot hold a line break",
        ));
    }
    Ok(GUARD
        .replace("{schema}", schema.as_str())
        .replace("{table}", &table.join("."))
        .replace("{resource}", &literal(resource.as_str())))
}

/// A string constant that means the same whatever `standard_conforming_strings` says.
fn literal(text: &str) -> String {
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_name_is_a_plain_identifier() {
        for good in ["fencelock", "_x", "a1", &"x".repeat(63)] {
            assert!(Schema::new(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "A",
            "1a",
            "pg_x",
            "a-b",
            "a\"b",
            "a b",
            "ä",
            &"x".repeat(64),
        ] {
            assert!(Schema::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_placeholder_is_rendered_and_any_encoding_can_hold_the_text() {
        let sql = schema_sql("other").unwrap() + &guard_sql("other", "t", "r").unwrap();
        assert!(sql.is_ascii());
        for left in ["{schema}", "{version}", "{table}", "{resource}"] {
            assert!(!sql.contains(left), "{left}");
        }
    }

    #[test]
    fn names_in_guard_sql_are_quoted() {
        let sql = guard_sql("fencelock", "a\"b.c", "it's \\ here").unwrap();
        assert!(sql.contains("\"a\"\"b\".\"c\""), "{sql}");
        assert!(sql.contains("E'it''s \\\\ here'"), "{sql}");
        for bad in ["", ".", "a.b.c", "a\nb"] {
            assert!(guard_sql("fencelock", bad, "r").is_err(), "{bad:?}");
        }
        assert!(guard_sql("fencelock", "t", "r\n; DROP").is_err());
    }
}
