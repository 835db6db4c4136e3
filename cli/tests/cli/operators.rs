//! What an operator and a script do with leases: acquire, renew, release, list, show, watch, break,
//! prune, repair, doctor; and the shapes of their JSON.

use std::time::Duration;

use serde_json::{Value, json};

use crate::bench::{Bench, Running, ended, eventually};

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    keys.sort_unstable();
    keys
}

/// `acquire NAME FLAGS --json`.
fn acquire(bench: &Bench, name: &str, flags: &[&str]) -> Value {
    let mut command = bench.command(["acquire", name, "--json"]);
    ended(command.args(flags)).expect_code(0).json()
}

/// `renew` or `release` of what `acquire` printed, with the holder in the environment.
fn with_lease(bench: &Bench, verb: &str, lease: &Value, flags: &[&str]) -> crate::bench::Ended {
    let name = lease["name"].as_str().unwrap();
    let token = lease["token"].to_string();
    let mut command = bench.command([verb, name, "--token", &token]);
    command
        .args(flags)
        .env("FENCELOCK_HOLDER", lease["holder"].as_str().unwrap());
    ended(&mut command)
}

#[test]
fn an_acquired_lease_stays_until_it_is_released() {
    let bench = Bench::new();
    let lease = acquire(&bench, "deploy", &["--ttl", "1h", "--label", "by hand"]);
    assert_eq!(
        keys(&lease),
        [
            "expires_in_ms",
            "fence",
            "holder",
            "name",
            "token",
            "ttl_ms"
        ]
    );
    assert_eq!(lease["name"], "deploy");
    assert_eq!(lease["token"], 1);
    assert_eq!(lease["ttl_ms"], 3_600_000);
    assert!(lease["expires_in_ms"].as_u64().unwrap() <= 3_600_000);
    assert!(lease["fence"].as_str().unwrap().starts_with("v1:1:"));
    bench.fencelock(["acquire", "deploy"]).expect_code(75);
    with_lease(&bench, "release", &lease, &[]).expect_code(0);
    let next = acquire(&bench, "deploy", &[]);
    assert_eq!(next["token"], 2);
    let refused = with_lease(&bench, "release", &lease, &[]).expect_code(76);
    assert!(refused.err.contains("no such lease"), "{}", refused.err);
    assert!(bench.is_held("deploy"), "the next holder keeps its own");
}

#[test]
fn text_output_is_one_key_and_value_a_line() {
    let bench = Bench::new();
    let printed = bench.fencelock(["acquire", "deploy"]).expect_code(0).out;
    let words: Vec<&str> = printed
        .lines()
        .map(|l| l.split_whitespace().next().unwrap())
        .collect();
    assert_eq!(
        words,
        ["name", "token", "holder", "fence", "ttl", "expires_in"]
    );
}

#[test]
fn renewing_keeps_the_token_and_never_shortens_the_lease() {
    let bench = Bench::new();
    let lease = acquire(&bench, "deploy", &["--ttl", "1h"]);
    let renewed = with_lease(&bench, "renew", &lease, &["--json"])
        .expect_code(0)
        .json();
    assert_eq!(
        renewed,
        json!({"name": "deploy", "token": 1, "ttl_ms": 3_600_000})
    );
    let left = bench.show("deploy")["holders"][0]["expires_in_ms"]
        .as_u64()
        .unwrap();
    assert!(left > 3_500_000, "{left}");
    with_lease(&bench, "renew", &lease, &["--ttl", "2h"]).expect_code(0);
    let left = bench.show("deploy")["holders"][0]["expires_in_ms"]
        .as_u64()
        .unwrap();
    assert!(left > 7_000_000, "{left}");
}

#[test]
fn a_lapsed_lease_is_not_revived() {
    let bench = Bench::new();
    let lease = acquire(&bench, "deploy", &["--ttl", "200ms"]);
    eventually("it lapses", || !bench.is_held("deploy"));
    with_lease(&bench, "renew", &lease, &[]).expect_code(76);
    with_lease(&bench, "renew", &lease, &["--ttl", "1h"]).expect_code(76);
    with_lease(&bench, "release", &lease, &[]).expect_code(76);
    assert!(!bench.is_held("deploy"));
}

#[test]
fn another_holder_or_token_renews_and_releases_nothing() {
    let bench = Bench::new();
    let lease = acquire(&bench, "deploy", &[]);
    let mut other = lease.clone();
    other["holder"] = json!("00000000000000000000000000000000");
    with_lease(&bench, "renew", &other, &[]).expect_code(76);
    with_lease(&bench, "release", &other, &[]).expect_code(76);
    let mut other = lease;
    other["token"] = json!(2);
    with_lease(&bench, "renew", &other, &["--ttl", "1h"]).expect_code(76);
    with_lease(&bench, "release", &other, &[]).expect_code(76);
    assert!(bench.is_held("deploy"));
}

