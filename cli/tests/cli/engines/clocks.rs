//! Cases of wall clocks that are wrong, or are set while a lock is held. Leases must not care: they
//! end by the store's clock or by one that nobody sets.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fencelock::clock::unix_micros;

use super::engine::Engine;
use super::stores::{acquire, destination, get, number, put, seconds, text};
use crate::bench::{Bench, Running, ended, now};

/// How often somebody else tries while a lock is held.
const TRY: Duration = Duration::from_millis(200);

/// One client is early and the other late by as much as the engine bears: no lease is shorter or
/// longer for it.
pub(super) fn clients_whose_wall_clocks_disagree_exclude_each_other<E: Engine>() {
    let engine = E::start();
    let bench = Bench::on(&engine.url());
    let to = destination(&engine.url(), "value");
    let ttl = seconds(engine.ttl_min());
    for (ours, theirs) in [("-", "+"), ("+", "-")] {
        let clock = |sign: &str| format!("{sign}{}", E::CLOCK_ERROR.as_secs());
        let script = "date +%s; echo $FENCELOCK_TOKEN; echo $FENCELOCK_FENCE; cat";
        let mut holder = bench.run_sh("job", &["--ttl", &ttl], script);
        let mut holder = Running::start(under(&mut holder, &clock(ours)).stdin(Stdio::piped()));
        assert_is_off(&holder.line(), E::CLOCK_ERROR);
        let token: u64 = holder.line().parse().unwrap();
        let fence = holder.line();
        // Renewed several times, and nobody gets in.
        let until = now() + 3 * engine.ttl_min();
        while now() < until {
            let mut other = bench.command(["acquire", "job"]);
            ended(under(&mut other, &clock(theirs))).expect_code(75);
            std::thread::sleep(TRY);
        }
        put(&bench, &to, b"by the holder", &["--fence", &fence]).expect_code(0);
        drop(holder.process.stdin.take());
        holder.end().expect_code(0);

        // One that is left to lapse is good for its whole TTL, and free after it at the first try.
        let mut left = bench.command(["acquire", "job", "--ttl", &ttl, "--json"]);
        let asked = now();
        let left = ended(under(&mut left, &clock(ours))).expect_code(0).json();
        assert!(number(&left["token"]) > token);
        let next = first_grant(&bench, &clock(theirs));
        assert!(asked.elapsed() >= engine.ttl_min(), "{:?}", asked.elapsed());
        assert!(number(&next["token"]) > number(&left["token"]));
        put(
            &bench,
            &to,
            b"by the next",
            &["--fence", text(&next["fence"])],
        )
        .expect_code(0);
        put(&bench, &to, b"late", &["--fence", text(&left["fence"])]).expect_code(77);
        assert_eq!(get(&bench, &to), "by the next");
        let (holder, token) = (text(&next["holder"]), number(&next["token"]).to_string());
        bench
            .fencelock(["release", "job", "--holder", holder, "--token", &token])
            .expect_code(0);
    }
}

/// The holder's wall clock is set forward and back, as an operator or a time server does it.
pub(super) fn a_wall_clock_that_is_set_loses_no_lock<E: Engine>() {
    let engine = E::start();
    let bench = Bench::on(&engine.url());
    let to = destination(&engine.url(), "value");
    let ttl = seconds(engine.ttl_min());
    let set = bench.path("clock");
    let turn = |error: &str| {
        // In one step: a half-written file would be another time.
        let half = bench.path("clock.next");
        fs::write(&half, error).unwrap();
        fs::rename(&half, &set).unwrap();
    };
    turn("+0");
    let script = format!(
        "echo held; while read -r line; do date +%s; done
         fencelock raise '{to}' >/dev/null && echo done | fencelock put '{to}'"
    );
    let mut holder = bench.run_sh("job", &["--ttl", &ttl], &script);
    holder
        .env("FAKETIME_TIMESTAMP_FILE", &set)
        .env("FAKETIME_NO_CACHE", "1");
    let mut holder = Running::start(with_library(&mut holder).stdin(Stdio::piped()));
    assert_eq!(holder.line(), "held");
    let mut stdin = holder.process.stdin.take().unwrap();
    for sign in ["+", "-"] {
        turn(&format!("{sign}{}", E::CLOCK_ERROR.as_secs()));
        std::io::Write::write_all(&mut stdin, b"\n").unwrap();
        assert_is_off(&holder.line(), E::CLOCK_ERROR);
        let until = now() + 2 * engine.ttl_min();
        while now() < until {
            bench.fencelock(["acquire", "job"]).expect_code(75);
            std::thread::sleep(TRY);
        }
    }
    drop(stdin);
    holder.end().expect_code(0);
    assert_eq!(get(&bench, &to), "done\n");
    acquire(&bench, "job", &[]);
}

/// Tries until the lock is free.
fn first_grant(bench: &Bench, clock: &str) -> serde_json::Value {
    let started: Instant = now();
    loop {
        let mut next = bench.command(["acquire", "job", "--json"]);
        let next = ended(under(&mut next, clock));
        if next.code == 0 {
            return next.json();
        }
        next.expect_code(75);
        assert!(started.elapsed() < crate::bench::LIMIT, "it never lapses");
        std::thread::sleep(TRY);
    }
}

/// The control: what runs beside the holder does read another time.
#[track_caller]
fn assert_is_off(said: &str, error: Duration) {
    let said: u64 = said.parse().expect("seconds since 1970");
    let real = unix_micros() / 1_000_000;
    assert!(said.abs_diff(real) > error.as_secs() / 2, "{said}");
}

/// Lets a command, and all that it starts, read a wall clock that is off.
fn under<'c>(command: &'c mut Command, error: &str) -> &'c mut Command {
    with_library(command.env("FAKETIME", error))
}

fn with_library(command: &mut Command) -> &mut Command {
    command
        .env("LD_PRELOAD", library())
        // A clock that is set moves neither the clocks that cannot be set nor the times of files.
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .env("NO_FAKE_STAT", "1")
}

/// Where Debian's package keeps it, by the processor.
fn library() -> PathBuf {
    let found = fs::read_dir("/usr/lib").unwrap().find_map(|dir| {
        let path = dir.ok()?.path().join("faketime/libfaketimeMT.so.1");
        path.exists().then_some(path)
    });
    found.unwrap_or_else(|| panic!("libfaketime is missing: install the package libfaketime, or name it in FENCELOCK_TEST_SKIP"))
}
