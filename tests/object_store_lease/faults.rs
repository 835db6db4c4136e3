//! Lost, late, doubled and refused requests, and servers that stop.

use std::sync::Arc;
use std::time::Duration;

use fencelock::lease::{Attempt, LeaseStore as _, Release, Renewal};
use fencelock::object_store::BucketStore;
use fencelock::object_store::client::{ObjectStore, RetryConfig};
use fencelock::{ErrorKind, Locks};
use fencelock_testbed::http::{Fault, Meddler};
use fencelock_testbed::s3::S3;

use super::lab::{
    MOTO, SEAWEED, client_at, granted, held, holders, in_time, lease, long, no_retries, whole,
};

/// A server, what stands in front of it, and a store that goes through that.
struct Lab {
    meddler: Meddler,
    store: BucketStore,
}

/// The writes of records, and nothing else.
const RECORD: &str = "put /bucket/p/lock/";

impl Lab {
    async fn start() -> Self {
        Self::with(no_retries()).await
    }

    async fn with(retry: RetryConfig) -> Self {
        let meddler = Meddler::start(MOTO.address());
        let client = client_at(meddler.address(), retry);
        let store = BucketStore::from_store(client, "p").await.unwrap();
        Self { meddler, store }
    }
}

#[tokio::test]
async fn a_lost_answer_is_found_by_what_was_written() {
    fencelock_testbed::skip!("s3");
    let lab = Lab::start().await;
    for fault in [
        Fault::AnswerAfter(503),
        Fault::Hang,
        Fault::AnswerAfter(500),
    ] {
        let name = format!("lost-{fault:?}").to_lowercase();
        let mine = long(&name);

        let before = lab.meddler.count(RECORD);
        lab.meddler.ambush(RECORD, fault, 1);
        let grant = granted(&lab.store, &mine).await;
        assert_eq!(lab.meddler.count(RECORD) - before, 1, "{fault:?}");
        let state = lab.store.inspect(&mine.name).await.unwrap().unwrap();
        assert_eq!(state.last_token, Some(grant.token));
        assert_eq!(state.holders.len(), 1);

        lab.meddler.ambush(RECORD, fault, 1);
        let renewed = lab.store.renew(&[(lease(&mine, &grant), mine.ttl)]).await;
        assert!(matches!(renewed[..], [Renewal::Renewed]), "{renewed:?}");

        lab.meddler.ambush(RECORD, fault, 1);
        let released = lab
            .store
            .release(&lease(&mine, &grant), Duration::ZERO)
            .await;
        assert_eq!(released.unwrap(), Release::Released);
        assert_eq!(lab.meddler.count(RECORD) - before, 3, "{fault:?}");
        assert!(granted(&lab.store, &long(&name)).await.token > grant.token);

        lab.meddler.ambush(RECORD, fault, 1);
        let broken = lab.store.break_lock(&mine.name).await.unwrap().unwrap();
        assert_eq!(broken.holders.len(), 1);
        assert_eq!(holders(&lab.store, &name).await, 0);
    }
}

#[tokio::test]
async fn a_client_that_repeats_by_itself_does_not_take_its_own_grant_for_anothers() {
    fencelock_testbed::skip!("s3");
    let lab = Lab::with(RetryConfig::default()).await;
    let mine = long("repeated");
    for _ in 0..2 {
        // The client asks again, and is told that the condition does not hold any more.
        lab.meddler.ambush(RECORD, Fault::AnswerAfter(503), 1);
        let grant = granted(&lab.store, &mine).await;
        assert_eq!(holders(&lab.store, "repeated").await, 1);
        lab.meddler.ambush(RECORD, Fault::AnswerAfter(503), 1);
        let released = lab
            .store
            .release(&lease(&mine, &grant), Duration::ZERO)
            .await;
        assert_eq!(released.unwrap(), Release::Released);
    }
}

