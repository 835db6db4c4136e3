//! Removing what a trial left in a database.

use super::database::Lane;
use super::lease::PostgresStore;
use crate::error::{Error, Result};

impl PostgresStore {
    /// Drops this store's schema, which has to be named after `mark`, as a trial's is.
    pub(crate) async fn erase(&self, mark: &str) -> Result<()> {
        let database = &self.shared.database;
        let schema = database.schema.as_str();
        if schema != mark.replace('-', "_") {
            return Err(Error::invalid("the schema is not a trial's own").with("schema", schema));
        }
        let drop = format!("DROP SCHEMA IF EXISTS \"{schema}\" CASCADE");
        database.query(Lane::Ask, &drop, &[]).await?;
        Ok(())
    }
}
