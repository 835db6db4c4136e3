//! The check in a transaction of sqlx.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fencelock::fence::{Domain, HolderTag};
use fencelock::postgres::sqlx::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use fencelock::postgres::sqlx::sqlx::{self, PgPool};
use fencelock::postgres::sqlx::{admit, admit_in};
use fencelock::{ErrorKind, Fence, FencingToken, Locks};
use fencelock_testbed::pgbouncer::PgBouncer;
use fencelock_testbed::postgres::Postgres;
use fencelock_testbed::proxy::Proxy;
use tokio::task::JoinSet;

use crate::lab::*;

fn token(number: u64) -> FencingToken {
    FencingToken::new(number).unwrap()
}

fn fence(lock: &str, holder: u8, number: u64) -> Fence {
    let domain = Domain::new("postgres", "r", &lock.parse().unwrap());
    Fence::new(token(number), HolderTag::from_bytes([holder; 16]), domain)
}

async fn pool(url: &str) -> PgPool {
    // A pooler does not take the parameter that sqlx sends otherwise.
    let options: PgConnectOptions = url.parse().unwrap();
    PgPoolOptions::new()
        .max_connections(8)
        .connect_with(options.extra_float_digits(None))
        .await
        .unwrap()
}

async fn server_with_table() -> (Postgres, PgPool) {
    let server = Postgres::fast();
    store(&server.url()).await;
    let _ = server.psql(
        "CREATE TABLE account (id int PRIMARY KEY, value bigint NOT NULL);
         INSERT INTO account VALUES (1, 0);
         CREATE TABLE ledger (at bigserial PRIMARY KEY, token bigint NOT NULL)",
    );
    let pool = pool(&server.url()).await;
    (server, pool)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_writer_is_refused_in_its_own_transaction() {
    fencelock_testbed::skip!("postgres");
    let (server, pool) = server_with_table().await;
    let locks = Locks::open(&server.url()).await.unwrap();
    let old = locks.acquire("account").no_renew().await.unwrap();
    let old_fence = old.fence();
    locks.break_lock("account").await.unwrap();
    let new = locks.acquire("account").await.unwrap();

    let mut transaction = pool.begin().await.unwrap();
    let written = admit(&mut transaction, "account", &new).await.unwrap();
    assert!(written.applied);
    assert_eq!(written.watermark.token, new.token());
    assert_eq!(written.watermark.holder, new.fence().holder());
    assert_eq!(written.watermark.domain.as_ref(), new.fence().domain());
    sqlx::query("UPDATE account SET value = 34")
        .execute(&mut *transaction)
        .await
        .unwrap();
    transaction.commit().await.unwrap();

    let mut transaction = pool.begin().await.unwrap();
    sqlx::query("UPDATE account SET value = 33")
        .execute(&mut *transaction)
        .await
        .unwrap();
    let refused = admit(&mut transaction, "account", old_fence).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced);
    assert_eq!(refused.token(), Some(old.token()));
    assert_eq!(refused.watermark(), Some(new.token()));
    // Even a caller that does not look cannot commit.
    let _ = transaction.commit().await;
    assert_eq!(server.psql("SELECT value FROM account"), "34");
}

