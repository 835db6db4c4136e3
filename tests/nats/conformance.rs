//! Every case, on a server that they share, each in a bucket of its own.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::time::Duration;

use fencelock::conformance::{LeaseHarness, lease};
use fencelock::nats::NatsStore;
use fencelock::{FencingToken, LeaseStore, LockName};
use fencelock_testbed::nats::{Nats, SERVER};
use fencelock_testbed::skipped;

use crate::lab::record;

/// The server of those cases that do not kill it.
fn shared() -> &'static Nats {
    static NATS: OnceLock<Nats> = OnceLock::new();
    NATS.get_or_init(Nats::start)
}

static BUCKETS: AtomicU32 = AtomicU32::new(0);

/// Run below, on a server of its own.
const KILLS: &str = "tokens_survive_a_restart";

struct Locks {
    bucket: String,
    /// `None` where these tests are left out.
    running: Option<Running>,
}

struct Running {
    /// The server that may be killed; `None` for the shared one.
    own: Option<Mutex<Nats>>,
    clients: [NatsStore; 2],
}

impl Locks {
    async fn shared() -> Self {
        Self::new(|| None).await
    }

    async fn own() -> Self {
        Self::new(|| Some(Nats::start())).await
    }

    async fn new(own: impl FnOnce() -> Option<Nats>) -> Self {
        let bucket = format!("case-{}", BUCKETS.fetch_add(1, Ordering::SeqCst));
        let mut locks = Self {
            bucket,
            running: None,
        };
        if !skipped(SERVER) {
            let own = own();
            let url = own.as_ref().unwrap_or_else(|| shared()).url();
            let clients = locks.open(&url).await;
            let own = own.map(Mutex::new);
            locks.running = Some(Running { own, clients });
        }
        locks
    }

    async fn open(&self, url: &str) -> [NatsStore; 2] {
        let url = format!("{url}?bucket={}", self.bucket);
        let open = async || NatsStore::open(&url).await.unwrap();
        [open().await, open().await]
    }

    fn running(&self) -> &Running {
        self.running.as_ref().unwrap()
    }

    fn with_server<T>(&self, work: impl FnOnce(&mut Nats) -> T) -> Option<T> {
        let own = self.running().own.as_ref()?;
        Some(work(&mut own.lock().unwrap()))
    }
}

fn stores(clients: [NatsStore; 2]) -> [Arc<dyn LeaseStore>; 2] {
    let [a, b] = clients;
    [Arc::new(a), Arc::new(b)]
}

#[async_trait::async_trait]
impl LeaseHarness for Locks {
    fn clients(&self) -> [Arc<dyn LeaseStore>; 2] {
        stores(self.running().clients.clone())
    }

    async fn expire(&self, _: &LockName, ttl: Duration) {
        // By the server's clock, which is this host's.
        tokio::time::sleep(ttl + Duration::from_millis(20)).await;
    }

    fn short_ttl(&self) -> Duration {
        Duration::from_millis(1_500)
    }

    async fn restart(&self) -> Option<[Arc<dyn LeaseStore>; 2]> {
        let url = self.with_server(|nats| {
            nats.kill_and_restart();
            nats.url()
        })?;
        Some(stores(self.open(&url).await))
    }

    async fn with_last_token(
        &self,
        name: &LockName,
        token: FencingToken,
    ) -> Option<Arc<dyn LeaseStore>> {
        let [store, _] = self.running().clients.clone();
        let subject = record(&self.bucket, &store, name.as_str());
        let body = format!(r#"{{"name":"{name}","last":{token},"permits":0,"holders":[]}}"#);
        let acknowledged = shared().publish(&subject, "", &body);
        assert!(acknowledged.contains("\"seq\""), "{acknowledged}");
        Some(Arc::new(store))
    }

    fn skips(&self) -> &'static [&'static str] {
        static ALL: LazyLock<Vec<&str>> =
            LazyLock::new(|| lease::CASES.iter().map(|case| case.name).collect());
        match &self.running {
            None => &ALL,
            Some(Running { own: None, .. }) => &[KILLS],
            Some(_) => &[],
        }
    }
}

mod locks {
    use super::*;
    fencelock::lease_conformance!(Locks::shared().await);
}

#[test]
fn tokens_survive_a_killed_server() {
    lease::run(KILLS, Locks::own());
}
