//! Exports a file to an object store under a lock: run it twice, one of them paused beyond its lease,
//! and the one that wakes up late is refused.
//!
//! ```sh
//! export AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… AWS_REGION=eu-central-1
//! cargo run --example object_store_export --features object_store -- s3://bucket/exports today.csv
//! ```

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use fencelock::body::Body;
use fencelock::object_store::FencedObjects;
use fencelock::{ErrorKind, Locks};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (Some(url), Some(path)) = (args.next(), args.next()) else {
        return Err("usage: object_store_export s3://bucket/prefix FILE".into());
    };
    // The lock may be in any engine that all exporters reach.
    let locks = Locks::open("file:locks").await?;
    let objects = FencedObjects::open(&url).await?;

    let guard = locks.acquire("payment-export").await?;
    // A large file goes out in parts, and is never in memory whole.
    let body = Body::from_file(std::fs::File::open(&path)?)?;
    match objects.put("payments/today.csv", body, &guard).await {
        Ok(_) => println!("exported with token {}", guard.token()),
        Err(error) if error.kind() == ErrorKind::Fenced => {
            println!("somebody newer exports, and this was not written: {error}");
        }
        Err(error) => return Err(error.into()),
    }
    guard.release().await?;
    Ok(())
}