#[test]
fn an_acquire_waits_and_gives_up() {
    let bench = Bench::new();
    acquire(&bench, "deploy", &["--ttl", "700ms"]);
    bench
        .fencelock(["acquire", "deploy", "--wait", "100ms"])
        .expect_code(75);
    // A name after a bare --wait is the name.
    let next = bench
        .fencelock(["acquire", "--json", "--wait", "deploy"])
        .expect_code(0)
        .json();
    assert_eq!(next["token"], 2);
}

#[test]
fn show_and_list_tell_who_and_never_the_secret() {
    let bench = Bench::new();
    let lease = acquire(&bench, "deploy", &["--label", "by hand"]);
    acquire(&bench, "demo", &[]);
    acquire(&bench, "other", &[]);
    let shown = bench.fencelock(["show", "deploy", "--json"]).expect_code(0);
    let state = shown.json();
    assert_eq!(keys(&state), ["capacity", "holders", "last_token", "name"]);
    let holder = &state["holders"][0];
    assert_eq!(
        keys(holder),
        [
            "expires_in_ms",
            "host",
            "label",
            "pid",
            "since",
            "token",
            "trace_id",
            "ttl_ms"
        ]
    );
    assert_eq!(holder["ttl_ms"], 30_000);
    assert_eq!(state["capacity"], 1);
    assert_eq!(state["last_token"], 1);
    assert_eq!(holder["label"], "by hand");
    assert_eq!(holder["trace_id"], Value::Null);
    let since = holder["since"].as_str().unwrap();
    assert!(
        since.starts_with("20") && since.ends_with('Z') && since.contains('T'),
        "{since}"
    );
    let text = bench.fencelock(["show", "deploy"]).expect_code(0);
    let listed = bench.fencelock(["list", "de"]).expect_code(0);
    let listed_json = bench.fencelock(["list", "de", "--json"]).expect_code(0);
    let secret = lease["holder"].as_str().unwrap();
    for out in [&shown.out, &text.out, &listed.out, &listed_json.out] {
        assert!(!out.contains(secret), "{out}");
    }
    let names: Vec<String> = listed_json
        .out
        .lines()
        .map(|line| {
            serde_json::from_str::<Value>(line).unwrap()["name"]
                .as_str()
                .unwrap()
                .to_owned()
        })
        .collect();
    assert_eq!(names, ["demo", "deploy"]);
    assert_eq!(
        listed.out.lines().count(),
        3,
        "a head and two rows: {}",
        listed.out
    );
    assert!(text.out.contains("by hand"), "{}", text.out);
    assert!(text.out.contains("\nttl         30s\n"), "{}", text.out);
}

#[test]
fn the_trace_is_shown_where_there_is_one() {
    let bench = Bench::new();
    acquire(&bench, "deploy", &[]);
    let listed = bench.fencelock(["list"]).expect_code(0).out;
    assert!(!listed.contains("TRACE"), "{listed}");
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let mut traced = bench.command(["acquire", "traced"]);
    traced.env("TRACEPARENT", format!("00-{trace}-b7ad6b7169203331-01"));
    ended(&mut traced).expect_code(0);
    let listed = bench.fencelock(["list"]).expect_code(0).out;
    assert!(
        listed.lines().next().unwrap().ends_with("  TRACE"),
        "{listed}"
    );
    assert!(listed.contains(trace), "{listed}");
    let mut watch = Running::start(&mut bench.command(["watch", "traced"]));
    assert!(watch.line().ends_with(&format!(" trace_id={trace}")));
}

#[test]
fn a_list_longer_than_a_page_is_whole() {
    let bench = Bench::new();
    let script = "i=0; while [ $i -lt 300 ]; do fencelock acquire many$i >/dev/null || exit 1; i=$((i+1)); done; fencelock list many --json | wc -l";
    let counted = ended(&mut bench.run_sh("job", &[], script)).expect_code(0);
    assert_eq!(counted.out.trim(), "300");
}

#[test]
fn a_name_that_was_never_held_is_free() {
    let bench = Bench::new();
    let shown = bench.fencelock(["show", "nothing"]).expect_code(0);
    assert!(shown.out.contains("never held"), "{}", shown.out);
    let state = bench.show("nothing");
    assert_eq!(
        state,
        json!({"name": "nothing", "capacity": null, "last_token": null, "holders": []})
    );
    assert_eq!(bench.fencelock(["list"]).expect_code(0).out, "");
    assert_eq!(
        bench.fencelock(["break", "nothing"]).expect_code(0).out,
        "nobody held it\n"
    );
}

