//! Lost answers, members that stop or die, and records that others damaged.

use std::time::{Duration, Instant};

use fencelock::etcd::EtcdStore;
use fencelock::etcd::client::Client;
use fencelock::lease::{Release, Renewal, Severity};
use fencelock::{ErrorKind, FencingToken, LeaseStore, Locks};
use fencelock_testbed::etcd::{Cluster, Etcd};
use fencelock_testbed::proxy::Proxy;
use fencelock_testbed::{Deadline, skip};

use crate::lab::*;
use crate::network::lose_answer;

const LIMIT: Duration = Duration::from_secs(10);

/// What only the transaction that grants this name holds.
const GRANT: &[u8] = br#""name":"lost""#;

#[expect(clippy::disallowed_methods, reason = "a test measures real time")]
fn now() -> Instant {
    Instant::now()
}

#[tokio::test]
async fn a_grant_whose_answer_was_lost_is_found_again() {
    skip!("etcd");
    let lab = Lab::new().await;
    let request = request("lost");
    let acquire = lab.store.acquire(&request);
    let granted = async || grants(&lab.other, "lost").await == 1;
    let error = lose_answer(&lab.proxy, acquire, granted).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    let grant = take(&lab.store, &request).await;
    let state = lab.other.inspect(&lock("lost")).await.unwrap().unwrap();
    assert_eq!(state.last_token, Some(grant.token));
    assert_eq!(state.holders.len(), 1);
    refused(&lab.other, &another(&request)).await;
}

#[tokio::test]
async fn a_request_lost_before_its_effect_is_sent_again() {
    skip!("etcd");
    let lab = Lab::new().await;
    let request = request("lost");
    lab.proxy.swallow_request(GRANT);
    let error = lab.store.acquire(&request).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    assert_eq!(grants(&lab.other, "lost").await, 0);
    take(&lab.store, &request).await;
    assert_eq!(grants(&lab.other, "lost").await, 1);
}

#[tokio::test]
async fn a_waiting_acquire_finds_its_lost_grant_by_itself() {
    skip!("etcd");
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
    skip!("etcd");
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
async fn what_changes_nothing_is_asked_again_by_itself() {
    skip!("etcd");
    let lab = Lab::new().await;
    let request = request("kept");
    let grant = take(&lab.store, &request).await;
    lab.proxy.swallow_answer(b"live/kept/");
    let batch = [(lease(&request, &grant), request.ttl)];
    let answers = lab.store.renew(&batch).await;
    lab.proxy.await_swallowed(LIMIT);
    assert!(matches!(answers[..], [Renewal::Renewed]), "{answers:?}");
}

#[tokio::test]
async fn a_paused_server_is_noticed_in_time_and_used_again_afterwards() {
    skip!("etcd");
    let mut lab = Lab::new().await;
    let held = request("held");
    let grant = take(&lab.store, &held).await;
    lab.etcd.server().pause();
    let started = now();
    let error = lab.store.acquire(&request("new")).await.unwrap_err();
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    // It hung at the look, before anything that changes something was sent.
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    let started = now();
    let answers = lab.store.renew(&[(lease(&held, &grant), held.ttl)]).await;
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    assert!(matches!(&answers[..], [Renewal::Unknown(_)]), "{answers:?}");
    lab.etcd.server().resume();
    lab.etcd.await_health();
    let answers = lab.store.renew(&[(lease(&held, &grant), held.ttl)]).await;
    assert!(matches!(&answers[..], [Renewal::Renewed]), "{answers:?}");
    assert_eq!(take(&lab.store, &held).await.token, grant.token);
}

#[tokio::test]
async fn a_network_that_swallows_everything_ends_each_operation_in_time() {
    skip!("etcd");
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
    );
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    for error in [&all.0, &all.2, &all.3, &all.5] {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    }
    for error in [&all.1, &all.4, &all.6] {
        let kind = error.kind();
        let unsure = matches!(kind, ErrorKind::Indeterminate | ErrorKind::Unavailable);
        assert!(unsure, "{error:?}");
    }
    lab.proxy.pass();
    take(&lab.store, &request("a")).await;
}

