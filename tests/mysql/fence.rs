//! The check in the user's own transaction, from any language, and by a trigger.

use std::time::Duration;

use fencelock::fence::{Domain, HolderTag};
use fencelock::lease::LeaseStore as _;
use fencelock::mysql::mysql_async::prelude::Queryable as _;
use fencelock::mysql::mysql_async::{self, Conn, IsolationLevel, Row, TxOpts};
use fencelock::mysql::{FencedMysql, admit, guard_sql};
use fencelock::token::{Admission, Intent, Watermark, judge};
use fencelock::{ErrorKind, Fence, Fenced, Locks};
use fencelock_testbed::mysql::Mysql;
use tokio::task::JoinSet;

use crate::lab::*;

async fn server_with_table() -> (Mysql, Conn) {
    let server = Mysql::fast();
    store(&server.url()).await;
    let _ = server.sql(
        "CREATE TABLE account (id INT PRIMARY KEY, value BIGINT NOT NULL, writer BIGINT) ENGINE = InnoDB;
                         INSERT INTO account VALUES (1, 0, 0)",
    );
    let client = client(&server.url()).await;
    (server, client)
}

/// Thousands of operations, drawn so that tokens, holders, sequences and domains often meet: the
/// function in the database answers each as the rule does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_function_judges_as_the_rule_does() {
    fencelock_testbed::skip!("mysql");
    let (_server, mut client) = server_with_table().await;
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut draw = |n: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % n
    };
    let domains = ["a", "b"].map(|name| Domain::new("mysql", "r", &name.parse().unwrap()));
    let (mut applied, mut repeated, mut refused) = (0, 0, 0);
    for run in 0..60 {
        let mut model: Option<Watermark> = None;
        let mut transaction = client.start_transaction(TxOpts::default()).await.unwrap();
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
            transaction.query_drop("SAVEPOINT s").await.unwrap();
            let called = transaction
                .exec_drop(
                    "CALL fencelock_judge(?, ?, ?, ?, ?, ?, @applied, @token, @holder, @seq, @domain)",
                    (
                        format!("run-{run}").into_bytes(),
                        number,
                        fence.holder().map(|tag| tag.as_bytes().to_vec()),
                        fence.domain().map(Domain::as_str),
                        fence.seq(),
                        word,
                    ),
                )
                .await;
            let answer = match called {
                Ok(()) => {
                    let row: Option<Row> = transaction
                        .query_first("SELECT @applied, @token, @holder, @seq, @domain")
                        .await
                        .unwrap();
                    Ok(row.unwrap())
                }
                Err(error) => Err(error),
            };
            let context = format!(
                "run={run} step={step} {model:?} {fence} {intent:?} {expected:?} {answer:?}"
            );
            match (expected, answer) {
                (Ok(admission), Ok(row)) => {
                    let (next, first) = match admission {
                        Admission::Apply(next) => (next, true),
                        Admission::Repeat(next) => (next, false),
                    };
                    type Stored = (bool, u64, Option<Vec<u8>>, u64, Option<String>);
                    let stored: Stored = mysql_async::from_row(row);
                    let expected = (
                        first,
                        next.token.get(),
                        next.holder.map(|tag| tag.as_bytes().to_vec()),
                        next.seq,
                        next.domain.as_ref().map(Domain::to_string),
                    );
                    assert_eq!(stored, expected, "{context}");
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
                    let mysql_async::Error::Server(error) = error else {
                        panic!("{context}");
                    };
                    assert_eq!(error.state, code, "{context}");
                    transaction.query_drop("ROLLBACK TO s").await.unwrap();
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
    fencelock_testbed::skip!("mysql");
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

    let mut transaction = client.start_transaction(TxOpts::default()).await.unwrap();
    let written = admit(&mut transaction, "account", &new).await.unwrap();
    assert!(written.applied);
    transaction
        .query_drop("UPDATE account SET value = 34")
        .await
        .unwrap();
    transaction.commit().await.unwrap();

    let mut transaction = client.start_transaction(TxOpts::default()).await.unwrap();
    transaction
        .query_drop("UPDATE account SET value = 33")
        .await
        .unwrap();
    let refused = admit(&mut transaction, "account", old_fence)
        .await
        .unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced);
    assert_eq!(refused.watermark(), Some(new.token()));
    assert_eq!(refused.token(), Some(old.token()));
    // As `?` does it in a program.
    drop(transaction);
    assert_eq!(server.sql("SELECT value FROM account"), "34");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_raise_is_undone_with_its_transaction_and_locks_until_its_end() {
    fencelock_testbed::skip!("mysql");
    let (server, mut first) = server_with_table().await;
    let mut second = client(&server.url()).await;
    let mut undone = first.start_transaction(TxOpts::default()).await.unwrap();
    admit(&mut undone, "account", token(50)).await.unwrap();

    // An older writer waits for the newer one's end, and passes, since that was undone.
    let waiting = tokio::spawn(async move {
        let mut transaction = second.start_transaction(TxOpts::default()).await.unwrap();
        let answer = admit(&mut transaction, "account", token(40)).await;
        transaction.commit().await.unwrap();
        (answer, second)
    });
    await_waiting(&server).await;
    undone.rollback().await.unwrap();
    let ((answer, mut second), _) = in_time(async { waiting.await.unwrap() }).await;
    assert_eq!(answer.unwrap().watermark.token, token(40));

    // And it is refused where the newer one committed.
    let mut committed = first.start_transaction(TxOpts::default()).await.unwrap();
    admit(&mut committed, "account", token(60)).await.unwrap();
    let waiting = tokio::spawn(async move {
        let mut transaction = second.start_transaction(TxOpts::default()).await.unwrap();
        admit(&mut transaction, "account", token(40)).await
    });
    await_waiting(&server).await;
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
    fencelock_testbed::skip!("mysql");
    let (server, _client) = server_with_table().await;
    let mut writers = JoinSet::new();
    for number in 1..=40_u64 {
        let url = server.url();
        writers.spawn(async move {
            let mut client = client(&url).await;
            let mut transaction = client.start_transaction(TxOpts::default()).await.unwrap();
            if admit(&mut transaction, "account", token(number))
                .await
                .is_err()
            {
                return 0;
            }
            let (value, writer): (i64, i64) = transaction
                .query_first("SELECT value, writer FROM account")
                .await
                .unwrap()
                .unwrap();
            let number = i64::try_from(number).unwrap();
            assert!(
                writer < number,
                "token {number} was admitted after {writer}"
            );
            transaction
                .exec_drop(
                    "UPDATE account SET value = ?, writer = ?",
                    (value + 1, number),
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
        server.sql("SELECT value FROM account"),
        admitted.to_string()
    );
    assert_eq!(server.sql("SELECT token FROM fencelock_fences"), "40");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_language_calls_the_function() {
    fencelock_testbed::skip!("mysql");
    let (server, _client) = server_with_table().await;
    let within = |calls: &str| {
        server.try_sql(
            &format!("START TRANSACTION; {calls}; SELECT @fencelock_applied; COMMIT"),
            &[],
        )
    };
    assert_eq!(within("CALL fencelock_admit('account', 34)").unwrap(), "1");
    let fence = "v1:35:00000000000000000000000000000001:mysql/r/account:7";
    let show = format!("CALL fencelock_admit_fence('account', '{fence}')");
    assert_eq!(within(&show).unwrap(), "1");
    assert_eq!(within(&show).unwrap(), "0", "the same write again");
    let refused = within("CALL fencelock_admit('account', 33)").unwrap_err();
    assert!(refused.contains("(FL001)"), "{refused}");
    assert!(refused.contains("stale fencing token refused"), "{refused}");
    assert!(refused.contains("token=33 watermark=35"), "{refused}");
    let other = "v1:36:00000000000000000000000000000001:mysql/r/other";
    let other = within(&format!("CALL fencelock_admit_fence('account', '{other}')"));
    assert!(other.unwrap_err().contains("(FL002)"));
    for bad in [
        "",
        "v1",
        "0",
        "-1",
        "36\\n",
        "v1:36:zz:-",
        "v1:36:-:-:0",
        "V1:36:-:-",
        "v1:36:-:mysql/r/Account",
        "v1:36:00000000000000000000000000000001:mysql/r/account\\n",
    ] {
        let refused = within(&format!("CALL fencelock_admit_fence('account', '{bad}')"));
        let refused = refused.unwrap_err();
        assert!(refused.contains("not a fence"), "{bad:?} {refused}");
    }
    let big = within("CALL fencelock_admit('account', 9223372036854775807)");
    assert!(big.unwrap_err().contains("implausibly far ahead"));
    let beyond = within("CALL fencelock_admit_fence('account', '9999999999999999999')");
    assert!(beyond.unwrap_err().contains("out of range"));
    for nothing in ["NULL", "''"] {
        let nameless = within(&format!("CALL fencelock_admit({nothing}, 36)"));
        assert!(nameless.unwrap_err().contains("no resource is named"));
    }
}

/// The row would be locked for the call alone, and the write would be unguarded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_outside_of_a_transaction_is_refused() {
    fencelock_testbed::skip!("mysql");
    let (server, _client) = server_with_table().await;
    let call = "CALL fencelock_admit('account', 34)";
    let refused = server.try_sql(call, &[]).unwrap_err();
    assert!(refused.contains("(FL005)"), "{refused}");
    assert!(refused.contains("START TRANSACTION first"), "{refused}");
    assert_eq!(server.sql("SELECT COUNT(*) FROM fencelock_fences"), "0");
    let _ = server.sql(&format!("SET autocommit = 0; {call}; COMMIT"));
    assert_eq!(server.sql("SELECT token FROM fencelock_fences"), "34");
}

/// The default isolation level shows a transaction what was true at its first read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_admits_first_reads_what_was_committed_while_it_waited() {
    fencelock_testbed::skip!("mysql");
    for level in [
        IsolationLevel::RepeatableRead,
        IsolationLevel::ReadCommitted,
        IsolationLevel::Serializable,
    ] {
        let (server, mut first) = server_with_table().await;
        let mut second = client(&server.url()).await;
        let mut options = TxOpts::default();
        options.with_isolation_level(level);
        let mut ahead = first.start_transaction(options.clone()).await.unwrap();
        admit(&mut ahead, "account", token(1)).await.unwrap();
        ahead
            .query_drop("UPDATE account SET value = 5")
            .await
            .unwrap();
        let waiting = tokio::spawn(async move {
            let mut behind = second.start_transaction(options).await.unwrap();
            admit(&mut behind, "account", token(2)).await.unwrap();
            let seen: Option<i64> = behind
                .query_first("SELECT value FROM account")
                .await
                .unwrap();
            behind.commit().await.unwrap();
            seen
        });
        await_waiting(&server).await;
        ahead.commit().await.unwrap();
        let (seen, _) = in_time(waiting).await;
        assert_eq!(seen.unwrap(), Some(5), "{level:?}");
    }
}

/// What such a transaction sees is from before, and the watermark must not be judged by that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_read_before_admitting_is_refused_by_the_present_watermark() {
    fencelock_testbed::skip!("mysql");
    let (server, mut first) = server_with_table().await;
    let mut second = client(&server.url()).await;
    let mut newer = second.start_transaction(TxOpts::default()).await.unwrap();
    admit(&mut newer, "account", token(5)).await.unwrap();
    newer.commit().await.unwrap();

    let mut options = TxOpts::default();
    options.with_isolation_level(IsolationLevel::RepeatableRead);
    let mut late = first.start_transaction(options).await.unwrap();
    let fences = "SELECT token FROM fencelock_fences";
    let seen: Option<u64> = late.query_first(fences).await.unwrap();
    let mut newer = second.start_transaction(TxOpts::default()).await.unwrap();
    admit(&mut newer, "account", token(9)).await.unwrap();
    newer.commit().await.unwrap();
    let still: Option<u64> = late.query_first(fences).await.unwrap();
    assert_eq!((seen, still), (Some(5), Some(5)), "the trap");
    let refused = admit(&mut late, "account", token(8)).await.unwrap_err();
    assert_eq!(refused.watermark(), Some(token(9)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guarded_table_refuses_whoever_is_stale_or_shows_nothing() {
    fencelock_testbed::skip!("mysql");
    let (server, mut client) = server_with_table().await;
    let guard = guard_sql("fencelock", "account", "account").unwrap();
    let _ = server.sql(&guard);
    let update = "UPDATE account SET value = value + 1";
    let with = |sql: &str, fence: &str| {
        let show = format!("--init-command=SET @fencelock_fence = '{fence}'");
        server.try_sql(sql, &[&show])
    };
    let changes = [
        update,
        "DELETE FROM account",
        "INSERT INTO account VALUES (2, 0, 0)",
        "REPLACE INTO account VALUES (1, 9, 0)",
        "INSERT INTO account VALUES (1, 9, 0) ON DUPLICATE KEY UPDATE value = 9",
    ];
    for sql in changes {
        let refused = server.try_sql(sql, &[]).unwrap_err();
        assert!(refused.contains("no fence was shown"), "{sql}: {refused}");
    }
    with(update, "34").unwrap();
    let holder = "00000000000000000000000000000001";
    with(update, &format!("v1:35:{holder}:mysql/r/account:1")).unwrap();
    with(update, &format!("v1:35:{holder}:mysql/r/account:1")).unwrap();
    for stale in [
        "34",
        "v1:34:-:-",
        "v1:35:00000000000000000000000000000002:mysql/r/account",
    ] {
        for sql in changes {
            let refused = with(sql, stale).unwrap_err();
            assert!(refused.contains("refused"), "{sql} {stale}: {refused}");
        }
    }
    assert!(with(update, "garbage").unwrap_err().contains("not a fence"));
    // The trigger and the library move one watermark.
    let mut transaction = client.start_transaction(TxOpts::default()).await.unwrap();
    admit(&mut transaction, "account", token(36)).await.unwrap();
    transaction.commit().await.unwrap();
    assert!(
        with(update, "35")
            .unwrap_err()
            .contains("token=35 watermark=36")
    );
    with(update, "36").unwrap();
    assert_eq!(server.sql("SELECT value FROM account"), "4");
    let _ = server.sql(&guard);
    // Who may write to the table needs no right to the watermarks: the triggers have their maker's.
    server.add_user("alice", CANARY);
    let _ = server.sql("GRANT SELECT, UPDATE ON test.account TO alice");
    let login = format!("--password={CANARY}");
    let alice = |fence: &str| {
        let show = format!("--init-command=SET @fencelock_fence = '{fence}'");
        server.try_sql(update, &["--user=alice", &login, &show])
    };
    alice("37").unwrap();
    assert!(alice("36").unwrap_err().contains("token=36 watermark=37"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_value_comes_back_and_one_too_large_says_what_to_raise() {
    fencelock_testbed::skip!("mysql");
    let server = Mysql::with(&["max-allowed-packet=4M"]);
    let values = FencedMysql::open(&server.url()).await.unwrap();
    let values = Fenced::new(values);
    let mut bytes = vec![0_u8; 3 << 20];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::try_from(i % 251).unwrap();
    }
    values.put("large", bytes.clone(), token(1)).await.unwrap();
    let seen = values.raise("large", token(2)).await.unwrap();
    assert!(seen.value.unwrap().into_bytes(4 << 20).unwrap() == bytes);
    for size in [(4 << 20) - 10, 5 << 20, 40 << 20] {
        let (answer, _) = in_time(values.put("large", vec![0_u8; size], token(3))).await;
        let error = answer.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{size} {}", whole(&error));
        assert!(error.to_string().contains("max_allowed_packet"), "{error}");
    }
    let seen = values.get("large").await.unwrap();
    assert_eq!(seen.watermark.unwrap().token, token(2));
    // The answer of a read can be too large as well.
    let _ = server.sql("SET GLOBAL max_allowed_packet = 1048576");
    let later = Fenced::new(FencedMysql::open(&server.url()).await.unwrap());
    let (answer, _) = in_time(later.get("large")).await;
    let error = answer.unwrap_err();
    assert!(
        error.to_string().contains("max_allowed_packet"),
        "{}",
        whole(&error)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_refused_leaves_no_row_behind() {
    fencelock_testbed::skip!("mysql");
    let server = Mysql::fast();
    let values = Fenced::new(FencedMysql::open(&server.url()).await.unwrap());
    let far = token(1 << 62);
    values.put("new", "v", far).await.unwrap_err();
    values.raise("new", far).await.unwrap_err();
    values.delete("new", far).await.unwrap_err();
    values.rebind("new", far).await.unwrap_err();
    let store = store(&server.url()).await;
    let mut request = long("new");
    request.above = Some(far);
    store.acquire(&request).await.unwrap_err();
    store
        .raise_floor(&request.name, far, false)
        .await
        .unwrap_err();
    for table in ["locks", "holders", "fences", "values"] {
        let rows = server.sql(&format!("SELECT COUNT(*) FROM fencelock_{table}"));
        assert_eq!(rows, "0", "{table}");
    }
}
