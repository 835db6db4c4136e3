//! Waiters, connections, expiry, and what goes over the wire.

use std::sync::Arc;
use std::time::Duration;

use fencelock::lease::{Attempt, Release, Renewal};
use fencelock::nats::NatsStore;
use fencelock::{LeaseStore, Locks};
use fencelock_testbed::nats::Nats;
use fencelock_testbed::proxy::Proxy;
use fencelock_testbed::skip;

use crate::lab::*;

/// Less than a waiter's own looks are apart.
const AT_ONCE: Duration = Duration::from_millis(1_000);

#[tokio::test]
async fn trips_are_few_and_renewals_are_not_waited_for_one_by_one() {
    skip!("nats");
    let lab = Lab::new().await;
    let trips = || lab.proxy.traffic().trips;
    let (mut requests, mut leases) = (Vec::new(), Vec::new());
    for i in 0..50 {
        let request = request(&format!("job-{i}"));
        let grant = take(&lab.store, &request).await;
        leases.push((lease(&request, &grant), request.ttl));
        requests.push(request);
    }
    let before = trips();
    let answers = lab.store.renew(&leases).await;
    assert!(
        answers.iter().all(|a| matches!(a, Renewal::Renewed)),
        "{answers:?}"
    );
    assert!(
        trips() - before <= 25,
        "a batch of renewals: {}",
        trips() - before
    );
    let before = trips();
    for (lease, _) in &leases {
        lab.store.release(lease, Duration::ZERO).await.unwrap();
    }
    assert!(trips() - before <= 50, "releases: {}", trips() - before);
    let before = trips();
    for request in &requests {
        take(&lab.store, &another(request)).await;
    }
    assert_eq!(trips() - before, 50, "acquires of what we gave up");
    let new = request("new");
    let before = trips();
    take(&lab.store, &new).await;
    assert!(
        trips() - before <= 3,
        "a look, and a grant: {}",
        trips() - before
    );
    assert_eq!(lab.proxy.open_connections(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_locks_share_three_connections() {
    skip!("nats");
    let nats = Nats::start();
    let proxy = Proxy::start(nats.address());
    let url = format!("nats://{}", proxy.address());
    let locks = Locks::open(&url).await.unwrap();
    let ttl = Duration::from_secs(2);
    let mut guards = Vec::new();
    for i in 0..200 {
        let name = format!("many-{i}");
        guards.push(locks.acquire(&name).ttl(ttl).wait(LIMIT).await.unwrap());
    }
    let mut waiters = Vec::new();
    for i in 0..20 {
        let acquire = locks.acquire(format!("many-{i}")).wait(LIMIT);
        waiters.push(tokio::spawn(acquire.into_future()));
    }
    tokio::time::sleep(3 * ttl).await;
    for guard in &guards {
        guard.check().unwrap();
    }
    let open = proxy.open_connections();
    assert!(open <= 3, "{open}");
    let other = NatsStore::open(&nats.url()).await.unwrap();
    for i in 0..200 {
        assert_eq!(grants(&other, &format!("many-{i}")).await, 1, "many-{i}");
    }
    drop(guards);
    for waiter in waiters {
        waiter.await.unwrap().unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn one_try_after_a_dead_holders_ttl_succeeds_and_none_before() {
    skip!("nats");
    let nats = Nats::start();
    let holder = NatsStore::open(&nats.url()).await.unwrap();
    let mut held = request("dead");
    held.ttl = millis(1_000);
    let started = now();
    let grant = take(&holder, &held).await;
    drop(holder);
    // Others who have seen nothing of it before.
    let early = NatsStore::open(&nats.url()).await.unwrap();
    let attempt = early.acquire(&another(&held)).await.unwrap();
    if started.elapsed() < Duration::from_millis(900) {
        assert!(matches!(attempt, Attempt::Held(_)), "{attempt:?}");
    }
    tokio::time::sleep(Duration::from_millis(1_050)).await;
    let late = NatsStore::open(&nats.url()).await.unwrap();
    assert!(take(&late, &another(&held)).await.token > grant.token);
}

#[tokio::test]
async fn a_server_that_was_down_or_paused_counts_that_time_too() {
    skip!("nats");
    let mut nats = Nats::start();
    let store = NatsStore::open(&nats.url()).await.unwrap();
    let mut held = request("dead");
    held.ttl = millis(1_000);
    let mut last = take(&store, &held).await;
    nats.pause();
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    nats.server().resume();
    held = another(&held);
    let next = take(&store, &held).await;
    assert!(next.token > last.token);
    last = next;
    nats.server().kill();
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    nats.kill_and_restart();
    assert!(take(&store, &another(&held)).await.token > last.token);
}

#[tokio::test]
async fn a_lapsed_grant_is_neither_renewed_nor_released() {
    skip!("nats");
    let lab = Lab::new().await;
    let mut held = request("lapsed");
    held.ttl = millis(300);
    let grant = take(&lab.store, &held).await;
    tokio::time::sleep(Duration::from_millis(350)).await;
    let lease = lease(&held, &grant);
    let answers = lab.store.renew(&[(lease.clone(), held.ttl)]).await;
    assert!(matches!(&answers[..], [Renewal::Lost]), "{answers:?}");
    let released = lab.store.release(&lease, Duration::ZERO).await.unwrap();
    assert_eq!(released, Release::NotHeld);
}

#[tokio::test]
async fn a_renewal_by_another_process_counts_from_then_on() {
    skip!("nats");
    let lab = Lab::new().await;
    let mut held = request("kept");
    held.ttl = millis(1_000);
    let grant = take(&lab.store, &held).await;
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        let answers = lab.other.renew(&[(lease(&held, &grant), held.ttl)]).await;
        assert!(matches!(&answers[..], [Renewal::Renewed]), "{answers:?}");
        refused(&lab.store, &another(&held)).await;
    }
}

#[tokio::test]
async fn all_permits_of_a_process_are_renewed_at_once() {
    skip!("nats");
    let lab = Lab::new().await;
    let mut leases = Vec::new();
    for _ in 0..40 {
        let mut permit = another(&request("many"));
        permit.permits = 50;
        let grant = take(&lab.store, &permit).await;
        leases.push((lease(&permit, &grant), permit.ttl));
    }
    // Somebody else's, and one that was never granted.
    let mut theirs = another(&request("many"));
    theirs.permits = 50;
    take(&lab.other, &theirs).await;
    let mut unlike = leases[7].clone();
    unlike.0.holder = another(&theirs).holder;
    leases.insert(3, unlike);
    let before = lab.proxy.traffic().trips;
    let answers = lab.store.renew(&leases).await;
    assert!(lab.proxy.traffic().trips - before <= 3);
    for (index, answer) in answers.iter().enumerate() {
        let right = match answer {
            Renewal::Renewed => index != 3,
            Renewal::Lost => index == 3,
            _ => false,
        };
        assert!(right, "index={index} {answer:?}");
    }
    assert_eq!(grants(&lab.other, "many").await, 41);
}

#[tokio::test]
async fn a_waiter_hears_of_a_release_at_once() {
    skip!("nats");
    let lab = Lab::new().await;
    for round in 0..20 {
        let held = another(&request("busy"));
        let grant = take(&lab.other, &held).await;
        let locks = Locks::new(lab.store.clone());
        let waiting = tokio::spawn(locks.acquire("busy").wait(LIMIT).into_future());
        tokio::time::sleep(Duration::from_millis(100)).await;
        let started = now();
        give(&lab.other, &held, &grant).await;
        let guard = waiting.await.unwrap().unwrap();
        assert!(
            started.elapsed() < AT_ONCE,
            "round={round} {:?}",
            started.elapsed()
        );
        assert!(guard.token() > grant.token);
        guard.release().await.unwrap();
    }
}

#[tokio::test]
async fn a_waiter_hears_of_a_break_and_of_a_shorter_lease() {
    skip!("nats");
    let lab = Lab::new().await;
    let held = request("busy");
    let grant = take(&lab.other, &held).await;
    let mut watch = lab.store.watch(&lock("busy")).await.unwrap();
    let quiet = tokio::time::timeout(Duration::from_millis(200), watch.changed()).await;
    assert!(quiet.is_err(), "told of nothing");
    let answers = lab.other.renew(&[(lease(&held, &grant), held.ttl)]).await;
    assert!(matches!(&answers[..], [Renewal::Renewed]));
    let quiet = tokio::time::timeout(Duration::from_millis(200), watch.changed()).await;
    assert!(quiet.is_err(), "a renewal makes no room");
    lab.other.renew(&[(lease(&held, &grant), secs(5))]).await;
    tokio::time::timeout(AT_ONCE, watch.changed())
        .await
        .unwrap();
    lab.other.break_lock(&lock("busy")).await.unwrap();
    tokio::time::timeout(AT_ONCE, watch.changed())
        .await
        .unwrap();
    // What comes while nobody waits is told to the next call.
    take(&lab.other, &another(&held)).await;
    lab.other.break_lock(&lock("busy")).await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    tokio::time::timeout(AT_ONCE, watch.changed())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_waiter_hears_of_what_happened_while_its_connection_was_down() {
    skip!("nats");
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
    skip!("nats");
    let lab = Lab::new().await;
    let mut held = request("dead");
    held.ttl = secs(4);
    take(&lab.other, &held).await;
    let locks = Locks::new(lab.store.clone());
    let before = lab.proxy.traffic().trips;
    let guard = locks.acquire("dead").wait(LIMIT).await.unwrap();
    let trips = lab.proxy.traffic().trips - before;
    assert!(trips < 30, "{trips} in four seconds");
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_contenders_never_hold_it_together() {
    skip!("nats");
    let nats = Nats::start();
    let (inside, entries) = (
        Arc::new(std::sync::Mutex::new(0)),
        Arc::new(std::sync::Mutex::new(Vec::new())),
    );
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let locks = Locks::open(&nats.url()).await.unwrap();
        let (inside, entries) = (Arc::clone(&inside), Arc::clone(&entries));
        tasks.push(tokio::spawn(async move {
            for _ in 0..20 {
                let guard = locks.acquire("one").wait(6 * LIMIT).await.unwrap();
                {
                    let mut inside = inside.lock().unwrap();
                    *inside += 1;
                    assert_eq!(*inside, 1);
                    entries.lock().unwrap().push(guard.token());
                }
                tokio::task::yield_now().await;
                *inside.lock().unwrap() -= 1;
                guard.release().await.unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let entries = entries.lock().unwrap();
    assert_eq!(entries.len(), 160);
    assert!(entries.is_sorted_by(|a, b| a < b), "{entries:?}");
}
