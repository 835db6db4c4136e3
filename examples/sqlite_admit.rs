//! Where do I check the token? In the transaction of the write that it guards.
//!
//! Adds 1 to a number in a table of one's own, under a lock in the same database. Two runs at once,
//! one of them paused for longer than its lease: what the paused one writes afterwards is refused,
//! and no addition is lost.
//!
//! `cargo run --example sqlite_admit --features sqlite -- app.db [PAUSE_SECONDS]`

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use std::error::Error;
use std::time::Duration;

use fencelock::sqlite::rusqlite::{Connection, TransactionBehavior};
use fencelock::sqlite::{SqliteStore, admit};
use fencelock::{ErrorKind, Locks};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("name a database")?;
    let pause = std::env::args().nth(2).map_or(Ok(0), |s| s.parse())?;
    let pause = tokio::time::sleep(Duration::from_secs(pause));
    match add_one(&path, pause).await? {
        Some(value) => println!("wrote {value}"),
        None => println!("refused, nothing was written"),
    }
    Ok(())
}

/// The new value, or `None` where somebody newer was there.
pub(crate) async fn add_one(
    path: &str,
    pause: impl Future<Output = ()>,
) -> Result<Option<i64>, Box<dyn Error>> {
    let locks = Locks::new(SqliteStore::open(path).await?);
    let mut connection = Connection::open(path)?;
    // What another program writes is waited for.
    connection.busy_timeout(Duration::from_secs(3))?;
    connection.execute_batch(
        "CREATE TABLE IF NOT EXISTS example (id INTEGER PRIMARY KEY, value INTEGER NOT NULL);
         INSERT INTO example VALUES (1, 0) ON CONFLICT DO NOTHING",
    )?;

    // The pause stands for a stopped process, so nothing renews the lease.
    let ttl = Duration::from_secs(2);
    let guard = locks.acquire("example").ttl(ttl).no_renew().await?;
    let fence = guard.fence();
    println!("token {}", guard.token());
    pause.await;

    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // Before anything is read: from here to the commit nobody else is admitted, and afterwards
    // nobody older.
    match admit(&transaction, "example", fence) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::Fenced => {
            println!("{error}");
            // Dropping the transaction rolls it back.
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    }
    let read = "SELECT value FROM example WHERE id = 1";
    let value: i64 = transaction.query_row(read, [], |row| row.get(0))?;
    transaction.execute("UPDATE example SET value = ?1 WHERE id = 1", [value + 1])?;
    transaction.commit()?;
    Ok(Some(value + 1))
}
