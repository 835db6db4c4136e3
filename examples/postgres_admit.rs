//! Where do I check the token? In the transaction of the write that it guards.
//!
//! Adds 1 to a number in a table, under a lock. Two runs at once, one of them paused for longer than
//! its lease: what the paused one writes afterwards is refused, and no addition is lost.
//!
//! `cargo run --example postgres_admit --features postgres -- postgres://postgres@localhost/postgres [PAUSE_SECONDS]`

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use std::error::Error;
use std::time::Duration;

use fencelock::postgres::admit;
use fencelock::postgres::tokio_postgres::{self, NoTls};
use fencelock::{ErrorKind, Locks};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("name a postgres:// URL")?;
    let pause = std::env::args().nth(2).map_or(Ok(0), |s| s.parse())?;

    let locks = Locks::open(&url).await?;
    let (mut client, connection) = tokio_postgres::connect(&url, NoTls).await?;
    tokio::spawn(connection);
    client
        .batch_execute(
            "CREATE TABLE IF NOT EXISTS example (id int PRIMARY KEY, value bigint NOT NULL);
                        INSERT INTO example VALUES (1, 0) ON CONFLICT DO NOTHING",
        )
        .await?;

    // The pause stands for a stopped process, so nothing renews the lease.
    let ttl = Duration::from_secs(2);
    let guard = locks.acquire("example").ttl(ttl).no_renew().await?;
    let fence = guard.fence();
    println!("token {}", guard.token());
    tokio::time::sleep(Duration::from_secs(pause)).await;

    let transaction = client.transaction().await?;
    // Before anything is read: from here to the commit nobody else is admitted, and afterwards
    // nobody older.
    match admit(&transaction, "example", fence).await {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::Fenced => {
            println!("refused, nothing was written: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    }
    let row = transaction
        .query_one("SELECT value FROM example WHERE id = 1", &[])
        .await?;
    let value = row.get::<_, i64>(0) + 1;
    transaction
        .execute("UPDATE example SET value = $1 WHERE id = 1", &[&value])
        .await?;
    transaction.commit().await?;
    println!("wrote {value}");
    Ok(())
}