#[test]
fn a_label_cannot_drive_the_operators_terminal() {
    let bench = Bench::new();
    acquire(
        &bench,
        "job\u{1b}[2J",
        &["--label", "\u{1b}]0;owned\u{7}\nfree"],
    );
    let out = |args: &[&str]| bench.fencelock(args).expect_code(0).out;
    for text in [
        out(&["list"]),
        out(&["show", "job\u{1b}[2J"]),
        out(&["break", "job\u{1b}[2J"]),
    ] {
        assert!(
            !text.contains('\u{1b}') && !text.contains('\u{7}'),
            "{text:?}"
        );
    }
}

#[test]
fn watch_prints_each_change_of_hands() {
    let bench = Bench::new();
    let mut watch = Running::start(&mut bench.command(["watch", "deploy", "--json"]));
    let mut next = || serde_json::from_str::<Value>(&watch.line()).unwrap();
    assert_eq!(next()["holders"], json!([]));
    let lease = acquire(&bench, "deploy", &["--label", "first"]);
    assert_eq!(next()["holders"][0]["label"], "first");
    with_lease(&bench, "renew", &lease, &[]).expect_code(0);
    with_lease(&bench, "release", &lease, &[]).expect_code(0);
    let free = next();
    assert_eq!(
        (&free["holders"], &free["last_token"]),
        (&json!([]), &json!(1))
    );
    acquire(&bench, "deploy", &["--label", "second"]);
    assert_eq!(next()["holders"][0]["token"], 2);
}

#[test]
fn a_broken_lock_goes_to_the_next_with_a_larger_token() {
    let bench = Bench::new();
    let lease = acquire(&bench, "deploy", &["--ttl", "1h"]);
    let broken = bench
        .fencelock(["break", "deploy", "--json"])
        .expect_code(0)
        .json();
    assert_eq!(broken["holders"][0]["token"], 1);
    assert!(!bench.is_held("deploy"));
    let again = bench.fencelock(["break", "deploy"]).expect_code(0).out;
    assert_eq!(again, "nobody held it; the next token is larger than 1\n");
    with_lease(&bench, "renew", &lease, &[]).expect_code(76);
    assert_eq!(acquire(&bench, "deploy", &[])["token"], 2);
    let broken = bench.fencelock(["break", "deploy"]).expect_code(0).out;
    assert!(broken.starts_with("evicted token=2 host="), "{broken}");
    assert!(
        broken.ends_with("; the next token is larger than 2\n"),
        "{broken}"
    );
}

#[test]
fn repair_and_prune_never_lower_a_token() {
    let bench = Bench::new();
    let lease = acquire(&bench, "deploy", &[]);
    with_lease(&bench, "release", &lease, &[]).expect_code(0);
    let repaired = bench
        .fencelock(["repair", "deploy", "--min-token", "100", "--json"])
        .expect_code(0);
    assert_eq!(keys(&repaired.json()), ["last_token", "name"]);
    let lease = acquire(&bench, "deploy", &[]);
    assert_eq!(lease["token"], 101);
    with_lease(&bench, "release", &lease, &[]).expect_code(0);
    bench
        .fencelock(["repair", "deploy", "--min-token", "5"])
        .expect_code(0);
    let pruned = bench
        .fencelock(["prune", "--idle", "0s", "--json"])
        .expect_code(0)
        .json();
    assert_eq!(keys(&pruned), ["kept", "removed"]);
    let after = acquire(&bench, "deploy", &[]);
    assert!(after["token"].as_u64().unwrap() > 101, "{after}");
    // One bad number must not use up the tokens.
    bench
        .fencelock(["repair", "deploy", "--min-token", "9223372036854775807"])
        .expect_code(64);
}

#[test]
fn tokens_above_what_a_double_holds_are_strings() {
    let bench = Bench::new();
    // A clock reading passes the bound on jumps; 2^53 lies beyond it, and is reached in steps.
    let now_us = fencelock::clock::unix_micros();
    bench
        .fencelock(["repair", "deploy", "--min-token", &now_us.to_string()])
        .expect_code(0);
    let lease = acquire(&bench, "deploy", &[]);
    assert_eq!(lease["token"].as_u64(), Some(now_us + 1));
}

