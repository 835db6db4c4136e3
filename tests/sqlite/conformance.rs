//! The whole list of cases.

use std::sync::Arc;
use std::time::Duration;

use fencelock::clock::Clock;
use fencelock::conformance::{FenceHarness, LeaseHarness};
use fencelock::sqlite::rusqlite::params;
use fencelock::sqlite::{FencedSqlite, SqliteStore};
use fencelock::{FencedStore, FencingToken, LeaseStore, LockName};

use crate::lab::Data;

struct Locks {
    data: Data,
    clock: Clock,
    clients: [SqliteStore; 2],
}

impl Locks {
    async fn new() -> Self {
        let (data, clock) = (Data::new(), Clock::adjustable());
        let clients = [open(&data, &clock).await, open(&data, &clock).await];
        Self {
            data,
            clock,
            clients,
        }
    }
}

async fn open(data: &Data, clock: &Clock) -> SqliteStore {
    let options = SqliteStore::options().clock(clock.clone());
    options.open(data.path()).await.unwrap()
}

#[async_trait::async_trait]
impl LeaseHarness for Locks {
    fn clients(&self) -> [Arc<dyn LeaseStore>; 2] {
        [0, 1].map(|i| -> Arc<dyn LeaseStore> { Arc::new(self.clients[i].clone()) })
    }

    async fn expire(&self, _: &LockName, ttl: Duration) {
        self.clock.advance(ttl);
    }

    async fn restart(&self) -> Option<[Arc<dyn LeaseStore>; 2]> {
        let again = [
            open(&self.data, &self.clock).await,
            open(&self.data, &self.clock).await,
        ];
        Some(again.map(|store| -> Arc<dyn LeaseStore> { Arc::new(store) }))
    }

    async fn with_last_token(
        &self,
        name: &LockName,
        token: FencingToken,
    ) -> Option<Arc<dyn LeaseStore>> {
        let last = i64::try_from(token.get()).unwrap();
        self.data
            .connect()
            .execute(
                "INSERT INTO fencelock_locks (name, last_token, used_unix_us) VALUES (?1, ?2, 0)",
                params![name.as_str().as_bytes(), last],
            )
            .unwrap();
        Some(Arc::new(self.clients[0].clone()))
    }
}

struct Values {
    data: Data,
    clients: [FencedSqlite; 2],
}

impl Values {
    async fn new() -> Self {
        let data = Data::new();
        let clients = [data.values().await, data.values().await];
        Self { data, clients }
    }
}

#[async_trait::async_trait]
impl FenceHarness for Values {
    fn clients(&self) -> [Arc<dyn FencedStore>; 2] {
        [0, 1].map(|i| -> Arc<dyn FencedStore> { Arc::new(self.clients[i].clone()) })
    }

    async fn restart(&self) -> Option<[Arc<dyn FencedStore>; 2]> {
        let again = [self.data.values().await, self.data.values().await];
        Some(again.map(|store| -> Arc<dyn FencedStore> { Arc::new(store) }))
    }
}

mod locks {
    use super::*;
    fencelock::lease_conformance!(Locks::new().await);
}

mod values {
    use super::*;
    fencelock::fence_conformance!(Values::new().await);
}
