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