#[tokio::test]
async fn a_doubled_request_is_one_grant() {
    fencelock_testbed::skip!("s3");
    let lab = Lab::start().await;
    for name in ["doubled", "doubled"] {
        let mine = long(name);
        lab.meddler.ambush(RECORD, Fault::Twice, 1);
        let grant = granted(&lab.store, &mine).await;
        assert_eq!(holders(&lab.store, name).await, 1);
        lab.meddler.ambush(RECORD, Fault::Twice, 1);
        let renewed = lab.store.renew(&[(lease(&mine, &grant), mine.ttl)]).await;
        assert!(matches!(renewed[..], [Renewal::Renewed]), "{renewed:?}");
        lab.meddler.ambush(RECORD, Fault::Twice, 1);
        let released = lab
            .store
            .release(&lease(&mine, &grant), Duration::ZERO)
            .await;
        assert_eq!(released.unwrap(), Release::Released);
    }
}

#[tokio::test]
async fn a_conflict_in_flight_is_no_answer() {
    fencelock_testbed::skip!("s3");
    let lab = Lab::start().await;
    // Both for a record that is not there yet, and for one that is.
    for _ in 0..2 {
        let mine = long("conflict");
        lab.meddler.ambush(RECORD, Fault::Answer(409), 3);
        let grant = granted(&lab.store, &mine).await;
        lab.meddler.ambush(RECORD, Fault::Answer(409), 2);
        let renewed = lab.store.renew(&[(lease(&mine, &grant), mine.ttl)]).await;
        assert!(matches!(renewed[..], [Renewal::Renewed]), "{renewed:?}");
        lab.meddler.ambush(RECORD, Fault::Answer(409), 2);
        let released = lab
            .store
            .release(&lease(&mine, &grant), Duration::ZERO)
            .await;
        assert_eq!(released.unwrap(), Release::Released);
    }
    // Another's conflict is not a grant either.
    let theirs = long("conflict");
    granted(&lab.store, &theirs).await;
    lab.meddler.ambush(RECORD, Fault::Answer(409), 1);
    held(&lab.store, &long("conflict")).await;
}

#[tokio::test]
async fn what_stays_in_doubt_is_said_and_found_by_the_same_request() {
    fencelock_testbed::skip!("s3");
    let lab = Lab::start().await;
    let mine = long("doubt");
    let grant = granted(&lab.store, &mine).await;
    let released = lab
        .store
        .release(&lease(&mine, &grant), Duration::ZERO)
        .await;
    assert_eq!(released.unwrap(), Release::Released);
    // What this client left free it takes with one write. Its answer is lost, and so is the look.
    let mine = long("doubt");
    lab.meddler.ambush(RECORD, Fault::AnswerAfter(503), 1);
    lab.meddler
        .ambush("get /bucket/p/lock/", Fault::Answer(503), 3);
    let error = lab.store.acquire(&mine).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    let state = lab.store.inspect(&mine.name).await.unwrap().unwrap();
    assert_eq!(state.holders.len(), 1);
    let again = granted(&lab.store, &mine).await;
    assert_eq!(Some(again.token), state.last_token);
    assert_eq!(holders(&lab.store, "doubt").await, 1);
}

#[tokio::test]
async fn a_write_that_arrives_late_changes_nothing() {
    fencelock_testbed::skip!("s3");
    let lab = Lab::start().await;
    let mine = long("late");
    lab.meddler
        .ambush(RECORD, Fault::Late(Duration::from_millis(3_600)), 1);
    let (grant, took) = in_time(granted(&lab.store, &mine)).await;
    assert!(took >= Duration::from_secs(2), "it waited for an answer");
    let before = lab.store.inspect(&mine.name).await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    let after = lab.store.inspect(&mine.name).await.unwrap().unwrap();
    assert_eq!(after.last_token, Some(grant.token));
    assert_eq!(after.last_token, before.last_token);
    assert_eq!(after.holders.len(), 1);
}

