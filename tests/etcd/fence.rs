//! Fenced values: every case, and what is etcd's own.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::time::{Duration, Instant};

use fencelock::conformance::{FenceHarness, fence};
use fencelock::etcd::client::{Client, Txn, TxnOp};
use fencelock::etcd::{FencedEtcd, VALUE_MAX_BYTES};
use fencelock::fence::{Domain, HolderTag};
use fencelock::{ErrorKind, Fence, Fenced, FencedStore, FencingToken, ResourceName, open};
use fencelock_testbed::etcd::{Etcd, SERVER};
use fencelock_testbed::proxy::Proxy;
use fencelock_testbed::{skip, skipped};

use crate::lab::lock;
use crate::network::lose_answer;
use crate::swaps;

const LIMIT: Duration = Duration::from_secs(10);

/// The server of those cases that do not kill it.
fn shared() -> &'static Etcd {
    static ETCD: OnceLock<Etcd> = OnceLock::new();
    ETCD.get_or_init(Etcd::start)
}

static CASES: AtomicU32 = AtomicU32::new(0);

/// Run below, on a server of its own.
const KILLS: &str = "watermarks_survive_a_restart";

struct Values {
    case: u32,
    running: Option<Running>,
}

struct Running {
    own: Option<Mutex<Etcd>>,
    clients: [Arc<dyn FencedStore>; 2],
}

impl Values {
    async fn new(own: impl FnOnce() -> Option<Etcd>) -> Self {
        let case = CASES.fetch_add(1, Ordering::SeqCst);
        let mut values = Self {
            case,
            running: None,
        };
        if !skipped(SERVER) {
            let own = own();
            let url = own.as_ref().unwrap_or_else(|| shared()).url();
            let clients = values.open(&url).await;
            let own = own.map(Mutex::new);
            values.running = Some(Running { own, clients });
        }
        values
    }

    async fn open(&self, url: &str) -> [Arc<dyn FencedStore>; 2] {
        let url = format!("{url}?prefix=values-{}/", self.case);
        let open = async || Arc::new(FencedEtcd::open(&url).await.unwrap());
        [open().await, open().await]
    }
}

#[async_trait::async_trait]
impl FenceHarness for Values {
    fn clients(&self) -> [Arc<dyn FencedStore>; 2] {
        self.running.as_ref().unwrap().clients.clone()
    }

    fn resource(&self, stem: &str) -> ResourceName {
        // A resource's name is its key, whatever the prefix.
        format!("{}/{stem}", self.case).parse().unwrap()
    }

    fn large_value_bytes(&self) -> usize {
        usize::try_from(VALUE_MAX_BYTES).unwrap()
    }

    async fn restart(&self) -> Option<[Arc<dyn FencedStore>; 2]> {
        let own = self.running.as_ref()?.own.as_ref()?;
        let url = {
            let mut etcd = own.lock().unwrap();
            etcd.kill_and_restart();
            etcd.url()
        };
        Some(self.open(&url).await)
    }

    fn skips(&self) -> &'static [&'static str] {
        static ALL: LazyLock<Vec<&str>> =
            LazyLock::new(|| fence::CASES.iter().map(|case| case.name).collect());
        match &self.running {
            None => &ALL,
            Some(Running { own: None, .. }) => &[KILLS],
            Some(_) => &[],
        }
    }
}

mod values {
    use super::*;
    fencelock::fence_conformance!(Values::new(|| None).await);
}

#[test]
fn watermarks_survive_a_killed_server() {
    fence::run(KILLS, Values::new(|| Some(Etcd::start())));
}

fn fence(token: u64, holder: u8, seq: u64) -> Fence {
    let domain = Domain::new("etcd", "r", &lock("l"));
    let token = FencingToken::new(token).unwrap();
    Fence::new(token, HolderTag::from_bytes([holder; 16]), domain).with_seq(seq)
}

