//! Adds a line to a report under a lock: a read-modify-write that loses nothing, whoever was paused.
//!
//! `cargo run --example export -- DIR`, in several terminals at once if you like.

use std::error::Error;
use std::time::Duration;

use fencelock::file::FencedFiles;
use fencelock::{Fenced, Locks};

/// The most that a report may hold, in bytes.
const REPORT_MAX_BYTES: u64 = 1 << 20;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let dir = match std::env::args().nth(1) {
        Some(dir) => std::path::absolute(dir)?,
        None => std::env::temp_dir().join("fencelock-example"),
    };
    std::fs::create_dir_all(&dir)?;
    let locks = Locks::open(&format!("file://{}/locks", dir.display())).await?;
    let reports = Fenced::new(FencedFiles::open(&dir)?);

    let guard = locks
        .acquire("payment-export")
        .label("adds a line")
        .wait(Duration::from_secs(10))
        .await?;

    // Raise first: from here on nobody older can write, and the raise reads in the same step.
    let before = reports.raise("today.csv", &guard).await?;
    let mut report = match before.value {
        Some(value) => value.into_bytes(REPORT_MAX_BYTES)?.to_vec(),
        None => Vec::new(),
    };
    report.extend_from_slice(format!("line of token {}\n", guard.token()).as_bytes());
    reports.put("today.csv", report, &guard).await?;

    guard.release().await?;
    Ok(())
}
