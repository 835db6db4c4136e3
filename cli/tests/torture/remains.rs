//! A run that is interrupted or killed leaves no process, no key and no file.

use rustix::process::Signal;

use crate::{Running, Yard, eventually};

/// Starts a run, waits until its clients are at work, and ends it by `signal`.
fn end_by(yard: &Yard, args: &[&str], signal: Signal, code: i32) {
    let mut command = yard.torture(&[args, &["--duration", "5m"]].concat());
    let run = Running::start(&mut command);
    let clients = || {
        let found = yard.processes();
        let clients = found
            .iter()
            .filter(|line| line.contains("__torture-client"));
        clients.count()
    };
    eventually("its clients are at work", || clients() >= 6);
    run.signal(signal);
    let ended = run.end();
    assert_eq!(ended.code, code, "{ended:?}");
    yard.expect_empty();
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let yard = Yard::new();
    for (signal, code) in [
        (Signal::INT, 130),
        (Signal::TERM, 143),
        (Signal::KILL, 1009),
    ] {
        end_by(&yard, &[], signal, code);
        eventually("no directory is left", || {
            !yard.bench.path("locks").exists()
        });
    }
}

#[cfg(feature = "redis")]
#[test]
fn an_interrupted_run_on_a_server_leaves_no_key() {
    fencelock_testbed::skip!("redis");
    let yard = Yard::new();
    let redis = fencelock_testbed::redis::Redis::start();
    for (signal, code) in [(Signal::INT, 130), (Signal::KILL, 1009)] {
        end_by(&yard, &["--store", &redis.url()], signal, code);
        eventually("no key is left", || redis.cli(&["KEYS", "*"]).is_empty());
    }
}

#[cfg(feature = "redis")]
#[test]
fn an_interrupted_run_leaves_no_server_of_its_own() {
    fencelock_testbed::skip!("redis");
    let yard = Yard::new();
    for (signal, code) in [(Signal::INT, 130), (Signal::KILL, 1009)] {
        end_by(&yard, &["--own", "redis"], signal, code);
    }
}

#[cfg(feature = "postgres")]
#[test]
fn an_interrupted_run_leaves_no_server_of_many_processes() {
    fencelock_testbed::skip!("postgres");
    let yard = Yard::new();
    for (signal, code) in [(Signal::INT, 130), (Signal::KILL, 1009)] {
        end_by(&yard, &["--own", "postgres"], signal, code);
    }
}

/// Its data is made by programs that outlive whoever started them.
#[cfg(feature = "postgres")]
#[test]
fn a_run_that_is_killed_while_its_server_is_set_up_leaves_nothing() {
    fencelock_testbed::skip!("postgres");
    let yard = Yard::new();
    let run = Running::start(&mut yard.torture(&["--own", "postgres"]));
    eventually("the server's data is being made", || {
        yard.processes().iter().any(|line| line.contains("initdb"))
    });
    run.signal(Signal::KILL);
    let ended = run.end();
    assert_eq!(ended.code, 1009, "{ended:?}");
    yard.expect_empty();
}

/// The databases of runs that are beside `app.db`.
#[cfg(feature = "sqlite")]
pub(crate) fn databases(yard: &Yard) -> Vec<String> {
    let all = std::fs::read_dir(yard.bench.path("")).unwrap().flatten();
    all.map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.contains("torture") || name.starts_with("app.db"))
        .collect()
}

/// The tables and procedures that are in a database.
#[cfg(feature = "mysql")]
pub(crate) fn tables(mysql: &fencelock_testbed::mysql::Mysql) -> String {
    let both = "SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_NAME LIKE 'fencelock%' UNION SELECT ROUTINE_NAME FROM information_schema.ROUTINES WHERE ROUTINE_NAME LIKE 'fencelock%'";
    mysql.sql(both).trim().to_owned()
}

/// How many buckets there are.
#[cfg(feature = "nats")]
pub(crate) fn buckets(nats: &fencelock_testbed::nats::Nats) -> u64 {
    let answer = nats.ask("$JS.API.STREAM.NAMES", "");
    let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
    answer["total"].as_u64().unwrap()
}

#[cfg(feature = "sqlite")]
#[test]
fn an_interrupted_run_leaves_no_database() {
    let yard = Yard::new();
    let store = format!("sqlite://{}", yard.bench.path("app.db").display());
    for (signal, code) in [(Signal::INT, 130), (Signal::KILL, 1009)] {
        end_by(&yard, &["--store", &store], signal, code);
        eventually("no database is left", || databases(&yard).is_empty());
    }
}

#[cfg(feature = "mysql")]
#[test]
fn an_interrupted_run_leaves_no_table_and_no_procedure() {
    fencelock_testbed::skip!("mysql");
    let yard = Yard::new();
    let mysql = fencelock_testbed::mysql::Mysql::fast();
    for (signal, code) in [(Signal::INT, 130), (Signal::KILL, 1009)] {
        end_by(&yard, &["--store", &mysql.url()], signal, code);
        eventually("no table is left", || tables(&mysql).is_empty());
    }
}

#[cfg(feature = "nats")]
#[test]
fn an_interrupted_run_leaves_no_bucket() {
    fencelock_testbed::skip!("nats");
    let yard = Yard::new();
    let nats = fencelock_testbed::nats::Nats::start();
    for (signal, code) in [(Signal::INT, 130), (Signal::KILL, 1009)] {
        end_by(&yard, &["--store", &nats.url()], signal, code);
        eventually("no bucket is left", || buckets(&nats) == 0);
    }
}

#[cfg(feature = "s3")]
#[test]
fn an_interrupted_run_leaves_no_object() {
    fencelock_testbed::skip!("s3");
    let yard = Yard::new();
    let s3 = fencelock_testbed::s3::S3::seaweed();
    let url = s3.url("runs");
    for (signal, code) in [(Signal::INT, 130), (Signal::KILL, 1009)] {
        end_by(&yard, &["--store", &url], signal, code);
        eventually("no object is left", || s3.keys("runs/").is_empty());
    }
}
