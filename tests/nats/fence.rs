//! Fenced values: every case, and what is NATS's own.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::time::Duration;

use fencelock::conformance::{FenceHarness, fence};
use fencelock::fence::{Domain, HolderTag};
use fencelock::nats::FencedNats;
use fencelock::{ErrorKind, Fence, Fenced, FencedStore, FencingToken, open};
use fencelock_testbed::nats::{Nats, SERVER};
use fencelock_testbed::proxy::Proxy;
use fencelock_testbed::{skip, skipped};

use crate::lab::*;
use crate::network::lose_answer;
use crate::swaps;

/// What a server takes where nothing is said.
const MAX_PAYLOAD: usize = 1 << 20;

/// The server of those cases that do not kill it.
fn shared() -> &'static Nats {
    static NATS: OnceLock<Nats> = OnceLock::new();
    NATS.get_or_init(Nats::start)
}

static CASES: AtomicU32 = AtomicU32::new(0);

/// Run below, on a server of its own.
const KILLS: &str = "watermarks_survive_a_restart";

struct Values {
    case: u32,
    running: Option<Running>,
}

struct Running {
    own: Option<Mutex<Nats>>,
    clients: [Arc<dyn FencedStore>; 2],
}

impl Values {
    async fn new(own: impl FnOnce() -> Option<Nats>) -> Self {
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
        let url = format!("{url}?bucket=values-{}", self.case);
        let open = async || Arc::new(FencedNats::open(&url).await.unwrap());
        [open().await, open().await]
    }
}

#[async_trait::async_trait]
impl FenceHarness for Values {
    fn clients(&self) -> [Arc<dyn FencedStore>; 2] {
        self.running.as_ref().unwrap().clients.clone()
    }

    fn large_value_bytes(&self) -> usize {
        MAX_PAYLOAD - 2_048
    }

    async fn restart(&self) -> Option<[Arc<dyn FencedStore>; 2]> {
        let own = self.running.as_ref()?.own.as_ref()?;
        let url = {
            let mut nats = own.lock().unwrap();
            nats.kill_and_restart();
            nats.url()
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
    fence::run(KILLS, Values::new(|| Some(Nats::start())));
}

fn fence(token: u64, holder: u8, seq: u64) -> Fence {
    let domain = Domain::new("nats", "r", &lock("l"));
    let token = FencingToken::new(token).unwrap();
    Fence::new(token, HolderTag::from_bytes([holder; 16]), domain).with_seq(seq)
}

#[tokio::test]
async fn a_write_whose_answer_was_lost_is_applied_once() {
    skip!("nats");
    let nats = Nats::start();
    let proxy = Proxy::start(nats.address());
    let url = format!("nats://{}", proxy.address());
    let store = Fenced::new(FencedNats::open(&url).await.unwrap());
    store.put("r", "first", fence(5, 1, 1)).await.unwrap();
    let again = fence(5, 1, 2);
    let direct = Fenced::new(FencedNats::open(&nats.url()).await.unwrap());
    let put = store.put("r", "second", again.clone());
    let written = async || {
        let seen = direct.get("r").await.unwrap();
        seen.watermark.is_some_and(|watermark| watermark.seq == 2)
    };
    let error = lose_answer(&proxy, put, written).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    let written = store.put("r", "second", again).await.unwrap();
    assert!(!written.applied, "it was applied before");
    let value = direct.get("r").await.unwrap().value.unwrap();
    assert_eq!(&value.into_bytes(100).unwrap()[..], b"second");
}

#[tokio::test]
async fn a_value_above_the_limit_is_refused_with_the_limit_before_it_is_sent() {
    skip!("nats");
    let nats = Nats::with("max_payload: 100000\n");
    let proxy = Proxy::start(nats.address());
    let url = format!("nats://{}", proxy.address());
    let store = Fenced::new(FencedNats::open(&url).await.unwrap());
    store.put("r", "x", fence(1, 1, 1)).await.unwrap();
    let before = proxy.traffic().sent_bytes;
    let error = store.put("r", vec![0; 97_953], fence(1, 1, 2)).await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("limit_bytes=97952"), "{error}");
    assert_eq!(proxy.traffic().sent_bytes, before);
    store
        .put("r", vec![0; 97_952], fence(1, 1, 3))
        .await
        .unwrap();
    // Raised, it is written once more.
    let raised = store.raise("r", fence(2, 2, 1)).await.unwrap();
    assert_eq!(raised.value.unwrap().len(), 97_952);
}

#[tokio::test]
async fn a_paused_server_ends_a_write_in_time() {
    skip!("nats");
    let mut nats = Nats::start();
    let store = Fenced::new(FencedNats::open(&nats.url()).await.unwrap());
    store.put("r", "before", fence(1, 1, 1)).await.unwrap();
    nats.pause();
    let started = now();
    let error = store.put("r", "late", fence(1, 1, 2)).await.unwrap_err();
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    unsure(&error);
    nats.server().resume();
    store.put("r", "after", fence(1, 1, 3)).await.unwrap();
}

#[tokio::test]
async fn a_late_write_of_a_former_connection_does_not_undo_a_newer_one() {
    skip!("nats");
    let nats = Nats::start();
    let proxy = Proxy::start(nats.address());
    let url = format!("nats://{}", proxy.address());
    let store = Fenced::new(FencedNats::open(&url).await.unwrap());
    let direct = Fenced::new(FencedNats::open(&nats.url()).await.unwrap());
    store.put("r", "first", fence(33, 1, 1)).await.unwrap();
    // Judged, sent, and held on the way.
    proxy.delay(Duration::from_millis(1_000));
    let late = store.put("r", "old", fence(33, 1, 2));
    let newer = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        direct.raise("r", fence(34, 2, 1)).await.unwrap();
        direct.put("r", "new", fence(34, 2, 1)).await.unwrap();
    };
    let (late, ()) = tokio::join!(late, newer);
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Fenced);
    let value = direct.get("r").await.unwrap().value.unwrap();
    assert_eq!(&value.into_bytes(100).unwrap()[..], b"new");
}

