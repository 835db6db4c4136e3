//! Lost answers, pauses, kills, and locks that somebody else keeps.

use std::time::Duration;

use fencelock::lease::{Attempt, LeaseStore, Release, Renewal};
use fencelock::{ErrorKind, FencingToken};
use fencelock_testbed::postgres::Postgres;
use fencelock_testbed::proxy::Proxy;

use crate::lab::*;

fn through(server: &Postgres) -> (Proxy, String) {
    let proxy = Proxy::start(server.address());
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
    (proxy, url)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_of_an_acquire_is_found_by_the_same_request() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    let (proxy, url) = through(&server);
    let store = store(&url).await;
    for _ in 0..3 {
        let request = long("lost");
        proxy.swallow_answer(b".acquire(");
        let (answer, _) = in_time(store.acquire(&request)).await;
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Indeterminate);
        proxy.await_swallowed(END);
        let told = server.psql("SELECT last_token FROM fencelock.locks");
        let grant = granted(&store, &request).await;
        assert_eq!(grant.token.to_string(), told);
        assert_eq!(holders(&store, "lost").await, 1);
        let other = store.acquire(&long("lost")).await.unwrap();
        assert!(matches!(other, Attempt::Held(_)), "{other:?}");
        store
            .release(&lease(&request, &grant), Duration::ZERO)
            .await
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_hide_a_lost_answer_from_their_user() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    let (proxy, url) = through(&server);
    let locks = locks(&url).await;
    proxy.swallow_answer(b".acquire(");
    let (guard, _) = in_time(async { locks.acquire("lost").await }).await;
    let guard = guard.unwrap();
    assert_eq!(guard.token(), FencingToken::MIN);
    proxy.swallow_answer(b".release(");
    let (released, _) = in_time(guard.release()).await;
    proxy.await_swallowed(END);
    drop(released);
    locks.drain().await;
    assert!(locks.try_acquire("lost").await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_of_a_renewal_or_release_is_unknown_and_then_known() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    let (proxy, url) = through(&server);
    let store = store(&url).await;
    let request = long("lost");
    let held = lease(&request, &granted(&store, &request).await);

    for swallow in [Proxy::swallow_answer, Proxy::swallow_request] {
        swallow(&proxy, b".renew(");
        let (answers, _) = in_time(store.renew(&[(held.clone(), request.ttl)])).await;
        assert!(
            matches!(answers.as_slice(), [Renewal::Unknown(_)]),
            "{answers:?}"
        );
        proxy.await_swallowed(END);
        let answers = store.renew(&[(held.clone(), request.ttl)]).await;
        assert!(
            matches!(answers.as_slice(), [Renewal::Renewed]),
            "{answers:?}"
        );
    }

    proxy.swallow_answer(b".release(");
    let (answer, _) = in_time(store.release(&held, Duration::ZERO)).await;
    assert_eq!(answer.unwrap_err().kind(), ErrorKind::Indeterminate);
    proxy.await_swallowed(END);
    let again = store.release(&held, Duration::ZERO).await.unwrap();
    assert_eq!(again, Release::NotHeld);
    assert_eq!(holders(&store, "lost").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_server_ends_every_request_in_time_and_is_used_again() {
    fencelock_testbed::skip!("postgres");
    let mut server = Postgres::fast();
    let store = store(&server.url()).await;
    let request = long("paused");
    let held = lease(&request, &granted(&store, &request).await);
    server.server().pause();
    let other = long("other");
    let batch = [(held.clone(), request.ttl)];
    let (asked, renewed, released, seen) = tokio::join!(
        in_time(store.acquire(&other)),
        in_time(store.renew(&batch)),
        in_time(store.release(&held, Duration::ZERO)),
        in_time(store.inspect(&request.name)),
    );
    let kind = asked.0.unwrap_err().kind();
    assert!(matches!(
        kind,
        ErrorKind::Indeterminate | ErrorKind::Unavailable
    ));
    assert!(matches!(renewed.0.as_slice(), [Renewal::Unknown(_)]));
    released.0.unwrap_err();
    seen.0.unwrap_err();
    let (again, _) = in_time(store.acquire(&other)).await;
    again.unwrap_err();
    server.server().resume();
    // What was sent before the pause ended may be applied after it: the same request finds out.
    let (grant, _) = in_time(async {
        loop {
            if let Ok(Attempt::Granted(grant)) = store.acquire(&other).await {
                break grant;
            }
        }
    })
    .await;
    assert_eq!(grant.token, FencingToken::MIN);
    assert_eq!(holders(&store, "other").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_is_unavailable_in_time_and_heals() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    let (proxy, url) = through(&server);
    let store = store(&url).await;
    granted(&store, &long("before")).await;
    proxy.black_hole();
    let (answer, _) = in_time(store.acquire(&long("during"))).await;
    assert_eq!(answer.unwrap_err().kind(), ErrorKind::Indeterminate);
    let (answer, _) = in_time(store.acquire(&long("during"))).await;
    assert_eq!(
        answer.unwrap_err().kind(),
        ErrorKind::Unavailable,
        "nothing could be sent"
    );
    let (opened, _) = in_time(try_store(&url)).await;
    assert_eq!(opened.unwrap_err().kind(), ErrorKind::Unavailable);
    proxy.pass();
    let (answer, _) = in_time(store.acquire(&long("after"))).await;
    assert!(matches!(answer, Ok(Attempt::Granted(_))), "{answer:?}");
}

/// The server's own default would lose what it acknowledged less than a second ago.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_token_is_told_twice_over_kills_of_the_server_even_with_synchronous_commit_off() {
    fencelock_testbed::skip!("postgres");
    for settings in [&[][..], &["synchronous_commit=off", "wal_writer_delay=10s"]] {
        let mut server = Postgres::with(settings);
        let store = store(&server.url()).await;
        let mut last = 0;
        for round in 0..4 {
            let mut told = Vec::new();
            let grants = async {
                loop {
                    let request = long("killed");
                    let Ok(Attempt::Granted(grant)) = store.acquire(&request).await else {
                        break;
                    };
                    told.push(grant.token.get());
                    let _ = store
                        .release(&lease(&request, &grant), Duration::ZERO)
                        .await;
                }
            };
            let kill = async {
                tokio::time::sleep(Duration::from_millis(150 + 70 * round)).await;
                tokio::task::block_in_place(|| server.server().kill());
            };
            tokio::join!(grants, kill);
            assert!(!told.is_empty(), "round={round}");
            for token in told {
                assert!(token > last, "round={round} token={token} last={last}");
                last = token;
            }
            tokio::task::block_in_place(|| server.server().restart());
            store.break_lock(&"killed".parse().unwrap()).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_acquire_leaves_no_lock() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    let locks = locks(&server.url()).await;
    for i in 0..60 {
        let wait = Duration::from_micros(i * 100);
        let acquiring = async { locks.acquire("dropped").await };
        drop(tokio::time::timeout(wait, acquiring).await);
    }
    locks.drain().await;
    let (guard, took) = in_time(async { locks.acquire("dropped").await }).await;
    guard.unwrap().release().await.unwrap();
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_somebody_keeps_locked_costs_no_other_lease() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    let store = store(&server.url()).await;
    let (stuck, free) = (long("stuck"), long("free"));
    let stuck_lease = lease(&stuck, &granted(&store, &stuck).await);
    let free_lease = lease(&free, &granted(&store, &free).await);

    let mut admin = client(&server.url()).await;
    let transaction = admin.transaction().await.unwrap();
    transaction
        .execute(
            "SELECT FROM fencelock.locks WHERE name = 'stuck' FOR UPDATE",
            &[],
        )
        .await
        .unwrap();
    let batch = [(stuck_lease.clone(), stuck.ttl), (free_lease, free.ttl)];
    let (answers, _) = in_time(store.renew(&batch)).await;
    match answers.as_slice() {
        [Renewal::Unknown(error), Renewal::Renewed] => {
            assert_eq!(error.kind(), ErrorKind::Unavailable);
        }
        other => panic!("{other:?}"),
    }
    let (refused, _) = in_time(store.acquire(&long("stuck"))).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unavailable);
    transaction.rollback().await.unwrap();
    let answers = store.renew(&[(stuck_lease, stuck.ttl)]).await;
    assert!(
        matches!(answers.as_slice(), [Renewal::Renewed]),
        "{answers:?}"
    );
}

/// The clock is read after the row is ours. `now()` would be from before the wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_the_row_does_not_make_the_clock_stale() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    let store = store(&server.url()).await;
    let ttl = Duration::from_millis(500);
    let mut admin = client(&server.url()).await;
    granted(&store, &request("waited", ttl)).await;

    let transaction = admin.transaction().await.unwrap();
    transaction
        .execute(
            "SELECT FROM fencelock.locks WHERE name = 'waited' FOR UPDATE",
            &[],
        )
        .await
        .unwrap();
    // Sent while the first grant is good, and answered after its lapse.
    let next = request("waited", Duration::from_secs(60));
    let asking = tokio::spawn({
        let (store, next) = (store.clone(), next.clone());
        async move { store.acquire(&next).await }
    });
    tokio::time::sleep(Duration::from_millis(700)).await;
    transaction.rollback().await.unwrap();
    let answer = asking.await.unwrap().unwrap();
    assert!(matches!(answer, Attempt::Granted(_)), "{answer:?}");
    let state = store.inspect(&next.name).await.unwrap().unwrap();
    let left = state.holders.first().unwrap().expires_in.unwrap();
    assert!(left > Duration::from_millis(59_500), "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_stopped_waiting_for_its_standby_is_indeterminate() {
    fencelock_testbed::skip!("postgres");
    let server = Postgres::fast();
    let store = store(&server.url()).await;
    let admin = client(&server.url()).await;
    admin
        .batch_execute("ALTER SYSTEM SET synchronous_standby_names = 'ghost'")
        .await
        .unwrap();
    admin
        .batch_execute("SELECT pg_reload_conf()")
        .await
        .unwrap();
    let request = long("unreplicated");
    let asking = tokio::spawn({
        let (store, request) = (store.clone(), request.clone());
        async move { store.acquire(&request).await }
    });
    let cancel = "SELECT count(*) FILTER (WHERE pg_cancel_backend(pid)) FROM pg_stat_activity
                  WHERE wait_event = 'SyncRep'";
    loop {
        let row = admin.query_one(cancel, &[]).await.unwrap();
        if row.get::<_, i64>(0) > 0 || asking.is_finished() {
            break;
        }
    }
    let error = asking.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate);
    assert!(error.to_string().contains("standby"), "{error}");
    admin
        .batch_execute("ALTER SYSTEM RESET synchronous_standby_names")
        .await
        .unwrap();
    admin
        .batch_execute("SELECT pg_reload_conf()")
        .await
        .unwrap();
    // It is committed here, so the same request finds it.
    let (grant, _) = in_time(async {
        loop {
            if let Ok(Attempt::Granted(grant)) = store.acquire(&request).await {
                break grant;
            }
        }
    })
    .await;
    assert_eq!(grant.token, FencingToken::MIN);
}
