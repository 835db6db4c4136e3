//! What has to hold of fenced values that are replaced on condition, where what a process remembers
//! of them saves it a read.

use std::time::{Duration, Instant};

use fencelock::fence::{Domain, HolderTag};
use fencelock::{ErrorKind, Fence, Fenced, FencingToken, Result};
use fencelock_testbed::proxy::Proxy;

/// What a slow network takes in each direction: far more than a server needs for an answer.
const DELAY: Duration = Duration::from_millis(150);

pub(crate) fn fence(token: u64, holder: u8, seq: u64) -> Fence {
    let domain = Domain::new("swaps", "r", &"l".parse().unwrap());
    let token = FencingToken::new(token).unwrap();
    Fence::new(token, HolderTag::from_bytes([holder; 16]), domain).with_seq(seq)
}

pub(crate) async fn value(store: &Fenced) -> String {
    let bytes = store.get("r").await.unwrap().value.unwrap();
    String::from_utf8(bytes.into_bytes(100).unwrap().to_vec()).unwrap()
}

/// What `work` yields, and how many times one after the other it crosses the network both ways.
async fn trips<T>(proxy: &Proxy, work: impl Future<Output = T>) -> (T, u128) {
    proxy.delay(DELAY);
    let started = now();
    let answer = work.await;
    let trips = started.elapsed().as_millis() / (2 * DELAY).as_millis();
    proxy.delay(Duration::ZERO);
    (answer, trips)
}

#[expect(clippy::disallowed_methods, reason = "a test measures real time")]
fn now() -> Instant {
    Instant::now()
}

#[track_caller]
fn refused<T>(answer: Result<T>) {
    let error = answer.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error:?}");
}

/// Steady writes take one trip, `raise` as many as are said, and whatever others do in between costs
/// at most a look: `after_others` is what a write takes then.
pub(crate) async fn a_steady_write_takes_one_trip(
    proxy: &Proxy,
    store: &Fenced,
    direct: &Fenced,
    raise: u128,
    after_others: u128,
) {
    // The connection that is kept is made.
    store.get("r").await.unwrap();
    let (_, cold) = trips(proxy, store.put("r", "first", fence(5, 1, 1))).await;
    assert!((2..=3).contains(&cold), "{cold}");
    // A busy machine only adds: the least is meant.
    let mut puts = Vec::new();
    for seq in 2..5 {
        let (written, took) = trips(proxy, store.put("r", "again", fence(5, 1, seq))).await;
        assert!(written.unwrap().applied);
        puts.push(took);
    }
    assert_eq!(puts.iter().min(), Some(&1), "{puts:?}");
    let mut others = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..3 {
        let token = 10 + round;
        let (seen, took) = trips(proxy, store.raise("r", fence(token, 1, 1))).await;
        assert!(seen.unwrap().value.is_some_and(|value| !value.is_empty()));
        others[0].push(took);
        let (deleted, took) = trips(proxy, store.delete("r", fence(token, 1, 2))).await;
        assert!(deleted.unwrap().applied);
        others[1].push(took);
        let (written, took) = trips(proxy, store.put("r", "anew", fence(token, 1, 3))).await;
        assert!(written.unwrap().applied);
        others[2].push(took);
    }
    let least = others.map(|took| took.into_iter().min());
    assert_eq!(least, [Some(raise), Some(1), Some(1)]);
    // Others write in turn.
    let mut turns = Vec::new();
    for turn in 1..=3 {
        let other = direct.put("r", "theirs", fence(19 + 2 * turn, 2, 1)).await;
        assert!(other.unwrap().applied);
        let put = store.put("r", "ours", fence(20 + 2 * turn, 1, 1));
        let (written, took) = trips(proxy, put).await;
        assert!(written.unwrap().applied);
        assert_eq!(value(direct).await, "ours");
        turns.push(took);
    }
    assert_eq!(turns.into_iter().min(), Some(after_others));
}

/// Nobody is refused, and no write is taken for a repeated one, by what is only remembered; and
/// whoever is stale is refused though what is remembered would admit it.
pub(crate) async fn what_is_remembered_decides_nothing(
    proxy: &Proxy,
    store: &Fenced,
    direct: &Fenced,
) {
    let mine = fence(33, 1, 1);
    store.put("r", "mine", mine.clone()).await.unwrap();
    for (stale, what) in [
        (fence(32, 1, 2), "a smaller token"),
        (fence(33, 2, 2), "another holder"),
    ] {
        let (answer, took) = trips(proxy, store.put("r", "stale", stale)).await;
        refused(answer);
        assert!(took >= 1, "{what} was refused without a look");
    }
    let (again, took) = trips(proxy, store.put("r", "again", mine)).await;
    assert!(!again.unwrap().applied, "it was applied before");
    assert!(took >= 1, "acknowledged without a look");
    // Remembered: 33. What is there: 34.
    direct.raise("r", fence(34, 2, 1)).await.unwrap();
    refused(store.put("r", "late", fence(33, 1, 2)).await);
    refused(store.delete("r", fence(33, 1, 3)).await);
    refused(store.raise("r", fence(33, 1, 4)).await);
    assert_eq!(value(direct).await, "mine");
    // Bound to another lock meanwhile.
    store.put("r", "ours", fence(35, 1, 1)).await.unwrap();
    let elsewhere = Fence::new(
        FencingToken::new(36).unwrap(),
        HolderTag::from_bytes([3; 16]),
        Domain::new("swaps", "r", &"another".parse().unwrap()),
    );
    direct.rebind("r", &elsewhere).await.unwrap();
    let error = store.put("r", "unbound", fence(37, 1, 1)).await;
    assert_eq!(error.unwrap_err().kind(), ErrorKind::DomainMismatch);
    assert_eq!(value(direct).await, "ours");
}

/// Those of one process write at once: each is applied, in one order, and the last is what stays.
pub(crate) async fn many_writers_of_one_process_are_all_applied(store: &Fenced) {
    let puts = (1..=16).map(|number: u64| {
        let store = store.clone();
        async move {
            // Bare numbers: none is a repeat of another.
            let put = store.put("r", number.to_string(), FencingToken::new(5).unwrap());
            put.await.unwrap().applied
        }
    });
    let applied = futures_util::future::join_all(puts).await;
    assert!(applied.into_iter().all(|applied| applied));
    let raised = store.raise("r", fence(6, 1, 1)).await.unwrap();
    assert!(raised.value.is_some());
    refused(store.put("r", "5", FencingToken::new(5).unwrap()).await);
}
