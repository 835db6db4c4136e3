//! The file engines pass every case.

#![cfg(feature = "file")]
#![expect(clippy::unwrap_used, reason = "a harness fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use fencelock::clock::Clock;
use fencelock::conformance::{FenceHarness, LeaseHarness};
use fencelock::file::{FencedFiles, FileStore};
use fencelock::{FencedStore, FencingToken, LeaseStore, LockName};
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

struct Values(TempDir);

impl Values {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn open(&self) -> Arc<dyn FencedStore> {
        Arc::new(FencedFiles::open(self.0.path()).unwrap())
    }
}

#[async_trait::async_trait]
impl FenceHarness for Values {
    fn clients(&self) -> [Arc<dyn FencedStore>; 2] {
        [self.open(), self.open()]
    }

    async fn restart(&self) -> Option<[Arc<dyn FencedStore>; 2]> {
        Some(self.clients())
    }
}

mod locks {
    use super::*;
    fencelock::lease_conformance!(Locks::new());
}

mod values {
    use super::*;
    fencelock::fence_conformance!(Values::new());
}
