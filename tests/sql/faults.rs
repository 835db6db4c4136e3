//! Lost answers, pauses, kills, and locks that somebody else keeps: the same on every server.

use std::time::Duration;

use fencelock::lease::{Attempt, LeaseStore, Release, Renewal};
use fencelock::{ErrorKind, FencingToken};
use fencelock_testbed::proxy::Proxy;

use crate::lab::*;

pub(crate) fn through(server: &Server) -> (Proxy, String) {
    let proxy = Proxy::start(server.address());
    let url = url_at(proxy.address());
    (proxy, url)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_of_an_acquire_is_found_by_the_same_request() {
    if skipped() {
        return;
    }
    let server = Server::fast();
    let (proxy, url) = through(&server);
    let store = store(&url).await;
    for _ in 0..3 {
        let request = long("lost");
        proxy.swallow_answer(&called("acquire"));
        let (answer, _) = in_time(store.acquire(&request)).await;
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Indeterminate);
        proxy.await_swallowed(END);
        let told = sql(&server, &format!("SELECT last_token FROM {LOCKS}"));
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
    if skipped() {
        return;
    }
    let server = Server::fast();
    let (proxy, url) = through(&server);
    let locks = locks(&url).await;
    proxy.swallow_answer(&called("acquire"));
    let (guard, _) = in_time(async { locks.acquire("lost").await }).await;
    let guard = guard.unwrap();
    assert_eq!(guard.token(), FencingToken::MIN);
    proxy.swallow_answer(&called("release"));
    let (released, _) = in_time(guard.release()).await;
    proxy.await_swallowed(END);
    drop(released);
    locks.drain().await;
    assert!(locks.try_acquire("lost").await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_of_a_renewal_or_release_is_unknown_and_then_known() {
    if skipped() {
        return;
    }
    let server = Server::fast();
    let (proxy, url) = through(&server);
    let store = store(&url).await;
    let request = long("lost");
    let held = lease(&request, &granted(&store, &request).await);

    for swallow in [Proxy::swallow_answer, Proxy::swallow_request] {
        swallow(&proxy, &called("renew"));
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

    proxy.swallow_answer(&called("release"));
    let (answer, _) = in_time(store.release(&held, Duration::ZERO)).await;
    assert_eq!(answer.unwrap_err().kind(), ErrorKind::Indeterminate);
    proxy.await_swallowed(END);
    let again = store.release(&held, Duration::ZERO).await.unwrap();
    assert_eq!(again, Release::NotHeld);
    assert_eq!(holders(&store, "lost").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_server_ends_every_request_in_time_and_is_used_again() {
    if skipped() {
        return;
    }
    let mut server = Server::fast();
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
    if skipped() {
        return;
    }
    let server = Server::fast();
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

/// Also with settings under which the server alone would lose what it acknowledged last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_token_is_told_twice_over_kills_of_the_server() {
    if skipped() {
        return;
    }
    for settings in KILLED {
        let mut server = Server::with(settings);
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
    if skipped() {
        return;
    }
    let server = Server::fast();
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
    if skipped() {
        return;
    }
    let server = Server::fast();
    let store = store(&server.url()).await;
    let (stuck, free) = (long("stuck"), long("free"));
    let stuck_lease = lease(&stuck, &granted(&store, &stuck).await);
    let free_lease = lease(&free, &granted(&store, &free).await);

    let kept = Kept::row(&server.url(), "stuck").await;
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
    kept.give_back().await;
    let answers = store.renew(&[(stuck_lease, stuck.ttl)]).await;
    assert!(
        matches!(answers.as_slice(), [Renewal::Renewed]),
        "{answers:?}"
    );
}

/// The clock is read after the row is ours. The time of the statement or the transaction would be from
/// before the wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_the_row_does_not_make_the_clock_stale() {
    if skipped() {
        return;
    }
    let server = Server::fast();
    let store = store(&server.url()).await;
    let ttl = Duration::from_millis(500);
    granted(&store, &request("waited", ttl)).await;

    let kept = Kept::row(&server.url(), "waited").await;
    // Sent while the first grant is good, and answered after its lapse.
    let next = request("waited", Duration::from_secs(60));
    let asking = tokio::spawn({
        let (store, next) = (store.clone(), next.clone());
        async move { store.acquire(&next).await }
    });
    tokio::time::sleep(Duration::from_millis(700)).await;
    kept.give_back().await;
    let answer = asking.await.unwrap().unwrap();
    assert!(matches!(answer, Attempt::Granted(_)), "{answer:?}");
    let state = store.inspect(&next.name).await.unwrap().unwrap();
    let left = state.holders.first().unwrap().expires_in.unwrap();
    assert!(left > Duration::from_millis(59_500), "{left:?}");
}
