//! Lost answers, servers that stop, die, forget or run full, and records that others damaged.

use std::time::{Duration, Instant};

use fencelock::lease::{Durability, LockState, Release, Renewal, Ttl};
use fencelock::redis::RedisStore;
use fencelock::{ErrorKind, FencingToken, LeaseStore};
use fencelock_testbed::proxy::Proxy;
use fencelock_testbed::redis::{Pair, Redis};
use fencelock_testbed::{eventually, skip};

use crate::lab::*;

const LIMIT: Duration = Duration::from_secs(10);

fn ttl() -> Ttl {
    Ttl::new(Duration::from_secs(600)).unwrap()
}

#[expect(clippy::disallowed_methods, reason = "a test measures real time")]
fn now() -> Instant {
    Instant::now()
}

#[tokio::test]
async fn a_grant_whose_answer_was_lost_is_found_again() {
    skip!("redis");
    let lab = Lab::new().await;
    let warm = request("warm");
    take(&lab.store, &warm).await;
    let request = request("lost");
    lab.proxy.swallow_answer(b"");
    let error = lab.store.acquire(&request).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    lab.proxy.await_swallowed(LIMIT);
    assert_eq!(grants(&lab.other, "lost").await, 1);
    let grant = take(&lab.store, &request).await;
    let state = lab.other.inspect(&lock("lost")).await.unwrap().unwrap();
    assert_eq!(state.last_token, Some(grant.token));
    assert_eq!(state.holders.len(), 1);
    refused(&lab.other, &another(&request)).await;
}

#[tokio::test]
async fn a_request_lost_before_its_effect_is_sent_again() {
    skip!("redis");
    let lab = Lab::new().await;
    take(&lab.store, &request("warm")).await;
    let request = request("unsent");
    lab.proxy.swallow_request(b"");
    let error = lab.store.acquire(&request).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    assert_eq!(grants(&lab.other, "unsent").await, 0);
    take(&lab.store, &request).await;
    assert_eq!(grants(&lab.other, "unsent").await, 1);
}

#[tokio::test]
async fn lost_answers_of_renew_and_release_are_unknown_and_then_certain() {
    skip!("redis");
    let lab = Lab::new().await;
    let request = request("kept");
    let grant = take(&lab.store, &request).await;
    let lease = lease(&request, &grant);
    lab.proxy.swallow_answer(b"");
    let answers = lab.store.renew(&[(lease.clone(), ttl())]).await;
    assert!(
        matches!(&answers[..], [Renewal::Unknown(e)] if e.kind() == ErrorKind::Indeterminate),
        "{answers:?}"
    );
    lab.proxy.await_swallowed(LIMIT);
    let answers = lab.store.renew(&[(lease.clone(), ttl())]).await;
    assert!(matches!(answers[..], [Renewal::Renewed]), "{answers:?}");
    assert_eq!(take(&lab.store, &request).await.token, grant.token);

    lab.proxy.swallow_answer(b"");
    let error = lab.store.release(&lease, Duration::ZERO).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    lab.proxy.await_swallowed(LIMIT);
    let again = lab.store.release(&lease, Duration::ZERO).await.unwrap();
    assert_eq!(again, Release::NotHeld);
    let next = take(&lab.other, &another(&request)).await;
    assert!(next.token > grant.token);
}

