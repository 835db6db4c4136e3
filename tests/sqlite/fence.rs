//! The check in the user's own transaction, the views and triggers, and values.

use std::time::Duration;

use fencelock::fence::{Domain, HolderTag};
use fencelock::sqlite::rusqlite::functions::FunctionFlags;
use fencelock::sqlite::rusqlite::{Connection, Transaction, TransactionBehavior, ffi};
use fencelock::sqlite::{admit, guard_sql, schema_sql, show};
use fencelock::{ErrorKind, Fence, FencedStore, Locks};

use crate::lab::*;

fn memory() -> Connection {
    let connection = Connection::open_in_memory().unwrap();
    connection.execute_batch(&schema_sql()).unwrap();
    connection
}

/// A database with a table of the user's, `mine`, that has one row.
async fn mine(data: &Data) -> Connection {
    data.store().await;
    let connection = data.connect();
    connection
        .execute_batch("CREATE TABLE mine (x INTEGER); INSERT INTO mine VALUES (0)")
        .unwrap();
    connection
}

fn immediate(connection: &mut Connection) -> Transaction<'_> {
    connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .unwrap()
}

fn x(connection: &Connection) -> i64 {
    connection
        .query_row("SELECT x FROM mine", [], |row| row.get(0))
        .unwrap()
}

fn set_x(connection: &Connection, to: i64) {
    connection.execute("UPDATE mine SET x = ?1", [to]).unwrap();
}

fn fence(number: u64, holder: u8, seq: u64) -> Fence {
    let domain: Domain = "sqlite/r/a".parse().unwrap();
    Fence::new(token(number), HolderTag::from_bytes([holder; 16]), domain).with_seq(seq)
}

#[tokio::test]
async fn a_stale_holder_is_refused_in_the_users_own_transaction() {
    let data = Data::new();
    let mut own = mine(&data).await;
    let locks = Locks::new(data.store().await);
    let paused = locks.acquire("export").await.unwrap();
    let late = paused.fence();
    locks.break_lock("export").await.unwrap();
    let guard = locks.acquire("export").await.unwrap();

    let transaction = own.transaction().unwrap();
    assert!(admit(&transaction, "mine", &guard).unwrap().applied);
    set_x(&transaction, 1);
    transaction.commit().unwrap();

    let transaction = own.transaction().unwrap();
    let error = admit(&transaction, "mine", late).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced);
    assert_eq!(error.watermark(), Some(guard.token()));
    drop(transaction);
    assert_eq!(x(&own), 1);
}

#[tokio::test]
async fn what_is_not_committed_raises_nothing() {
    let data = Data::new();
    let mut own = mine(&data).await;
    let transaction = own.transaction().unwrap();
    admit(&transaction, "mine", token(40)).unwrap();
    set_x(&transaction, 40);
    drop(transaction);
    let transaction = own.transaction().unwrap();
    admit(&transaction, "mine", token(39)).unwrap();
    assert_eq!(x(&transaction), 0);
}

