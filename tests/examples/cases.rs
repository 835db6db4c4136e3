//! What each example prints, and what it leaves behind.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use fencelock::Fenced;
use fencelock::nats::FencedNats;
use fencelock::object_store::{FencedObjects, ObjectOptions};
use fencelock_testbed::etcd::Etcd;
use fencelock_testbed::mysql::Mysql;
use fencelock_testbed::nats::Nats;
use fencelock_testbed::port::Port;
use fencelock_testbed::postgres::Postgres;
use fencelock_testbed::redis::Redis;
use fencelock_testbed::s3::{self, S3};
use fencelock_testbed::{eventually, skip};
use rustix::process::Signal;
use tempfile::tempdir;

use crate::program::{Running, example, run};

/// The number in the line that begins like this.
#[track_caller]
fn number(lines: &[String], beginning: &str) -> u64 {
    let mut found = lines.iter().filter_map(|l| l.strip_prefix(beginning));
    let (Some(rest), None) = (found.next(), found.next()) else {
        panic!("one line begins with {beginning:?}: {lines:?}");
    };
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

/// Two runs of a program that adds 1 to a number, the first of them stopped for longer than its lease.
/// `value` reads the number.
fn the_paused_one_is_refused(name: &str, target: &str, value: impl Fn() -> String) {
    // It has to be stopped before this is over.
    let pause_secs = "10";
    let mut paused = Running::start(example(name).args([target, pause_secs]));
    let stale = number(&[paused.line()], "token ");
    paused.signal(Signal::STOP);
    let next = run(example(name).arg(target));
    assert!(number(&next, "token ") > stale, "{next:?}");
    assert_eq!(number(&next, "wrote "), 1);
    paused.signal(Signal::CONT);
    let late = paused.end();
    assert!(
        late.iter()
            .any(|line| line.starts_with("refused, nothing was written")),
        "{late:?}"
    );
    assert!(
        late.iter()
            .any(|line| line.contains(&format!("token={stale} "))),
        "{late:?}"
    );
    assert!(
        !late.iter().any(|line| line.starts_with("wrote")),
        "{late:?}"
    );
    assert_eq!(value(), "1");
    let again = run(example(name).arg(target));
    assert_eq!(number(&again, "wrote "), 2);
    assert_eq!(value(), "2");
}

/// Two runs, one after the other: the second is given the larger token, which it tells after
/// `beginning`.
fn tokens_rise(mut command: impl FnMut() -> Command, beginning: &str) {
    let first = number(&run(&mut command()), beginning);
    let second = number(&run(&mut command()), beginning);
    assert!(second > first, "{second} after {first}");
}

fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(work)
}

pub(crate) fn mysql_admit() {
    skip!("mysql");
    let server = Mysql::fast();
    the_paused_one_is_refused("mysql_admit", &server.url(), || {
        server.sql("SELECT value FROM example")
    });
}

pub(crate) fn postgres_admit() {
    skip!("postgres");
    let server = Postgres::fast();
    the_paused_one_is_refused("postgres_admit", &server.url(), || {
        server.psql("SELECT value FROM example")
    });
}

pub(crate) fn postgres_sqlx() {
    skip!("postgres");
    let server = Postgres::fast();
    the_paused_one_is_refused("postgres_sqlx", &server.url(), || {
        server.psql("SELECT value FROM example")
    });
}

pub(crate) fn sqlite_admit() {
    let dir = tempdir().unwrap();
    let database = dir.path().join("app.db");
    the_paused_one_is_refused("sqlite_admit", database.to_str().unwrap(), || {
        let database = rusqlite::Connection::open(&database).unwrap();
        let read = "SELECT CAST(value AS TEXT) FROM example";
        database.query_row(read, [], |row| row.get(0)).unwrap()
    });
}

/// The lock of the pool is in the database: its last token is what the program told.
pub(crate) fn mysql_own_pool() {
    skip!("mysql");
    let server = Mysql::fast();
    let command = || {
        let mut command = example("mysql_own_pool");
        command.arg(server.url());
        command
    };
    tokens_rise(command, "token ");
    let left = "SELECT last_token FROM fencelock_locks WHERE name = 'nightly'";
    assert_eq!(server.sql(left), "2");
}

