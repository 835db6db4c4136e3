//! The memory engine passes every case.

use std::sync::Arc;
use std::time::Duration;

use fencelock::clock::Clock;
use fencelock::conformance::{FenceHarness, LeaseHarness};
use fencelock::memory::{FencedMemory, MemoryStore};
use fencelock::{FencedStore, FencingToken, LeaseStore, LockName};

struct Locks {
    store: MemoryStore,
    clock: Clock,
}

impl Locks {
    fn new() -> Self {
        let clock = Clock::adjustable();
        let store = MemoryStore::with_clock(clock.clone());
        Self { store, clock }
    }
}

#[async_trait::async_trait]
impl LeaseHarness for Locks {
    fn clients(&self) -> [Arc<dyn LeaseStore>; 2] {
        [Arc::new(self.store.clone()), Arc::new(self.store.clone())]
    }

    async fn expire(&self, _: &LockName, ttl: Duration) {
        self.clock.advance(ttl);
    }

    async fn with_last_token(
        &self,
        _: &LockName,
        token: FencingToken,
    ) -> Option<Arc<dyn LeaseStore>> {
        Some(Arc::new(MemoryStore::starting_after(token)))
    }
}

struct Values(FencedMemory);

impl FenceHarness for Values {
    fn clients(&self) -> [Arc<dyn FencedStore>; 2] {
        [Arc::new(self.0.clone()), Arc::new(self.0.clone())]
    }

    fn skips(&self) -> &'static [&'static str] {
        // They end with the process.
        &["watermarks_survive_a_restart"]
    }
}

mod locks {
    use super::*;
    fencelock::lease_conformance!(Locks::new());
}

mod values {
    use super::*;
    fencelock::fence_conformance!(Values(FencedMemory::new()));
}
