//! `fencelock schema`: the SQL of a store's tables, or of the trigger that guards a table.

use std::io::{self, Write as _};

use fencelock::postgres::{guard_sql, schema_sql};

use crate::cli::{SchemaArgs, SchemaEngine};
use crate::exit_codes;
use crate::failure::Result;

/// Prints it.
pub(crate) fn print(args: &SchemaArgs) -> Result<u8> {
    let sql = match (args.engine, &args.guard, &args.resource) {
        (SchemaEngine::Postgres, Some(table), Some(resource)) => {
            guard_sql(&args.schema, table, resource)?
        }
        (SchemaEngine::Postgres, _, _) => schema_sql(&args.schema)?,
    };
    io::stdout().write_all(sql.as_bytes())?;
    Ok(exit_codes::OK)
}
