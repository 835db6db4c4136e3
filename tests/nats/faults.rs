//! Lost answers, servers that stop or die, and requests that come late.

use std::time::Duration;

use fencelock::lease::{LeaseRef, Release, Renewal};
use fencelock::nats::{NatsStore, client};
use fencelock::{ErrorKind, FencingToken, LeaseStore, Locks};
use fencelock_testbed::nats::Nats;
use fencelock_testbed::proxy::Proxy;
use fencelock_testbed::{Deadline, skip};

use crate::lab::*;
use crate::network::lose_answer;

/// What only the message that grants this name holds.
const GRANT: &[u8] = br#"{"name":"lost""#;

#[tokio::test]
async fn a_grant_whose_answer_was_lost_is_found_again() {
    skip!("nats");
    let lab = Lab::new().await;
    let request = request("lost");
    let acquire = lab.store.acquire(&request);
    let granted = async || grants(&lab.other, "lost").await == 1;
    let error = lose_answer(&lab.proxy, acquire, granted).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    let state = lab.other.inspect(&lock("lost")).await.unwrap().unwrap();
    let grant = take(&lab.store, &request).await;
    assert_eq!(state.last_token, Some(grant.token));
    let state = lab.other.inspect(&lock("lost")).await.unwrap().unwrap();
    assert_eq!(state.last_token, Some(grant.token));
    assert_eq!(state.holders.len(), 1);
    refused(&lab.other, &another(&request)).await;
}

#[tokio::test]
async fn a_request_lost_before_its_effect_is_sent_again() {
    skip!("nats");
    let lab = Lab::new().await;
    let request = request("lost");
    lab.proxy.swallow_request(GRANT);
    let started = now();
    let error = lab.store.acquire(&request).await.unwrap_err();
    // Not after a time limit: the connection was seen to break.
    assert!(
        started.elapsed() < Duration::from_secs(2),
        "{:?}",
        started.elapsed()
    );
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    assert_eq!(grants(&lab.other, "lost").await, 0);
    take(&lab.store, &request).await;
    assert_eq!(grants(&lab.other, "lost").await, 1);
}

#[tokio::test]
async fn a_waiting_acquire_finds_its_lost_grant_by_itself() {
    skip!("nats");
    let lab = Lab::new().await;
    let locks = Locks::new(lab.store.clone());
    lab.proxy.swallow_answer(GRANT);
    let guard = locks.acquire("lost").wait(LIMIT).await.unwrap();
    let state = lab.other.inspect(&lock("lost")).await.unwrap().unwrap();
    assert_eq!(state.last_token, Some(guard.token()));
    assert_eq!(state.holders.len(), 1);
}

#[tokio::test]
async fn a_lost_answer_to_a_release_is_unknown_and_then_certain() {
    skip!("nats");
    let lab = Lab::new().await;
    let request = request("kept");
    let grant = take(&lab.store, &request).await;
    let lease = lease(&request, &grant);
    let release = lab.store.release(&lease, Duration::ZERO);
    let gone = async || grants(&lab.other, "kept").await == 0;
    let error = lose_answer(&lab.proxy, release, gone).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    let again = lab.store.release(&lease, Duration::ZERO).await.unwrap();
    assert_eq!(again, Release::NotHeld);
    let next = take(&lab.other, &another(&request)).await;
    assert!(next.token > grant.token);
}

#[tokio::test]
async fn a_lost_answer_to_a_renewal_is_unknown_and_the_next_one_renews() {
    skip!("nats");
    let lab = Lab::new().await;
    let request = request("kept");
    let grant = take(&lab.store, &request).await;
    lab.proxy.swallow_answer(b"lock.kept");
    let batch = [(lease(&request, &grant), request.ttl)];
    let answers = lab.store.renew(&batch).await;
    lab.proxy.await_swallowed(LIMIT);
    assert!(matches!(&answers[..], [Renewal::Unknown(_)]), "{answers:?}");
    let answers = lab.store.renew(&batch).await;
    assert!(matches!(&answers[..], [Renewal::Renewed]), "{answers:?}");
}

