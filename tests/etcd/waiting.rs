//! Waiters are woken by the cluster, and granted only what is theirs.

use std::time::{Duration, Instant};

use fencelock::lease::Attempt;
use fencelock::{LeaseStore, Locks};
use fencelock_testbed::skip;

use crate::lab::*;

const LIMIT: Duration = Duration::from_secs(20);

/// Less than a waiter's own looks are apart.
const AT_ONCE: Duration = Duration::from_millis(1_500);

#[expect(clippy::disallowed_methods, reason = "a test measures real time")]
fn now() -> Instant {
    Instant::now()
}

#[tokio::test]
async fn a_grant_whose_lease_lapsed_on_the_way_is_none() {
    skip!("etcd");
    let lab = Lab::new().await;
    let mut request = request("slow");
    request.ttl = secs(1);
    // The lease that is to carry the grant lapses before the grant arrives, each time.
    lab.proxy.delay(Duration::from_millis(1_100));
    let attempt = lab.store.acquire(&request).await;
    assert!(!matches!(attempt, Ok(Attempt::Granted(_))), "{attempt:?}");
    assert_eq!(grants(&lab.other, "slow").await, 0);
    lab.proxy.delay(Duration::ZERO);
    take(&lab.other, &another(&request)).await;
}

#[tokio::test]
async fn a_waiter_that_was_cut_off_for_its_ttl_is_granted_anew_or_not_at_all() {
    skip!("etcd");
    let lab = Lab::new().await;
    let held = request("busy");
    let grant = take(&lab.other, &held).await;
    let locks = Locks::new(lab.store.clone());
    let ttl = Duration::from_secs(2);
    let waiting = locks.acquire("busy").ttl(ttl).wait(LIMIT).into_future();
    let waiting = tokio::spawn(waiting);
    tokio::time::sleep(Duration::from_millis(300)).await;
    lab.proxy.hold();
    give(&lab.other, &held, &grant).await;
    tokio::time::sleep(2 * ttl).await;
    lab.proxy.pass();
    let guard = waiting.await.unwrap().unwrap();
    guard.check().unwrap();
    let state = lab.other.inspect(&lock("busy")).await.unwrap().unwrap();
    assert_eq!(state.holders.len(), 1);
    assert_eq!(state.holders[0].token, guard.token());
    assert!(guard.token() > grant.token);
}

#[tokio::test]
async fn a_waiter_hears_of_a_release_at_once() {
    skip!("etcd");
    let lab = Lab::new().await;
    let held = request("busy");
    let grant = take(&lab.other, &held).await;
    let locks = Locks::new(lab.store.clone());
    let waiting = tokio::spawn(locks.acquire("busy").wait(LIMIT).into_future());
    tokio::time::sleep(Duration::from_millis(500)).await;
    let started = now();
    give(&lab.other, &held, &grant).await;
    let guard = waiting.await.unwrap().unwrap();
    assert!(started.elapsed() < AT_ONCE, "{:?}", started.elapsed());
    assert!(guard.token() > grant.token);
}

#[tokio::test]
async fn a_waiter_hears_of_a_holder_that_died() {
    skip!("etcd");
    let lab = Lab::new().await;
    let mut held = request("dead");
    held.ttl = secs(2);
    let grant = take(&lab.other, &held).await;
    let locks = Locks::new(lab.store.clone());
    let started = now();
    let guard = locks.acquire("dead").wait(LIMIT).await.unwrap();
    assert!(guard.token() > grant.token);
    let waited = started.elapsed();
    assert!(waited < Duration::from_secs(6), "{waited:?}");
}

#[tokio::test]
async fn a_waiter_hears_of_what_happened_while_its_stream_was_down() {
    skip!("etcd");
    let lab = Lab::new().await;
    for round in 0..3 {
        let held = another(&request("busy"));
        let grant = take(&lab.other, &held).await;
        let mut watch = lab.store.watch(&lock("busy")).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        lab.proxy.refuse();
        lab.proxy.cut();
        give(&lab.other, &held, &grant).await;
        lab.proxy.pass();
        let heard = tokio::time::timeout(LIMIT, watch.changed()).await;
        assert!(heard.is_ok(), "round={round}");
    }
}

#[tokio::test]
async fn a_waiter_does_not_ask_again_and_again() {
    skip!("etcd");
    let lab = Lab::new().await;
    let mut held = request("dead");
    held.ttl = secs(4);
    take(&lab.other, &held).await;
    let locks = Locks::new(lab.store.clone());
    let before = lab.proxy.traffic().trips;
    let guard = locks.acquire("dead").wait(LIMIT).await.unwrap();
    // A connection and its greeting, a few looks, a grant.
    let trips = lab.proxy.traffic().trips - before;
    assert!(trips < 30, "{trips} in four seconds");
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_waiter_hears_though_what_it_knew_is_compacted() {
    skip!("etcd");
    let lab = Lab::new().await;
    let held = request("busy");
    let grant = take(&lab.other, &held).await;
    let put = |i: u32| lab.etcd.ctl(&["put", "filler", &i.to_string()]);
    for i in 0..20 {
        let _ = put(i);
    }
    let status = lab.etcd.ctl(&["endpoint", "status", "-w", "fields"]);
    let revision = status.lines().find(|line| line.starts_with("\"Revision\""));
    let revision = revision.and_then(|line| line.rsplit_once(" : ")).unwrap().1;
    let _ = lab.etcd.ctl(&["compaction", revision]);
    let mut watch = lab.store.watch(&held.name).await.unwrap();
    let quiet = Duration::from_millis(700);
    let mut hints = 0;
    while tokio::time::timeout(quiet, watch.changed()).await.is_ok() {
        hints += 1;
        assert!(hints < 5, "told again and again of nothing");
    }
    assert!(hints > 0, "whoever missed something has to ask");
    give(&lab.other, &held, &grant).await;
    let heard = tokio::time::timeout(AT_ONCE, watch.changed()).await;
    assert!(heard.is_ok());
}
