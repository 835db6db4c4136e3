//! The check in the user's own transaction, from any language, and by a trigger.

use std::time::Duration;

use fencelock::fence::{Domain, HolderTag};
use fencelock::postgres::tokio_postgres::Client;
use fencelock::postgres::{admit, guard_sql};
use fencelock::token::{Admission, Intent, Watermark, judge};
use fencelock::{ErrorKind, Fence, Locks};
use fencelock_testbed::postgres::Postgres;
use tokio::task::JoinSet;

use crate::lab::*;

async fn server_with_table() -> (Postgres, Client) {
    let server = Postgres::fast();
    store(&server.url()).await;
    let _ = server.psql(
        "CREATE TABLE account (id int PRIMARY KEY, value bigint NOT NULL, writer bigint);
                         INSERT INTO account VALUES (1, 0, 0)",
    );
    let client = client(&server.url()).await;
    (server, client)
}

/// Thousands of operations, drawn so that tokens, holders, sequences and domains often meet: the
/// function in the database answers each as the rule does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_function_judges_as_the_rule_does() {
    fencelock_testbed::skip!("postgres");
    let (_server, mut client) = server_with_table().await;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % n
    };
    let domains = ["a", "b"].map(|name| Domain::new("postgres", "r", &name.parse().unwrap()));
    let (mut applied, mut repeated, mut refused) = (0, 0, 0);
    for run in 0..60 {
        let mut model: Option<Watermark> = None;
        let transaction = client.transaction().await.unwrap();
        for step in 0..25 {
            let number = match draw(40) {
                0 => 1 << 62,
                1 => 1 << 52,
                n => 1 + n % 3 + step / 8,
            };
            let bare = Fence::from(token(number));
            let holder = HolderTag::from_bytes([u8::try_from(draw(6) / 5).unwrap(); 16]);
            let domain = domains[usize::try_from(draw(8) / 7).unwrap()].clone();
            let fence = match draw(4) {
                0 => bare,
                1 => Fence::new(token(number), holder, domain),
                _ => Fence::new(token(number), holder, domain).with_seq(1 + draw(3)),
            };
            let (intent, word) = match draw(6) {
                0 => (Intent::Rebind, "rebind"),
                1 => (Intent::Raise, "raise"),
                _ => (Intent::Write, "write"),
            };
            #[expect(
                clippy::disallowed_methods,
                reason = "the bound on jumps is in real time"
            )]
            let now = std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap();
            let expected = judge(
                model.as_ref(),
                &fence,
                intent,
                u64::try_from(now.as_micros()).unwrap(),
            );
            let signed = |n: u64| i64::try_from(n).unwrap();
            transaction.batch_execute("SAVEPOINT s").await.unwrap();
            let answer = transaction
                .query_one(
                    "SELECT j.applied, (j.fence).token, (j.fence).holder, (j.fence).seq, (j.fence).domain
                     FROM fencelock.judge($1, $2, $3, $4, $5, $6) AS j",
                    &[
                        &format!("run-{run}").into_bytes(),
                        &signed(number),
                        &fence.holder().map(|tag| tag.as_bytes().to_vec()),
                        &fence.domain().map(Domain::as_str),
                        &fence.seq().map(signed),
                        &word,
                    ],
                )
                .await;
            let context = format!(
                "run={run} step={step} {model:?} {fence} {intent:?} {expected:?} {answer:?}"
            );
            match (expected, answer) {
                (Ok(admission), Ok(row)) => {
                    let (next, first) = match admission {
                        Admission::Apply(next) => (next, true),
                        Admission::Repeat(next) => (next, false),
                    };
                    assert_eq!(row.get::<_, bool>(0), first, "{context}");
                    assert_eq!(row.get::<_, i64>(1), signed(next.token.get()), "{context}");
                    let holder = next.holder.map(|tag| tag.as_bytes().to_vec());
                    assert_eq!(row.get::<_, Option<Vec<u8>>>(2), holder, "{context}");
                    assert_eq!(row.get::<_, i64>(3), signed(next.seq), "{context}");
                    let domain = next.domain.as_ref().map(Domain::as_str);
                    assert_eq!(row.get::<_, Option<&str>>(4), domain, "{context}");
                    model = Some(next);
                    if first { applied += 1 } else { repeated += 1 }
                }
                (Err(refusal), Err(error)) => {
                    let code = match refusal.kind() {
                        ErrorKind::Fenced => "FL001",
                        ErrorKind::DomainMismatch => "FL002",
                        _ if intent == Intent::Rebind && fence.domain().is_none() => "FL009",
                        _ => "FL003",
                    };
                    assert_eq!(error.code().unwrap().code(), code, "{context}");
                    transaction.batch_execute("ROLLBACK TO s").await.unwrap();
                    refused += 1;
                }
                _ => panic!("{context}"),
            }
        }
        transaction.commit().await.unwrap();
    }
    assert!(
        applied > 100 && repeated > 10 && refused > 100,
        "{applied} {repeated} {refused}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_writer_is_refused_in_its_own_transaction() {
    fencelock_testbed::skip!("postgres");
    let (server, mut client) = server_with_table().await;
    let locks = Locks::open(&server.url()).await.unwrap();
    let old = locks
        .acquire("account")
        .no_renew()
        .ttl(Duration::from_secs(5))
        .await
        .unwrap();
    let old_fence = old.fence();
    locks.break_lock("account").await.unwrap();
    let new = locks.acquire("account").await.unwrap();

    let transaction = client.transaction().await.unwrap();
    let written = admit(&transaction, "account", &new).await.unwrap();
    assert!(written.applied);
    transaction
        .execute("UPDATE account SET value = 34", &[])
        .await
        .unwrap();
    transaction.commit().await.unwrap();

    let transaction = client.transaction().await.unwrap();
    transaction
        .execute("UPDATE account SET value = 33", &[])
        .await
        .unwrap();
    let refused = admit(&transaction, "account", old_fence).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced);
    assert_eq!(refused.watermark(), Some(new.token()));
    assert_eq!(refused.token(), Some(old.token()));
    // Even a caller that does not look cannot commit.
    transaction.commit().await.unwrap();
    assert_eq!(server.psql("SELECT value FROM account"), "34");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_raise_is_undone_with_its_transaction_and_locks_until_its_end() {
    fencelock_testbed::skip!("postgres");
    let (server, mut first) = server_with_table().await;
    let mut second = client(&server.url()).await;
    let undone = first.transaction().await.unwrap();
    admit(&undone, "account", token(50)).await.unwrap();

    // An older writer waits for the newer one's end, and passes, since that was undone.
    let waiting = tokio::spawn(async move {
        let transaction = second.transaction().await.unwrap();
        let answer = admit(&transaction, "account", token(40)).await;
        transaction.commit().await.unwrap();
        (answer, second)
    });
    let blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
    in_time(async {
        while server.psql(blocked) != "1" {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    undone.rollback().await.unwrap();
    let ((answer, mut second), _) = in_time(async { waiting.await.unwrap() }).await;
    assert_eq!(answer.unwrap().watermark.token, token(40));

    // And it is refused where the newer one committed.
    let committed = first.transaction().await.unwrap();
    admit(&committed, "account", token(60)).await.unwrap();
    let waiting = tokio::spawn(async move {
        let transaction = second.transaction().await.unwrap();
        admit(&transaction, "account", token(40)).await
    });
    in_time(async {
        while server.psql(blocked) != "1" {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    committed.commit().await.unwrap();
    let refused = waiting.await.unwrap().unwrap_err();
    assert_eq!(
        (refused.kind(), refused.watermark()),
        (ErrorKind::Fenced, Some(token(60)))
    );
}

/// Forty holders, one after the other by their locks and all at once by their transactions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forty_writers_lose_no_update() {
    fencelock_testbed::skip!("postgres");
    let (server, _client) = server_with_table().await;
    let mut writers = JoinSet::new();
    for number in 1..=40_u64 {
        let url = server.url();
        writers.spawn(async move {
            let mut client = client(&url).await;
            let transaction = client.transaction().await.unwrap();
            if admit(&transaction, "account", token(number)).await.is_err() {
                return 0;
            }
            let row = transaction
                .query_one("SELECT value, writer FROM account", &[])
                .await
                .unwrap();
            let (value, writer): (i64, i64) = (row.get(0), row.get(1));
            let number = i64::try_from(number).unwrap();
            assert!(
                writer < number,
                "token {number} was admitted after {writer}"
            );
            transaction
                .execute(
                    "UPDATE account SET value = $1, writer = $2",
                    &[&(value + 1), &number],
                )
                .await
                .unwrap();
            transaction.commit().await.unwrap();
            1
        });
    }
    let admitted: i64 = writers.join_all().await.into_iter().sum();
    assert!(admitted >= 1);
    assert_eq!(
        server.psql("SELECT value FROM account"),
        admitted.to_string()
    );
    assert_eq!(server.psql("SELECT token FROM fencelock.fences"), "40");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_language_calls_the_function() {
    fencelock_testbed::skip!("postgres");
    let (server, _client) = server_with_table().await;
    assert_eq!(server.psql("SELECT fencelock.admit('account', 34)"), "t");
    let fence = "v1:35:00000000000000000000000000000001:postgres/r/account:7";
    let show = format!("SELECT fencelock.admit_fence('account', '{fence}')");
    assert_eq!(server.psql(&show), "t");
    assert_eq!(server.psql(&show), "f", "the same write again");
    let refused = server
        .try_psql(
            "\\set VERBOSITY verbose\nSELECT fencelock.admit('account', 33)",
            &[],
        )
        .or_else(|_| server.try_psql("SELECT fencelock.admit('account', 33)", &[]))
        .unwrap_err();
    assert!(refused.contains("stale fencing token refused"), "{refused}");
    assert!(refused.contains("token=33 watermark=35"), "{refused}");
    let caught = "DO $$ BEGIN PERFORM fencelock.admit('account', 33);
                  EXCEPTION WHEN SQLSTATE 'FL001' THEN RAISE EXCEPTION 'caught'; END $$";
    assert!(server.try_psql(caught, &[]).unwrap_err().contains("caught"));
    for bad in ["", "v1", "0", "-1", "v1:35:zz:-", "v1:35:-:-:0"] {
        let refused = server.try_psql(
            &format!("SELECT fencelock.admit_fence('account', '{bad}')"),
            &[],
        );
        assert!(refused.unwrap_err().contains("not a fence"), "{bad:?}");
    }
    let big = server.try_psql(
        "SELECT fencelock.admit('account', 9223372036854775807)",
        &[],
    );
    assert!(big.unwrap_err().contains("implausibly far ahead"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guarded_table_refuses_whoever_is_stale_or_shows_nothing() {
    fencelock_testbed::skip!("postgres");
    let (server, mut client) = server_with_table().await;
    let _ = server.psql(&guard_sql("fencelock", "public.account", "account").unwrap());
    let update = "UPDATE account SET value = value + 1";
    let with = |sql: &str, fence: &str| {
        let options = format!("-c fencelock.fence={fence}");
        server.try_psql(sql, &[("PGOPTIONS", &options)])
    };

    for sql in [
        update,
        "DELETE FROM account",
        "INSERT INTO account VALUES (2, 0)",
        "TRUNCATE account",
    ] {
        let refused = server.try_psql(sql, &[]).unwrap_err();
        assert!(refused.contains("no fence was shown"), "{sql}: {refused}");
    }
    with(update, "34").unwrap();
    let holder = "00000000000000000000000000000001";
    with(update, &format!("v1:35:{holder}:postgres/r/account:1")).unwrap();
    with(update, &format!("v1:35:{holder}:postgres/r/account:1")).unwrap();
    for stale in [
        "34",
        "v1:34:-:-",
        "v1:35:00000000000000000000000000000002:postgres/r/account",
    ] {
        for sql in [
            update,
            "DELETE FROM account",
            "INSERT INTO account VALUES (2, 0)",
            "TRUNCATE account",
        ] {
            let refused = with(sql, stale).unwrap_err();
            assert!(refused.contains("refused"), "{sql} {stale}: {refused}");
        }
    }
    assert!(with(update, "garbage").unwrap_err().contains("not a fence"));
    // The trigger and the library move one watermark.
    let transaction = client.transaction().await.unwrap();
    admit(&transaction, "account", token(36)).await.unwrap();
    transaction.commit().await.unwrap();
    assert!(
        with(update, "35")
            .unwrap_err()
            .contains("token=35 watermark=36")
    );
    with(update, "36").unwrap();
    assert_eq!(server.psql("SELECT value FROM account"), "4");
    let _ = server.psql(&guard_sql("fencelock", "account", "account").unwrap());
}
