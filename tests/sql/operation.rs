//! First users, connections, round trips, clean-up and the tables: the same on every server.

use std::collections::HashSet;
use std::time::Duration;

use fencelock::lease::{Attempt, LeaseStore};
use fencelock::{ErrorKind, FencingToken, Locks};
use fencelock_testbed::proxy::Proxy;
use tokio::task::JoinSet;

use crate::lab::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_first_users_at_once_make_one_set_of_tables() {
    if skipped() {
        return;
    }
    let server = Server::fast();
    let mut users = JoinSet::new();
    for _ in 0..20 {
        let url = server.url();
        users.spawn(async move { store(&url).await.profile().realm.clone() });
    }
    let realms: HashSet<String> = users.join_all().await.into_iter().collect();
    assert_eq!(realms.len(), 1, "{realms:?}");
    assert_eq!(sql(&server, &format!("SELECT COUNT(*) FROM {META}")), "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_locks_take_three_connections() {
    if skipped() {
        return;
    }
    let server = Server::fast();
    let locks = locks(&server.url()).await;
    let mut guards = Vec::new();
    for i in 0..200 {
        let name = format!("many-{i}");
        guards.push(
            locks
                .acquire(name)
                .ttl(Duration::from_secs(3))
                .await
                .unwrap(),
        );
    }
    let mut waiters = JoinSet::new();
    for i in 0..20 {
        let locks = locks.clone();
        waiters.spawn(async move {
            let guard = locks.acquire(format!("many-{i}")).await.unwrap();
            let token = guard.token().get();
            guard.release().await.unwrap();
            token
        });
    }
    // Renewed a few times over.
    tokio::time::sleep(Duration::from_secs(4)).await;
    for guard in &guards {
        guard.check().unwrap();
    }
    let connections: u32 = sql(&server, CONNECTIONS).parse().unwrap();
    assert!((1..=3).contains(&connections), "{connections}");
    for guard in guards {
        guard.release().await.unwrap();
    }
    assert!(waiters.join_all().await.iter().all(|token| *token == 2));
}

/// The connections belong to fencelock's own thread, also where the store was opened elsewhere.
#[tokio::test]
async fn a_runtime_that_is_blocked_loses_no_lock() {
    if skipped() {
        return;
    }
    let server = Server::fast();
    for locks in [
        Locks::open(&server.url()).await.unwrap(),
        Locks::new(Store::open(&server.url()).await.unwrap()),
    ] {
        let ttl = Duration::from_millis(600);
        let guard = locks.acquire("blocked").ttl(ttl).await.unwrap();
        let elsewhere = std::thread::spawn({
            let locks = locks.clone();
            move || {
                let runtime = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build();
                runtime.unwrap().block_on(in_time(async {
                    locks
                        .acquire("elsewhere")
                        .await
                        .unwrap()
                        .release()
                        .await
                        .unwrap();
                }))
            }
        });
        std::thread::sleep(ttl * 3);
        assert!(elsewhere.is_finished(), "it waited for the blocked runtime");
        guard.check().unwrap();
        guard.release().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_operation_is_one_round_trip() {
    if skipped() {
        return;
    }
    let server = Server::fast();
    let proxy = Proxy::start(server.address());
    let url = url_at(proxy.address());
    let store = store(&url).await;
    // Makes both connections.
    let warm = long("warm");
    let held = lease(&warm, &granted(&store, &warm).await);
    store.release(&held, Duration::ZERO).await.unwrap();

    let before = proxy.traffic();
    let request = long("counted");
    let held = lease(&request, &granted(&store, &request).await);
    assert_eq!(proxy.traffic().trips - before.trips, 1, "acquire");
    store.renew(&[(held.clone(), request.ttl)]).await;
    assert_eq!(proxy.traffic().trips - before.trips, 2, "renew");
    store.inspect(&request.name).await.unwrap();
    assert_eq!(proxy.traffic().trips - before.trips, 3, "inspect");
    store.release(&held, Duration::ZERO).await.unwrap();
    assert_eq!(proxy.traffic().trips - before.trips, 4, "release");
    assert_eq!(proxy.traffic().connections, before.connections);

    let values = values(&url).await;
    values.put("warm", "v", FencingToken::MIN).await.unwrap();
    let before = proxy.traffic();
    values.put("k", "v", FencingToken::MIN).await.unwrap();
    values.raise("k", FencingToken::MIN).await.unwrap();
    values.get("k").await.unwrap();
    assert_eq!(
        proxy.traffic().trips - before.trips,
        3,
        "put, raise and get"
    );
}

/// Clean-up removes the very record that others are about to use, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clean_up_at_the_worst_moment_brings_no_token_back() {
    if skipped() {
        return;
    }
    let server = Server::fast();
    let mut users = JoinSet::new();
    for _ in 0..6 {
        let url = server.url();
        users.spawn(async move {
            let store = store(&url).await;
            let mut told = Vec::new();
            while told.len() < 60 {
                let request = long("pruned");
                if let Attempt::Granted(grant) = store.acquire(&request).await.unwrap() {
                    told.push(grant.token.get());
                    let held = lease(&request, &grant);
                    store.release(&held, Duration::ZERO).await.unwrap();
                }
                store.prune(Duration::ZERO).await.unwrap();
            }
            told
        });
    }
    let per_user = users.join_all().await;
    assert!(per_user.iter().all(|told| told.is_sorted()), "{per_user:?}");
    let all: HashSet<u64> = per_user.iter().flatten().copied().collect();
    assert_eq!(all.len(), 360, "a token was told twice");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_that_were_replaced_or_are_of_another_version_are_refused() {
    if skipped() {
        return;
    }
    let server = Server::fast();
    let first = store(&server.url()).await;
    granted(&first, &long("a")).await;
    let _ = sql(&server, FORGET);
    let gone = first.acquire(&long("a")).await.unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::Corrupt, "{}", whole(&gone));
    let second = store(&server.url()).await;
    assert_ne!(first.profile().realm, second.profile().realm);
    let replaced = first.acquire(&long("a")).await.unwrap_err();
    assert_eq!(replaced.kind(), ErrorKind::Corrupt, "{}", whole(&replaced));
    assert!(replaced.to_string().contains("replaced"), "{replaced}");

    let _ = sql(&server, &format!("UPDATE {META} SET version = 99"));
    let other = try_store(&server.url()).await.unwrap_err();
    assert_eq!(other.kind(), ErrorKind::Unsupported);
    assert!(other.to_string().contains("found=99"), "{other}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_printed_schema_can_be_run_twice_and_is_what_is_used() {
    if skipped() {
        return;
    }
    let server = Server::fast();
    let schema = schema_sql("by_hand").unwrap();
    for _ in 0..2 {
        let _ = sql(&server, &schema);
    }
    let url = format!("{}?{NAMESPACE}=by_hand&create=false", server.url());
    granted(&store(&url).await, &long("a")).await;
    let _ = sql(&server, &schema);
    assert_eq!(
        sql(
            &server,
            &format!(
                "SELECT last_token FROM {}",
                LOCKS.replace("fencelock", "by_hand")
            )
        ),
        "1"
    );
    // Another name of the tables is another realm with locks of its own.
    let other = store(&server.url()).await;
    granted(&other, &long("a")).await;
}

/// What ten clients are told that take turns, five times each.
pub(crate) async fn fifty_tokens_of_ten_clients(url: &str) -> Vec<u64> {
    let mut clients = JoinSet::new();
    for _ in 0..10 {
        let url = url.to_owned();
        clients.spawn(async move {
            let locks = locks(&url).await;
            let mut told = Vec::new();
            for _ in 0..5 {
                let guard = locks
                    .acquire("busy")
                    .wait(Duration::from_secs(60))
                    .await
                    .unwrap();
                told.push(guard.token().get());
                guard.release().await.unwrap();
            }
            told
        });
    }
    let mut told: Vec<u64> = clients.join_all().await.into_iter().flatten().collect();
    told.sort_unstable();
    told
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_grants_by_ten_clients_are_all_given_back() {
    if skipped() {
        return;
    }
    let server = Server::fast();
    let told = fifty_tokens_of_ten_clients(&server.url()).await;
    assert_eq!(told, (1..=50).collect::<Vec<_>>());
}