#[test]
fn a_damaged_record_is_65_and_repaired_above_what_was_seen() {
    let bench = Bench::new();
    acquire(&bench, "deploy", &[]);
    let mut damaged = 0;
    for file in files_below(&bench.path("locks")) {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with("deploy") {
            let len = usize::try_from(std::fs::metadata(&file).unwrap().len()).unwrap();
            std::fs::write(&file, vec![0xff; len]).unwrap();
            damaged += 1;
        }
    }
    assert!(damaged > 0, "{:?}", files_below(&bench.path("locks")));
    bench.fencelock(["acquire", "deploy"]).expect_code(65);
    bench.fencelock(["show", "deploy"]).expect_code(65);
    acquire(&bench, "sound", &[]);
    let listed = bench.fencelock(["list"]).expect_code(65);
    let rows: Vec<Vec<&str>> = listed
        .out
        .lines()
        .map(|row| row.split_whitespace().take(3).collect())
        .collect();
    assert_eq!(rows.len(), 3, "{listed:?}");
    assert_eq!(rows[1], ["deploy", "-", "unreadable"]);
    assert_eq!(rows[2][0], "sound");
    assert!(
        listed.err.contains("a record cannot be read: "),
        "{listed:?}"
    );
    let listed = bench.fencelock(["list", "--json"]).expect_code(65).out;
    let states: Vec<Value> = listed
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(states[0]["name"], "deploy");
    assert!(states[0]["damage"].is_string(), "{listed}");
    assert_eq!(states[1]["name"], "sound");
    assert_eq!(
        keys(&states[1]),
        ["capacity", "holders", "last_token", "name"]
    );
    // What doctor says to type can be typed.
    let found = bench.fencelock(["doctor", "--json"]).expect_code(78).out;
    assert!(
        found.contains("fencelock repair 'deploy' --min-token N"),
        "{found}"
    );
    bench
        .fencelock(["repair", "deploy", "--min-token", "41"])
        .expect_code(0);
    assert_eq!(acquire(&bench, "deploy", &[])["token"], 42);
}

fn files_below(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_below(&path));
        } else {
            files.push(path);
        }
    }
    files
}

#[test]
fn doctor_finds_a_sound_store_sound() {
    let bench = Bench::new();
    let found = bench
        .fencelock(["doctor", "--dest", "value", "--json"])
        .expect_code(0);
    let findings: Vec<Value> = found
        .out
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert!(findings.len() > 2, "{}", found.out);
    for finding in &findings {
        assert_eq!(keys(finding), ["detail", "place", "severity", "subject"]);
        assert_ne!(finding["severity"], "bad", "{finding}");
    }
    let text = bench.fencelock(["doctor"]).expect_code(0);
    assert!(text.out.contains("good"), "{}", text.out);
    let last = text.out.lines().next_back().unwrap();
    assert!(
        last == "all good" || last.ends_with("warning") || last.ends_with("warnings"),
        "{last}"
    );
}

#[test]
fn doctor_fails_where_something_is_bad() {
    let bench = Bench::new();
    let sick = bench
        .fencelock(["--store", "nonsense", "doctor", "--json"])
        .expect_code(78);
    assert_eq!(sick.json()["severity"], "bad");
    let sick = bench.fencelock(["doctor", "--dest", "no-dir/"]);
    assert_eq!(sick.code, 78, "{sick:?}");
    assert!(
        sick.out
            .lines()
            .next_back()
            .unwrap()
            .starts_with("1 problem"),
        "{sick:?}"
    );
}

#[test]
fn a_lease_that_cannot_be_printed_is_released() {
    let bench = Bench::new();
    let mut command = bench.command(["acquire", "deploy", "--json"]);
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let status = command.stdout(full).status().unwrap();
    assert_eq!(status.code(), Some(70));
    assert!(!bench.is_held("deploy"));
}

#[test]
fn an_acquire_that_is_interrupted_leaves_nothing_held() {
    let bench = Bench::new();
    let lease = acquire(&bench, "deploy", &[]);
    let waiter = Running::start(&mut bench.command(["acquire", "deploy", "--wait"]));
    eventually("the waiter catches TERM", || waiter.catches_term());
    waiter.signal(rustix::process::Signal::TERM);
    waiter.end().expect_code(143);
    with_lease(&bench, "release", &lease, &[]).expect_code(0);
    eventually("the lock is free", || !bench.is_held("deploy"));
}

#[test]
fn a_short_wait_takes_no_longer_than_it_says() {
    let bench = Bench::new();
    acquire(&bench, "deploy", &[]);
    let started = crate::bench::now();
    bench
        .fencelock(["acquire", "deploy", "--wait", "200ms"])
        .expect_code(75);
    assert!(
        started.elapsed() < Duration::from_secs(3),
        "{:?}",
        started.elapsed()
    );
}
