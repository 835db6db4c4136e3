//! Fenced storage from scripts: the seven steps, refusals, and the shapes of the JSON.

use std::io::Write as _;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::bench::{Bench, Ended, Running, ended, eventually};

fn put(bench: &Bench, value: &str, flags: &[&str]) -> Ended {
    let mut command = bench.command(["put", "value"]);
    let mut running = Running::start(command.args(flags).stdin(Stdio::piped()));
    let mut stdin = running.process.stdin.take().unwrap();
    // Where it is refused early, it does not read all.
    let _ = stdin.write_all(value.as_bytes());
    drop(stdin);
    running.end()
}

fn get(bench: &Bench) -> String {
    bench.fencelock(["get", "value"]).expect_code(0).out
}

#[test]
fn the_seven_steps_with_acquire_and_put() {
    let bench = Bench::new();
    // 1 to 3: A acquires, and nothing renews its lease while it is away.
    let a = bench
        .fencelock(["acquire", "export", "--ttl", "300ms", "--json"])
        .expect_code(0)
        .json();
    eventually("A's lease lapses", || !bench.is_held("export"));
    // 4 and 5: B acquires and writes.
    let b = bench
        .fencelock(["acquire", "export", "--json"])
        .expect_code(0)
        .json();
    assert_eq!(b["token"].as_u64(), a["token"].as_u64().map(|n| n + 1));
    put(&bench, "by B", &["--fence", b["fence"].as_str().unwrap()]).expect_code(0);
    // 6: A wakes and writes.
    let refused = put(&bench, "by A", &["--fence", a["fence"].as_str().unwrap()]).expect_code(77);
    assert!(refused.err.contains("token=1"), "{}", refused.err);
    assert!(refused.err.contains("watermark=2"), "{}", refused.err);
    assert_eq!(refused.out, "");
    assert_eq!(get(&bench), "by B");
    // With the bare number it is no better.
    put(&bench, "by A", &["--token", "1"]).expect_code(77);
    assert_eq!(get(&bench), "by B");
    // 7: without fencing, B's data is gone.
    std::fs::write(bench.path("value"), "by A").unwrap();
    assert_eq!(
        std::fs::read_to_string(bench.path("value")).unwrap(),
        "by A"
    );
}

#[test]
fn the_seven_steps_with_run_and_a_real_pause() {
    let bench = Bench::new();
    // A's pipeline is beyond the reach of A's fencelock and of its warden, as on another host: a
    // session of its own. It writes when it is told to.
    // A background job of a shell has /dev/null for standard input, so the pipe is passed as 3.
    let script = "exec 3<&0; \
        setsid sh -c 'echo $$; read -r go <&3 && echo by A | fencelock put value; echo $?' & wait";
    let mut command = bench.run_sh("export", &["--ttl", "1s"], script);
    let mut a = Running::start(command.stdin(Stdio::piped()));
    let writer = a.line_pid();
    a.signal(Signal::STOP);
    rustix::process::kill_process(writer, Signal::STOP).unwrap();
    let b = ended(&mut bench.run_sh(
        "export",
        &["--wait", "20s"],
        "echo by B | fencelock put value",
    ));
    b.expect_code(0);
    rustix::process::kill_process(writer, Signal::CONT).unwrap();
    a.process
        .stdin
        .as_mut()
        .unwrap()
        .write_all(b"go\n")
        .unwrap();
    assert_eq!(a.line(), "77");
    assert_eq!(get(&bench), "by B\n");
    a.signal(Signal::CONT);
    let woken = a.end().expect_code(76);
    assert!(woken.err.contains("token=1 watermark=2"), "{}", woken.err);
}

#[test]
fn the_whole_job_is_one_line() {
    let bench = Bench::new();
    let script = "echo data | fencelock put value";
    ended(&mut bench.run_sh("export", &[], script)).expect_code(0);
    assert_eq!(get(&bench), "data\n");
    assert_eq!(
        std::fs::read_to_string(bench.path("value")).unwrap(),
        "data\n",
        "a plain file"
    );
}

