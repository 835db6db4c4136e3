//! `fencelock schema`: the SQL of a store's tables, or of the trigger that guards a table.

use std::io::{self, Write as _};

#[cfg(feature = "mysql")]
use fencelock::mysql;
#[cfg(feature = "postgres")]
use fencelock::postgres;

use crate::cli::{SchemaArgs, SchemaEngine};
use crate::exit_codes;
use crate::failure::Result;

/// Prints it.
pub(crate) fn print(args: &SchemaArgs) -> Result<u8> {
    let guard = args.guard.as_deref().zip(args.resource.as_deref());
    let sql = match (args.engine, guard) {
        #[cfg(feature = "mysql")]
        (SchemaEngine::Mysql, Some((table, resource))) => {
            mysql::guard_sql(&args.schema, table, resource)?
        }
        #[cfg(feature = "mysql")]
        (SchemaEngine::Mysql, None) => mysql::schema_sql(&args.schema)?,
        #[cfg(feature = "postgres")]
        (SchemaEngine::Postgres, Some((table, resource))) => {
            postgres::guard_sql(&args.schema, table, resource)?
        }
        #[cfg(feature = "postgres")]
        (SchemaEngine::Postgres, None) => postgres::schema_sql(&args.schema)?,
    };
    io::stdout().write_all(sql.as_bytes())?;
    Ok(exit_codes::OK)
}
