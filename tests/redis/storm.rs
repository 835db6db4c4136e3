//! Locks and fenced values together, while the network and the server fail at random.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fencelock::redis::FencedRedis;
use fencelock::{ErrorKind, Fenced, Locks};
use fencelock_testbed::proxy::Proxy;
use fencelock_testbed::redis::Redis;
use fencelock_testbed::{Deadline, skip};

const WORKERS: usize = 6;
const STORM: Duration = Duration::from_secs(8);

/// What came of one reading, adding one, and writing.
#[derive(Default)]
struct Tally {
    certain: AtomicU64,
    unknown: AtomicU64,
    refused: AtomicU64,
    tokens: Mutex<BTreeSet<u64>>,
}

/// The value is the number of writes that were acknowledged, up to those of unknown outcome; no
/// token is told twice.
#[tokio::test(flavor = "multi_thread")]
async fn no_acknowledged_update_is_lost_in_a_storm() {
    skip!("redis");
    let mut redis = Redis::with(&["--appendonly", "yes", "--appendfsync", "always"]);
    let proxy = Arc::new(Proxy::start(redis.address()));
    let tally = Arc::new(Tally::default());
    let over = Arc::new(AtomicBool::new(false));
    let mut workers = Vec::new();
    for _ in 0..WORKERS {
        let url = format!("redis://{}", proxy.address());
        let locks = Locks::open(&format!("{url}?ttl=1s")).await.unwrap();
        let values = Fenced::new(FencedRedis::open(&url).await.unwrap());
        let (tally, over) = (Arc::clone(&tally), Arc::clone(&over));
        workers.push(tokio::spawn(async move {
            while !over.load(Ordering::SeqCst) {
                add_one(&locks, &values, &tally).await;
            }
            locks.drain().await;
        }));
    }
    let nemesis = Arc::clone(&proxy);
    let strikes = tokio::task::spawn_blocking(move || {
        let end = Deadline::after(STORM);
        let mut turn = 0;
        while !end.passed() {
            turn += 1;
            match turn % 8 {
                0 => nemesis.cut(),
                3 => {
                    redis.server().pause();
                    std::thread::sleep(Duration::from_millis(1_500));
                    redis.server().resume();
                }
                5 => redis.server().restart(),
                6 => nemesis.swallow_request(b""),
                _ => nemesis.swallow_answer(b""),
            }
            std::thread::sleep(Duration::from_millis(40));
        }
        redis
    });
    let redis = strikes.await.unwrap();
    over.store(true, Ordering::SeqCst);
    for worker in workers {
        worker.await.unwrap();
    }
    let value: u64 = redis.cli(&["GET", "sum"]).parse().unwrap();
    let certain = tally.certain.load(Ordering::SeqCst);
    let unknown = tally.unknown.load(Ordering::SeqCst);
    let refused = tally.refused.load(Ordering::SeqCst);
    let said = format!("value={value} certain={certain} unknown={unknown} refused={refused}");
    assert!((certain..=certain + unknown).contains(&value), "{said}");
    // It proved something only where enough went well, and enough did not.
    assert!(certain > 50 && unknown > 0, "{said}");
}

async fn add_one(locks: &Locks, values: &Fenced, tally: &Tally) {
    let Ok(guard) = locks.acquire("sum").wait(Duration::from_secs(5)).await else {
        return;
    };
    let token = guard.token().get();
    let new = tally.tokens.lock().unwrap().insert(token);
    assert!(new, "token {token} was told twice");
    let before = match values.raise("sum", &guard).await {
        Ok(snapshot) => snapshot.value,
        Err(_) => return,
    };
    let before: u64 = match before {
        None => 0,
        Some(body) => {
            let bytes = body.into_bytes(64).unwrap();
            std::str::from_utf8(&bytes).unwrap().parse().unwrap()
        }
    };
    let counted = match values.put("sum", (before + 1).to_string(), &guard).await {
        Ok(_) => &tally.certain,
        Err(error) => match error.kind() {
            ErrorKind::Indeterminate => &tally.unknown,
            _ => &tally.refused,
        },
    };
    counted.fetch_add(1, Ordering::SeqCst);
    // Sometimes the guard is only dropped.
    if !before.is_multiple_of(3) {
        let _ = guard.release().await;
    }
}