#[tokio::test]
async fn a_write_that_was_committed_before_is_told_so() {
    let data = Data::new();
    let mut own = mine(&data).await;
    for applied in [true, false] {
        let transaction = own.transaction().unwrap();
        let written = admit(&transaction, "mine", fence(1, 1, 7)).unwrap();
        assert_eq!(written.applied, applied);
        transaction.commit().unwrap();
    }
    let transaction = own.transaction().unwrap();
    let error = admit(&transaction, "mine", fence(1, 1, 6)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    let error = admit(&transaction, "mine", fence(1, 2, 8)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
}

/// A deferred transaction that has read sees the state of then. It must not judge by it.
#[tokio::test]
async fn a_transaction_that_was_overtaken_is_never_admitted_by_what_it_sees() {
    let data = Data::new();
    let mut own = mine(&data).await;
    let mut other = data.connect();
    let overtaken = own.transaction().unwrap();
    assert_eq!(x(&overtaken), 0);

    let transaction = other.transaction().unwrap();
    admit(&transaction, "mine", token(34)).unwrap();
    set_x(&transaction, 34);
    transaction.commit().unwrap();

    for number in [33, 34, 35] {
        let error = admit(&overtaken, "mine", token(number)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("BEGIN IMMEDIATE"), "{error}");
    }
    // Nor can it write past the refusal.
    assert!(overtaken.execute("UPDATE mine SET x = 33", []).is_err());
    drop(overtaken);
    let transaction = own.transaction().unwrap();
    let error = admit(&transaction, "mine", token(33)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    drop(transaction);
    let transaction = own.transaction().unwrap();
    admit(&transaction, "mine", token(35)).unwrap();
    assert_eq!(x(&transaction), 34);
}

/// The same through the view, which is what other languages use.
#[tokio::test]
async fn an_overtaken_transaction_is_not_admitted_by_the_view_either() {
    let data = Data::new();
    let mut own = mine(&data).await;
    let overtaken = own.transaction().unwrap();
    assert_eq!(x(&overtaken), 0);
    let other = data.connect();
    let insert = "INSERT INTO fencelock_admit (resource, token) VALUES ('mine', 34)";
    other.execute(insert, []).unwrap();
    let refused = overtaken.execute(insert, []).unwrap_err();
    let code = refused.sqlite_error().unwrap().extended_code;
    assert_eq!(code, ffi::SQLITE_BUSY_SNAPSHOT);
}

#[tokio::test]
async fn nobody_writes_between_an_admission_and_its_commit() {
    let data = Data::new();
    let mut own = mine(&data).await;
    let mut other = data.connect();
    // Deferred, and nothing read: the admission itself takes the lock.
    let transaction = own.transaction().unwrap();
    admit(&transaction, "mine", token(34)).unwrap();
    let blocked = other.transaction().unwrap();
    let error = admit(&blocked, "mine", token(33)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(blocked.execute("UPDATE mine SET x = 33", []).is_err());
    set_x(&transaction, 34);
    transaction.commit().unwrap();
    drop(blocked);
    let transaction = other.transaction().unwrap();
    let error = admit(&transaction, "mine", token(33)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    drop(transaction);
    assert_eq!(x(&other), 34);
}

#[tokio::test]
async fn a_transaction_that_sqlite_ended_admits_nothing() {
    let data = Data::new();
    let mut own = mine(&data).await;
    let transaction = own.transaction().unwrap();
    transaction.execute_batch("ROLLBACK").unwrap();
    let error = admit(&transaction, "mine", token(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    drop(transaction);
    let known: i64 = own
        .query_row("SELECT count(*) FROM fencelock_fences", [], |r| r.get(0))
        .unwrap();
    assert_eq!(known, 0);
}

#[test]
fn a_database_without_the_tables_says_how_they_come_there() {
    let mut own = Connection::open_in_memory().unwrap();
    let transaction = own.transaction().unwrap();
    let error = admit(&transaction, "mine", token(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(
        error.to_string().contains("fencelock schema sqlite"),
        "{error}"
    );
}

#[test]
fn a_temporary_table_of_the_same_name_hides_nothing() {
    let mut own = memory();
    let transaction = own.transaction().unwrap();
    admit(&transaction, "r", token(34)).unwrap();
    transaction.commit().unwrap();
    own.execute_batch("CREATE TEMP TABLE fencelock_fences (resource, token, holder, seq, domain)")
        .unwrap();
    let transaction = own.transaction().unwrap();
    let error = admit(&transaction, "r", token(33)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
}

/// A program may keep its database in the older mode, as long as it uses no locks there.
#[test]
fn admission_holds_without_a_write_ahead_log_too() {
    let data = Data::new();
    let mut own = data.connect();
    own.execute_batch(&schema_sql()).unwrap();
    let mut other = data.connect();
    let reads = other.transaction().unwrap();
    reads
        .query_row("SELECT count(*) FROM fencelock_fences", [], |_| Ok(()))
        .unwrap();
    let transaction = own.transaction().unwrap();
    admit(&transaction, "r", token(34)).unwrap();
    let error = admit(&reads, "r", token(33)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    drop(reads);
    transaction.commit().unwrap();
    let transaction = other.transaction().unwrap();
    let error = admit(&transaction, "r", token(33)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
}

#[tokio::test]
async fn eight_writers_that_read_after_their_admission_lose_nothing() {
    let data = Data::new();
    drop(mine(&data).await);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut own = data.connect();
                own.busy_timeout(Duration::from_secs(10)).unwrap();
                for _ in 0..25 {
                    let transaction = immediate(&mut own);
                    admit(&transaction, "mine", token(5)).unwrap();
                    let seen = x(&transaction);
                    set_x(&transaction, seen + 1);
                    transaction.commit().unwrap();
                }
            });
        }
    });
    assert_eq!(x(&data.connect()), 200);
}

#[tokio::test]
async fn a_resource_is_one_however_it_is_written() {
    let data = Data::new();
    let mut own = mine(&data).await;
    let values = data.values().await;
    let resource = "mine".parse().unwrap();
    let fence = Fence::from(token(34));
    values.put(&resource, vec![1].into(), &fence).await.unwrap();
    let transaction = own.transaction().unwrap();
    let error = admit(&transaction, "mine", token(33)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    drop(transaction);
    let insert = "INSERT INTO fencelock_admit_fence (resource, fence) VALUES ('mine', ?1)";
    assert!(own.execute(insert, ["33"]).is_err());
    own.execute(insert, ["36"]).unwrap();
    let fence = Fence::from(token(35));
    let put = values.put(&resource, vec![1].into(), &fence).await;
    assert_eq!(put.unwrap_err().kind(), ErrorKind::Fenced);
}

#[tokio::test]
async fn a_value_of_64_mib_is_the_largest() {
    let data = Data::new();
    let values = data.values().await;
    let (resource, fence) = ("v".parse().unwrap(), Fence::from(token(1)));
    let largest = vec![7; 64 << 20];
    values
        .put(&resource, largest.clone().into(), &fence)
        .await
        .unwrap();
    let seen = values.get(&resource).await.unwrap().value.unwrap();
    assert!(seen.into_bytes(u64::MAX).unwrap() == largest);
    let put = values.put(&resource, vec![7; (64 << 20) + 1].into(), &fence);
    assert_eq!(put.await.unwrap_err().kind(), ErrorKind::Invalid);
}

// The guard.

fn guarded() -> Connection {
    let connection = memory();
    connection
        .execute_batch("CREATE TABLE \"my table\" (id INTEGER PRIMARY KEY, x INTEGER UNIQUE)")
        .unwrap();
    let guard = guard_sql("my table", "it's mine").unwrap();
    connection.execute_batch(&guard).unwrap();
    // Twice is harmless.
    connection.execute_batch(&guard).unwrap();
    connection
}

const CHANGES: [&str; 6] = [
    "INSERT INTO \"my table\" VALUES (1, 1)",
    "UPDATE \"my table\" SET x = 2",
    "INSERT OR REPLACE INTO \"my table\" VALUES (1, 3)",
    "INSERT OR IGNORE INTO \"my table\" VALUES (2, 4)",
    "INSERT INTO \"my table\" VALUES (1, 5) ON CONFLICT (id) DO UPDATE SET x = 6",
    "DELETE FROM \"my table\"",
];

fn rows(connection: &Connection) -> Vec<(i64, i64)> {
    connection
        .prepare("SELECT id, x FROM \"my table\" ORDER BY id")
        .unwrap()
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap()
}

fn watermark(connection: &Connection) -> i64 {
    connection
        .query_row("SELECT token FROM fencelock_fences", [], |row| row.get(0))
        .unwrap()
}

#[test]
fn a_guarded_table_is_changed_by_nobody_who_shows_no_fence() {
    let own = guarded();
    for change in CHANGES {
        let refused = own.execute(change, []).unwrap_err().to_string();
        assert!(refused.contains("fencelock_fence"), "{change}: {refused}");
    }
    assert!(rows(&own).is_empty());
}

#[test]
fn a_guarded_table_takes_every_change_from_the_newest_and_none_from_a_stale_one() {
    let own = guarded();
    for (n, change) in (0..).zip(CHANGES) {
        show(&own, fence(100 + n, 1, 3)).unwrap();
        own.execute(change, []).unwrap();
        assert_eq!(u64::try_from(watermark(&own)).unwrap(), 100 + n, "{change}");
    }
    show(&own, token(200)).unwrap();
    own.execute("INSERT INTO \"my table\" VALUES (1, 1)", [])
        .unwrap();
    let before = rows(&own);
    show(&own, fence(199, 1, 3)).unwrap();
    for change in &CHANGES[1..] {
        let refused = own.execute(change, []).unwrap_err().to_string();
        assert!(
            refused.contains("stale fencing token refused"),
            "{change}: {refused}"
        );
    }
    assert_eq!(rows(&own), before);
    assert_eq!(watermark(&own), 200);
    // An older schema setting does not disarm it.
    own.execute_batch("PRAGMA trusted_schema = OFF").unwrap();
    assert!(own.execute(CHANGES[1], []).is_err());
    show(&own, token(201)).unwrap();
    own.execute(CHANGES[1], []).unwrap();
}

#[test]
fn one_fence_covers_many_statements_of_a_guarded_table_and_its_sequence_is_not_looked_at() {
    let own = guarded();
    let text = fence(7, 1, 3).to_string();
    assert!(text.ends_with(":3"));
    own.create_scalar_function(
        "fencelock_fence",
        0,
        FunctionFlags::SQLITE_UTF8,
        move |_| Ok(text.clone()),
    )
    .unwrap();
    for n in 0..3 {
        own.execute("INSERT INTO \"my table\" VALUES (?1, ?1)", [n])
            .unwrap();
    }
    let seq: i64 = own
        .query_row("SELECT seq FROM fencelock_fences", [], |row| row.get(0))
        .unwrap();
    assert_eq!(seq, 0);
}

// The rule in SQL.

fn admit_by_view(connection: &Connection, shown: &Fence) -> Result<bool, ErrorKind> {
    let insert = "INSERT INTO fencelock_admit_fence (resource, fence) VALUES ('r', ?1)";
    match connection.execute(insert, [shown.to_string()]) {
        Ok(_) => Ok(true),
        Err(error) => match error.to_string().as_str() {
            "fencelock: this very write was applied before" => Ok(false),
            "fencelock: stale fencing token refused" => Err(ErrorKind::Fenced),
            "fencelock: the resource is bound to another lock" => Err(ErrorKind::DomainMismatch),
            "fencelock: fencing token is implausibly far ahead" => Err(ErrorKind::Invalid),
            other => panic!("{shown}: {other}"),
        },
    }
}

fn admit_by_library(connection: &mut Connection, shown: &Fence) -> Result<bool, ErrorKind> {
    let transaction = connection.transaction().unwrap();
    let written = admit(&transaction, "r", shown).map_err(|error| error.kind())?;
    // The view answers a repeat with an error, after which nothing is committed.
    if written.applied {
        transaction.commit().unwrap();
    }
    Ok(written.applied)
}

type Row = (i64, Option<String>, i64, Option<String>);

fn row(connection: &Connection) -> Option<Row> {
    connection
        .query_row(
            "SELECT token, holder, seq, domain FROM fencelock_fences",
            [],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)),
        )
        .ok()
}

#[test]
fn the_rule_in_sql_is_the_rule_of_the_library() {
    let mut random = 7_u64;
    let mut draw = |below: u64| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    let mut seen = std::collections::HashMap::new();
    for _ in 0..150 {
        let (by_view, mut by_library) = (memory(), memory());
        let mut last = None;
        for _ in 0..14 {
            let number = match draw(12) {
                0 => 1 << 62,
                1 => (1 << 32) + draw(3),
                _ => 1 + draw(4),
            };
            let holder = (draw(4) > 0).then(|| draw(2));
            let domain = (draw(4) > 0).then(|| draw(8) / 7);
            let text = format!(
                "v1:{number}:{}:{}",
                holder.map_or("-".to_owned(), |h| format!("{h:032x}")),
                domain.map_or("-".to_owned(), |d| format!("file/r-{d}/a=2fb_1")),
            );
            let seq = (holder.is_some() && draw(3) > 0).then(|| draw(3) + 1);
            let text = seq.map_or(text.clone(), |seq| format!("{text}:{seq}"));
            // Now and then the same write again.
            let shown: Fence = match last {
                Some(last) if draw(5) == 0 => last,
                _ => text.parse().unwrap(),
            };
            last = Some(shown.clone());
            let answer = admit_by_library(&mut by_library, &shown);
            assert_eq!(admit_by_view(&by_view, &shown), answer, "{shown}");
            assert_eq!(row(&by_view), row(&by_library), "{shown}");
            *seen.entry(format!("{answer:?}")).or_insert(0) += 1;
        }
    }
    // Every answer came up, and often.
    assert_eq!(seen.len(), 5, "{seen:?}");
    assert!(seen.values().all(|n| *n > 20), "{seen:?}");
}

#[test]
fn what_is_no_fence_is_refused_by_the_view_as_by_the_library() {
    let own = memory();
    let insert = "INSERT INTO fencelock_admit_fence (resource, fence) VALUES ('r', ?1)";
    let holder = "0".repeat(32);
    for text in [
        String::new(),
        "0".to_owned(),
        "-1".to_owned(),
        "+1".to_owned(),
        "01".to_owned(),
        " 1".to_owned(),
        "1 ".to_owned(),
        "1.5".to_owned(),
        "1e3".to_owned(),
        "0x10".to_owned(),
        "9223372036854775808".to_owned(),
        "99999999999999999999".to_owned(),
        "v1:1".to_owned(),
        "v1:1:-".to_owned(),
        "v2:1:-:-".to_owned(),
        "v1::-:-".to_owned(),
        "v1:1:-:".to_owned(),
        "v1:1::-".to_owned(),
        "v1:1:-:-:".to_owned(),
        "v1:1:-:-:1".to_owned(),
        format!("v1:1:{holder}:-:0"),
        format!("v1:1:{holder}:-:01"),
        format!("v1:1:{holder}:-:1:1"),
        format!("v1:1:{holder}:-:x"),
        format!("v1:1:{}:-", "0".repeat(31)),
        format!("v1:1:{}:-", "A".repeat(32)),
        "v1:1:-:a/b".to_owned(),
        "v1:1:-:a/b/c/d".to_owned(),
        "v1:1:-:a//c".to_owned(),
        "v1:1:-:/b/c".to_owned(),
        "v1:1:-:a/b/".to_owned(),
        "v1:1:-:A/b/c".to_owned(),
        "v1:1:-:a/b/c d".to_owned(),
        "1\0".to_owned(),
        "v1:1:-:a/b/c\0d".to_owned(),
    ] {
        assert!(
            text.parse::<Fence>().is_err() || text.parse::<u64>().is_ok(),
            "{text:?}"
        );
        let refused = own.execute(insert, [&text]).unwrap_err().to_string();
        assert_eq!(refused, "fencelock: not a fence", "{text:?}");
    }
    assert!(own.execute(insert, [None::<String>]).is_err());
    assert_eq!(row(&own), None);
    let refused = own.execute(
        "INSERT INTO fencelock_admit (resource, token) VALUES (?1, 1)",
        ["x".repeat(513)],
    );
    assert!(refused.is_err());
    // Numbers are fences whatever their type.
    own.execute(insert, [5]).unwrap();
    own.execute(insert, ["6"]).unwrap();
    assert_eq!(row(&own).unwrap().0, 6);
}