#[tokio::test]
async fn a_damaged_watermark_is_refused() {
    skip!("nats");
    let nats = Nats::start();
    let store = Fenced::new(FencedNats::open(&nats.url()).await.unwrap());
    store.put("r", "kept", fence(5, 1, 1)).await.unwrap();
    let info = nats.ask(
        "$JS.API.STREAM.INFO.KV_fencelock",
        r#"{"subjects_filter":">"}"#,
    );
    let subject = info
        .split('"')
        .find(|text| text.ends_with(".value.r"))
        .unwrap();
    for bad in [
        "",
        "Fencelock-Watermark: {}\r\n",
        "Fencelock-Watermark: {\"name\":\"x\",\"token\":1}\r\n",
        "Fencelock-Watermark: {\"name\":\"r\",\"token\":0}\r\n",
    ] {
        let acknowledged = nats.publish(subject, bad, "x");
        assert!(acknowledged.contains("\"seq\""), "{acknowledged}");
        let error = store.put("r", "x", fence(9, 1, 2)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{bad}: {error:?}");
        assert_eq!(store.get("r").await.unwrap_err().kind(), ErrorKind::Corrupt);
    }
}

#[tokio::test]
async fn a_destination_is_a_url_with_a_key() {
    skip!("nats");
    let nats = Nats::start();
    let destination = format!("{}/?bucket=b&key=payments/today.csv", nats.url());
    let (store, resource) = open::destination(&destination).await.unwrap();
    store.put(&resource, "data", fence(5, 1, 1)).await.unwrap();
    let error = store.put(&resource, "old", fence(4, 2, 1)).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Fenced);
    let error = open::destination(&nats.url()).await.unwrap_err();
    assert!(error.to_string().contains("?key=NAME"), "{error}");
}

/// A server, values behind a proxy, and the same reached directly.
async fn remembering() -> (Nats, Proxy, Fenced, Fenced) {
    let nats = Nats::start();
    let proxy = Proxy::start(nats.address());
    let through = format!("nats://{}", proxy.address());
    let store = Fenced::new(FencedNats::open(&through).await.unwrap());
    let direct = Fenced::new(FencedNats::open(&nats.url()).await.unwrap());
    (nats, proxy, store, direct)
}

#[tokio::test]
async fn a_steady_write_takes_one_trip() {
    skip!("nats");
    let (_nats, proxy, store, direct) = remembering().await;
    swaps::a_steady_write_takes_one_trip(&proxy, &store, &direct, 2, 3).await;
}

#[tokio::test]
async fn what_is_remembered_decides_nothing() {
    skip!("nats");
    let (_nats, proxy, store, direct) = remembering().await;
    swaps::what_is_remembered_decides_nothing(&proxy, &store, &direct).await;
}

#[tokio::test]
async fn many_writers_of_one_process_are_all_applied() {
    skip!("nats");
    let (_nats, _proxy, store, _) = remembering().await;
    swaps::many_writers_of_one_process_are_all_applied(&store).await;
}

/// Puts, and again where the connection is found broken only then.
async fn put_over_a_new_connection(
    store: &Fenced,
    value: &'static str,
    fence: &Fence,
) -> fencelock::Result<fencelock::fence::Written> {
    let put = async {
        loop {
            match store.put("r", value, fence).await {
                Err(error) if error.kind() == ErrorKind::Indeterminate => {}
                answer => return answer,
            }
        }
    };
    let bound = Duration::from_secs(60);
    tokio::time::timeout(bound, put).await.unwrap()
}

// A bucket that lost its last messages tells their sequences again: what is remembered has one that
// somebody else's message has now.
#[tokio::test]
async fn what_is_remembered_from_before_a_loss_admits_nobody() {
    skip!("nats");
    let mut nats = Nats::start();
    let open = async |nats: &Nats| Fenced::new(FencedNats::open(&nats.url()).await.unwrap());
    let store = open(&nats).await;
    store.put("r", "first", fence(5, 1, 1)).await.unwrap();
    let data = nats.server().dir().join("jetstream");
    let backup = nats.server().dir().join("backup");
    nats.server().stop();
    fencelock_testbed::process::copy_dir(&data, &backup);
    nats.kill_and_restart();
    // The first connection went with the server.
    put_over_a_new_connection(&store, "lost", &fence(50, 1, 1))
        .await
        .unwrap();
    nats.server().kill();
    std::fs::remove_dir_all(&data).unwrap();
    std::fs::rename(&backup, &data).unwrap();
    nats.kill_and_restart();
    let newer = open(&nats).await;
    newer.put("r", "newer", fence(60, 2, 1)).await.unwrap();
    let late = put_over_a_new_connection(&store, "late", &fence(51, 1, 1)).await;
    assert_eq!(late.unwrap_err().kind(), ErrorKind::Fenced);
    let value = newer.get("r").await.unwrap().value.unwrap();
    assert_eq!(&value.into_bytes(100).unwrap()[..], b"newer");
}