#[tokio::test]
async fn a_paused_server_is_noticed_in_time_and_used_again_afterwards() {
    skip!("redis");
    let mut lab = Lab::new().await;
    let held = request("held");
    let grant = take(&lab.store, &held).await;
    lab.redis.server().pause();
    let started = now();
    let error = lab.store.acquire(&request("new")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    // The connection was given up: the next request finds that no server answers.
    let started = now();
    let answers = lab.store.renew(&[(lease(&held, &grant), ttl())]).await;
    assert!(matches!(&answers[..], [Renewal::Unknown(_)]), "{answers:?}");
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    lab.redis.server().resume();
    let answers = lab.store.renew(&[(lease(&held, &grant), ttl())]).await;
    assert!(matches!(&answers[..], [Renewal::Renewed]), "{answers:?}");
    assert_eq!(take(&lab.store, &held).await.token, grant.token);
}

#[tokio::test]
async fn a_network_that_swallows_everything_ends_each_operation_in_time() {
    skip!("redis");
    let lab = Lab::new().await;
    take(&lab.store, &request("warm")).await;
    lab.proxy.black_hole();
    let lease = lease(&request("x"), &take(&lab.other, &request("x")).await);
    let started = now();
    let all = tokio::join!(
        async { lab.store.acquire(&request("a")).await.unwrap_err() },
        async { lab.store.release(&lease, Duration::ZERO).await.unwrap_err() },
        async { lab.store.inspect(&lock("a")).await.unwrap_err() },
        async { lab.store.list("", None, 10).await.unwrap_err() },
        async { lab.store.break_lock(&lock("a")).await.unwrap_err() },
        async { lab.store.probe().await.unwrap_err() },
        async {
            lab.store
                .raise_floor(&lock("a"), FencingToken::MIN, false)
                .await
                .unwrap_err()
        },
    );
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    for error in [all.0, all.1, all.2, all.3, all.4, all.5, all.6] {
        let kind = error.kind();
        let unsure = matches!(kind, ErrorKind::Indeterminate | ErrorKind::Unavailable);
        assert!(unsure, "{error:?}");
    }
    lab.proxy.pass();
    take(&lab.store, &request("a")).await;
}

#[tokio::test]
async fn after_a_crash_tokens_go_on_upwards_in_the_same_realm() {
    skip!("redis");
    let mut lab = Lab::new().await;
    let before = request("job");
    let grant = take(&lab.store, &before).await;
    lab.redis.server().restart();
    // Nothing was saved: the hold is gone, and with it the last token and the realm.
    let answers = lab.store.renew(&[(lease(&before, &grant), ttl())]).await;
    let lost = matches!(&answers[..], [Renewal::Lost | Renewal::Unknown(_)]);
    assert!(lost, "{answers:?}");
    let mut next = lab.store.acquire(&another(&before)).await;
    if next.is_err() {
        next = lab.store.acquire(&another(&before)).await;
    }
    next.unwrap();
    let state = lab.store.inspect(&lock("job")).await.unwrap().unwrap();
    assert!(state.last_token > Some(grant.token), "{state:?}");
    let newcomer = RedisStore::open(&lab.redis.url()).await.unwrap();
    assert_eq!(newcomer.profile().realm, lab.store.profile().realm);
}

#[tokio::test]
async fn after_a_flush_a_holder_has_lost_and_the_next_token_is_larger() {
    skip!("redis");
    let lab = Lab::new().await;
    let before = request("job");
    let grant = take(&lab.store, &before).await;
    assert_eq!(lab.redis.cli(&["FLUSHALL"]), "OK");
    let answers = lab.store.renew(&[(lease(&before, &grant), ttl())]).await;
    assert!(matches!(&answers[..], [Renewal::Lost]), "{answers:?}");
    let next = take(&lab.other, &another(&before)).await;
    assert!(next.token > grant.token);
}

#[tokio::test]
async fn a_counter_that_was_flushed_goes_on_above_the_watermark_that_was_met() {
    skip!("redis");
    let lab = Lab::with(&[], "tokens=counter").await;
    for _ in 0..5 {
        let request = request("job");
        let grant = take(&lab.store, &request).await;
        let lease = lease(&request, &grant);
        lab.store.release(&lease, Duration::ZERO).await.unwrap();
    }
    assert_eq!(lab.redis.cli(&["FLUSHALL"]), "OK");
    let mut again = request("job");
    assert_eq!(take(&lab.store, &again).await.token, FencingToken::MIN);
    let met = FencingToken::new(5).unwrap();
    lab.store
        .raise_floor(&lock("job"), met, false)
        .await
        .unwrap();
    lab.store.break_lock(&lock("job")).await.unwrap();
    again = another(&again);
    assert_eq!(take(&lab.store, &again).await.token.get(), 6);
    // A client that connects anew sees that this is not the data that it was opened on.
    lab.proxy.cut();
    let error = loop {
        let error = lab.store.inspect(&lock("job")).await.unwrap_err();
        if error.kind() != ErrorKind::Indeterminate {
            break error;
        }
    };
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
}

#[tokio::test]
async fn failing_over_to_a_replica_that_lags_does_not_repeat_a_token() {
    skip!("redis");
    let mut pair = Pair::start();
    let between = Proxy::start(pair.master.address());
    pair.replica.follow_at(between.port());
    let master = RedisStore::open(&pair.master.url()).await.unwrap();
    let early = take(&master, &request("early")).await;
    eventually("the replica has it", LIMIT, || {
        pair.replica.cli(&["DBSIZE"]) == pair.master.cli(&["DBSIZE"])
    });
    between.black_hole();
    let mut last = early.token;
    for _ in 0..20 {
        let request = request("late");
        let grant = take(&master, &request).await;
        assert!(grant.token > last);
        last = grant.token;
        let lease = lease(&request, &grant);
        master.release(&lease, Duration::ZERO).await.unwrap();
    }
    pair.master.server().kill();
    pair.replica.promote();
    let promoted = RedisStore::open(&pair.replica.url()).await.unwrap();
    assert_eq!(promoted.profile().realm, master.profile().realm);
    assert_eq!(promoted.inspect(&lock("late")).await.unwrap(), None);
    assert!(take(&promoted, &request("late")).await.token > last);
}

#[tokio::test]
async fn an_evicted_record_does_not_repeat_a_token() {
    skip!("redis");
    let args = ["--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru"];
    let lab = Lab::with(&args, "allow_eviction=true").await;
    let grant = take(&lab.store, &request("job")).await;
    let fill = "for i = 1, 6000 do redis.call('SET', 'fill' .. i, string.rep('x', 1000)) end";
    eventually("the record is evicted", LIMIT, || {
        let _ = lab.redis.cli(&["EVAL", fill, "0"]);
        lab.redis.cli(&["EXISTS", &record_key(&lock("job"))]) == "0"
    });
    let mut next = request("job");
    next.info.label = Some("next".to_owned());
    assert!(take(&lab.other, &next).await.token > grant.token);
}

#[tokio::test]
async fn a_server_that_evicts_any_key_is_refused() {
    skip!("redis");
    for policy in ["allkeys-lru", "allkeys-lfu", "allkeys-random"] {
        let redis = Redis::with(&["--maxmemory-policy", policy]);
        let error = RedisStore::open(&redis.url()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
        assert!(error.to_string().contains("allow_eviction"), "{error}");
        let allowed = format!("{}?allow_eviction=true", redis.url());
        RedisStore::open(&allowed).await.unwrap();
    }
}

#[tokio::test]
async fn what_may_be_evicted_has_no_expiry() {
    skip!("redis");
    for (policy, ttl) in [("volatile-lru", "-1"), ("noeviction", "")] {
        let redis = Redis::with(&["--maxmemory-policy", policy]);
        let store = RedisStore::open(&redis.url()).await.unwrap();
        take(&store, &request("job")).await;
        let expiry = redis.cli(&["PTTL", &record_key(&lock("job"))]);
        if ttl.is_empty() {
            // Long after its grant ends.
            assert!(expiry.parse::<u64>().unwrap() > 86_400_000, "{expiry}");
        } else {
            assert_eq!(expiry, ttl, "{policy}");
        }
    }
}

#[tokio::test]
async fn a_full_server_grants_nothing_and_still_renews_and_releases() {
    skip!("redis");
    let lab = Lab::new().await;
    let held = request("held");
    let grant = take(&lab.store, &held).await;
    let lease = lease(&held, &grant);
    assert_eq!(lab.redis.cli(&["CONFIG", "SET", "maxmemory", "1"]), "OK");
    let error = lab.store.acquire(&request("new")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("memory limit"), "{error}");
    assert_eq!(grants(&lab.other, "new").await, 0);
    let answers = lab.store.renew(&[(lease.clone(), ttl())]).await;
    assert!(matches!(&answers[..], [Renewal::Renewed]), "{answers:?}");
    refused(&lab.store, &another(&held)).await;
    let released = lab.store.release(&lease, Duration::ZERO).await.unwrap();
    assert_eq!(released, Release::Released);
    assert_eq!(lab.redis.cli(&["CONFIG", "SET", "maxmemory", "0"]), "OK");
    assert!(take(&lab.other, &another(&held)).await.token > grant.token);
}

#[tokio::test]
async fn refusals_of_the_server_are_certain() {
    skip!("redis");
    let lab = Lab::new().await;
    take(&lab.store, &request("warm")).await;
    let settings = [
        ("min-replicas-to-write", "1", "0", "fewer replicas"),
        ("stop-writes-on-bgsave-error", "yes", "yes", ""),
    ];
    for (setting, bad, good, said) in settings {
        assert_eq!(lab.redis.cli(&["CONFIG", "SET", setting, bad]), "OK");
        if !said.is_empty() {
            let error = lab.store.acquire(&request("x")).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
            assert!(error.to_string().contains(said), "{error}");
        }
        assert_eq!(lab.redis.cli(&["CONFIG", "SET", setting, good]), "OK");
    }
    assert_eq!(grants(&lab.other, "x").await, 0);
    // A demoted master.
    let port = Redis::start();
    lab.redis.follow(&port);
    let error = lab.store.acquire(&request("x")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    let error = RedisStore::open(&lab.redis.url()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("replica"), "{error}");
}

#[tokio::test]
async fn a_server_without_scripts_is_said_to_be_one() {
    skip!("redis");
    for command in ["EVALSHA", "INFO"] {
        let redis = Redis::with(&["--rename-command", command, ""]);
        let error = match RedisStore::open(&redis.url()).await {
            Ok(store) => store.acquire(&request("job")).await.unwrap_err(),
            Err(error) => error,
        };
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
        assert!(error.to_string().contains("does not know"), "{error}");
    }
}

#[tokio::test]
async fn scripts_that_the_server_forgot_are_sent_again() {
    skip!("redis");
    let lab = Lab::new().await;
    let mut leases = Vec::new();
    for i in 0..20 {
        let request = request(&format!("job-{i}"));
        let grant = take(&lab.store, &request).await;
        leases.push((lease(&request, &grant), request.ttl));
    }
    let flush = || assert_eq!(lab.redis.cli(&["SCRIPT", "FLUSH"]), "OK");
    flush();
    let answers = lab.store.renew(&leases).await;
    let renewed = |answer: &Renewal| matches!(answer, Renewal::Renewed);
    assert!(answers.iter().all(renewed), "{answers:?}");
    assert_eq!(answers.len(), leases.len());
    flush();
    take(&lab.store, &request("new")).await;
    flush();
    let states = lab.store.list("job-", None, 100).await.unwrap();
    assert_eq!(states.len(), leases.len());
}

#[tokio::test]
async fn a_record_that_others_damaged_is_corrupt_until_it_is_mended() {
    skip!("redis");
    let lab = Lab::new().await;
    let key = record_key(&lock("job"));
    let plant: [&[&str]; 5] = [
        &["SET", &key, "held"],
        &["RPUSH", &key, "held"],
        &["HSET", &key, "owner", "me"],
        &["HSET", &key, "last", "x", "name", "job"],
        &["HSET", &key, "last", "7", "name", "job", "h:me", "for ever"],
    ];
    for planted in plant {
        assert_ne!(lab.redis.cli(planted), "");
        for error in [
            lab.store.acquire(&request("job")).await.unwrap_err(),
            lab.store.inspect(&lock("job")).await.unwrap_err(),
            lab.store.break_lock(&lock("job")).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{planted:?} {error:?}");
        }
        // It hides no other lock.
        let listed = lab.store.list("", None, 10).await.unwrap();
        let damaged: Vec<_> = listed.iter().map(|s| s.damage.is_some()).collect();
        assert_eq!(damaged, [true, false], "{planted:?} {listed:?}");
        let floor = FencingToken::new(41).unwrap();
        let refused = lab.store.raise_floor(&lock("job"), floor, false).await;
        assert_eq!(
            refused.unwrap_err().kind(),
            ErrorKind::Corrupt,
            "{planted:?}"
        );
        lab.store
            .raise_floor(&lock("job"), floor, true)
            .await
            .unwrap();
        let state: LockState = lab.store.inspect(&lock("job")).await.unwrap().unwrap();
        assert_eq!(state.last_token, Some(floor));
        assert!(take(&lab.store, &request("job")).await.token > floor);
        assert_eq!(lab.redis.cli(&["DEL", &key]), "1");
    }
    // A grant that somebody made endless still lapses.
    take(&lab.store, &request_for("job", Duration::from_millis(100))).await;
    assert_ne!(lab.redis.cli(&["PERSIST", &key]), "");
    tokio::time::sleep(Duration::from_millis(150)).await;
    take(&lab.other, &request("job")).await;
}

#[tokio::test]
async fn a_lease_that_lapses_by_itself_is_lost() {
    skip!("redis");
    let lab = Lab::new().await;
    let short = request_for("short", Duration::from_millis(300));
    let grant = take(&lab.store, &short).await;
    refused(&lab.other, &another(&short)).await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    let answers = lab.store.renew(&[(lease(&short, &grant), ttl())]).await;
    assert!(matches!(&answers[..], [Renewal::Lost]), "{answers:?}");
    assert!(take(&lab.other, &another(&short)).await.token > grant.token);
}

#[tokio::test]
async fn a_clean_up_keeps_what_the_clock_has_not_passed() {
    skip!("redis");
    let lab = Lab::new().await;
    let used = take(&lab.store, &request("ahead")).await;
    let hour_us = 3_600_000_000;
    let floor = FencingToken::new(used.token.get() + hour_us).unwrap();
    let name = lock("ahead");
    lab.store.raise_floor(&name, floor, false).await.unwrap();
    lab.store.break_lock(&name).await.unwrap();
    let before_us = lab.redis.cli(&["PTTL", &record_key(&name)]);
    assert!(before_us.parse::<u64>().unwrap() > hour_us / 1_000);
    assert_eq!(lab.store.prune(Duration::ZERO).await.unwrap().removed, 0);
    // A day later, which the record is made to look like, it is removed.
    let key = record_key(&lock("old"));
    let old = (used.token.get() - 25 * hour_us).to_string();
    let plant = ["HSET", &key, "name", "old", "last", &old, "idle", &old];
    assert_eq!(lab.redis.cli(&plant), "3");
    assert_eq!(lab.store.prune(Duration::ZERO).await.unwrap().removed, 1);
    assert_eq!(lab.redis.cli(&["EXISTS", &key]), "0");
    assert!(take(&lab.store, &request("ahead")).await.token > floor);
}

#[tokio::test]
async fn a_grant_counts_only_once_replicas_have_it() {
    skip!("redis");
    let mut pair = Pair::start();
    let proxy = Proxy::start(pair.master.address());
    let url = format!("redis://{}?wait_replicas=1", proxy.address());
    let store = RedisStore::open(&url).await.unwrap();
    let kept = request("kept");
    let grant = take(&store, &kept).await;
    let before = proxy.traffic();
    let answers = store.renew(&[(lease(&kept, &grant), ttl())]).await;
    assert!(matches!(&answers[..], [Renewal::Renewed]), "{answers:?}");
    take(&store, &request("other")).await;
    // Renew's script is new to the server; the acquire is one trip with its wait.
    assert_eq!(proxy.traffic().trips - before.trips, 3);

    pair.replica.server().pause();
    let error = store.acquire(&request("unsure")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("replicas=0"), "{error}");
    assert_eq!(grants(&store, "unsure").await, 0);
    let answers = store.renew(&[(lease(&kept, &grant), ttl())]).await;
    assert!(matches!(&answers[..], [Renewal::Unknown(_)]), "{answers:?}");
    pair.replica.server().resume();
}

#[tokio::test]
async fn waiting_for_the_disk_is_refused_where_it_cannot_be_known() {
    skip!("redis");
    let redis = Redis::start();
    let error = RedisStore::open(&format!("{}?wait_aof=1", redis.url())).await;
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");

    let redis = Redis::with(&["--appendonly", "yes"]);
    let opened = RedisStore::open(&format!("{}?wait_aof=1", redis.url())).await;
    let info = redis.cli(&["INFO", "server"]);
    let version = |part: &str| info.contains(&format!("redis_version:{part}"));
    if version("6.") || version("7.0.") {
        assert_eq!(opened.unwrap_err().kind(), ErrorKind::Unsupported);
    } else {
        let store = opened.unwrap();
        assert_eq!(store.profile().durability, Durability::D2PowerLoss);
        take(&store, &request("job")).await;
    }
}
