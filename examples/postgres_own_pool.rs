//! Locks through the pool that a service has already: no connection is opened for them.
//!
//! `cargo run --example postgres_own_pool --features postgres -- postgres://postgres@localhost/postgres`

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use std::error::Error;

use fencelock::Locks;
use fencelock::postgres::deadpool_postgres::{Manager, Pool};
use fencelock::postgres::tokio_postgres::NoTls;
use fencelock::postgres::{PostgresOptions, PostgresStore};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("name a postgres:// URL")?;
    let pool = Pool::builder(Manager::new(url.parse()?, NoTls))
        .max_size(4)
        .build()?;

    let store = PostgresStore::from_pool(pool.clone(), PostgresOptions::for_pool()).await?;
    let locks = Locks::new(store);
    locks
        .with_lock("nightly", async |guard| {
            let client = pool.get().await?;
            let row = client.query_one("SELECT now()::text", &[]).await?;
            println!("token {} at {}", guard.token(), row.get::<_, String>(0));
            Ok::<_, Box<dyn Error>>(())
        })
        .await
}