#[test]
fn a_read_modify_write_loses_nothing() {
    let bench = Bench::new();
    let script = "n=$(fencelock raise value) && echo $((n + 1)) | fencelock put value";
    let runs: Vec<Running> = (0..8)
        .map(|_| Running::start(&mut bench.run_sh("counter", &["--wait", "30s"], script)))
        .collect();
    for run in runs {
        run.end().expect_code(0);
    }
    assert_eq!(get(&bench), "8\n");
}

#[test]
fn answers_have_their_documented_shapes() {
    let bench = Bench::new();
    let keys = |value: &Value| {
        let mut keys: Vec<String> = value.as_object().unwrap().keys().cloned().collect();
        keys.sort();
        keys.join(" ")
    };
    let shape = "applied resource token watermark";
    let empty = bench
        .fencelock(["get", "value", "--json"])
        .expect_code(0)
        .json();
    assert_eq!(
        empty,
        json!({"resource": "value", "token": null, "watermark": null, "size": null})
    );
    let raised = bench
        .fencelock(["raise", "value", "--token", "5", "--json"])
        .expect_code(0)
        .json();
    assert_eq!(keys(&raised), shape);
    assert_eq!(
        raised,
        json!({"resource": "value", "token": 5, "watermark": 5, "applied": true})
    );
    let written = put(&bench, "abc", &["--token", "6", "--json"]).expect_code(0);
    let written: Value = serde_json::from_str(&written.out).unwrap();
    assert_eq!(
        written,
        json!({"resource": "value", "token": 6, "watermark": 6, "applied": true})
    );
    let got = bench
        .fencelock(["get", "value", "--json"])
        .expect_code(0)
        .json();
    assert_eq!(
        got,
        json!({"resource": "value", "token": 6, "watermark": 6, "size": 3})
    );
    let deleted = bench
        .fencelock(["delete", "value", "--token", "7", "--json"])
        .expect_code(0)
        .json();
    assert_eq!(
        deleted,
        json!({"resource": "value", "token": 7, "watermark": 7, "applied": true})
    );
    let now_us = fencelock::clock::unix_micros().to_string();
    let large = put(&bench, "", &["--token", &now_us, "--json"]).expect_code(0);
    assert!(
        large.out.contains(&format!("\"token\":{now_us}")),
        "{}",
        large.out
    );
}

#[test]
fn the_same_write_again_is_acknowledged_and_not_applied() {
    let bench = Bench::new();
    let fence = "v1:5:00000000000000000000000000000001:file/r/job:3";
    let flags = ["--fence", fence, "--json"];
    let first: Value =
        serde_json::from_str(&put(&bench, "one", &flags).expect_code(0).out).unwrap();
    assert_eq!(first["applied"], true);
    let again: Value =
        serde_json::from_str(&put(&bench, "two", &flags).expect_code(0).out).unwrap();
    assert_eq!(again["applied"], false);
    assert_eq!(get(&bench), "one");
}

#[test]
fn no_value_is_told_apart_from_an_empty_one() {
    let bench = Bench::new();
    let none = bench.fencelock(["get", "value"]).expect_code(66);
    assert_eq!(none.out, "");
    assert!(none.err.contains("no value"), "{}", none.err);
    assert_eq!(
        bench
            .fencelock(["raise", "value", "--token", "1"])
            .expect_code(0)
            .out,
        ""
    );
    bench.fencelock(["get", "value"]).expect_code(66);
    put(&bench, "", &["--token", "1"]).expect_code(0);
    assert_eq!(get(&bench), "");
    bench
        .fencelock(["delete", "value", "--token", "1"])
        .expect_code(0);
    bench.fencelock(["get", "value"]).expect_code(66);
    // And the watermark is kept.
    bench
        .fencelock(["raise", "value", "--token", "2"])
        .expect_code(0);
    put(&bench, "old", &["--token", "1"]).expect_code(77);
}

#[test]
fn another_lock_is_78_until_a_rebind() {
    let bench = Bench::new();
    let write = "echo x | fencelock put value";
    ended(&mut bench.run_sh("one", &[], write)).expect_code(0);
    let refused = ended(&mut bench.run_sh("two", &[], write)).expect_code(78);
    assert!(refused.err.contains("bound_to="), "{}", refused.err);
    let moved = ended(&mut bench.run_sh(
        "two",
        &[],
        "fencelock rebind value && echo y | fencelock put value",
    ));
    assert_eq!(moved.code, 0, "{moved:?}");
    ended(&mut bench.run_sh("one", &["--wait"], write)).expect_code(78);
    assert_eq!(get(&bench), "y\n");
}

