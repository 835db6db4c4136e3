//! Uncontended acquire and release through the public API: `cargo bench --bench uncontended`.
//!
//! One line for each engine and number of threads; the figure is pairs a second. Absolute figures
//! are this machine's; compare engines within one run.

#![expect(
    clippy::expect_used,
    reason = "a benchmark that cannot go on has to stop"
)]

use fencelock::Locks;
use fencelock::file::FileStore;
use fencelock::memory::MemoryStore;

fn main() {
    divan::main();
}

/// How many pairs one sample runs.
const PAIRS: usize = 1_000;

#[divan::bench(threads = [1, 2])]
fn memory(bencher: divan::Bencher<'_, '_>) {
    let locks = Locks::new(MemoryStore::new());
    pairs(bencher, &locks);
}

/// With durable tokens, on whatever disk the temporary directory is on: `TMPDIR` chooses.
#[divan::bench(threads = [1, 2])]
fn file(bencher: divan::Bencher<'_, '_>) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let locks = Locks::new(FileStore::open(dir.path()).expect("a store"));
    pairs(bencher, &locks);
}

fn pairs(bencher: divan::Bencher<'_, '_>, locks: &Locks) {
    bencher
        .counter(divan::counter::ItemsCount::new(PAIRS))
        .bench(|| {
            let name = format!("bench-{:?}", std::thread::current().id());
            pollster::block_on(async {
                for _ in 0..PAIRS {
                    let guard = locks.acquire(&name).await;
                    guard
                        .expect("nobody contends")
                        .release()
                        .await
                        .expect("it is ours");
                }
            });
        });
}
