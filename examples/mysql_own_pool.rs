//! Locks through the pool that a service has already: no connection is opened for them.
//!
//! `cargo run --example mysql_own_pool --features mysql -- mysql://root@127.0.0.1/test`

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use std::error::Error;

use fencelock::Locks;
use fencelock::mysql::mysql_async::Pool;
use fencelock::mysql::mysql_async::prelude::Queryable as _;
use fencelock::mysql::{MysqlOptions, MysqlStore};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args().nth(1).ok_or("name a mysql:// URL")?;
    let pool = Pool::from_url(&url)?;

    let store = MysqlStore::from_pool(pool.clone(), MysqlOptions::for_pool()).await?;
    let locks = Locks::new(store);
    locks
        .with_lock("nightly", async |guard| {
            let mut conn = pool.get_conn().await?;
            let now: Option<String> = conn.query_first("SELECT DATE_FORMAT(NOW(), '%T')").await?;
            println!("token {} at {}", guard.token(), now.unwrap_or_default());
            Ok::<_, Box<dyn Error>>(())
        })
        .await
}