#[test]
fn a_value_larger_than_memory_would_hold_passes_through_a_pipe() {
    const SIZE: usize = 24 * 1024 * 1024;
    let bench = Bench::new();
    let script = format!(
        "head -c {SIZE} /dev/zero | tr '\\0' x | fencelock put value && fencelock get value | cksum; head -c {SIZE} /dev/zero | tr '\\0' x | cksum"
    );
    let ran = ended(&mut bench.run_sh("job", &[], &script)).expect_code(0);
    let sums: Vec<&str> = ran.out.lines().collect();
    assert_eq!(sums.len(), 2);
    assert_eq!(sums[0], sums[1]);
}

#[test]
fn a_file_is_taken_from_its_argument_and_from_standard_input() {
    let bench = Bench::new();
    std::fs::write(bench.path("new"), "one\ntwo\n").unwrap();
    bench
        .fencelock(["put", "value", "new", "--token", "1"])
        .expect_code(0);
    assert_eq!(get(&bench), "one\ntwo\n");
    // What was read of it before is not written.
    let script = "{ read -r first; fencelock put value -; } < new";
    ended(&mut bench.run_sh("job", &["--raise", "other"], script)).expect_code(0);
    assert_eq!(get(&bench), "two\n");
}

#[test]
fn a_live_holder_that_is_refused_makes_the_next_token_larger() {
    let bench = Bench::new();
    bench
        .fencelock(["raise", "value", "--token", "1000"])
        .expect_code(0);
    let refused =
        ended(&mut bench.run_sh("job", &[], "echo x | fencelock put value")).expect_code(77);
    assert!(refused.err.contains("larger than 1000"), "{}", refused.err);
    assert!(refused.err.contains("watermark=1000"), "{}", refused.err);
    ended(&mut bench.run_sh("job", &["--wait", "10s"], "echo x | fencelock put value"))
        .expect_code(0);
    let got = bench
        .fencelock(["get", "value", "--json"])
        .expect_code(0)
        .json();
    assert_eq!(got["token"], 1001);
}

#[test]
fn a_stale_holder_that_is_refused_changes_nothing() {
    let bench = Bench::new();
    let old = bench
        .fencelock(["acquire", "job", "--json"])
        .expect_code(0)
        .json();
    bench.fencelock(["break", "job"]).expect_code(0);
    bench
        .fencelock(["raise", "value", "--token", "1000"])
        .expect_code(0);
    let mut command = bench.command(["delete", "value"]);
    command
        .env("FENCELOCK_NAME", "job")
        .env("FENCELOCK_FENCE", old["fence"].as_str().unwrap());
    let refused = ended(&mut command).expect_code(77);
    assert!(!refused.err.contains("larger"), "{}", refused.err);
    let next = bench
        .fencelock(["acquire", "job", "--json"])
        .expect_code(0)
        .json();
    assert_eq!(next["token"], 2);
}

#[test]
fn an_implausible_token_is_refused_as_wrong_usage() {
    let bench = Bench::new();
    bench
        .fencelock(["raise", "value", "--token", "9223372036854775807"])
        .expect_code(64);
    bench
        .fencelock(["raise", "value", "--token", "1"])
        .expect_code(0);
}

#[test]
fn two_holders_of_one_number_do_not_pass_for_each_other() {
    let bench = Bench::new();
    let fence = |n: u8| format!("v1:5:000000000000000000000000000000{n:02x}:file/r/job");
    put(&bench, "one", &["--fence", &fence(1)]).expect_code(0);
    put(&bench, "two", &["--fence", &fence(2)]).expect_code(77);
    assert_eq!(get(&bench), "one");
}

#[test]
fn the_tokens_number_stands_for_the_whole_fence_of_the_surrounding_run() {
    let bench = Bench::new();
    // As a bare number it would pass for the other lock, too.
    ended(&mut bench.run_sh("one", &[], "fencelock raise value")).expect_code(0);
    let script = "fencelock raise value --token $FENCELOCK_TOKEN";
    ended(&mut bench.run_sh("two", &[], script)).expect_code(78);
}

