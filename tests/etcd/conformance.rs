//! Every case, on a server that they share, each under a prefix of its own.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::time::Duration;

use fencelock::conformance::{LeaseHarness, lease};
use fencelock::etcd::EtcdStore;
use fencelock::{FencingToken, LeaseStore, LockName};
use fencelock_testbed::etcd::{Etcd, SERVER};
use fencelock_testbed::skipped;

use crate::lab::{lapsed, record_key};

/// The server of those cases that do not kill it.
fn shared() -> &'static Etcd {
    static ETCD: OnceLock<Etcd> = OnceLock::new();
    ETCD.get_or_init(Etcd::start)
}

static PREFIXES: AtomicU32 = AtomicU32::new(0);

/// Run below, on a server of its own.
const KILLS: &str = "tokens_survive_a_restart";

struct Locks {
    prefix: String,
    /// `None` where these tests are left out.
    running: Option<Running>,
}

struct Running {
    /// The server that may be killed; `None` for the shared one.
    own: Option<Mutex<Etcd>>,
    clients: [EtcdStore; 2],
}

impl Locks {
    async fn shared() -> Self {
        Self::new(|| None).await
    }

    async fn own() -> Self {
        Self::new(|| Some(Etcd::start())).await
    }

    async fn new(own: impl FnOnce() -> Option<Etcd>) -> Self {
        let prefix = format!("case-{}/", PREFIXES.fetch_add(1, Ordering::SeqCst));
        let mut locks = Self {
            prefix,
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

    async fn open(&self, url: &str) -> [EtcdStore; 2] {
        let url = format!("{url}?prefix={}", self.prefix);
        let open = async || EtcdStore::open(&url).await.unwrap();
        [open().await, open().await]
    }

    fn running(&self) -> &Running {
        self.running.as_ref().unwrap()
    }

    fn with_server<T>(&self, work: impl FnOnce(&mut Etcd) -> T) -> Option<T> {
        let own = self.running().own.as_ref()?;
        Some(work(&mut own.lock().unwrap()))
    }
}

fn stores(clients: [EtcdStore; 2]) -> [Arc<dyn LeaseStore>; 2] {
    let [a, b] = clients;
    [Arc::new(a), Arc::new(b)]
}

#[async_trait::async_trait]
impl LeaseHarness for Locks {
    fn clients(&self) -> [Arc<dyn LeaseStore>; 2] {
        stores(self.running().clients.clone())
    }

    async fn expire(&self, name: &LockName, ttl: Duration) {
        let own = self.with_server(|etcd| etcd.address());
        let address = own.unwrap_or_else(|| shared().address());
        lapsed(address, &self.prefix, name, ttl).await;
    }

    fn short_ttl(&self) -> Duration {
        Duration::from_secs(2)
    }

    async fn restart(&self) -> Option<[Arc<dyn LeaseStore>; 2]> {
        let url = self.with_server(|etcd| {
            etcd.kill_and_restart();
            etcd.url()
        })?;
        Some(stores(self.open(&url).await))
    }

    async fn with_last_token(
        &self,
        name: &LockName,
        token: FencingToken,
    ) -> Option<Arc<dyn LeaseStore>> {
        let record = format!(r#"{{"name":"{name}","last":{token},"granted":false,"permits":0}}"#);
        let _ = shared().ctl(&["put", &record_key(&self.prefix, name), &record]);
        let [store, _] = self.running().clients.clone();
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
