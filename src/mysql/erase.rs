//! Removing what a trial left in a database.

use super::database::{Lane, get};
use super::lease::MysqlStore;
use crate::error::{Error, Result};
use crate::fence::hex;

impl MysqlStore {
    /// Drops this store's tables and procedures, whose prefix has to be named after `mark`, as a
    /// trial's is.
    pub(crate) async fn erase(&self, mark: &str) -> Result<()> {
        let database = self.database();
        let prefix = database.prefix.as_str();
        if prefix != mark.replace('-', "_") {
            return Err(Error::invalid("the prefix is not a trial's own").with("prefix", prefix));
        }
        // The names are ours by their beginning; `_` stands for any character in LIKE only.
        let begin = format!("{prefix}_");
        let (text, length) = (hex(begin.as_bytes()), begin.len());
        for (from, what, kind) in [
            ("TABLES", "TABLE_NAME", "TABLE"),
            ("ROUTINES", "ROUTINE_NAME", "PROCEDURE"),
        ] {
            let schema = if kind == "TABLE" {
                "TABLE_SCHEMA"
            } else {
                "ROUTINE_SCHEMA"
            };
            let sql = format!(
                "SELECT {what} FROM information_schema.{from} WHERE {schema} = DATABASE() AND LEFT({what}, {length}) = CONVERT(X'{text}' USING utf8mb4)"
            );
            for row in database.query(Lane::Ask, &sql).await? {
                let name: String = get(&row, 0)?;
                if !name.starts_with(&begin) || name.contains('`') {
                    continue;
                }
                let drop = format!("DROP {kind} IF EXISTS `{name}`");
                database.query(Lane::Ask, &drop).await?;
            }
        }
        Ok(())
    }
}