#[tokio::test]
async fn a_killed_server_keeps_grants_and_tokens() {
    skip!("etcd");
    let mut lab = Lab::new().await;
    let (held, given) = (request("held"), request("given"));
    let grant = take(&lab.store, &held).await;
    let former = take(&lab.store, &given).await;
    give(&lab.store, &given, &former).await;
    lab.etcd.server().kill();
    let error = lab.store.acquire(&another(&given)).await.unwrap_err();
    let kind = error.kind();
    let unsure = matches!(kind, ErrorKind::Indeterminate | ErrorKind::Unavailable);
    assert!(unsure, "{error:?}");
    lab.etcd.kill_and_restart();
    let answers = lab.store.renew(&[(lease(&held, &grant), held.ttl)]).await;
    assert!(matches!(&answers[..], [Renewal::Renewed]), "{answers:?}");
    refused(&lab.other, &another(&held)).await;
    assert_eq!(take(&lab.store, &held).await.token, grant.token);
    assert!(take(&lab.other, &another(&given)).await.token > former.token);
}

#[tokio::test]
async fn a_killed_leader_costs_no_lock() {
    skip!("etcd");
    let mut cluster = Cluster::start();
    let locks = Locks::open(&cluster.url()).await.unwrap();
    let other = EtcdStore::open(&cluster.url()).await.unwrap();
    assert_eq!(
        other.profile().durability,
        fencelock::lease::Durability::D3Failover
    );
    let ttl = Duration::from_secs(6);
    let kept = locks.acquire("kept").ttl(ttl).wait(LIMIT).await.unwrap();
    let given = locks.acquire("given").ttl(ttl).wait(LIMIT).await.unwrap();
    let former = given.token();
    given.release().await.unwrap();
    cluster.leader().server().kill();
    let given = locks.acquire("given").ttl(ttl).wait(LIMIT).await.unwrap();
    assert!(given.token() > former);
    // Past the TTL of what was held before: it was renewed at another member.
    tokio::time::sleep(ttl + Duration::from_secs(1)).await;
    kept.check().unwrap();
    refused(&other, &request("kept")).await;
    assert_eq!(grants(&other, "given").await, 1);
}

#[tokio::test]
async fn a_paused_member_is_left_for_another() {
    skip!("etcd");
    let mut cluster = Cluster::start();
    let store = EtcdStore::open(&cluster.url()).await.unwrap();
    take(&store, &request("warm")).await;
    for member in &mut cluster.members {
        member.server().pause();
        let deadline = Deadline::after(2 * LIMIT);
        let mut request = request("moved");
        request.info.label = Some("x".to_owned());
        let grant = loop {
            match store.acquire(&request).await {
                Ok(fencelock::lease::Attempt::Granted(grant)) => break grant,
                Ok(held) => panic!("{held:?}"),
                Err(error) => assert!(!deadline.passed(), "{error:?}"),
            }
        };
        member.server().resume();
        member.await_health();
        give(&store, &request, &grant).await;
    }
}

#[tokio::test]
async fn two_hundred_locks_share_three_connections() {
    skip!("etcd");
    let etcd = Etcd::start();
    let proxy = Proxy::start(etcd.address());
    let url = format!("etcd://{}", proxy.address());
    let locks = Locks::open(&url).await.unwrap();
    let ttl = Duration::from_secs(3);
    let mut guards = Vec::new();
    for i in 0..200 {
        let name = format!("many-{i}");
        guards.push(locks.acquire(&name).ttl(ttl).wait(LIMIT).await.unwrap());
    }
    tokio::time::sleep(2 * ttl).await;
    for guard in &guards {
        guard.check().unwrap();
    }
    assert!(
        proxy.open_connections() <= 3,
        "{}",
        proxy.open_connections()
    );
    let other = EtcdStore::open(&etcd.url()).await.unwrap();
    for i in 0..200 {
        assert_eq!(grants(&other, &format!("many-{i}")).await, 1, "many-{i}");
    }
}