#[tokio::test]
async fn a_write_whose_answer_was_lost_is_applied_once() {
    skip!("etcd");
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.address());
    let url = format!("etcd://{}", proxy.address());
    let store = Fenced::new(FencedEtcd::open(&url).await.unwrap());
    store.put("r", "first", fence(5, 1, 1)).await.unwrap();
    let again = fence(5, 1, 2);
    let direct = Fenced::new(FencedEtcd::open(&etcd.url()).await.unwrap());
    let put = store.put("r", "second", again.clone());
    let written = async || {
        let seen = direct.get("r").await.unwrap();
        seen.watermark.is_some_and(|watermark| watermark.seq == 2)
    };
    let error = lose_answer(&proxy, put, written).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    let written = store.put("r", "second", again).await.unwrap();
    assert!(!written.applied, "it was applied before");
    assert_eq!(
        etcd.ctl(&["get", "r", "--print-value-only"]).trim(),
        "second"
    );
}

#[tokio::test]
async fn a_value_above_the_limit_is_refused_with_the_limit() {
    skip!("etcd");
    let etcd = Etcd::start();
    let store = Fenced::new(FencedEtcd::open(&etcd.url()).await.unwrap());
    let size = usize::try_from(VALUE_MAX_BYTES).unwrap() + 1;
    let error = store.put("r", vec![0; size], fence(1, 1, 1)).await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("limit_bytes=1048576"), "{error}");
    assert!(store.get("r").await.unwrap().watermark.is_none());
}

#[tokio::test]
async fn a_paused_server_ends_a_write_in_time() {
    skip!("etcd");
    let mut etcd = Etcd::start();
    let store = Fenced::new(FencedEtcd::open(&etcd.url()).await.unwrap());
    store.put("r", "before", fence(1, 1, 1)).await.unwrap();
    etcd.server().pause();
    #[expect(clippy::disallowed_methods, reason = "a test measures real time")]
    let started = Instant::now();
    let error = store.put("r", "late", fence(1, 1, 2)).await.unwrap_err();
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    let kind = error.kind();
    let unsure = matches!(kind, ErrorKind::Indeterminate | ErrorKind::Unavailable);
    assert!(unsure, "{error:?}");
    etcd.server().resume();
    etcd.await_health();
    store.put("r", "after", fence(1, 1, 3)).await.unwrap();
}