#[tokio::test]
async fn a_server_that_ignores_a_condition_is_refused_at_open() {
    fencelock_testbed::skip!("s3");
    for header in ["if-none-match", "if-match"] {
        let meddler = Meddler::start(MOTO.address());
        meddler.strip(header);
        let client = client_at(meddler.address(), no_retries());
        let error = BucketStore::from_store(client, "p").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stops_is_said_in_time_and_loses_nothing() {
    fencelock_testbed::skip!("s3");
    let mut server = S3::seaweed();
    let client = client_at(server.address(), no_retries());
    let store = BucketStore::from_store(client, "p").await.unwrap();
    let mine = long("stops");
    let grant = granted(&store, &mine).await;

    server.server().pause();
    let (asked, _) = in_time(store.acquire(&long("stops"))).await;
    let error = asked.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", whole(&error));
    let (renewed, _) = in_time(store.renew(&[(lease(&mine, &grant), mine.ttl)])).await;
    match &renewed[..] {
        [Renewal::Unknown(error)] => assert_eq!(error.kind(), ErrorKind::Indeterminate),
        other => panic!("{other:?}"),
    }
    server.server().resume();
    let renewed = store.renew(&[(lease(&mine, &grant), mine.ttl)]).await;
    assert!(matches!(renewed[..], [Renewal::Renewed]), "{renewed:?}");

    server.server().kill();
    let (asked, _) = in_time(store.acquire(&long("stops"))).await;
    assert_eq!(asked.unwrap_err().kind(), ErrorKind::Unavailable);
    server.server().restart();
    held(&store, &long("stops")).await;
    let released = store.release(&lease(&mine, &grant), Duration::ZERO).await;
    assert_eq!(released.unwrap(), Release::Released);
    assert!(granted(&store, &long("stops")).await.token > grant.token);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_belief_ends_while_the_server_is_silent() {
    fencelock_testbed::skip!("s3");
    let mut server = S3::moto();
    let client = client_at(server.address(), no_retries());
    let locks = Locks::new(BucketStore::from_store(client, "p").await.unwrap());
    let ttl = Duration::from_secs(2);
    let guard = locks.acquire("silent").ttl(ttl).await.unwrap();
    guard.check().unwrap();
    server.server().pause();
    let (_, took) = in_time(guard.lost()).await;
    assert!(took <= ttl, "{took:?}");
    guard.check().unwrap_err();
    server.server().resume();
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_races_of_sixteen_have_one_winner_each() {
    fencelock_testbed::skip!("s3");
    let mut clients = Vec::new();
    for _ in 0..2 {
        let client = client_at(SEAWEED.address(), no_retries());
        clients.push(BucketStore::from_store(client, "races").await.unwrap());
    }
    // The first race of a name creates its record, the second replaces it.
    for race in 0..20 {
        let name = format!("race-{}", race / 2);
        let mut racing = Vec::new();
        for i in 0..16 {
            let (store, request) = (clients[i % 2].clone(), long(&name));
            racing.push(tokio::spawn(async move {
                (store.acquire(&request).await.unwrap(), request)
            }));
        }
        let mut winners = Vec::new();
        for racer in racing {
            if let (Attempt::Granted(grant), request) = racer.await.unwrap() {
                winners.push(lease(&request, &grant));
            }
        }
        assert_eq!(winners.len(), 1, "race {race}");
        let released = clients[1].release(&winners[0], Duration::ZERO).await;
        assert_eq!(released.unwrap(), Release::Released);
    }
}

#[tokio::test]
async fn wrong_places_and_credentials_are_said_in_time() {
    fencelock_testbed::skip!("s3");
    let open = async |client: Arc<dyn ObjectStore>| {
        let (opened, _) = in_time(BucketStore::from_store(client, "p")).await;
        opened.unwrap_err()
    };
    let wrong = super::lab::builder(SEAWEED.address(), no_retries())
        .with_secret_access_key("canary-Xq7")
        .build();
    let error = open(Arc::new(wrong.unwrap())).await;
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    assert!(error.to_string().contains("denied access"), "{error}");
    assert!(!whole(&error).contains("canary"), "{}", whole(&error));

    // SeaweedFS makes a bucket that is missing.
    let missing = super::lab::builder(MOTO.address(), no_retries())
        .with_bucket_name("missing")
        .build();
    let error = open(Arc::new(missing.unwrap())).await;
    assert!(error.to_string().contains("bucket"), "{error}");

    let nobody = fencelock_testbed::port::Port::free();
    let nowhere = std::net::SocketAddr::from(([127, 0, 0, 1], nobody.number()));
    let error = open(client_at(nowhere, no_retries())).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("cannot be reached"), "{error}");

    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let error = open(client_at(silent.local_addr().unwrap(), no_retries())).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(
        error.to_string().contains("did not answer in time"),
        "{error}"
    );
}