/// The two drivers move one watermark and give one answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_drivers_answer_alike() {
    fencelock_testbed::skip!("postgres");
    let (server, pool) = server_with_table().await;
    let mut plain = client(&server.url()).await;
    let steps = [
        Fence::from(token(7)),
        fence("a", 1, 7).with_seq(2),
        fence("a", 1, 7).with_seq(2),
        fence("a", 1, 7).with_seq(1),
        fence("a", 2, 7),
        fence("b", 1, 8),
        Fence::from(token(6)),
        Fence::from(token(1 << 62)),
        fence("a", 3, 9).with_seq(1),
        Fence::from(token(9)),
    ];
    let mut kinds = Vec::new();
    for (step, fence) in steps.into_iter().enumerate() {
        let transaction = plain.transaction().await.unwrap();
        let a = fencelock::postgres::admit(&transaction, "account", &fence).await;
        transaction.rollback().await.unwrap();
        let mut transaction = pool.begin().await.unwrap();
        let b = admit(&mut transaction, "account", &fence).await;
        match (a, b) {
            (Ok(a), Ok(b)) => {
                assert_eq!(a, b, "{step}");
                transaction.commit().await.unwrap();
                kinds.push(if a.applied { "applied" } else { "repeated" });
            }
            (Err(a), Err(b)) => {
                assert_eq!(a.kind(), b.kind(), "{step}");
                // The bound on jumps names the server's present time.
                if a.kind() != ErrorKind::Invalid {
                    assert_eq!(a.to_string(), b.to_string());
                }
                assert_eq!((a.token(), a.watermark()), (b.token(), b.watermark()));
                kinds.push(b.kind().as_str());
            }
            different => panic!("{step} {fence}: {different:?}"),
        }
    }
    let expected = [
        "applied",
        "applied",
        "repeated",
        "fenced",
        "fenced",
        "domain_mismatch",
        "fenced",
        "invalid",
        "applied",
        "applied",
    ];
    assert_eq!(kinds, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_raise_is_undone_with_its_transaction_and_locks_until_its_end() {
    fencelock_testbed::skip!("postgres");
    let (server, pool) = server_with_table().await;
    for (first, rolls_back) in [(50, true), (60, false)] {
        let mut newer = pool.begin().await.unwrap();
        admit(&mut newer, "account", token(first)).await.unwrap();
        let older = pool.clone();
        let older = tokio::spawn(async move {
            let mut transaction = older.begin().await.unwrap();
            let answer = admit(&mut transaction, "account", token(40)).await;
            let _ = transaction.commit().await;
            answer
        });
        in_time(async {
            let blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
            while server.psql(blocked) != "1" {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await;
        if rolls_back {
            newer.rollback().await.unwrap();
        } else {
            newer.commit().await.unwrap();
        }
        let (answer, _) = in_time(async { older.await.unwrap() }).await;
        match answer {
            Ok(written) => assert!(rolls_back && written.watermark.token == token(40)),
            Err(refused) => {
                assert!(!rolls_back, "{refused:?}");
                assert_eq!(refused.watermark(), Some(token(60)));
            }
        }
    }
}

/// A thousand transactions that read, add 1 and write, by racing tasks with tokens out of order.
/// Returns how many were admitted.
async fn thousand(pool: &PgPool, fenced: bool) -> i64 {
    let mut tasks = JoinSet::new();
    let tickets = Arc::new(AtomicU64::new(0));
    for _ in 0..8 {
        let (pool, tickets) = (pool.clone(), Arc::clone(&tickets));
        tasks.spawn(async move {
            let mut admitted = 0;
            loop {
                let ticket = tickets.fetch_add(1, Ordering::Relaxed);
                if ticket >= 1000 {
                    break;
                }
                // Grows on the whole; neighbours come in any order, some of them far behind.
                let number = 1 + ticket / 4 + ticket * 7919 % 3;
                let mut transaction = pool.begin().await.unwrap();
                if fenced {
                    match admit(&mut transaction, "account", token(number)).await {
                        Ok(_) => {}
                        Err(error) if error.kind() == ErrorKind::Fenced => continue,
                        Err(error) => panic!("{error:?}"),
                    }
                }
                let value: i64 = sqlx::query_scalar("SELECT value FROM account")
                    .persistent(false)
                    .fetch_one(&mut *transaction)
                    .await
                    .unwrap();
                sqlx::query("UPDATE account SET value = $1")
                    .bind(value + 1)
                    .persistent(false)
                    .execute(&mut *transaction)
                    .await
                    .unwrap();
                sqlx::query("INSERT INTO ledger (token) VALUES ($1)")
                    .bind(i64::try_from(number).unwrap())
                    .persistent(false)
                    .execute(&mut *transaction)
                    .await
                    .unwrap();
                transaction.commit().await.unwrap();
                admitted += 1;
            }
            admitted
        });
    }
    tasks.join_all().await.into_iter().sum()
}

async fn thousand_lose_nothing(server: &Postgres, pool: &PgPool) {
    let admitted = thousand(pool, true).await;
    assert!((100..1000).contains(&admitted), "{admitted}");
    assert_eq!(
        server.psql("SELECT value FROM account"),
        admitted.to_string()
    );
    // In the order of the writes, tokens never go down (S4).
    let back = "SELECT count(*) FROM (SELECT token < max(token) OVER (ORDER BY at) AS back FROM ledger) AS l WHERE back";
    assert_eq!(server.psql(back), "0");
    assert_eq!(
        server.psql("SELECT token FROM fencelock.fences"),
        server.psql("SELECT max(token) FROM ledger")
    );
    // The same run without the fence proves that this one proved something.
    let _ = server.psql("UPDATE account SET value = 0");
    assert_eq!(thousand(pool, false).await, 1000);
    let left: i64 = server.psql("SELECT value FROM account").parse().unwrap();
    assert!(left < 1000, "{left}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_racing_increments_lose_nothing() {
    fencelock_testbed::skip!("postgres");
    let (server, pool) = server_with_table().await;
    thousand_lose_nothing(&server, &pool).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_racing_increments_lose_nothing_behind_a_pooler() {
    fencelock_testbed::skip!("postgres");
    fencelock_testbed::skip!("pgbouncer");
    let (server, _) = server_with_table().await;
    // Fewer server connections than clients: statements of all share them.
    let pooler = PgBouncer::start(&server, "transaction", 2);
    thousand_lose_nothing(&server, &pool(&pooler.url()).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_keeps_its_token_is_admitted_each_time() {
    fencelock_testbed::skip!("postgres");
    let (server, pool) = server_with_table().await;
    let locks = Locks::open(&server.url()).await.unwrap();
    let guard = locks.acquire("account").await.unwrap();
    for _ in 0..5 {
        let mut transaction = pool.begin().await.unwrap();
        let written = admit(&mut transaction, "account", &guard).await.unwrap();
        assert!(written.applied, "each call is a write of its own");
        transaction.commit().await.unwrap();
    }
    // One write, shown again after a commit of unknown outcome.
    let fence = guard.fence();
    for applied in [true, false] {
        let mut transaction = pool.begin().await.unwrap();
        let written = admit(&mut transaction, "account", &fence).await.unwrap();
        assert_eq!(written.applied, applied);
        transaction.commit().await.unwrap();
    }
}

/// A lock whose engine lost its data counts from 1 again, and the resource remembers 1000.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_holder_makes_the_next_token_larger() {
    fencelock_testbed::skip!("postgres");
    let (server, pool) = server_with_table().await;
    let _ = server.psql("SELECT fencelock.admit('account', 1000)");
    let locks = Locks::open(&server.url()).await.unwrap();
    let guard = locks.acquire("account").await.unwrap();
    let mut transaction = pool.begin().await.unwrap();
    let refused = admit(&mut transaction, "account", &guard).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Fenced);
    drop(transaction);
    guard.release().await.unwrap();
    let guard = locks.acquire("account").await.unwrap();
    assert!(guard.token() > token(1000));
    let mut transaction = pool.begin().await.unwrap();
    admit(&mut transaction, "account", &guard).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_is_said_and_the_pool_goes_on() {
    fencelock_testbed::skip!("postgres");
    let (server, pool) = server_with_table().await;
    let begin = async || pool.begin().await.unwrap();
    for (schema, kind, says) in [
        ("missing", ErrorKind::Corrupt, "schema=missing"),
        ("x\"; DROP", ErrorKind::Invalid, "not a schema name"),
    ] {
        let mut transaction = begin().await;
        let refused = admit_in(&mut transaction, schema, "account", token(1)).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.kind(), kind, "{refused:?}");
        assert!(refused.to_string().contains(says), "{refused}");
    }
    let mut transaction = begin().await;
    let unnamed = admit(&mut transaction, "", token(1)).await.unwrap_err();
    assert_eq!(unnamed.kind(), ErrorKind::Invalid);
    drop(transaction);

    // A wait that the server ends.
    let mut first = begin().await;
    admit(&mut first, "account", token(5)).await.unwrap();
    let mut second = begin().await;
    sqlx::query("SET LOCAL lock_timeout = '50ms'")
        .execute(&mut *second)
        .await
        .unwrap();
    let refused = admit(&mut second, "account", token(6)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(
        refused.to_string().contains("keeps the row locked"),
        "{refused}"
    );
    drop(second);

    // A future that is dropped while it waits, and rolled back.
    let mut third = begin().await;
    let waiting = admit(&mut third, "account", token(7));
    assert!(
        tokio::time::timeout(Duration::from_millis(50), waiting)
            .await
            .is_err()
    );
    first.commit().await.unwrap();
    let (rolled_back, _) = in_time(third.rollback()).await;
    rolled_back.unwrap();
    assert_eq!(server.psql("SELECT token FROM fencelock.fences"), "5");

    // A session that the server ends.
    let mut fourth = begin().await;
    let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()")
        .fetch_one(&mut *fourth)
        .await
        .unwrap();
    let _ = server.psql(&format!("SELECT pg_terminate_backend({pid}, 5000)"));
    let refused = admit(&mut fourth, "account", token(8)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:?}");
    drop(fourth);
    let mut fifth = begin().await;
    admit(&mut fifth, "account", token(8)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_of_admit_has_no_effect() {
    fencelock_testbed::skip!("postgres");
    let (server, _) = server_with_table().await;
    let proxy = Proxy::start(server.address());
    let url = format!("postgres://postgres@{}/postgres", proxy.address());
    let pool = pool(&url).await;
    let mut transaction = pool.begin().await.unwrap();
    proxy.swallow_answer(b".judge(");
    let (answer, _) = in_time(admit(&mut transaction, "account", token(5))).await;
    let refused = answer.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:?}");
    assert!(!whole(&refused).contains(CANARY));
    drop(transaction);
    assert_eq!(server.psql("SELECT count(*) FROM fencelock.fences"), "0");
}