pub(crate) fn postgres_own_pool() {
    skip!("postgres");
    let server = Postgres::fast();
    let command = || {
        let mut command = example("postgres_own_pool");
        command.arg(server.url());
        command
    };
    tokens_rise(command, "token ");
    let left = "SELECT last_token FROM fencelock.locks WHERE name = 'nightly'";
    assert_eq!(server.psql(left), "2");
}

/// The three requests of its documentation.
pub(crate) fn axum_postgres() {
    skip!("postgres");
    let server = Postgres::fast();
    let port = Port::free();
    let address = SocketAddr::from(([127, 0, 0, 1], port.number()));
    let service =
        Running::start(example("axum_postgres").args([server.url(), address.to_string()]));
    let ask = |head: &str, body: &str| {
        let mut stream = TcpStream::connect(address).ok()?;
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let length = body.len();
        write!(
            stream,
            "{head}Host: {address}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        Some((head.get(9..12).unwrap().to_owned(), body.trim().to_owned()))
    };
    let deposit = |token: u64| {
        let head = format!("POST /accounts/alice HTTP/1.1\r\nFencing-Token: {token}\r\n");
        ask(&head, "10").unwrap()
    };
    let balance = || ask("GET /accounts/alice HTTP/1.1\r\n", "");
    eventually("a service that listens", Duration::from_secs(30), || {
        balance().is_some()
    });
    assert_eq!(deposit(34), ("200".to_owned(), "10".to_owned()));
    let (status, problem) = deposit(33);
    assert_eq!(status, "412", "{problem}");
    assert_eq!(balance().unwrap(), ("200".to_owned(), "10".to_owned()));
    assert_eq!(server.psql("SELECT balance FROM account"), "10");
    drop(service);
}

pub(crate) fn redis_own_client() {
    skip!("redis");
    let server = Redis::start();
    let mut before = 0;
    for round in 1..=2 {
        let lines = run(example("redis_own_client").env("REDIS_URL", server.url()));
        let token = number(&lines, "token ");
        assert!(token > before, "{token} after {before}");
        before = token;
        assert_eq!(number(&lines, "balance "), 5 * round);
        assert!(
            lines.iter().any(|line| line.starts_with("refused: ")),
            "{lines:?}"
        );
        let left = server.cli(&["GET", "example:balance"]);
        assert_eq!(
            left.trim(),
            (5 * round).to_string(),
            "the stale addition had no effect"
        );
    }
}

pub(crate) fn etcd_own_client() {
    skip!("etcd");
    let server = Etcd::start();
    let address = server.address().to_string();
    let command = || {
        let mut command = example("etcd_own_client");
        command.arg(&address);
        command
    };
    tokens_rise(command, "written with ");
    let value = |key| server.ctl(&["get", key, "--print-value-only"]);
    assert_eq!(value("exports/today").trim(), "data");
    assert_eq!(value("exports/index").trim(), "today");
}

pub(crate) fn nats_own_client() {
    skip!("nats");
    let server = Nats::start();
    let address = server.address().to_string();
    let command = || {
        let mut command = example("nats_own_client");
        command.arg(&address);
        command
    };
    tokens_rise(command, "written with ");
    let count = block_on(async {
        let store = Fenced::new(FencedNats::open(&server.url()).await.unwrap());
        let seen = store.get("exports/today").await.unwrap();
        seen.value.unwrap().into_bytes(64).unwrap()
    });
    assert_eq!(count, "2", "each run adds 1 to what it read");
}

/// An example with what Amazon's clients read from the environment.
fn with_bucket(server: &S3, name: &str) -> Command {
    let mut command = example(name);
    command
        .env("AWS_ENDPOINT_URL", format!("http://{}", server.address()))
        .env("AWS_ENDPOINT", format!("http://{}", server.address()))
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_ACCESS_KEY_ID", s3::KEY)
        .env("AWS_SECRET_ACCESS_KEY", s3::SECRET)
        .env("AWS_REGION", "us-east-1");
    command
}

pub(crate) fn object_store_own_client() {
    skip!("s3");
    let server = S3::moto();
    tokens_rise(
        || with_bucket(&server, "object_store_own_client"),
        "held with ",
    );
}

/// Its locks are files, in the directory that it is started in.
pub(crate) fn object_store_export() {
    skip!("s3");
    let server = S3::moto();
    let dir = tempdir().unwrap();
    for (round, report) in ["first", "second"].into_iter().enumerate() {
        std::fs::write(dir.path().join("today.csv"), report).unwrap();
        let lines = run(with_bucket(&server, "object_store_export")
            .current_dir(dir.path())
            .args(["s3://bucket/exports", "today.csv"]));
        let token = number(&lines, "exported with token ");
        assert_eq!(token, u64::try_from(round).unwrap() + 1);
        let seen = block_on(async {
            let objects = exports(&server).await;
            let seen = objects.get("payments/today.csv").await.unwrap();
            assert_eq!(seen.watermark.unwrap().token.get(), token);
            seen.value.unwrap().into_bytes(64).unwrap()
        });
        assert_eq!(seen, report);
    }
    // Somebody newer, of the same lock.
    block_on(async {
        let objects = exports(&server).await;
        let seen = objects.get("payments/today.csv").await.unwrap();
        let domain = seen.watermark.unwrap().domain;
        let newer = fencelock::FencingToken::new(1_000).unwrap();
        let tag = fencelock::fence::HolderTag::from_bytes([7; 16]);
        let fence = fencelock::Fence::new(newer, tag, domain.unwrap());
        objects.raise("payments/today.csv", fence).await.unwrap();
    });
    let lines = run(with_bucket(&server, "object_store_export")
        .current_dir(dir.path())
        .args(["s3://bucket/exports", "today.csv"]));
    assert!(
        lines
            .iter()
            .any(|line| line.starts_with("somebody newer exports")),
        "{lines:?}"
    );
}

async fn exports(server: &S3) -> FencedObjects {
    let options = ObjectOptions::default().credentials(s3::KEY, s3::SECRET, None);
    options.open_fenced(&server.url("exports")).await.unwrap()
}

pub(crate) fn export() {
    let dir = tempdir().unwrap();
    for _ in 0..2 {
        run(example("export").arg(dir.path()));
    }
    let report = std::fs::read_to_string(dir.path().join("today.csv")).unwrap();
    assert_eq!(report, "line of token 1\nline of token 2\n");
}

/// Its other half, several at once on every engine, is among the tests of the command line.
pub(crate) fn two_values() {
    let dir = tempdir().unwrap();
    let place = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let store = format!("file://{}", place("locks"));
    for _ in 0..2 {
        let args = [store.clone(), place("alice"), place("bob"), "5".to_owned()];
        run(example("two_values").args(args));
    }
    let account = |name: &str| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(place(name)).unwrap()).unwrap()
    };
    let state = |balance| serde_json::json!({ "balance": balance, "transfers": 2, "sends": 0 });
    assert_eq!(account("alice"), state(-10));
    assert_eq!(account("bob"), state(10));
}

pub(crate) fn own_backend() {
    let dir = tempdir().unwrap();
    for round in 1..=2 {
        let lines = run(example("own_backend").env("TMPDIR", dir.path()));
        let token = number(&lines, "holding payment-export with token ");
        assert_eq!(token, round);
        let shown = format!("storage would be shown v1:{round}:");
        assert!(
            lines.iter().any(|line| line.starts_with(&shown)),
            "{lines:?}"
        );
    }
}

/// The trace of the span is in the lease, and the metrics tell of one acquire.
pub(crate) fn observability() {
    let lines = run(&mut example("observability"));
    let trace = lines
        .iter()
        .find_map(|line| line.strip_prefix("trace of the holder: Some(\""))
        .and_then(|rest| rest.strip_suffix("\")"));
    let trace = trace.unwrap_or_else(|| panic!("a trace: {lines:?}"));
    assert_eq!(trace.len(), 32, "{trace}");
    assert_ne!(trace, "0".repeat(32), "a span that is not recorded");
    let acquires = lines
        .iter()
        .find(|line| line.starts_with("fencelock_acquires"));
    let acquires = acquires.unwrap_or_else(|| panic!("metrics: {lines:?}"));
    assert!(acquires.ends_with(" 1"), "{acquires}");
}