#[tokio::test]
async fn a_transaction_of_ones_own_is_refused_once_it_is_stale() {
    skip!("etcd");
    let etcd = Etcd::start();
    let store = FencedEtcd::open(&etcd.url()).await.unwrap();
    let client = Client::connect([etcd.address().to_string()], None)
        .await
        .unwrap();
    let old = store.admit("both", fence(33, 1, 1)).await.unwrap();
    let new = store.admit("both", fence(34, 2, 1)).await.unwrap();
    let commit = async |admitted: fencelock::etcd::Admitted, text: &str| {
        let mut ops = admitted.operations;
        ops.push(TxnOp::put("one", text, None));
        ops.push(TxnOp::put("two", text, None));
        let txn = Txn::new().when(admitted.compares).and_then(ops);
        client.kv_client().txn(txn).await.unwrap().succeeded()
    };
    assert!(commit(new, "new").await);
    assert!(!commit(old, "old").await);
    let error = store.admit("both", fence(33, 1, 1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error:?}");
    assert!(store.admit("both", fence(34, 2, 1)).await.unwrap().repeated);
    for key in ["one", "two"] {
        assert_eq!(etcd.ctl(&["get", key, "--print-value-only"]).trim(), "new");
    }
}

#[tokio::test]
async fn the_keys_of_locks_are_no_resources() {
    skip!("etcd");
    let etcd = Etcd::start();
    let store = Fenced::new(FencedEtcd::open(&etcd.url()).await.unwrap());
    for key in ["fencelock/lock/a", "fencelock/realm", "fencelock/"] {
        let error = store.put(key, "x", fence(1, 1, 1)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{key}");
        assert_eq!(store.get(key).await.unwrap_err().kind(), ErrorKind::Invalid);
    }
}

#[tokio::test]
async fn a_damaged_watermark_is_refused() {
    skip!("etcd");
    let etcd = Etcd::start();
    let store = Fenced::new(FencedEtcd::open(&etcd.url()).await.unwrap());
    store.put("r", "kept", fence(5, 1, 1)).await.unwrap();
    for bad in [
        "",
        "{}",
        r#"{"name":"x","token":1}"#,
        r#"{"name":"r","token":0}"#,
    ] {
        let _ = etcd.ctl(&["put", "--", "fencelock/fence/r", bad]);
        let error = store.put("r", "x", fence(9, 1, 2)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{bad}: {error:?}");
        assert_eq!(store.get("r").await.unwrap_err().kind(), ErrorKind::Corrupt);
    }
    assert_eq!(etcd.ctl(&["get", "r", "--print-value-only"]).trim(), "kept");
}

#[tokio::test]
async fn a_destination_is_a_url_with_a_key() {
    skip!("etcd");
    let etcd = Etcd::start();
    let destination = format!("{}/?key=payments/today.csv", etcd.url());
    let (store, resource) = open::destination(&destination).await.unwrap();
    store.put(&resource, "data", fence(5, 1, 1)).await.unwrap();
    let error = store.put(&resource, "old", fence(4, 2, 1)).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Fenced);
    let plain = etcd.ctl(&["get", "payments/today.csv", "--print-value-only"]);
    assert_eq!(plain.trim(), "data");
    let error = open::destination(&etcd.url()).await.unwrap_err();
    assert!(error.to_string().contains("?key=NAME"), "{error}");
}

/// A server, values behind a proxy, and the same reached directly.
async fn remembering() -> (Etcd, Proxy, Fenced, Fenced) {
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.address());
    let through = format!("etcd://{}", proxy.address());
    let store = Fenced::new(FencedEtcd::open(&through).await.unwrap());
    let direct = Fenced::new(FencedEtcd::open(&etcd.url()).await.unwrap());
    (etcd, proxy, store, direct)
}

#[tokio::test]
async fn a_steady_write_takes_one_trip() {
    skip!("etcd");
    let (_etcd, proxy, store, direct) = remembering().await;
    swaps::a_steady_write_takes_one_trip(&proxy, &store, &direct, 1, 2).await;
}

#[tokio::test]
async fn what_is_remembered_decides_nothing() {
    skip!("etcd");
    let (_etcd, proxy, store, direct) = remembering().await;
    swaps::what_is_remembered_decides_nothing(&proxy, &store, &direct).await;
}

#[tokio::test]
async fn many_writers_of_one_process_are_all_applied() {
    skip!("etcd");
    let (_etcd, _proxy, store, _) = remembering().await;
    swaps::many_writers_of_one_process_are_all_applied(&store).await;
}

// A restored cluster tells its revisions again: what is remembered has one that somebody else's
// watermark has now.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_remembered_from_before_a_restore_admits_nobody() {
    skip!("etcd");
    let mut etcd = Etcd::start();
    let open = async |etcd: &Etcd| Fenced::new(FencedEtcd::open(&etcd.url()).await.unwrap());
    let store = open(&etcd).await;
    store.put("r", "first", fence(5, 1, 1)).await.unwrap();
    let snapshot = etcd.snapshot();
    let revision = |etcd: &Etcd| etcd.ctl(&["get", "r", "-w", "fields"]);
    store.put("r", "lost", fence(50, 1, 1)).await.unwrap();
    let lost = revision(&etcd);
    etcd.restore(&snapshot);
    let newer = open(&etcd).await;
    newer.put("r", "newer", fence(60, 2, 1)).await.unwrap();
    let modified = |fields: &str| {
        let line = fields.lines().find(|line| line.contains("ModRevision"));
        line.unwrap().to_owned()
    };
    assert_eq!(modified(&lost), modified(&revision(&etcd)), "told again");
    let error = store.put("r", "late", fence(51, 1, 1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error:?}");
    let value = etcd.ctl(&["get", "r", "--print-value-only"]);
    assert_eq!(value.trim(), "newer");
}

#[tokio::test]
async fn a_watermark_that_was_removed_is_not_remembered() {
    skip!("etcd");
    let etcd = Etcd::start();
    let store = Fenced::new(FencedEtcd::open(&etcd.url()).await.unwrap());
    store.put("r", "first", fence(50, 1, 1)).await.unwrap();
    let _ = etcd.ctl(&["del", "fencelock/fence/r"]);
    // As for a process that remembers nothing.
    store.put("r", "second", fence(40, 1, 2)).await.unwrap();
    let seen = store.get("r").await.unwrap();
    assert_eq!(seen.watermark.unwrap().token.get(), 40);
}
