//! Buckets that would forget, and what operators do to them.

use fencelock::nats::{FencedNats, NatsStore};
use fencelock::{ErrorKind, Fenced, FencingToken, LeaseStore, Locks};
use fencelock_testbed::nats::Nats;
use fencelock_testbed::{Deadline, skip};

use crate::lab::*;

fn make(nats: &Nats, bucket: &str, settings: &str) {
    let config = format!(
        r#"{{"name":"KV_{bucket}","subjects":["$KV.{bucket}.>"],"max_msgs_per_subject":1{settings}}}"#
    );
    let made = nats.ask(&format!("$JS.API.STREAM.CREATE.KV_{bucket}"), &config);
    assert!(made.contains("did_create"), "{made}");
}

fn delete(nats: &Nats, bucket: &str) {
    let deleted = nats.ask(&format!("$JS.API.STREAM.DELETE.KV_{bucket}"), "");
    assert!(deleted.contains("\"success\":true"), "{deleted}");
}

#[tokio::test]
async fn a_bucket_that_could_forget_a_token_is_refused() {
    skip!("nats");
    let nats = Nats::start();
    for (bucket, settings, said) in [
        ("memory", r#","storage":"memory""#, "memory"),
        (
            "aged",
            r#","storage":"file","max_age":60000000000"#,
            "expire",
        ),
        (
            "work",
            r#","storage":"file","retention":"workqueue""#,
            "retention",
        ),
        (
            "small",
            r#","storage":"file","discard":"old","max_bytes":100000"#,
            "drops",
        ),
        (
            "silent",
            r#","storage":"file","no_ack":true"#,
            "acknowledges",
        ),
        (
            "async",
            r#","storage":"file","persist_mode":"async""#,
            "async",
        ),
    ] {
        make(&nats, bucket, settings);
        for error in [
            NatsStore::open(&format!("{}?bucket={bucket}", nats.url()))
                .await
                .unwrap_err(),
            FencedNats::open(&format!("{}?bucket={bucket}", nats.url()))
                .await
                .unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
            assert!(error.to_string().contains(said), "{bucket}: {error}");
        }
    }
    NatsStore::open(&format!("{}?bucket=whole", nats.url()))
        .await
        .unwrap();
    let mirror = r#"{"name":"KV_copy","mirror":{"name":"KV_whole"},"storage":"file"}"#;
    let made = nats.ask("$JS.API.STREAM.CREATE.KV_copy", mirror);
    assert!(made.contains("did_create"), "{made}");
    let error = NatsStore::open(&format!("{}?bucket=copy", nats.url())).await;
    assert!(error.unwrap_err().to_string().contains("copy"));
    let error = NatsStore::open(&format!("{}?bucket=whole&replicas=3", nats.url())).await;
    assert!(error.unwrap_err().to_string().contains("present=1"));
    // A single server has no second one.
    let error = NatsStore::open(&format!("{}?bucket=three&replicas=3", nats.url())).await;
    assert!(error.unwrap_err().to_string().contains("replicas=1"));
}

#[tokio::test]
async fn a_bucket_of_the_users_own_holds_locks() {
    skip!("nats");
    let nats = Nats::start();
    make(
        &nats,
        "own",
        r#","storage":"file","discard":"new","allow_direct":true"#,
    );
    let url = format!("{}?bucket=own", nats.url());
    let (store, other) = (
        NatsStore::open(&url).await.unwrap(),
        NatsStore::open(&url).await.unwrap(),
    );
    assert_eq!(store.profile().realm, other.profile().realm);
    let held = request("held");
    take(&store, &held).await;
    refused(&other, &another(&held)).await;
    let findings = store.probe().await.unwrap();
    let records = findings.iter().find(|finding| finding.subject == "records");
    assert_eq!(
        records.unwrap().severity,
        fencelock::lease::Severity::Warning
    );
}

#[tokio::test]
async fn many_who_make_the_bucket_at_once_share_it() {
    skip!("nats");
    let nats = Nats::start();
    let url = nats.url();
    let opening: Vec<_> = (0..8)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move { NatsStore::open(&url).await.unwrap() })
        })
        .collect();
    let mut realms = Vec::new();
    for opened in opening {
        realms.push(opened.await.unwrap().profile().realm.clone());
    }
    realms.dedup();
    assert_eq!(realms.len(), 1, "{realms:?}");
}

