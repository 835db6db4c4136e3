//! Locks and fenced values over a Redis client of one's own: its settings, its TLS, its connection.
//!
//! ```text
//! redis-server &
//! cargo run --example redis_own_client --features redis
//! ```
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

use std::time::Duration;

use fencelock::redis::client::{Client, Script};
use fencelock::redis::{GUARD_LUA, RedisStore, fence_key, refusal};
use fencelock::{Fence, FencingToken, Locks, ResourceName};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("REDIS_URL").unwrap_or("redis://127.0.0.1:6379".to_owned());
    let client = Client::open(url)?;

    // The store connects by itself, as this client says; renewals do not wait for this runtime.
    let store = RedisStore::options().prefix("example:")?;
    let locks = Locks::new(store.open_client(client.clone()).await?);
    let guard = locks
        .acquire("payment-export")
        .ttl(Duration::from_secs(10))
        .wait(Duration::from_secs(30))
        .await?;
    println!("token {}", guard.token());

    // A script of one's own, which only runs for a fresh token.
    let script = Script::new(&format!(
        "{GUARD_LUA}\nreturn redis.call('INCRBY', KEYS[2], ARGV[2])"
    ));
    let resource = ResourceName::new("example:balance")?;
    let mut connection = client.get_multiplexed_async_connection().await?;
    let balance: i64 = script
        .key(fence_key(&resource))
        .key(resource.as_str())
        .arg(guard.fence().to_string())
        .arg(5)
        .invoke_async(&mut connection)
        .await?;
    println!("balance {balance}");

    // Somebody who was paused for too long.
    let stale = FencingToken::new(guard.token().get() - 1)?;
    let refused = script
        .key(fence_key(&resource))
        .key(resource.as_str())
        .arg(Fence::from(stale).to_string())
        .arg(1_000_000)
        .invoke_async::<i64>(&mut connection)
        .await;
    if let Err(error) = refused {
        println!("refused: {}", refusal(&error).ok_or(error)?);
    }
    guard.release().await?;
    Ok(())
}
