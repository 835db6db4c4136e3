//! The programs of the manual, and the example, as they are printed.

use std::path::Path;
use std::process::{Command, Output};

use fencelock::FencedStore;
use fencelock::sqlite::guard_sql;

use crate::lab::*;

#[path = "../../examples/sqlite_admit.rs"]
#[expect(dead_code, reason = "the program's own beginning")]
mod example;

const STORAGE: &str = include_str!("../../docs/storages/sqlite.md");
const BACKEND: &str = include_str!("../../docs/backends/sqlite.md");

/// The blocks of a language in a page.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let fence = format!("```{language}\n");
    page.split(fence.as_str())
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap())
        .collect()
}

fn python(program: &str, database: &Path, fence: &str) -> Output {
    let python = fencelock_testbed::process::program("sqlite3", "python3", "python3", &[]);
    Command::new(python)
        .args(["-c", program])
        .arg(database)
        .env("FENCELOCK_FENCE", fence)
        .output()
        .unwrap()
}

async fn payments() -> Data {
    let data = Data::new();
    data.store().await;
    data.connect()
        .execute_batch("CREATE TABLE payments (exported INTEGER); INSERT INTO payments VALUES (0)")
        .unwrap();
    data
}

fn exported(data: &Data) -> i64 {
    data.connect()
        .query_row("SELECT exported FROM payments", [], |row| row.get(0))
        .unwrap()
}

#[tokio::test]
async fn the_manuals_python_programs_write_with_the_newest_token_and_not_with_a_stale_one() {
    fencelock_testbed::skip!("sqlite3");
    let programs = blocks(STORAGE, "python");
    assert_eq!(programs.len(), 2);
    for (program, guarded) in [(programs[0], false), (programs[1], true)] {
        let data = payments().await;
        if guarded {
            let guard = guard_sql("payments", "payments").unwrap();
            shell(&data.path(), &guard);
        }
        let holder = "8c1f0000000000000000000000000000";
        for (token, accepted) in [(34, true), (33, false), (35, true)] {
            let fence = format!("v1:{token}:{holder}:file/r/payment-export");
            let ran = python(program, &data.path(), &fence);
            assert_eq!(ran.status.success(), accepted, "{ran:?}");
            if !accepted {
                let said = String::from_utf8_lossy(&ran.stderr);
                assert!(
                    said.contains("fencelock: stale fencing token refused"),
                    "{said}"
                );
            }
        }
        assert_eq!(exported(&data), 2);
        if guarded {
            let refused = data
                .connect()
                .execute("UPDATE payments SET exported = 9", []);
            assert!(refused.unwrap_err().to_string().contains("fencelock_fence"));
        }
    }
}

#[tokio::test]
async fn the_manuals_sql_is_accepted_by_the_shell_and_refused_when_stale() {
    fencelock_testbed::skip!("sqlite3");
    let data = payments().await;
    let sql = blocks(STORAGE, "sql");
    assert_eq!(sql.len(), 1);
    shell(&data.path(), sql[0]);
    assert_eq!(exported(&data), 1);
    let resource = "payments".parse().unwrap();
    let seen = data.values().await.get(&resource).await.unwrap();
    assert_eq!(seen.watermark.unwrap().token.get(), 34);
    shell(
        &data.path(),
        "INSERT INTO fencelock_admit (resource, token) VALUES ('payments', 35)",
    );
    let program = fencelock_testbed::process::program("sqlite3", "sqlite3", "sqlite3", &[]);
    let stale = Command::new(program)
        .args(["-batch", "-bail"])
        .arg(data.path())
        .arg(sql[0])
        .output()
        .unwrap();
    assert!(!stale.status.success());
    let said = String::from_utf8_lossy(&stale.stderr);
    assert!(said.contains("stale fencing token refused"), "{said}");
}

#[tokio::test]
async fn the_manuals_sql_makes_another_realm_and_shows_the_locks() {
    fencelock_testbed::skip!("sqlite3");
    let data = Data::new();
    let store = data.store().await;
    cycle(&store, "export").await;
    let realms = blocks(BACKEND, "sql");
    assert_eq!(realms.len(), 1);
    shell(&data.path(), realms[0]);
    let again = data.store().await;
    assert_ne!(format!("{store:?}"), format!("{again:?}"));
    let look = "SELECT CAST(name AS TEXT), last_token FROM fencelock_locks";
    assert!(BACKEND.contains(look));
    assert_eq!(shell(&data.path(), look).trim(), "export|1");
}

#[test]
fn the_shell_creates_the_tables_from_what_is_printed_and_twice_is_harmless() {
    fencelock_testbed::skip!("sqlite3");
    let data = Data::new();
    for _ in 0..2 {
        shell(&data.path(), &fencelock::sqlite::schema_sql());
    }
}

#[tokio::test]
async fn of_two_runs_of_the_example_the_paused_one_is_refused() {
    let data = Data::new();
    let path = data.path();
    let path = path.to_str().unwrap();
    let (holds, held) = tokio::sync::oneshot::channel();
    let (wrote, written) = tokio::sync::oneshot::channel();
    let paused = example::add_one(path, async {
        holds.send(()).unwrap();
        // Beyond its lease of two seconds: until another has it, and has written.
        written.await.unwrap();
    });
    let next = async {
        held.await.unwrap();
        let value = example::add_one(path, async {}).await;
        wrote.send(()).unwrap();
        value
    };
    let (paused, next) = tokio::join!(paused, next);
    assert_eq!(paused.unwrap(), None);
    assert_eq!(next.unwrap(), Some(1));
    let again = example::add_one(path, async {}).await;
    assert_eq!(again.unwrap(), Some(2));
}
