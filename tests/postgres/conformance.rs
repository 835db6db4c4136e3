//! The whole list of cases, on a server and behind PgBouncer.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use fencelock::conformance::{Case, FenceHarness, LeaseHarness, fence, lease};
use fencelock::postgres::{FencedPostgres, PostgresOptions, PostgresStore};
use fencelock::{FencedStore, FencingToken, LeaseStore, LockName};
use fencelock_testbed::pgbouncer::PgBouncer;
use fencelock_testbed::postgres::Postgres;

/// The servers of the cases that leave them running, each in a schema of its own. They end with
/// the test's process.
static SHARED: LazyLock<(Postgres, PgBouncer)> = LazyLock::new(|| {
    let server = Postgres::fast();
    // Fewer server connections than clients have, so that statements of both share them.
    let pooler = PgBouncer::start(&server, "transaction", 2);
    (server, pooler)
});

static SCHEMAS: AtomicU32 = AtomicU32::new(0);

/// The data of one case, and how its clients come to it.
struct Data {
    schema: String,
    pooled: bool,
    /// A server that the case may kill.
    private: Option<Mutex<Postgres>>,
}

impl Data {
    fn shared(pooled: bool) -> Self {
        let n = SCHEMAS.fetch_add(1, Ordering::Relaxed);
        Self {
            schema: format!("case_{n}"),
            pooled,
            private: None,
        }
    }

    fn private() -> Self {
        Self {
            private: Some(Mutex::new(Postgres::start())),
            ..Self::shared(false)
        }
    }

    fn options(&self) -> PostgresOptions {
        let url = match &self.private {
            Some(server) => server.lock().unwrap().url(),
            None if self.pooled => SHARED.1.url(),
            None => SHARED.0.url(),
        };
        PostgresOptions::parse(&format!("{url}?schema={}", self.schema)).unwrap()
    }

    fn psql(&self, sql: &str) {
        let sql = sql.replace("{schema}", &self.schema);
        let _ = match &self.private {
            Some(server) => server.lock().unwrap().psql(&sql),
            None => SHARED.0.psql(&sql),
        };
    }

    /// What this data cannot be asked: everything, where the servers are left out by name, and to
    /// be killed, where others are on the server.
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
    clients: Vec<PostgresStore>,
}

impl Locks {
    async fn of(data: Data) -> Self {
        let mut clients = Vec::new();
        while !skipped() && clients.len() < 2 {
            clients.push(PostgresStore::connect(data.options()).await.unwrap());
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
        self.data.psql(&format!(
            "UPDATE {{schema}}.locks SET holders = ARRAY(
                 SELECT CASE WHEN h.ttl_ms <= {ms} OR h.released THEN ROW(h.id, h.token, h.ttl_ms,
                     h.expires - interval '{ms} ms', h.released, h.info)::{{schema}}.holder ELSE h END
                 FROM unnest(holders) AS h),
             busy_until = busy_until - interval '{ms} ms'
             WHERE name = '\\x{hex}'"
        ));
    }

    async fn restart(&self) -> Option<[Arc<dyn LeaseStore>; 2]> {
        self.data.restart();
        let a = PostgresStore::connect(self.data.options()).await.unwrap();
        let b = PostgresStore::connect(self.data.options()).await.unwrap();
        Some([Arc::new(a), Arc::new(b)])
    }

    async fn with_last_token(
        &self,
        name: &LockName,
        token: FencingToken,
    ) -> Option<Arc<dyn LeaseStore>> {
        let hex = hex(name);
        self.data.psql(&format!(
            "INSERT INTO {{schema}}.locks (name, last_token) VALUES ('\\x{hex}', {token})"
        ));
        Some(Arc::new(self.clients[0].clone()))
    }

    fn skips(&self) -> &'static [&'static str] {
        self.data.skips(lease::CASES, &[RESTART])
    }
}

struct Values {
    data: Data,
    clients: Vec<FencedPostgres>,
}

impl Values {
    async fn of(data: Data) -> Self {
        let mut clients = Vec::new();
        while !skipped() && clients.len() < 2 {
            clients.push(FencedPostgres::connect(data.options()).await.unwrap());
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
        let a = FencedPostgres::connect(self.data.options()).await.unwrap();
        let b = FencedPostgres::connect(self.data.options()).await.unwrap();
        Some([Arc::new(a), Arc::new(b)])
    }

    fn skips(&self) -> &'static [&'static str] {
        self.data.skips(fence::CASES, &[VALUE_RESTART])
    }
}

fn skipped() -> bool {
    ["postgres", "pgbouncer"]
        .into_iter()
        .any(fencelock_testbed::skipped)
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

mod locks_behind_pgbouncer {
    use super::*;
    fencelock::lease_conformance!(Locks::of(Data::shared(true)).await);
}

mod values {
    use super::*;
    fencelock::fence_conformance!(Values::of(Data::shared(false)).await);
}

mod values_behind_pgbouncer {
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
