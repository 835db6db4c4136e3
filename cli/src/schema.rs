//! `fencelock schema`: the SQL of a store's tables, or of the trigger that guards a table.

use std::io::{self, Write as _};

use crate::cli::{SchemaArgs, SchemaEngine};
use crate::exit_codes;
use crate::failure::Result;

/// Prints it.
pub(crate) fn print(args: &SchemaArgs) -> Result<u8> {
    let sql = match args.engine {
        #[cfg(feature = "mysql")]
        SchemaEngine::Mysql => mysql(args)?,
        #[cfg(feature = "postgres")]
        SchemaEngine::Postgres => postgres(args)?,
        #[cfg(feature = "sqlite")]
        SchemaEngine::Sqlite => sqlite(args)?,
    };
    io::stdout().write_all(sql.as_bytes())?;
    Ok(exit_codes::OK)
}

#[cfg(feature = "mysql")]
fn mysql(args: &SchemaArgs) -> fencelock::Result<String> {
    use fencelock::mysql::{PREFIX_DEFAULT, guard_sql, schema_sql};
    let prefix = args.schema.as_deref().unwrap_or(PREFIX_DEFAULT);
    match (&args.guard, &args.resource) {
        (Some(table), Some(resource)) => guard_sql(prefix, table, resource),
        _ => schema_sql(prefix),
    }
}

#[cfg(feature = "postgres")]
fn postgres(args: &SchemaArgs) -> fencelock::Result<String> {
    use fencelock::postgres::{SCHEMA_DEFAULT, guard_sql, schema_sql};
    let schema = args.schema.as_deref().unwrap_or(SCHEMA_DEFAULT);
    match (&args.guard, &args.resource) {
        (Some(table), Some(resource)) => guard_sql(schema, table, resource),
        _ => schema_sql(schema),
    }
}

#[cfg(feature = "sqlite")]
fn sqlite(args: &SchemaArgs) -> fencelock::Result<String> {
    use fencelock::sqlite::{guard_sql, schema_sql};
    if let Some(schema) = &args.schema {
        return Err(
            fencelock::Error::invalid("SQLite has no schemas; leave --schema out")
                .with("schema", format_args!("{schema:?}")),
        );
    }
    match (&args.guard, &args.resource) {
        (Some(table), Some(resource)) => guard_sql(table, resource),
        _ => Ok(schema_sql()),
    }
}
