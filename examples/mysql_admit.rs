//! Where do I check the token? In the transaction of the write that it guards.
//!
//! Adds 1 to a number in a table, under a lock. Two runs at once, one of them paused for longer than
//! its lease: what the paused one writes afterwards is refused, and no addition is lost.
//!
//! `cargo run --example mysql_admit --features mysql -- mysql://root@127.0.0.1/test [PAUSE_SECONDS]`

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use std::error::Error;
use std::time::Duration;

use fencelock::mysql::admit;
use fencelock::mysql::mysql_async::prelude::Queryable as _;
use fencelock::mysql::mysql_async::{Conn, Opts, TxOpts};
use fencelock::{ErrorKind, Locks};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("name a mysql:// URL")?;
    let pause = std::env::args().nth(2).map_or(Ok(0), |s| s.parse())?;

    let locks = Locks::open(&url).await?;
    let mut conn = Conn::new(Opts::from_url(&url)?).await?;
    conn.query_drop(
        "CREATE TABLE IF NOT EXISTS example (id INT PRIMARY KEY, value BIGINT NOT NULL) ENGINE = InnoDB",
    )
    .await?;
    conn.query_drop("INSERT IGNORE INTO example VALUES (1, 0)")
        .await?;

    // The pause stands for a stopped process, so nothing renews the lease.
    let ttl = Duration::from_secs(2);
    let guard = locks.acquire("example").ttl(ttl).no_renew().await?;
    let fence = guard.fence();
    println!("token {}", guard.token());
    tokio::time::sleep(Duration::from_secs(pause)).await;

    let mut transaction = conn.start_transaction(TxOpts::default()).await?;
    // Before anything is read: from here to the commit nobody else is admitted, and afterwards
    // nobody older.
    match admit(&mut transaction, "example", fence).await {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::Fenced => {
            transaction.rollback().await?;
            println!("refused, nothing was written: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    }
    let value: Option<i64> = transaction
        .query_first("SELECT value FROM example WHERE id = 1")
        .await?;
    let value = value.ok_or("the row is gone")? + 1;
    transaction
        .exec_drop("UPDATE example SET value = ? WHERE id = 1", (value,))
        .await?;
    transaction.commit().await?;
    println!("wrote {value}");
    Ok(())
}
