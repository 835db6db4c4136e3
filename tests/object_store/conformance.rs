//! Every storage case, in memory, in moto and in SeaweedFS.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use fencelock::FencedStore;
use fencelock::conformance::{FenceHarness, fence};
use fencelock::object_store::ObjectOptions;
use fencelock::object_store::client::memory::InMemory;
use fencelock_testbed::s3::{S3, SERVER};
use fencelock_testbed::skipped;

use crate::lab::open;

static CASES: AtomicU32 = AtomicU32::new(0);

/// Run below, on a server of its own.
const KILLS: &str = "watermarks_survive_a_restart";

/// moto looks at a condition and then writes, not in one step: under load, two of sixteen racing
/// creates can win. Races are for SeaweedFS and for memory.
const RACES: &[&str] = &[
    KILLS,
    "forty_writers_leave_the_highest",
    "racing_holders_of_one_number_are_one",
    "a_read_modify_write_with_a_raise_loses_nothing",
];

struct Memory(Arc<InMemory>);

impl Memory {
    fn new() -> Self {
        Self(Arc::new(InMemory::new()))
    }

    async fn two(&self) -> [Arc<dyn FencedStore>; 2] {
        let open = async || {
            let store: Arc<InMemory> = Arc::clone(&self.0);
            let options = ObjectOptions::default();
            Arc::new(options.open_fenced_store(store, "a/b").await.unwrap())
        };
        [open().await, open().await]
    }
}

#[async_trait::async_trait]
impl FenceHarness for Memory {
    fn clients(&self) -> [Arc<dyn FencedStore>; 2] {
        pollster::block_on(self.two())
    }

    async fn restart(&self) -> Option<[Arc<dyn FencedStore>; 2]> {
        Some(self.two().await)
    }
}

mod memory {
    use super::*;
    fencelock::fence_conformance!(Memory::new());
}

struct Values {
    case: u32,
    running: Option<Running>,
    skips: &'static [&'static str],
}

struct Running {
    own: Option<Mutex<S3>>,
    clients: [Arc<dyn FencedStore>; 2],
}

impl Values {
    /// On a server of the case's own, or on the one that they share.
    async fn new(
        own: Option<fn() -> S3>,
        shared: fn() -> &'static S3,
        skips: &'static [&'static str],
    ) -> Self {
        static ALL: LazyLock<Vec<&str>> =
            LazyLock::new(|| fence::CASES.iter().map(|case| case.name).collect());
        let mut values = Self {
            case: CASES.fetch_add(1, Ordering::SeqCst),
            running: None,
            skips: &ALL,
        };
        if !skipped(SERVER) {
            let own = own.map(|start| start());
            let server = own.as_ref().unwrap_or_else(|| shared());
            let clients = values.two(server.address()).await;
            values.skips = skips;
            let own = own.map(Mutex::new);
            values.running = Some(Running { own, clients });
        }
        values
    }

    async fn two(&self, address: std::net::SocketAddr) -> [Arc<dyn FencedStore>; 2] {
        let url = fencelock_testbed::s3::url(address, &format!("case-{}", self.case));
        let open = async || Arc::new(open(&url).await.unwrap());
        [open().await, open().await]
    }
}

#[async_trait::async_trait]
impl FenceHarness for Values {
    fn clients(&self) -> [Arc<dyn FencedStore>; 2] {
        self.running.as_ref().unwrap().clients.clone()
    }

    async fn restart(&self) -> Option<[Arc<dyn FencedStore>; 2]> {
        let address = {
            let own = self.running.as_ref()?.own.as_ref()?;
            let mut server = own.lock().unwrap();
            server.kill_and_restart();
            server.address()
        };
        Some(self.two(address).await)
    }

    fn skips(&self) -> &'static [&'static str] {
        self.skips
    }
}

fn the_moto() -> &'static S3 {
    static SERVER: OnceLock<S3> = OnceLock::new();
    SERVER.get_or_init(S3::moto)
}

fn the_seaweed() -> &'static S3 {
    static SERVER: OnceLock<S3> = OnceLock::new();
    SERVER.get_or_init(S3::seaweed)
}

mod moto {
    use super::*;
    fencelock::fence_conformance!(Values::new(None, the_moto, RACES).await);
}

mod seaweed {
    use super::*;
    fencelock::fence_conformance!(Values::new(None, the_seaweed, &[KILLS]).await);
}

#[test]
fn watermarks_survive_a_killed_server() {
    fence::run(KILLS, Values::new(Some(S3::seaweed), the_seaweed, &[]));
}