/// Deletes and makes anew, by a store that opens it; or by hand, for everybody's subjects.
async fn made_anew(by_hand: bool) {
    let nats = Nats::start();
    let settings = r#","storage":"file","discard":"new""#;
    if by_hand {
        make(&nats, "fencelock", settings);
    }
    let store = NatsStore::open(&nats.url()).await.unwrap();
    let values = Fenced::new(FencedNats::open(&nats.url()).await.unwrap());
    let (held, given) = (request("held"), request("given"));
    let grant = take(&store, &held).await;
    let former = take(&store, &given).await;
    give(&store, &given, &former).await;
    values.put("r", "x", FencingToken::MIN).await.unwrap();
    delete(&nats, "fencelock");
    let error = store.acquire(&request("new")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    if by_hand {
        make(&nats, "fencelock", settings);
    }
    // The server may be deleting the old one's files still.
    let deadline = Deadline::after(LIMIT);
    let next = loop {
        match NatsStore::open(&nats.url()).await {
            Ok(store) => break store,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}"),
        }
        assert!(!deadline.passed(), "the bucket cannot be made anew");
    };
    assert_ne!(next.profile().realm, store.profile().realm);
    // What is free in the new one is not granted through the old one, known or not.
    for request in [&given, &request("new"), &held] {
        let error = store.acquire(&another(request)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    }
    let answers = store.renew(&[(lease(&held, &grant), held.ttl)]).await;
    assert!(
        !matches!(&answers[..], [fencelock::lease::Renewal::Renewed]),
        "{answers:?}"
    );
    let error = values.put("r", "y", FencingToken::MIN).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(next.list("", None, 10).await.unwrap().is_empty());
    let error = store.acquire(&request("new")).await.unwrap_err();
    assert!(
        error.to_string().contains("open the store again"),
        "{error}"
    );
}

#[tokio::test]
async fn a_bucket_that_was_made_anew_is_other_data() {
    skip!("nats");
    made_anew(false).await;
}

#[tokio::test]
async fn a_bucket_that_was_made_anew_by_hand_is_other_data() {
    skip!("nats");
    made_anew(true).await;
}

#[tokio::test]
async fn nobody_purges_a_bucket_that_was_made_here() {
    skip!("nats");
    let nats = Nats::start();
    let store = NatsStore::open(&nats.url()).await.unwrap();
    let held = request("held");
    take(&store, &held).await;
    let purged = nats.ask("$JS.API.STREAM.PURGE.KV_fencelock", "{}");
    assert!(purged.contains("not permitted"), "{purged}");
    let deleted = nats.ask("$JS.API.STREAM.MSG.DELETE.KV_fencelock", r#"{"seq":1}"#);
    assert!(deleted.contains("not permitted"), "{deleted}");
    refused(&store, &another(&held)).await;
}

#[tokio::test]
async fn after_a_purge_tokens_go_on_from_where_they_were() {
    skip!("nats");
    let nats = Nats::start();
    make(&nats, "own", r#","storage":"file","discard":"new""#);
    let url = format!("{}?bucket=own", nats.url());
    let store = NatsStore::open(&url).await.unwrap();
    let (held, given) = (request("held"), request("given"));
    let mut last = take(&store, &held).await;
    let former = take(&store, &given).await;
    give(&store, &given, &former).await;
    for _ in 0..3 {
        let purged = nats.ask("$JS.API.STREAM.PURGE.KV_own", "{}");
        assert!(purged.contains("\"success\":true"), "{purged}");
        let answers = store.renew(&[(lease(&held, &last), held.ttl)]).await;
        assert!(
            matches!(&answers[..], [fencelock::lease::Renewal::Lost]),
            "{answers:?}"
        );
        let next = take(&store, &another(&given)).await;
        assert!(next.token > former.token);
        let again = take(&store, &held).await;
        assert!(again.token > last.token && again.token > next.token);
        last = again;
    }
}

#[tokio::test]
async fn damaged_records_are_refused_and_mended() {
    skip!("nats");
    let lab = Lab::new().await;
    let taken = take(&lab.store, &request("bad")).await;
    let name = lock("bad");
    let subject = record("fencelock", &lab.store, "bad");
    for (headers, bad) in [
        ("", ""),
        ("", "{}"),
        (
            "",
            r#"{"name":"x","last":1,"granted":true,"permits":1,"holders":[]}"#,
        ),
        (
            "",
            r#"{"name":"bad","last":1,"permits":1,"holders":[{"id":"x","ttl_ms":1}]}"#,
        ),
        // What `nats kv del` leaves.
        ("KV-Operation: DEL\r\n", ""),
    ] {
        let acknowledged = lab.nats.publish(&subject, headers, bad);
        assert!(acknowledged.contains("\"seq\""), "{acknowledged}");
        let error = lab.other.acquire(&request("bad")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{bad}: {error:?}");
        assert!(error.to_string().contains("repair"), "{error}");
        let listed = lab.other.list("", None, 10).await.unwrap();
        let damaged = listed.iter().find(|state| state.name == name).unwrap();
        assert!(damaged.damage.is_some(), "{damaged:?}");
        assert_eq!(
            lab.other.inspect(&name).await.unwrap_err().kind(),
            ErrorKind::Corrupt
        );
        let plain = lab.other.raise_floor(&name, taken.token, false).await;
        assert_eq!(plain.unwrap_err().kind(), ErrorKind::Corrupt);
        let last = lab
            .other
            .raise_floor(&name, taken.token, true)
            .await
            .unwrap();
        assert!(last >= taken.token);
        let next = take(&lab.other, &request("bad")).await;
        assert!(next.token > last, "{bad}");
        lab.other.break_lock(&name).await.unwrap();
    }
}

#[tokio::test]
async fn a_realm_that_is_named_outlives_the_bucket() {
    skip!("nats");
    let nats = Nats::start();
    let url = format!("{}?realm=payments", nats.url());
    let store = NatsStore::open(&url).await.unwrap();
    assert_eq!(store.profile().realm, "payments");
    delete(&nats, "fencelock");
    let deadline = Deadline::after(LIMIT);
    let store = loop {
        match NatsStore::open(&url).await {
            Ok(store) => break store,
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}"),
        }
        assert!(!deadline.passed(), "the bucket cannot be made anew");
    };
    assert_eq!(store.profile().realm, "payments");
}

#[tokio::test]
async fn a_full_bucket_refuses_and_forgets_nothing() {
    skip!("nats");
    let nats = Nats::start();
    make(
        &nats,
        "full",
        r#","storage":"file","discard":"new","max_bytes":3000"#,
    );
    let store = NatsStore::open(&format!("{}?bucket=full", nats.url()))
        .await
        .unwrap();
    let mut error = None;
    let first = request("job-0");
    let grant = take(&store, &first).await;
    for i in 1..30 {
        if let Err(e) = store.acquire(&request(&format!("job-{i}"))).await {
            error = Some(e);
            break;
        }
    }
    let error = error.unwrap();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("full"), "{error}");
    refused(&store, &another(&first)).await;
    assert_eq!(grants(&store, "job-0").await, 1);
    assert_eq!(take(&store, &first).await.token, grant.token);
}

#[tokio::test]
async fn a_probe_names_what_the_operator_has_to_see_to() {
    skip!("nats");
    let nats = Nats::start();
    let locks = Locks::open(&nats.url()).await.unwrap();
    let findings = locks.probe().await.unwrap();
    let of = |subject: &str| findings.iter().find(|f| f.subject == subject).unwrap();
    assert!(of("durability").detail.contains("sync_interval"));
    assert!(of("replicas").detail.starts_with("1 replica"));
    assert_eq!(of("records").severity, fencelock::lease::Severity::Good);
    assert!(of("version").detail.contains("2."));
}

#[tokio::test]
async fn a_backup_that_was_put_back_is_noticed_by_a_store_that_was_open() {
    skip!("nats");
    let mut nats = Nats::start();
    let store = NatsStore::open(&nats.url()).await.unwrap();
    let (held, given) = (request("held"), request("given"));
    take(&store, &request("before")).await;
    let data = nats.server().dir().join("jetstream");
    let backup = nats.server().dir().join("backup");
    nats.server().stop();
    fencelock_testbed::process::copy_dir(&data, &backup);
    nats.kill_and_restart();
    let grant = take(&store, &held).await;
    let former = take(&store, &given).await;
    give(&store, &given, &former).await;
    nats.server().kill();
    std::fs::remove_dir_all(&data).unwrap();
    std::fs::rename(&backup, &data).unwrap();
    nats.kill_and_restart();
    // A read is asked again over a new connection.
    store.probe().await.unwrap();
    for request in [&given, &held, &request("new")] {
        let error = store.acquire(&another(request)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        assert!(error.to_string().contains("behind"), "{error}");
    }
    let lease = lease(&held, &grant);
    let answers = store.renew(&[(lease, held.ttl)]).await;
    let unknown = matches!(&answers[..], [fencelock::lease::Renewal::Unknown(_)]);
    assert!(unknown, "{answers:?}");
}
