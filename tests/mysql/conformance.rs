//! The whole list of cases, on connections of our own and through a pool of the user's.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use fencelock::conformance::{Case, FenceHarness, LeaseHarness, fence, lease};
use fencelock::mysql::mysql_async::{Opts, OptsBuilder, Pool, PoolConstraints, PoolOpts};
use fencelock::mysql::{FencedMysql, MysqlOptions, MysqlStore};
use fencelock::{FencedStore, FencingToken, LeaseStore, LockName};
use fencelock_testbed::mysql::Mysql;

/// The server of the cases that leave it running, each with tables of its own. It ends with the
/// test's process.
static SHARED: LazyLock<Mysql> = LazyLock::new(Mysql::fast);

static PREFIXES: AtomicU32 = AtomicU32::new(0);

/// The data of one case, and how its clients come to it.
struct Data {
    prefix: String,
    pooled: bool,
    /// A server that the case may kill.
    private: Option<Mutex<Mysql>>,
}

impl Data {
    fn shared(pooled: bool) -> Self {
        let n = PREFIXES.fetch_add(1, Ordering::Relaxed);
        Self {
            prefix: format!("case_{n}"),
            pooled,
            private: None,
        }
    }

    fn private() -> Self {
        Self {
            private: Some(Mutex::new(Mysql::start())),
            ..Self::shared(false)
        }
    }

    fn url(&self) -> String {
        match &self.private {
            Some(server) => server.lock().unwrap().url(),
            None => SHARED.url(),
        }
    }

    fn options(&self) -> MysqlOptions {
        MysqlOptions::parse(&format!("{}?prefix={}", self.url(), self.prefix)).unwrap()
    }

    /// A pool whose sessions differ from ours in all that could matter: an isolation level that
    /// fixes what is seen, a time zone with summer time, a mode with other quotes.
    fn pool(&self) -> Option<Pool> {
        let few = PoolConstraints::new(0, 8).unwrap();
        self.pooled.then(|| {
            let opts = OptsBuilder::from_opts(Opts::from_url(&self.url()).unwrap())
                .pool_opts(PoolOpts::default().with_constraints(few))
                .setup(vec![
                    "SET SESSION tx_isolation = 'REPEATABLE-READ', time_zone = '+05:45', \
                     sql_mode = 'ANSI,NO_BACKSLASH_ESCAPES'"
                        .to_owned(),
                ]);
            Pool::new(opts)
        })
    }

    async fn store(&self) -> MysqlStore {
        match self.pool() {
            Some(pool) => MysqlStore::from_pool(pool, self.pool_options()).await,
            None => MysqlStore::connect(self.options()).await,
        }
        .unwrap()
    }

    async fn values(&self) -> FencedMysql {
        match self.pool() {
            Some(pool) => FencedMysql::from_pool(pool, self.pool_options()).await,
            None => FencedMysql::connect(self.options()).await,
        }
        .unwrap()
    }

    fn pool_options(&self) -> MysqlOptions {
        MysqlOptions::for_pool().prefix(&self.prefix).unwrap()
    }

    fn sql(&self, sql: &str) {
        let sql = sql.replace("{prefix}", &self.prefix);
        let _ = match &self.private {
            Some(server) => server.lock().unwrap().sql(&sql),
            None => SHARED.sql(&sql),
        };
    }

    /// What this data cannot be asked: everything, where the server is left out by name, and to be
    /// killed, where others are on the server.
    fn skips(&self, all: &[Case], killing: &'static [&'static str]) -> &'static [&'static str] {
        if skipped() {
            let names: Vec<_> = all.iter().map(|case| case.name).collect();
            return names.leak();
        }
        if self.private.is_some() { &[] } else { killing }
    }

    fn restart(&self) {
        let mut server = self.private.as_ref().unwrap().lock().unwrap();
        server.server().kill();
        server.server().restart();
    }
}

struct Locks {
    data: Data,
    clients: Vec<MysqlStore>,
}

