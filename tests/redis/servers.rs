//! Sentinels, clusters, users, TLS, and connections of the user's own.

use std::time::Duration;

use fencelock::lease::{Release, Renewal};
use fencelock::redis::client::Client;
use fencelock::redis::{FencedRedis, RedisStore};
use fencelock::{ErrorKind, Fenced, LeaseStore, Locks};
use fencelock_testbed::redis::{Cluster, MASTER, Redis, Sentinels, sentinel};
use fencelock_testbed::{eventually, skip};

use crate::lab::*;

const LIMIT: Duration = Duration::from_secs(30);

/// The least rights with which every operation works. As docs/backends/redis.md states them.
const RIGHTS: &[&str] = &[
    "on",
    ">canary",
    "~{fencelock:*",
    "&{fencelock:*",
    "+hello",
    "+info",
    "+time",
    "+scan",
    "+eval",
    "+evalsha",
    "+get",
    "+set",
    "+del",
    "+exists",
    "+hget",
    "+hmget",
    "+hgetall",
    "+hset",
    "+hdel",
    "+persist",
    "+pexpireat",
    "+publish",
    "+subscribe",
    "+unsubscribe",
];

#[tokio::test]
async fn a_master_is_found_again_after_a_failover() {
    skip!("redis");
    let mut watch = Sentinels::start();
    let url = format!("redis-sentinel://{}/{MASTER}", watch.hosts());
    let store = RedisStore::open(&url).await.unwrap();
    let before = request("job");
    let grant = take(&store, &before).await;
    let old = watch.pair.master.port();
    watch.pair.master.server().kill();
    watch.await_failover(old);
    let mut next = None;
    let deadline = fencelock_testbed::Deadline::after(LIMIT);
    let mut last = String::new();
    while next.is_none() {
        assert!(!deadline.passed(), "no new master: {last}");
        let asked = another(&before);
        match store.acquire(&asked).await {
            Ok(fencelock::lease::Attempt::Granted(grant)) => next = Some(grant),
            // The replica had the grant; an operator frees it.
            Ok(fencelock::lease::Attempt::Held(_)) => {
                store.break_lock(&lock("job")).await.unwrap();
            }
            Err(error) => {
                let kind = error.kind();
                let passing = matches!(kind, ErrorKind::Unavailable | ErrorKind::Indeterminate);
                assert!(passing, "{error:?}");
                last = chain(&error);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
    assert!(next.unwrap().token > grant.token);
    // One Sentinel that does not answer holds nobody up. The first may have been the only one that knew.
    watch.await_agreement(old);
    watch.sentinels[0].pause();
    let newcomer = RedisStore::open(&url).await.unwrap();
    assert_eq!(newcomer.profile().realm, store.profile().realm);
}

/// It has not heard of a failover, and the host that it names answers nobody.
#[tokio::test]
async fn a_sentinel_that_lags_behind_holds_nobody_up() {
    skip!("redis");
    let watch = Sentinels::start();
    let mut silent = Redis::start();
    let lagging = sentinel(silent.port());
    silent.server().pause();
    let hosts = format!("{},{}", lagging.address(), watch.hosts());
    // Whoever answers first.
    for _ in 0..8 {
        let url = format!("redis-sentinel://{hosts}/{MASTER}");
        RedisStore::open(&url).await.unwrap();
    }
}

#[tokio::test]
async fn an_unknown_master_is_named() {
    skip!("redis");
    let watch = Sentinels::start();
    let url = format!("redis-sentinel://{}/nobody", watch.hosts());
    let error = RedisStore::open(&url).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("master=\"nobody\""), "{error}");
}

#[tokio::test]
async fn a_cluster_keeps_each_lock_in_one_slot_whatever_its_name() {
    skip!("redis");
    let cluster = Cluster::start();
    let url = format!("redis-cluster://{}", cluster.hosts());
    let store = RedisStore::open(&url).await.unwrap();
    let names = ["a", "{a}", "{a}b", "}{", "{}", "a{b}c", "plain", "x:y"];
    let mut leases = Vec::new();
    for name in names {
        let request = request(name);
        let grant = take(&store, &request).await;
        refused(&store, &another(&request)).await;
        leases.push((lease(&request, &grant), request.ttl));
    }
    let answers = store.renew(&leases).await;
    let renewed = |answer: &Renewal| matches!(answer, Renewal::Renewed);
    assert!(answers.iter().all(renewed), "{answers:?}");
    let mut listed: Vec<String> = Vec::new();
    for state in store.list("", None, 100).await.unwrap() {
        listed.push(state.name.as_str().to_owned());
    }
    let mut sorted = names.map(str::to_owned);
    sorted.sort();
    assert_eq!(listed, sorted);
    for (lease, _) in &leases {
        let released = store.release(lease, Duration::ZERO).await.unwrap();
        assert_eq!(released, Release::Released);
    }
    // The locks were spread over the masters.
    let used = cluster.nodes.iter().filter(|n| n.cli(&["DBSIZE"]) != "0");
    assert_eq!(used.count(), 3);
    store.probe().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_wakes_waiters_and_guards_values() {
    skip!("redis");
    let cluster = Cluster::start();
    let url = format!("redis-cluster://{}?ttl=600s", cluster.hosts());
    let (holder, waiting) = (
        Locks::open(&url).await.unwrap(),
        Locks::open(&url).await.unwrap(),
    );
    let guard = holder.acquire("job").await.unwrap();
    let first = guard.token();
    let waiter = tokio::spawn(async move { waiting.acquire("job").wait(LIMIT).await });
    eventually("the waiter listens", LIMIT, || {
        let on = |node: &Redis| node.cli(&["PUBSUB", "CHANNELS"]).lines().count();
        cluster.nodes.iter().map(on).sum::<usize>() == 1
    });
    guard.release().await.unwrap();
    let next = waiter.await.unwrap().unwrap();
    let at = format!("redis-cluster://{}", cluster.hosts());
    let values = Fenced::new(FencedRedis::open(&at).await.unwrap());
    for name in ["v", "{t}v", "a{b"] {
        values.put(name, "new", &next).await.unwrap();
        let refused = values.put(name, "old", first).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Fenced, "{refused:?}");
    }
    let odd = values.put("a}b", "x", &next).await.unwrap_err();
    assert_eq!(odd.kind(), ErrorKind::Unsupported, "{odd:?}");
}

#[tokio::test]
async fn a_user_with_the_documented_rights_can_do_everything() {
    skip!("redis");
    let redis = Redis::start();
    let mut rights = vec!["ACL", "SETUSER", "locks"];
    rights.extend(RIGHTS);
    assert_eq!(redis.cli(&rights), "OK");
    let url = format!("redis://locks:canary@{}", redis.address());
    let store = RedisStore::open(&url).await.unwrap();
    let request = request("job");
    let mut watch = store.watch(&lock("job")).await.unwrap();
    let grant = take(&store, &request).await;
    let lease = lease(&request, &grant);
    let answers = store.renew(&[(lease.clone(), request.ttl)]).await;
    assert!(matches!(&answers[..], [Renewal::Renewed]), "{answers:?}");
    store.inspect(&lock("job")).await.unwrap().unwrap();
    assert_eq!(store.list("", None, 9).await.unwrap().len(), 1);
    let floor = fencelock::FencingToken::MIN;
    store.raise_floor(&lock("job"), floor, true).await.unwrap();
    store.release(&lease, Duration::from_secs(1)).await.unwrap();
    tokio::time::timeout(LIMIT, watch.changed()).await.unwrap();
    store.break_lock(&lock("job")).await.unwrap();
    store.prune(Duration::ZERO).await.unwrap();
    store.probe().await.unwrap();

    // One right fewer, and it is said that a right is missing.
    assert_eq!(
        redis.cli(&["ACL", "SETUSER", "locks", "-evalsha", "-eval"]),
        "OK"
    );
    let error = store.acquire(&another(&request)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    assert!(error.to_string().contains("may not"), "{error}");
}

#[tokio::test]
async fn a_wrong_password_is_said_and_no_password_is_shown() {
    skip!("redis");
    let redis = Redis::with_password("right-canary");
    let address = redis.address();
    let good = format!("redis://:right-canary@{address}");
    let store = RedisStore::open(&good).await.unwrap();
    let locks = Locks::open(&good).await.unwrap();
    for url in [
        format!("redis://:wrong-canary@{address}"),
        format!("redis://canary:canary@{address}"),
        format!("redis://{address}"),
    ] {
        let error = RedisStore::open(&url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
        assert!(error.to_string().contains("password"), "{error}");
        let shown = format!("{error:?} {error} {}", chain(&error));
        assert!(!shown.contains("canary"), "{shown}");
        // Each cause once.
        let told = chain(&error);
        let parts: std::collections::BTreeSet<&str> = told.split(": ").collect();
        assert_eq!(parts.len(), told.split(": ").count(), "{told}");
    }
    let shown = format!("{store:?} {locks:?} {:?}", store.probe().await.unwrap());
    assert!(!shown.contains("canary"), "{shown}");
}

#[tokio::test]
async fn a_host_that_nobody_answers_at_is_unavailable_in_time() {
    skip!("redis");
    let nobody = fencelock_testbed::port::Port::free();
    // Takes connections and never says a word.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for host in [
        format!("127.0.0.1:{}", nobody.number()),
        silent.local_addr().unwrap().to_string(),
        // Never routed (RFC 5737).
        "192.0.2.1".to_owned(),
        "no-such-host.invalid".to_owned(),
    ] {
        let url = format!("redis://{host}?insecure=true");
        let opened = RedisStore::open(&url);
        let error = tokio::time::timeout(Duration::from_secs(10), opened).await;
        let error = error.expect("an answer in time").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        assert!(chain(&error).contains("reached"), "{}", chain(&error));
    }
}

#[tokio::test]
async fn databases_and_prefixes_do_not_meet() {
    skip!("redis");
    let redis = Redis::start();
    let mut tokens = Vec::new();
    for at in ["/0", "/5", "/0?prefix=other:", "/0?prefix="] {
        let store = RedisStore::open(&format!("{}{at}", redis.url()))
            .await
            .unwrap();
        tokens.push(take(&store, &request("job")).await.token);
        assert_eq!(store.list("", None, 10).await.unwrap().len(), 1, "{at}");
    }
    assert_eq!(tokens.len(), 4);
}

#[tokio::test]
async fn a_connection_of_the_users_own_is_enough() {
    skip!("redis");
    let redis = Redis::start();
    let client = Client::open(redis.url()).unwrap();
    let connection = client.get_multiplexed_async_connection().await.unwrap();
    let lent = RedisStore::from_connection(connection.clone())
        .await
        .unwrap();
    let own = RedisStore::from_client(client).await.unwrap();
    assert_eq!(lent.profile().realm, own.profile().realm);
    assert!(!lent.profile().wakes_waiters);
    let request = request("job");
    let grant = take(&lent, &request).await;
    refused(&own, &another(&request)).await;
    let lease = lease(&request, &grant);
    own.release(&lease, Duration::ZERO).await.unwrap();
    let options = RedisStore::options().wait_replicas(1);
    let error = options
        .open_connection(connection.clone())
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let values = RedisStore::options().open_fenced_connection(connection);
    let values = Fenced::new(values.await.unwrap());
    values.put("v", "x", grant.token).await.unwrap();
}

#[cfg(feature = "redis-tls")]
#[tokio::test]
async fn tls_verifies_the_server_and_says_what_is_wrong() {
    skip!("redis");
    let redis = Redis::with_tls();
    let error = RedisStore::open(&redis.url()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    assert!(
        error.to_string().contains("certificate is not accepted"),
        "{error}"
    );
    let authority = redis.certificates().authority();
    let url = format!("{}?ca={}", redis.url(), authority.display());
    let store = RedisStore::open(&url).await.unwrap();
    take(&store, &request("job")).await;
    let missing = format!("{}?ca=/nowhere.pem", redis.url());
    let error = RedisStore::open(&missing).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
    let plain = format!("redis://{}", redis.address());
    let error = RedisStore::open(&plain).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
}
