//! Locks over an object store client of your own: here Amazon's, with what the environment says.
//!
//! ```sh
//! cargo run --features object_store --example object_store_own_client -- bucket
//! ```

use std::sync::Arc;

use fencelock::Locks;
use fencelock::object_store::BucketStore;
use fencelock::object_store::client::ClientConfigKey;
use fencelock::object_store::client::aws::{AmazonS3Builder, AmazonS3ConfigKey};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // This build of the client leaves the choice of a cryptography provider to the program.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let bucket = std::env::args().nth(1);
    // One setting more: `with_client_options` would forget those of the environment.
    let timeout = AmazonS3ConfigKey::Client(ClientConfigKey::Timeout);
    let client = AmazonS3Builder::from_env()
        .with_config(timeout, "5s")
        .with_bucket_name(bucket.unwrap_or_else(|| "bucket".to_owned()))
        .build()?;

    let locks = Locks::new(BucketStore::from_store(Arc::new(client), "locks").await?);
    let guard = locks.acquire("payment-export").await?;
    let mut out = std::io::stdout();
    std::io::Write::write_fmt(&mut out, format_args!("held with {}\n", guard.token()))?;
    guard.release().await?;
    Ok(())
}