impl Locks {
    async fn of(data: Data) -> Self {
        let mut clients = Vec::new();
        while !skipped() && clients.len() < 2 {
            clients.push(data.store().await);
        }
        Self { data, clients }
    }
}

#[async_trait::async_trait]
impl LeaseHarness for Locks {
    fn clients(&self) -> [Arc<dyn LeaseStore>; 2] {
        [0, 1].map(|i| -> Arc<dyn LeaseStore> { Arc::new(self.clients[i].clone()) })
    }

    /// Moves what is stored, as if so much time had passed; longer grants stay.
    async fn expire(&self, name: &LockName, ttl: Duration) {
        let (hex, ms) = (hex(name), ttl.as_millis());
        self.data.sql(&format!(
            "UPDATE {{prefix}}_holders SET expires_us = expires_us - {ms} * 1000
                 WHERE name = X'{hex}' AND (ttl_ms <= {ms} OR released);
             UPDATE {{prefix}}_locks SET changed_us = changed_us - {ms} * 1000 WHERE name = X'{hex}'"
        ));
    }

    async fn restart(&self) -> Option<[Arc<dyn LeaseStore>; 2]> {
        self.data.restart();
        let (a, b) = (self.data.store().await, self.data.store().await);
        Some([Arc::new(a), Arc::new(b)])
    }

    async fn with_last_token(
        &self,
        name: &LockName,
        token: FencingToken,
    ) -> Option<Arc<dyn LeaseStore>> {
        let hex = hex(name);
        self.data.sql(&format!(
            "INSERT INTO {{prefix}}_locks (name, last_token, changed_us) VALUES (X'{hex}', {token}, 0)"
        ));
        Some(Arc::new(self.clients[0].clone()))
    }

    fn skips(&self) -> &'static [&'static str] {
        self.data.skips(lease::CASES, &[RESTART])
    }
}

struct Values {
    data: Data,
    clients: Vec<FencedMysql>,
}

impl Values {
    async fn of(data: Data) -> Self {
        let mut clients = Vec::new();
        while !skipped() && clients.len() < 2 {
            clients.push(data.values().await);
        }
        Self { data, clients }
    }
}

#[async_trait::async_trait]
impl FenceHarness for Values {
    fn clients(&self) -> [Arc<dyn FencedStore>; 2] {
        [0, 1].map(|i| -> Arc<dyn FencedStore> { Arc::new(self.clients[i].clone()) })
    }

    async fn restart(&self) -> Option<[Arc<dyn FencedStore>; 2]> {
        self.data.restart();
        let (a, b) = (self.data.values().await, self.data.values().await);
        Some([Arc::new(a), Arc::new(b)])
    }

    fn skips(&self) -> &'static [&'static str] {
        self.data.skips(fence::CASES, &[VALUE_RESTART])
    }
}

fn skipped() -> bool {
    fencelock_testbed::skipped("mysql")
}

fn hex(name: &LockName) -> String {
    name.as_str().bytes().map(|b| format!("{b:02x}")).collect()
}

const RESTART: &str = "tokens_survive_a_restart";
const VALUE_RESTART: &str = "watermarks_survive_a_restart";

mod locks {
    use super::*;
    fencelock::lease_conformance!(Locks::of(Data::shared(false)).await);
}

mod locks_through_a_pool {
    use super::*;
    fencelock::lease_conformance!(Locks::of(Data::shared(true)).await);
}

mod values {
    use super::*;
    fencelock::fence_conformance!(Values::of(Data::shared(false)).await);
}

mod values_through_a_pool {
    use super::*;
    fencelock::fence_conformance!(Values::of(Data::shared(true)).await);
}

/// Not on the shared server: it is killed.
#[test]
fn tokens_survive_the_kill_of_the_server() {
    lease::run(RESTART, Locks::of(Data::private()));
}

#[test]
fn values_survive_the_kill_of_the_server() {
    fence::run(VALUE_RESTART, Values::of(Data::private()));
}