#[tokio::test]
async fn a_paused_server_is_noticed_in_time_and_used_again_afterwards() {
    skip!("nats");
    let mut lab = Lab::new().await;
    let held = request("held");
    let grant = take(&lab.store, &held).await;
    lab.nats.pause();
    let started = now();
    let error = lab.store.acquire(&request("new")).await.unwrap_err();
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    // It hung at the look, before anything that changes something was sent.
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    let started = now();
    let answers = lab.store.renew(&[(lease(&held, &grant), held.ttl)]).await;
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    assert!(matches!(&answers[..], [Renewal::Unknown(_)]), "{answers:?}");
    lab.nats.server().resume();
    // It has worked off what came in the meantime.
    let _ = lab.nats.ask("$JS.API.INFO", "");
    let answers = lab.store.renew(&[(lease(&held, &grant), held.ttl)]).await;
    assert!(matches!(&answers[..], [Renewal::Renewed]), "{answers:?}");
    assert_eq!(take(&lab.store, &held).await.token, grant.token);
}

#[tokio::test]
async fn a_network_that_swallows_everything_ends_each_operation_in_time() {
    skip!("nats");
    let lab = Lab::new().await;
    let held = request("x");
    let lease = lease(&held, &take(&lab.other, &held).await);
    lab.proxy.black_hole();
    let started = now();
    let all = tokio::join!(
        async { lab.store.acquire(&request("a")).await.unwrap_err() },
        async {
            let released = lab.store.release(&lease, Duration::ZERO).await;
            released.unwrap_err()
        },
        async { lab.store.inspect(&lock("a")).await.unwrap_err() },
        async { lab.store.list("", None, 10).await.unwrap_err() },
        async { lab.store.break_lock(&lock("a")).await.unwrap_err() },
        async { lab.store.probe().await.unwrap_err() },
        async {
            let name = lock("a");
            let raised = lab.store.raise_floor(&name, FencingToken::MIN, false);
            raised.await.unwrap_err()
        },
        async { lab.store.prune(Duration::ZERO).await.unwrap_err() },
    );
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    for error in [&all.0, &all.2, &all.3, &all.5, &all.7] {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    }
    for error in [&all.1, &all.4, &all.6] {
        unsure(error);
    }
    lab.proxy.pass();
    take(&lab.store, &request("a")).await;
}

#[tokio::test]
async fn a_killed_server_keeps_grants_and_tokens() {
    skip!("nats");
    let mut lab = Lab::new().await;
    let (held, given) = (request("held"), request("given"));
    let grant = take(&lab.store, &held).await;
    let former = take(&lab.store, &given).await;
    give(&lab.store, &given, &former).await;
    lab.nats.server().kill();
    let error = lab.store.acquire(&another(&given)).await.unwrap_err();
    unsure(&error);
    lab.nats.kill_and_restart();
    let answers = lab.store.renew(&[(lease(&held, &grant), held.ttl)]).await;
    assert!(matches!(&answers[..], [Renewal::Renewed]), "{answers:?}");
    refused(&lab.other, &another(&held)).await;
    assert_eq!(take(&lab.store, &held).await.token, grant.token);
    assert!(take(&lab.other, &another(&given)).await.token > former.token);
}

#[tokio::test]
async fn locks_outlive_a_server_that_is_restarted_while_they_are_renewed() {
    skip!("nats");
    let mut lab = Lab::new().await;
    let locks = Locks::new(lab.store.clone());
    let guard = locks
        .acquire("kept")
        .ttl(Duration::from_secs(6))
        .await
        .unwrap();
    for _ in 0..3 {
        lab.nats.server().kill();
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        lab.nats.kill_and_restart();
        tokio::time::sleep(Duration::from_millis(2_500)).await;
        guard.check().unwrap();
        refused(&lab.other, &request("kept")).await;
    }
}

