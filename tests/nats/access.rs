//! Who cannot be reached, refuses, or may not: each says so in time, and without the password.

use fencelock::nats::client::ConnectOptions;
use fencelock::nats::client::connection::State;
use fencelock::nats::{FencedNats, NatsOptions, NatsStore};
use fencelock::{ErrorKind, Fenced, FencingToken, LeaseStore, Locks};
use fencelock_testbed::nats::Nats;
use fencelock_testbed::skip;

use crate::lab::*;

async fn refusal(url: &str, kind: ErrorKind, said: &str) {
    let started = now();
    let error = Locks::open(url).await.unwrap_err();
    assert!(started.elapsed() < LIMIT, "{:?}", started.elapsed());
    let text = format!("{} {error:?}", chain(&error));
    assert_eq!(error.kind(), kind, "{text}");
    assert!(text.contains(said), "{text}");
    assert!(!text.contains("canary"), "{text}");
}

#[tokio::test]
async fn who_cannot_be_reached_or_refuses_is_named_without_the_password() {
    skip!("nats");
    let nats = Nats::with_user("user", "canary", "");
    let address = nats.address();
    let unavailable = ErrorKind::Unavailable;
    for (url, said) in [
        (
            "nats://u:canary@127.0.0.1:1".to_owned(),
            "cannot be reached host=127.0.0.1 port=1",
        ),
        // Nobody answers there.
        ("nats://u:canary@192.0.2.1".to_owned(), "192.0.2.1"),
        (
            "nats://u:canary@no.such.host.invalid".to_owned(),
            "no.such.host.invalid",
        ),
        (format!("nats://user:canary2@{address}"), "refused the user"),
        (format!("nats://canary@{address}"), "refused the user"),
        (format!("nats://{address}"), "refused the user"),
    ] {
        let kind = match said {
            "refused the user" => ErrorKind::Unsupported,
            _ => unavailable,
        };
        refusal(&url, kind, said).await;
    }
    let url = format!("nats://user:canary@{address}");
    let locks = Locks::open(&url).await.unwrap();
    let guard = locks.acquire("protected").wait(LIMIT).await.unwrap();
    assert!(!format!("{locks:?} {guard:?}").contains("canary"));
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_token_is_a_login_too() {
    skip!("nats");
    let nats = Nats::with("authorization { token: \"t0k\" }\n");
    let store = NatsStore::open(&format!("nats://t0k@{}", nats.address())).await;
    take(&store.unwrap(), &request("a")).await;
    let url = format!("nats://canary@{}", nats.address());
    refusal(&url, ErrorKind::Unsupported, "refused the user").await;
}

#[tokio::test]
async fn a_server_without_jetstream_says_what_to_start_it_with() {
    skip!("nats");
    let nats = Nats::without_jetstream();
    refusal(&nats.url(), ErrorKind::Unsupported, "start it with -js").await;
}

#[tokio::test]
async fn an_account_without_jetstream_says_so() {
    skip!("nats");
    let nats = Nats::with(
        "accounts { A { users: [ { user: a, password: a } ] }, B { jetstream: enabled, users: [ { user: b, password: b } ] } }\n",
    );
    let url = format!("nats://a:a@{}", nats.address());
    refusal(&url, ErrorKind::Unsupported, "not enabled for this account").await;
    let url = format!("nats://b:b@{}", nats.address());
    take(&NatsStore::open(&url).await.unwrap(), &request("a")).await;
}

#[tokio::test]
async fn certificates_are_verified_both_ways() {
    skip!("nats");
    let nats = Nats::with_tls();
    let files = nats.certificates();
    let (ca, cert, key) = (files.authority(), files.certificate(), files.key());
    let (ca, cert, key) = (ca.display(), cert.display(), key.display());
    let address = nats.address();
    let wrong = ErrorKind::Unsupported;
    for (url, said) in [
        // The server asks for TLS, and gets it.
        (format!("nats://{address}"), "ca=/path/to/ca.pem"),
        (format!("tls://{address}"), "ca=/path/to/ca.pem"),
        (format!("nats://{address}?ca={ca}"), "cert="),
    ] {
        refusal(&url, wrong, said).await;
    }
    let url = format!("nats://{address}?ca=/nowhere");
    refusal(&url, ErrorKind::Invalid, "path=/nowhere").await;
    let plain = Nats::start();
    let url = format!("tls://{}", plain.address());
    refusal(&url, wrong, "speaks no TLS").await;
    let url = format!("tls://{address}?ca={ca}&cert={cert}&cert_key={key}");
    let locks = Locks::open(&url).await.unwrap();
    let guard = locks.acquire("secret").await.unwrap();
    guard.release().await.unwrap();
}

/// What docs/backends/nats.md says that a user needs.
const ENOUGH: &str = r#"publish: ["$JS.API.STREAM.INFO.KV_fencelock", "$JS.API.STREAM.MSG.GET.KV_fencelock", "$KV.fencelock.>", "fencelock.fencelock.>"], subscribe: ["_INBOX.>", "fencelock.fencelock.>"]"#;

#[tokio::test]
async fn the_documented_permissions_are_enough() {
    skip!("nats");
    let nats = Nats::with_user("locks", "secret", ENOUGH);
    let url = |user: &str| format!("nats://{user}@{}", nats.address());
    // Made by somebody who may.
    NatsStore::open(&url("admin:admin")).await.unwrap();
    let store = NatsStore::open(&url("locks:secret")).await.unwrap();
    let held = request("held");
    let mut watch = store.watch(&held.name).await.unwrap();
    let grant = take(&store, &held).await;
    refused(&store, &another(&held)).await;
    let answers = store.renew(&[(lease(&held, &grant), held.ttl)]).await;
    assert!(
        matches!(&answers[..], [fencelock::lease::Renewal::Renewed]),
        "{answers:?}"
    );
    assert_eq!(store.list("", None, 10).await.unwrap().len(), 1);
    give(&store, &held, &grant).await;
    assert!(tokio::time::timeout(LIMIT, watch.changed()).await.is_ok());
    store
        .raise_floor(&held.name, grant.token, false)
        .await
        .unwrap();
    take(&store, &held).await;
    store.break_lock(&held.name).await.unwrap();
    store.prune(std::time::Duration::ZERO).await.unwrap();
    store.probe().await.unwrap();
    let values = Fenced::new(FencedNats::open(&url("locks:secret")).await.unwrap());
    values.put("r", "x", FencingToken::MIN).await.unwrap();
}

#[tokio::test]
async fn a_missing_permission_is_named_at_once() {
    skip!("nats");
    for (missing, said) in [
        (
            "\"$JS.API.STREAM.INFO.KV_fencelock\", ",
            "$JS.API.STREAM.INFO",
        ),
        (
            "\"$JS.API.STREAM.MSG.GET.KV_fencelock\", ",
            "$JS.API.STREAM.MSG.GET",
        ),
        ("\"$KV.fencelock.>\", ", "$KV.fencelock."),
        ("\"_INBOX.>\", ", "_INBOX."),
    ] {
        let some = ENOUGH.replace(missing, "");
        assert_ne!(some, ENOUGH);
        let nats = Nats::with_user("locks", "canary", &some);
        let url = |user: &str| format!("nats://{user}@{}", nats.address());
        NatsStore::open(&url("admin:admin")).await.unwrap();
        let started = now();
        let error = match NatsStore::open(&url("locks:canary")).await {
            Ok(store) => store.acquire(&request("a")).await.unwrap_err(),
            Err(error) => error,
        };
        assert!(started.elapsed().as_secs() < 2, "{:?}", started.elapsed());
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
        let text = format!("{} {error:?}", chain(&error));
        assert!(text.contains("may not do this"), "{text}");
        assert!(text.contains(said), "{text}");
        assert!(!text.contains("canary"), "{text}");
    }
    // Who may not make a bucket, and finds none.
    let nats = Nats::with_user("locks", "canary", ENOUGH);
    let url = format!("nats://locks:canary@{}", nats.address());
    refusal(&url, ErrorKind::Unsupported, "STREAM.CREATE").await;
    refusal(
        &format!("{url}?create=false"),
        ErrorKind::Invalid,
        "does not exist",
    )
    .await;
}

#[tokio::test]
async fn without_the_permission_to_listen_waiters_poll() {
    skip!("nats");
    let some = ENOUGH.replace(", \"fencelock.fencelock.>\"", "");
    let nats = Nats::with_user("locks", "secret", &some);
    let url = |user: &str| format!("nats://{user}@{}", nats.address());
    let other = NatsStore::open(&url("admin:admin")).await.unwrap();
    let mut held = request("held");
    held.ttl = millis(1_000);
    take(&other, &held).await;
    let locks = Locks::open(&url("locks:secret")).await.unwrap();
    let guard = locks.acquire("held").wait(LIMIT).await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_client_of_the_users_own_is_used_as_it_is() {
    skip!("nats");
    let mut nats = Nats::with_user("user", "secret", "");
    let options = ConnectOptions::with_user_and_password("user".to_owned(), "secret".to_owned());
    let client = options.connect(nats.url()).await.unwrap();
    let store = NatsOptions::default().bucket("own").unwrap();
    let store = store.open_client(client.clone()).await.unwrap();
    let values = Fenced::new(FencedNats::from_client(client.clone()).await.unwrap());
    let held = request("held");
    let grant = take(&store, &held).await;
    refused(&store, &another(&held)).await;
    values.put("r", "x", FencingToken::MIN).await.unwrap();
    nats.server().kill();
    let error = store.acquire(&request("new")).await.unwrap_err();
    unsure(&error);
    while client.connection_state() == State::Connected {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    // While it is not connected, nothing is given to it to be kept.
    let error = store.acquire(&request("new")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    nats.kill_and_restart();
    let deadline = fencelock_testbed::Deadline::after(LIMIT);
    let lease = lease(&held, &grant);
    while !matches!(
        &store.renew(&[(lease.clone(), held.ttl)]).await[..],
        [fencelock::lease::Renewal::Renewed]
    ) {
        assert!(!deadline.passed(), "it does not connect again");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert_eq!(grants(&store, "new").await, 0);
}