#[test]
fn the_demo_keeps_its_promise() {
    let bench = Bench::new();
    let started = crate::bench::now();
    let mut command = bench.command(["demo"]);
    let told = ended(command.env_remove("FENCELOCK_STORE")).expect_code(0);
    assert!(
        started.elapsed() < Duration::from_secs(15),
        "{:?}",
        started.elapsed()
    );
    assert_eq!(told.err, "");
    for said in [
        "SIGSTOP",
        "SIGCONT",
        "token 1",
        "token 2",
        "REFUSED: token 1 is older than 2",
        "exported by B",
        "B's data is safe",
    ] {
        assert!(told.out.contains(said), "{said} in {}", told.out);
    }
    for step in 1..=7 {
        assert!(
            told.out.contains(&format!("\n{step}. ")),
            "{step} in {}",
            told.out
        );
    }
    assert!(
        !told.out.contains('\u{1b}'),
        "plain where there is no terminal"
    );
}

#[test]
fn the_readme_shows_what_the_demo_says() {
    let readme = include_str!("../../../README.md");
    let shown = readme
        .split_once("$ fencelock demo\n")
        .and_then(|(_, rest)| rest.split_once("```"))
        .expect("the README shows the demo")
        .0;
    let bench = Bench::new();
    let mut command = bench.command(["demo"]);
    let told = ended(command.env_remove("FENCELOCK_STORE")).expect_code(0);
    assert_eq!(plain(&told.out), plain(shown));
}

/// The lines of a demo without what differs from run to run: process ids, directories, alignment.
fn plain(demo: &str) -> Vec<String> {
    let word = |word: &str| {
        if word.starts_with("file:///") || word.starts_with('/') {
            "PATH".to_owned()
        } else if word.ends_with(')') && word.starts_with(|c: char| c.is_ascii_digit()) {
            "PID)".to_owned()
        } else {
            word.to_owned()
        }
    };
    let line = |line: &str| {
        line.split_whitespace()
            .map(word)
            .collect::<Vec<_>>()
            .join(" ")
    };
    demo.trim_end().lines().map(line).collect()
}

#[test]
fn the_demo_checks_its_stage_before_it_plays() {
    let bench = Bench::new();
    let refused = |flags: &[&str], said: &str| {
        let mut command = bench.command(["demo"]);
        let refused = ended(command.args(flags)).expect_code(78);
        assert_eq!(refused.out, "", "nothing was played");
        assert!(refused.err.contains(said), "{}", refused.err);
    };
    refused(&["--store", "memory:"], "one process's own");
    refused(&["--dest", "missing/value"], "no such file or directory");
    refused(
        &["--dest", "missing/value", "--without-fencing"],
        "no such file or directory",
    );
    refused(&["--dest", "/proc/value"], "directory");
}

#[test]
fn without_fencing_the_demo_loses_the_data() {
    let bench = Bench::new();
    let mut command = bench.command(["demo", "--without-fencing"]);
    let told = ended(command.env_remove("FENCELOCK_STORE")).expect_code(0);
    assert!(
        told.out
            .contains("The file now says \"payments, exported by A\""),
        "{}",
        told.out
    );
    assert!(told.out.contains("B's data is lost"), "{}", told.out);
}

#[test]
fn the_demo_plays_on_a_store_and_a_destination_of_ones_own() {
    let bench = Bench::new();
    for round in 1..=2 {
        bench.fencelock(["demo", "--dest", "value"]).expect_code(0);
        assert_eq!(get(&bench), "payments, exported by B\n");
        assert_eq!(bench.show("payment-export")["last_token"], round * 2);
    }
    // A demo that does not end as promised fails: here the resource belongs to another lock, and
    // there it has seen a larger token.
    bench
        .fencelock(["--store", "./elsewhere", "demo", "--dest", "value"])
        .expect_code(78);
    bench
        .fencelock(["put", "ahead", "--token", "1000", "/dev/null"])
        .expect_code(0);
    let failed = bench.fencelock(["demo", "--dest", "ahead"]).expect_code(77);
    assert!(!failed.out.contains("written"), "{}", failed.out);
    assert!(failed.err.contains("give another --dest"), "{}", failed.err);
}
