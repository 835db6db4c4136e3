//! Locks and a fenced value over a NATS client of your own.
//!
//! ```sh
//! cargo run --features nats --example nats_own_client -- 127.0.0.1:4222
//! ```

use fencelock::nats::{FencedNats, NatsStore, client};
use fencelock::{Fenced, Locks};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1);
    let address = address.unwrap_or_else(|| "127.0.0.1:4222".to_owned());
    let client = client::connect(address).await?;

    let locks = Locks::new(NatsStore::from_client(client.clone()).await?);
    let store = Fenced::new(FencedNats::from_client(client).await?);

    let guard = locks.acquire("payment-export").await?;
    // Raised before it is read: from here on, nobody with an older token changes it.
    let before = store.raise("exports/today", &guard).await?;
    let count = match before.value {
        Some(body) => String::from_utf8(body.into_bytes(64)?.into())?.parse::<u64>()?,
        None => 0,
    };
    store
        .put("exports/today", (count + 1).to_string(), &guard)
        .await?;
    let mut out = std::io::stdout();
    std::io::Write::write_fmt(&mut out, format_args!("written with {}\n", guard.token()))?;
    guard.release().await?;
    Ok(())
}
