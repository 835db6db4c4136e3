//! Waiters, connections, and what goes over the wire.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use fencelock::lease::Ttl;
use fencelock::redis::RedisStore;
use fencelock::{LeaseStore, Locks};
use fencelock_testbed::proxy::Proxy;
use fencelock_testbed::redis::Redis;
use fencelock_testbed::{eventually, skip};

use crate::lab::*;

const LIMIT: Duration = Duration::from_secs(20);

async fn locks(url: &str) -> Locks {
    Locks::open(&format!("{url}?ttl=600s")).await.unwrap()
}

#[tokio::test]
async fn each_operation_is_one_round_trip() {
    skip!("redis");
    let lab = Lab::new().await;
    // The server learns the scripts, and the store connects.
    let warm = request("warm");
    for _ in 0..2 {
        let grant = take(&lab.store, &warm).await;
        let lease = lease(&warm, &grant);
        lab.store.renew(&[(lease.clone(), warm.ttl)]).await;
        lab.store.inspect(&lock("warm")).await.unwrap();
        lab.store.release(&lease, Duration::ZERO).await.unwrap();
    }
    let trips = || lab.proxy.traffic().trips;
    let before = trips();
    let mut leases = Vec::new();
    for i in 0..50 {
        let request = request(&format!("job-{i}"));
        let grant = take(&lab.store, &request).await;
        leases.push((lease(&request, &grant), request.ttl));
    }
    assert_eq!(trips() - before, 50, "acquires");
    let before = trips();
    lab.store.renew(&leases).await;
    assert_eq!(trips() - before, 1, "a batch of renewals");
    let before = trips();
    for (lease, _) in &leases {
        lab.store.release(lease, Duration::ZERO).await.unwrap();
    }
    assert_eq!(trips() - before, 50, "releases");
    assert_eq!(lab.proxy.open_connections(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_locks_need_at_most_three_connections() {
    skip!("redis");
    let redis = Redis::start();
    let locks = locks(&redis.url()).await;
    let mut guards = Vec::new();
    for i in 0..200 {
        guards.push(locks.acquire(format!("job-{i}")).await.unwrap());
    }
    let mut waiters = Vec::new();
    for i in 0..20 {
        let locks = locks.clone();
        waiters.push(tokio::spawn(async move {
            locks.acquire(format!("job-{i}")).await.unwrap()
        }));
    }
    eventually("the waiters listen", LIMIT, || {
        redis.cli(&["PUBSUB", "CHANNELS"]).lines().count() == 20
    });
    // Not counting the one that asks.
    let connections = redis.cli(&["CLIENT", "LIST"]).lines().count() - 1;
    assert!(connections <= 3, "connections={connections}");
    drop(guards);
    for waiter in waiters {
        waiter.await.unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn waiters_of_one_process_are_served_in_order() {
    skip!("redis");
    let redis = Redis::start();
    let (holder, waiting) = (locks(&redis.url()).await, locks(&redis.url()).await);
    let guard = holder.acquire("queue").await.unwrap();
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for i in 0..8 {
        let (waiting, served) = (waiting.clone(), Arc::clone(&served));
        let (joined, join) = tokio::sync::oneshot::channel();
        tasks.push(tokio::spawn(async move {
            let acquire = waiting.acquire("queue").wait(LIMIT);
            let mut acquire = std::pin::pin!(acquire.into_future());
            // The first poll sends it on its way.
            let first =
                std::future::poll_fn(|cx| std::task::Poll::Ready(acquire.as_mut().poll(cx)));
            assert!(first.await.is_pending());
            joined.send(()).unwrap();
            let guard = acquire.await.unwrap();
            served.lock().unwrap().push((i, guard.token()));
            guard.release().await.unwrap();
        }));
        join.await.unwrap();
        // One request of each has to reach the server before the next one asks.
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    guard.release().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    let served = served.lock().unwrap().clone();
    let order: Vec<i32> = served.iter().map(|(i, _)| *i).collect();
    assert_eq!(order, (0..8).collect::<Vec<_>>());
    assert!(served.is_sorted_by(|a, b| a.1 < b.1), "{served:?}");
}

#[tokio::test]
async fn a_waiter_hears_again_after_its_connection_was_cut() {
    skip!("redis");
    let lab = Lab::new().await;
    let request = request("job");
    let grant = take(&lab.other, &request).await;
    let mut watch = lab.store.watch(&lock("job")).await.unwrap();
    lab.proxy.cut();
    // Told at once that it may have missed something, it asks again, and that connects.
    tokio::time::timeout(LIMIT, watch.changed()).await.unwrap();
    let mut asked = lab.store.acquire(&another(&request)).await;
    if asked.is_err() {
        asked = lab.store.acquire(&another(&request)).await;
    }
    asked.unwrap();
    let channel = record_key(&lock("job"));
    eventually("subscribed again", LIMIT, || {
        lab.redis.cli(&["PUBSUB", "NUMSUB", &channel]) == format!("{channel}\n1")
    });
    let lease = lease(&request, &grant);
    lab.other.release(&lease, Duration::ZERO).await.unwrap();
    tokio::time::timeout(LIMIT, watch.changed()).await.unwrap();
}

#[tokio::test]
async fn channels_are_given_up_when_nobody_waits() {
    skip!("redis");
    let lab = Lab::new().await;
    let first = lab.store.watch(&lock("first")).await.unwrap();
    let twin = lab.store.watch(&lock("first")).await.unwrap();
    drop((first, twin));
    let _second = lab.store.watch(&lock("second")).await.unwrap();
    assert_eq!(
        lab.redis.cli(&["PUBSUB", "CHANNELS"]),
        record_key(&lock("second"))
    );
}

#[tokio::test]
async fn a_dropped_acquire_leaves_no_lock() {
    skip!("redis");
    let redis = Redis::start();
    let proxy = Proxy::start(redis.address());
    let slow = locks(&format!("redis://{}", proxy.address())).await;
    let other = RedisStore::open(&redis.url()).await.unwrap();
    slow.acquire("warm").await.unwrap().release().await.unwrap();
    proxy.delay(Duration::from_millis(100));
    for wait_ms in [0, 20, 90, 120, 180, 250] {
        let acquire = slow.acquire("dropped").wait(LIMIT);
        let limit = Duration::from_millis(wait_ms);
        drop(tokio::time::timeout(limit, acquire.into_future()).await);
        slow.drain().await;
    }
    tokio::time::timeout(LIMIT, async {
        while grants(&other, "dropped").await > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("every grant is given back");
    take(&other, &request("dropped")).await;
}

#[tokio::test]
async fn held_locks_are_renewed_while_the_users_runtime_is_blocked() {
    skip!("redis");
    let redis = Redis::start();
    // Opened in this runtime, whose only thread is blocked below.
    let store = RedisStore::open(&redis.url()).await.unwrap();
    let ttl = Ttl::new(Duration::from_millis(900)).unwrap();
    let locks = Locks::builder(store).ttl(ttl).build();
    let guard = locks.acquire("job").await.unwrap();
    std::thread::sleep(Duration::from_millis(2_500));
    guard.check().unwrap();
    let state = locks.inspect("job").await.unwrap().unwrap();
    assert_eq!(state.holders.len(), 1);
    assert_eq!(state.last_token, Some(guard.token()));
    guard.release().await.unwrap();
}