/// A client that connects again by itself sends what it was given meanwhile: that is why the
/// engine's own connections do not.
#[tokio::test]
async fn a_client_as_it_comes_sends_late_what_nobody_waits_for() {
    skip!("nats");
    let mut lab = Lab::new().await;
    let client = client::connect(lab.nats.url()).await.unwrap();
    lab.nats.server().kill();
    while client.connection_state() == client::connection::State::Connected {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let subject = record("fencelock", &lab.store, "late");
    let asked = client.request(subject.clone(), "x".into());
    let given_up = tokio::time::timeout(Duration::from_millis(500), asked).await;
    assert!(!matches!(given_up, Ok(Ok(_))));
    lab.nats.kill_and_restart();
    let deadline = Deadline::after(LIMIT);
    let body = format!(r#"{{"last_by_subj":"{subject}"}}"#);
    while !lab
        .nats
        .ask("$JS.API.STREAM.MSG.GET.KV_fencelock", &body)
        .contains("\"seq\"")
    {
        assert!(!deadline.passed(), "it was never sent");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn nothing_that_was_given_up_is_sent_after_the_server_is_back() {
    skip!("nats");
    let mut lab = Lab::new().await;
    // Known to be free, so that nothing but the grant itself is asked.
    let warm = request("free");
    for round in 0..10_u64 {
        let grant = take(&lab.store, &warm).await;
        give(&lab.store, &warm, &grant).await;
        // From before the connection is lost until after.
        let pause = Duration::from_millis(round);
        let ((), acquired) = tokio::join!(
            async {
                tokio::time::sleep(pause).await;
                lab.nats.server().kill();
            },
            async {
                let mut last = None;
                for _ in 0..6 {
                    let request = another(&warm);
                    match lab.store.acquire(&request).await {
                        Ok(fencelock::lease::Attempt::Granted(grant)) => {
                            give_if_there(&lab.store, &lease(&request, &grant)).await;
                        }
                        Ok(held) => panic!("{held:?}"),
                        Err(error) => {
                            unsure(&error);
                            last = Some(request);
                        }
                    }
                }
                last
            }
        );
        lab.nats.kill_and_restart();
        if let Some(request) = acquired {
            // The clean-up that follows an acquire of unknown outcome.
            let lease = LeaseRef {
                name: request.name.clone(),
                holder: request.holder,
                token: None,
            };
            lab.store.release(&lease, Duration::ZERO).await.unwrap();
        }
        lab.other.break_lock(&warm.name).await.unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(grants(&lab.other, "free").await, 0, "round={round}");
    }
}

async fn give_if_there(store: &NatsStore, lease: &LeaseRef) {
    if let Err(error) = store.release(lease, Duration::ZERO).await {
        unsure(&error);
    }
}

#[tokio::test]
async fn a_grant_that_arrives_after_it_was_given_up_finds_another_record() {
    skip!("nats");
    let nats = Nats::start();
    let (one, two) = (Proxy::start(nats.address()), Proxy::start(nats.address()));
    let url = format!("nats://{},{}", one.address(), two.address());
    let store = NatsStore::open(&url).await.unwrap();
    let other = NatsStore::open(&nats.url()).await.unwrap();
    // Known to be free, so that nothing but the grant itself is asked; over the second way.
    let warm = request("late");
    let grant = take(&store, &warm).await;
    give(&store, &warm, &grant).await;
    assert_eq!((one.open_connections(), two.open_connections()), (0, 1));
    two.hold();
    let late = another(&warm);
    let error = store.acquire(&late).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    // Given up over the first way, while the grant is still on its own.
    let lease = LeaseRef {
        name: late.name.clone(),
        holder: late.holder,
        token: None,
    };
    let released = store.release(&lease, Duration::ZERO).await.unwrap();
    assert_eq!(released, Release::NotHeld);
    two.pass();
    // Sent on, and nobody is there for the answer.
    fencelock_testbed::eventually("the late request has arrived", LIMIT, || {
        two.open_connections() == 0
    });
    // That nothing comes of it shows only in time.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(grants(&other, "late").await, 0);
    take(&other, &another(&warm)).await;
}

#[tokio::test]
async fn dropped_acquires_leave_no_lock() {
    skip!("nats");
    let lab = Lab::new().await;
    let locks = Locks::new(lab.store.clone());
    lab.proxy.delay(Duration::from_millis(20));
    for after_ms in (0..200).step_by(20) {
        let name = format!("dropped-{after_ms}");
        let acquire = locks.acquire(&name).wait(LIMIT);
        let limit = Duration::from_millis(after_ms);
        drop(tokio::time::timeout(limit, acquire.into_future()).await);
        // What was granted after all is given back: long before its TTL.
        let direct = Locks::new(lab.other.clone());
        let taken = direct.acquire(&name).wait(LIMIT).await;
        assert!(taken.is_ok(), "{name}: {taken:?}");
    }
}

#[tokio::test]
async fn names_with_a_common_beginning_do_not_meet() {
    skip!("nats");
    let lab = Lab::new().await;
    let taken = take(&lab.store, &request("a.b")).await;
    for name in ["a", "a.", "a.b.", "a.b.c", "a.*", "a.>", "*", ">", "ab"] {
        take(&lab.other, &request(name)).await;
        lab.other.break_lock(&lock(name)).await.unwrap();
    }
    assert_eq!(grants(&lab.other, "a.b").await, 1);
    let state = lab.store.inspect(&lock("a.b")).await.unwrap().unwrap();
    assert_eq!(state.last_token, Some(taken.token));
}
