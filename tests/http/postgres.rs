//! The example service on a private PostgreSQL, and what becomes of a layer whose storage stands
//! still.

use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, Method};
use axum::routing::put;
use fencelock::http::{FencingLayer, writes_by_path};
use fencelock::postgres::{FencedPostgres, PostgresOptions};
use fencelock::{ErrorKind, Fence, Fenced, Locks};
use fencelock_testbed::postgres::Postgres;
use tokio::task::JoinSet;

use crate::lab::*;

#[path = "../../examples/axum_postgres.rs"]
#[expect(dead_code, reason = "its main serves until it is stopped")]
mod example;

async fn service(database: &Postgres) -> Server {
    Server::start(example::service(&database.url()).await.unwrap()).await
}

async fn deposit(client: &Client, fence: Fence, amount: &'static str) -> Answer {
    let sent = client.try_send(Method::POST, "/accounts/alice", shown(fence), amount);
    in_time(sent).await.unwrap()
}

async fn balance(client: &Client) -> String {
    let answer = client
        .send(Method::GET, "/accounts/alice", HeaderMap::new())
        .await;
    answer.text().trim().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_holders_of_one_lock_at_two_replicas_of_the_example() {
    fencelock_testbed::skip!("postgres");
    let database = Postgres::fast();
    let replicas = [service(&database).await, service(&database).await];
    let [a, b] = [Client::of(&replicas[0]), Client::of(&replicas[1])];

    let locks = Locks::open(&database.url()).await.unwrap();
    let paused = locks.acquire("alice").no_renew().await.unwrap();
    assert_eq!(deposit(&a, paused.fence(), "10").await.text(), "10\n");
    let late = paused.fence();
    locks.break_lock("alice").await.unwrap();
    let newer = locks.acquire("alice").await.unwrap();
    assert_eq!(deposit(&b, newer.fence(), "100").await.text(), "110\n");
    let error = deposit(&a, late, "10").await;
    let error = error.assert_refused(412, ErrorKind::Fenced);
    assert_eq!(error.token(), Some(paused.token()));
    assert_eq!(error.watermark(), Some(newer.token()));
    assert_eq!(balance(&a).await, "110");

    // The answer was lost: the same request again counts once (S7).
    let again = newer.fence();
    assert_eq!(deposit(&b, again.clone(), "5").await.text(), "115\n");
    assert_eq!(deposit(&a, again, "5").await.text(), "115\n");
    deposit(&a, of_lock("another", 1, 99), "1")
        .await
        .assert_refused(409, ErrorKind::DomainMismatch);
    let unfenced = a
        .send(Method::POST, "/accounts/alice", HeaderMap::new())
        .await;
    unfenced.assert_refused(428, ErrorKind::Invalid);
    assert_eq!(balance(&b).await, "115");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thirty_three_thirty_four_thirty_three_by_number_alone() {
    fencelock_testbed::skip!("postgres");
    let database = Postgres::fast();
    let server = service(&database).await;
    let client = Client::of(&server);
    for (number, status, after) in [
        (33, 200, "1"),
        (34, 200, "2"),
        (33, 412, "2"),
        (34, 200, "3"),
    ] {
        let answer = deposit(&client, token(number).into(), "1").await;
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(balance(&client).await, after);
    }
}

/// Whoever is admitted adds 1 in a transaction that reads first: nothing is lost, and nobody who is
/// older is admitted after somebody newer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forty_clients_with_shuffled_tokens_lose_no_deposit() {
    fencelock_testbed::skip!("postgres");
    let database = Postgres::fast();
    let replicas = [service(&database).await, service(&database).await];
    let mut clients = JoinSet::new();
    for i in 0..40_usize {
        let client = Client::of(&replicas[i % 2]);
        let number = u64::try_from(1 + i * 17 % 40).unwrap();
        clients.spawn(async move {
            let holder = u8::try_from(number).unwrap();
            let answer = deposit(&client, fence(holder, number), "1").await;
            if answer.status != 200 {
                answer.assert_refused(412, ErrorKind::Fenced);
            }
            usize::from(answer.status == 200)
        });
    }
    let admitted: usize = clients.join_all().await.into_iter().sum();
    let client = Client::of(&replicas[0]);
    assert_eq!(balance(&client).await, admitted.to_string());
    let mark = database.psql("SELECT token FROM fencelock.fences");
    assert_eq!(mark, "40");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_storage_is_paused_nobody_is_let_in_and_afterwards_all_is_as_before() {
    fencelock_testbed::skip!("postgres");
    let mut database = Postgres::fast();
    let options = PostgresOptions::parse(&database.url()).unwrap();
    let store = Fenced::new(FencedPostgres::connect(options).await.unwrap());
    for hold in [true, false] {
        let path = format!("/r{hold}");
        let layer = match hold {
            true => FencingLayer::hold(store.clone(), writes_by_path),
            false => FencingLayer::pass(writes_by_path).raise_first(store.clone()),
        };
        let layer = layer.store_limit(Duration::from_secs(2));
        let app = Router::new().fallback(put(async || "in")).layer(layer);
        let server = Server::start(app).await;
        let client = Client::of(&server);
        assert_eq!(client.put(&path, fence(1, 33)).await.text(), "in");
        database.server().pause();
        for number in [33, 34] {
            let answer = client.put(&path, fence(1, number)).await;
            answer.assert_refused(503, ErrorKind::Unavailable);
            assert_eq!(answer.headers["retry-after"], "1");
        }
        database.server().resume();
        // The raise to 34 may have been applied or not, so the next holder is 35.
        in_time(async {
            while client.put(&path, fence(2, 35)).await.status != 200 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        let stale = client.put(&path, fence(1, 33)).await;
        stale.assert_refused(412, ErrorKind::Fenced);
    }
}
