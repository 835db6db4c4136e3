//! Where do I check the token if my program uses sqlx? In the transaction of the write.
//!
//! Adds 1 to a number in a table, under a lock. Two runs at once, one of them paused for longer than
//! its lease: what the paused one writes afterwards is refused, and no addition is lost.
//!
//! `cargo run --example postgres_sqlx --features sqlx -- postgres://postgres@localhost/postgres [PAUSE_SECONDS]`

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use std::error::Error;
use std::time::Duration;

use fencelock::postgres::sqlx::{admit, sqlx};
use fencelock::{ErrorKind, Locks};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("name a postgres:// URL")?;
    let pause = std::env::args().nth(2).map_or(Ok(0), |s| s.parse())?;

    let locks = Locks::open(&url).await?;
    let pool = sqlx::PgPool::connect(&url).await?;
    sqlx::raw_sql(
        "CREATE TABLE IF NOT EXISTS example (id int PRIMARY KEY, value bigint NOT NULL);
         INSERT INTO example VALUES (1, 0) ON CONFLICT DO NOTHING",
    )
    .execute(&pool)
    .await?;

    // The pause stands for a stopped process, so nothing renews the lease.
    let ttl = Duration::from_secs(2);
    let guard = locks.acquire("example").ttl(ttl).no_renew().await?;
    let fence = guard.fence();
    println!("token {}", guard.token());
    tokio::time::sleep(Duration::from_secs(pause)).await;

    let mut transaction = pool.begin().await?;
    // Before anything is read: from here to the commit nobody else is admitted, and afterwards
    // nobody older.
    match admit(&mut transaction, "example", fence).await {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::Fenced => {
            println!("refused, nothing was written: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    }
    // `persistent(false)`, so that a pooler in transaction mode may stand between.
    let value: i64 = sqlx::query_scalar("SELECT value FROM example WHERE id = 1")
        .persistent(false)
        .fetch_one(&mut *transaction)
        .await?;
    sqlx::query("UPDATE example SET value = $1 WHERE id = 1")
        .bind(value + 1)
        .persistent(false)
        .execute(&mut *transaction)
        .await?;
    transaction.commit().await?;
    println!("wrote {}", value + 1);
    Ok(())
}
