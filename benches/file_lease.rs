//! Uncontended acquire and release pairs a second in one process, through the trait.
//!
//! `cargo bench --bench file_lease [-- DIRECTORY]`

#![expect(
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a bench fails by panicking and says what it measured"
)]

use std::time::Duration;

use fencelock::clock::Clock;
use fencelock::file::FileStore;
use fencelock::lease::{AcquireRequest, Attempt, LeaseRef, LeaseStore as _};
use fencelock::{LockName, Ttl};

const PAIRS: u32 = 50_000;

fn main() -> fencelock::Result<()> {
    let dir = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    let temporary = tempfile::tempdir().expect("a temporary directory");
    let store = match dir {
        Some(dir) => FileStore::open(dir)?,
        None => FileStore::open(temporary.path())?,
    };
    let name: LockName = "bench".parse()?;
    let clock = Clock::system();
    for round in 1..=3 {
        let start = clock.now();
        for _ in 0..PAIRS {
            pollster::block_on(pair(&store, &name))?;
        }
        let took = clock.now().since(start);
        println!(
            "round {round}: {:.0} pairs a second",
            f64::from(PAIRS) / took.as_secs_f64()
        );
    }
    Ok(())
}

async fn pair(store: &FileStore, name: &LockName) -> fencelock::Result<()> {
    let request = AcquireRequest::new(name.clone(), Ttl::DEFAULT);
    if let Attempt::Granted(grant) = store.acquire(&request).await? {
        let lease = LeaseRef {
            name: name.clone(),
            holder: request.holder,
            token: Some(grant.token),
        };
        store.release(&lease, Duration::ZERO).await?;
    }
    Ok(())
}