#[tokio::test]
async fn dropped_acquires_leave_no_lock() {
    skip!("etcd");
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
async fn damaged_records_are_refused_and_mended() {
    skip!("etcd");
    let lab = Lab::new().await;
    let taken = take(&lab.store, &request("bad")).await;
    let name = lock("bad");
    for bad in [
        "",
        "{}",
        r#"{"name":"x","last":1,"granted":true,"permits":1}"#,
    ] {
        let _ = lab
            .etcd
            .ctl(&["put", "--", &record_key(PREFIX, &name), bad]);
        let acquired = lab.other.acquire(&request("bad")).await;
        let error = acquired.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{bad}: {error:?}");
        assert!(error.to_string().contains("repair"), "{error}");
        let inspected = lab.other.inspect(&name).await;
        assert_eq!(inspected.unwrap_err().kind(), ErrorKind::Corrupt);
        let plain = lab.other.raise_floor(&name, taken.token, false).await;
        assert_eq!(plain.unwrap_err().kind(), ErrorKind::Corrupt);
        let last = lab.other.raise_floor(&name, taken.token, true).await;
        let last = last.unwrap();
        assert!(last >= taken.token);
        let next = take(&lab.other, &request("bad")).await;
        assert!(next.token > last, "{bad}");
        lab.other.break_lock(&name).await.unwrap();
    }
}

#[tokio::test]
async fn a_holder_that_would_never_lapse_is_refused() {
    skip!("etcd");
    let lab = Lab::new().await;
    let planted = format!("{PREFIX}live/planted/{}", "0".repeat(32));
    let holder = r#"{"token":1,"ttl_secs":10}"#;
    let _ = lab.etcd.ctl(&["put", &planted, holder]);
    let error = lab.store.acquire(&request("planted")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
    assert!(lab.store.break_lock(&lock("planted")).await.is_err());
    take(&lab.store, &request("planted")).await;
}

#[tokio::test]
async fn who_cannot_be_reached_or_refuses_is_named_without_the_password() {
    skip!("etcd");
    let etcd = Etcd::start();
    etcd.protect("canary");
    let address = etcd.address();
    for (url, said) in [
        (
            "etcd://u:canary@127.0.0.1:1".to_owned(),
            "cannot be reached",
        ),
        (format!("etcd://root:canary2@{address}"), "refused the user"),
        (
            format!("etcd://nobody:canary@{address}"),
            "refused the user",
        ),
        (format!("etcd://{address}"), "refused the user"),
    ] {
        let started = now();
        let error = Locks::open(&url).await.unwrap_err();
        assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
        let kind = match said {
            "cannot be reached" => ErrorKind::Unavailable,
            _ => ErrorKind::Unsupported,
        };
        assert_eq!(error.kind(), kind, "{error:?}");
        let text = format!("{} {error:?}", chain(&error));
        assert!(text.contains(said), "{text}");
        assert!(!text.contains("canary"), "{text}");
    }
    let url = format!("etcd://root:canary@{address}");
    let locks = Locks::open(&url).await.unwrap();
    let guard = locks.acquire("protected").wait(LIMIT).await.unwrap();
    assert!(!format!("{locks:?} {guard:?}").contains("canary"));
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_login_outlives_the_server_that_gave_it() {
    skip!("etcd");
    let mut etcd = Etcd::start();
    etcd.protect("secret");
    let url = format!("etcd://root:secret@{}", etcd.address());
    let store = EtcdStore::open(&url).await.unwrap();
    let held = request("held");
    let grant = take(&store, &held).await;
    // Simple tokens are known to the server only as long as it lives.
    etcd.kill_and_restart();
    let again = store.renew(&[(lease(&held, &grant), held.ttl)]).await;
    assert!(matches!(&again[..], [Renewal::Renewed]), "{again:?}");
}

#[tokio::test]
async fn a_probe_names_what_is_old_and_alone() {
    skip!("etcd");
    let etcd = Etcd::start();
    let store = EtcdStore::open(&etcd.url()).await.unwrap();
    let findings = store.probe().await.unwrap();
    let of = |subject: &str| {
        let found = findings.iter().find(|finding| finding.subject == subject);
        found.map(|finding| finding.severity)
    };
    assert_eq!(of("members"), Some(Severity::Warning));
    assert_eq!(of("revision"), Some(Severity::Good));
    assert!(of("version").is_some(), "{findings:?}");
}

#[tokio::test]
async fn names_with_a_common_beginning_do_not_meet() {
    skip!("etcd");
    let lab = Lab::new().await;
    let taken = take(&lab.store, &request("a/b")).await;
    // Measured elsewhere: a lock `a` that waited behind a holder of `a/b`.
    for name in ["a", "a/", "a/b/", "a/b/c", "a/b0", "ab"] {
        take(&lab.other, &request(name)).await;
        lab.other.break_lock(&lock(name)).await.unwrap();
    }
    assert_eq!(grants(&lab.other, "a/b").await, 1);
    let state = lab.store.inspect(&lock("a/b")).await.unwrap().unwrap();
    assert_eq!(state.last_token, Some(taken.token));
}

#[tokio::test]
async fn a_full_database_keeps_what_is_held() {
    skip!("etcd");
    let etcd = Etcd::with(&["--quota-backend-bytes", "4194304"]);
    let store = EtcdStore::open(&etcd.url()).await.unwrap();
    let (held, given) = (request("held"), request("given"));
    let grant = take(&store, &held).await;
    let former = take(&store, &given).await;
    let mut client = Client::connect([etcd.address().to_string()], None)
        .await
        .unwrap();
    let mut full = false;
    for i in 0..20 {
        full |= client
            .put(format!("filler-{i}"), vec![b'x'; 1 << 20], None)
            .await
            .is_err();
    }
    assert!(full, "the database did not fill up");
    let error = store.acquire(&request("new")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("full"), "{error}");
    let answers = store.renew(&[(lease(&held, &grant), held.ttl)]).await;
    assert!(matches!(&answers[..], [Renewal::Renewed]), "{answers:?}");
    give(&store, &given, &former).await;
    refused(&store, &another(&held)).await;
    let findings = store.probe().await.unwrap();
    assert!(
        findings.iter().any(|f| f.subject == "alarms"),
        "{findings:?}"
    );
}

#[tokio::test]
async fn rights_to_the_prefix_are_enough() {
    skip!("etcd");
    let etcd = Etcd::start();
    etcd.protect_for("locks", "secret", PREFIX);
    let url = format!("etcd://locks:secret@{}", etcd.address());
    let store = EtcdStore::open(&url).await.unwrap();
    let held = request("held");
    let mut watch = store.watch(&held.name).await.unwrap();
    let grant = take(&store, &held).await;
    refused(&store, &another(&held)).await;
    for ttl in [held.ttl, secs(60)] {
        let answers = store.renew(&[(lease(&held, &grant), ttl)]).await;
        assert!(matches!(&answers[..], [Renewal::Renewed]), "{answers:?}");
    }
    assert_eq!(store.list("", None, 10).await.unwrap().len(), 1);
    give(&store, &held, &grant).await;
    assert!(tokio::time::timeout(LIMIT, watch.changed()).await.is_ok());
    let last = store.raise_floor(&held.name, grant.token, false).await;
    assert!(last.unwrap() >= grant.token);
    take(&store, &held).await;
    store.break_lock(&held.name).await.unwrap();
    store.prune(Duration::ZERO).await.unwrap();
    for finding in store.probe().await.unwrap() {
        assert_ne!(finding.severity, Severity::Bad, "{finding:?}");
    }
    let error = EtcdStore::open(&format!("{url}?prefix=others/")).await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    assert!(error.to_string().contains("may not"), "{error}");
}
