//! Three servers, of which one dies.

use std::time::Duration;

use fencelock::lease::Attempt;
use fencelock::nats::{FencedNats, NatsStore};
use fencelock::{Fenced, FencingToken, LeaseStore, Locks};
use fencelock_testbed::nats::Cluster;
use fencelock_testbed::{Deadline, skip};

use crate::lab::*;

/// A new leader is there after four to nine seconds.
const ELECTION: Duration = Duration::from_secs(40);

#[tokio::test]
async fn a_killed_leader_costs_no_lock_and_no_token() {
    skip!("nats");
    let mut cluster = Cluster::start();
    let url = format!("{}?replicas=3", cluster.url());
    let locks = Locks::open(&url).await.unwrap();
    let other = NatsStore::open(&url).await.unwrap();
    let values = Fenced::new(FencedNats::open(&url).await.unwrap());
    let ttl = Duration::from_secs(45);
    // So that the next token is not the smallest.
    take(&other, &request("first")).await;
    let kept = locks.acquire("kept").ttl(ttl).wait(LIMIT).await.unwrap();
    let given = locks.acquire("given").ttl(ttl).wait(LIMIT).await.unwrap();
    let former = given.token();
    given.release().await.unwrap();
    values.put("r", "x", &kept).await.unwrap();
    // A holder that dies with the leader, and whose stamp the next one cannot read.
    let mut dead = request("dead");
    dead.ttl = millis(1_000);
    let dead_grant = take(&other, &dead).await;
    cluster.leader("fencelock").server().kill();
    let deadline = Deadline::after(ELECTION);
    let given = loop {
        match locks.acquire("given").ttl(ttl).wait(LIMIT).await {
            Ok(guard) => break guard,
            // An election may take longer than a caller who was never answered is kept waiting.
            Err(error) => {
                unsure(&error);
                assert!(!deadline.passed(), "{error:?}");
            }
        }
    };
    assert!(given.token() > former);
    kept.check().unwrap();
    let deadline = Deadline::after(ELECTION);
    let mut first = None;
    let next = loop {
        match other.acquire(&another(&dead)).await {
            Ok(Attempt::Granted(grant)) => break grant,
            Ok(Attempt::Held(by)) => {
                // The new leader gives it a whole TTL of its own, and no more.
                first.get_or_insert_with(now);
                assert!(by.free_in.unwrap() <= Duration::from_secs(1), "{by:?}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(error) => {
                unsure(&error);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        assert!(!deadline.passed(), "the dead holder does not lapse");
    };
    assert!(next.token > dead_grant.token);
    let waited = first.unwrap().elapsed();
    assert!(waited > Duration::from_millis(900), "{waited:?}");
    refused(&other, &request("kept")).await;
    kept.renew().await.unwrap();
    let stale = values.put("r", "y", FencingToken::MIN).await;
    assert_eq!(stale.unwrap_err().kind(), fencelock::ErrorKind::Fenced);
    values.put("r", "z", &kept).await.unwrap();
}

#[tokio::test]
async fn a_server_that_does_not_lead_may_die() {
    skip!("nats");
    let mut cluster = Cluster::start();
    let url = format!("{}?replicas=3", cluster.url());
    let store = NatsStore::open(&url).await.unwrap();
    let held = request("held");
    let grant = take(&store, &held).await;
    let leader = cluster.leader("fencelock").port();
    let other = cluster
        .servers
        .iter_mut()
        .find(|server| server.port() != leader);
    other.unwrap().server().kill();
    let deadline = Deadline::after(ELECTION);
    loop {
        let answers = store.renew(&[(lease(&held, &grant), held.ttl)]).await;
        match &answers[..] {
            [fencelock::lease::Renewal::Renewed] => break,
            [fencelock::lease::Renewal::Unknown(error)] => unsure(error),
            other => panic!("{other:?}"),
        }
        assert!(!deadline.passed(), "not renewed");
    }
    refused(&store, &another(&held)).await;
}

#[tokio::test]
async fn a_paused_leader_that_wakes_grants_nothing() {
    skip!("nats");
    let mut cluster = Cluster::start();
    let url = format!("{}?replicas=3", cluster.url());
    let store = NatsStore::open(&url).await.unwrap();
    let held = request("held");
    let grant = take(&store, &held).await;
    give(&store, &held, &grant).await;
    let paused = cluster.leader("fencelock").port();
    let old = NatsStore::open(&format!("nats://127.0.0.1:{paused}"))
        .await
        .unwrap();
    refused_or_taken(&old).await;
    cluster.leader("fencelock").pause();
    let deadline = Deadline::after(ELECTION);
    let next = another(&held);
    let granted = loop {
        match store.acquire(&next).await {
            Ok(Attempt::Granted(grant)) => break grant,
            Ok(Attempt::Held(by)) => panic!("{by:?}"),
            Err(error) => unsure(&error),
        }
        assert!(!deadline.passed(), "no new leader");
    };
    assert!(granted.token > grant.token);
    let woken = cluster
        .servers
        .iter_mut()
        .find(|server| server.port() == paused);
    woken.unwrap().server().resume();
    // Asked at once, and again until it knows better: it never grants what is held.
    let deadline = Deadline::after(Duration::from_secs(15));
    let mut held = 0;
    while held < 20 && !deadline.passed() {
        match old.acquire(&another(&next)).await {
            Ok(Attempt::Granted(grant)) => panic!("granted twice: {grant:?}"),
            Ok(Attempt::Held(_)) => held += 1,
            Err(error) => unsure(&error),
        }
    }
    assert!(held > 0, "it never answered");
}

/// Makes its connection.
async fn refused_or_taken(store: &NatsStore) {
    take(store, &request("warm")).await;
}
