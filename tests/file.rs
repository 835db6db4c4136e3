//! The file engines pass every case.

#![cfg(feature = "file")]

use std::sync::Arc;
use std::time::Duration;

use fencelock::clock::Clock;
use fencelock::conformance::LeaseHarness;
use fencelock::file::FileStore;
use fencelock::{FencingToken, LeaseStore, LockName};
use tempfile::TempDir;

struct Locks {
    dir: TempDir,
    other: TempDir,
    clock: Clock,
}

impl Locks {
    fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            other: tempfile::tempdir().unwrap(),
            clock: Clock::adjustable(),
        }
    }

    fn open(&self) -> Arc<dyn LeaseStore> {
        let options = FileStore::options().clock(self.clock.clone());
        Arc::new(options.open(self.dir.path()).unwrap())
    }
}

#[async_trait::async_trait]
impl LeaseHarness for Locks {
    fn clients(&self) -> [Arc<dyn LeaseStore>; 2] {
        [self.open(), self.open()]
    }

    async fn expire(&self, _: &LockName, ttl: Duration) {
        self.clock.advance(ttl);
    }

    async fn restart(&self) -> Option<[Arc<dyn LeaseStore>; 2]> {
        Some(self.clients())
    }

    async fn with_last_token(
        &self,
        _: &LockName,
        token: FencingToken,
    ) -> Option<Arc<dyn LeaseStore>> {
        // A store whose identity is damaged is mended above a token.
        drop(FileStore::open(self.other.path()).unwrap());
        std::fs::write(self.other.path().join("store"), "damaged").unwrap();
        let options = FileStore::options().mend(token);
        Some(Arc::new(options.open(self.other.path()).unwrap()))
    }
}

mod locks {
    use super::*;
    fencelock::lease_conformance!(Locks::new());
}
