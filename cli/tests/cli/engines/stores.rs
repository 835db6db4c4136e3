//! Cases of every store.

use std::io::Write as _;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;

use super::engine::Engine;
use crate::bench::{Bench, Ended, Running, ended, eventually};

/// A place for a value in a store: where scripts put it.
pub(super) fn destination(store: &str, key: &str) -> String {
    if let Some(dir) = store.strip_prefix("file://") {
        return format!("{dir}.{key}");
    }
    if store.starts_with("s3://") {
        let (place, options) = store.split_once('?').expect("an endpoint");
        return format!("{place}/{key}?{options}");
    }
    let joint = if store.contains('?') { '&' } else { '?' };
    format!("{store}{joint}key={key}")
}

pub(super) fn seconds(ttl: Duration) -> String {
    format!("{}ms", ttl.as_millis())
}

/// `fencelock put`, with what it reads.
pub(super) fn put(bench: &Bench, destination: &str, value: &[u8], flags: &[&str]) -> Ended {
    let mut command = bench.command(["put", destination]);
    let mut running = Running::start(command.args(flags).stdin(Stdio::piped()));
    let mut stdin = running.process.stdin.take().unwrap();
    // Where it is refused early, it does not read all.
    let _ = stdin.write_all(value);
    drop(stdin);
    running.end()
}

pub(super) fn get(bench: &Bench, destination: &str) -> String {
    bench.fencelock(["get", destination]).expect_code(0).out
}

pub(super) fn acquire(bench: &Bench, name: &str, flags: &[&str]) -> Value {
    let mut command = bench.command(["acquire", name, "--json"]);
    ended(command.args(flags)).expect_code(0).json()
}

pub(super) fn number(value: &Value) -> u64 {
    // Tokens from 2^53 on are strings.
    let text = value.as_str().and_then(|text| text.parse().ok());
    value.as_u64().or(text).unwrap()
}

pub(super) fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

pub(super) fn the_seven_steps<E: Engine>() {
    let engine = E::start();
    let bench = Bench::on(&engine.url());
    let to = destination(&engine.url(), "report");
    let ttl = seconds(engine.ttl_min());
    // 1 to 3: A acquires, is away, and its lease lapses.
    let a = acquire(&bench, "export", &["--ttl", &ttl]);
    bench.fencelock(["acquire", "export"]).expect_code(75);
    eventually("A's lease lapses", || !bench.is_held("export"));
    // 4 and 5: B acquires at the first try, and writes.
    let b = acquire(&bench, "export", &[]);
    assert!(number(&b["token"]) > number(&a["token"]), "{a} {b}");
    put(&bench, &to, b"by B", &["--fence", text(&b["fence"])]).expect_code(0);
    // 6: A wakes and writes: refused, with both numbers.
    let refused = put(&bench, &to, b"by A", &["--fence", text(&a["fence"])]).expect_code(77);
    for said in [
        format!("token={}", number(&a["token"])),
        format!("watermark={}", number(&b["token"])),
    ] {
        assert!(refused.err.contains(&said), "{}", refused.err);
    }
    assert_eq!(get(&bench, &to), "by B");
    // The bare number is no better, nor are the other ways to change it.
    let token = number(&a["token"]).to_string();
    put(&bench, &to, b"by A", &["--token", &token]).expect_code(77);
    for command in ["raise", "delete"] {
        bench
            .fencelock([command, to.as_str(), "--token", &token])
            .expect_code(77);
    }
    assert_eq!(get(&bench, &to), "by B");
    // B goes on.
    put(&bench, &to, b"by B again", &["--fence", text(&b["fence"])]).expect_code(0);
    assert_eq!(get(&bench, &to), "by B again");
    // A can neither renew nor release, and B can.
    for command in ["renew", "release"] {
        for (lease, code) in [(&a, 76), (&b, 0)] {
            let token = number(&lease["token"]).to_string();
            let holder = text(&lease["holder"]);
            bench
                .fencelock([command, "export", "--holder", holder, "--token", &token])
                .expect_code(code);
        }
    }
}

pub(super) fn eight_processes_count_without_a_loss<E: Engine>() {
    let engine = E::start();
    let bench = Bench::on(&engine.url());
    let to = destination(&engine.url(), "count");
    let script = format!("n=$(fencelock raise '{to}') && echo $((n + 1)) | fencelock put '{to}'");
    let runs: Vec<Running> = (0..8)
        .map(|_| Running::start(&mut bench.run_sh("counter", &["--wait", "30s"], &script)))
        .collect();
    for run in runs {
        run.end().expect_code(0);
    }
    assert_eq!(get(&bench, &to), "8\n");
}

pub(super) fn a_killed_holder_is_replaced_after_its_ttl<E: Engine>() {
    let engine = E::start();
    let bench = Bench::on(&engine.url());
    let ttl = seconds(2 * engine.ttl_min());
    let mut holder = Running::start(&mut bench.run_sh(
        "job",
        &["--ttl", &ttl],
        "echo $FENCELOCK_TOKEN; sleep 1000",
    ));
    let former: u64 = holder.line().parse().unwrap();
    holder.signal(Signal::KILL);
    let next = ended(&mut bench.run_sh("job", &["--wait", "25s"], "echo $FENCELOCK_TOKEN"));
    let next: u64 = next.expect_code(0).out.trim().parse().unwrap();
    assert!(next > former, "{former} {next}");
}

pub(super) fn values_keep_their_watermark<E: Engine>() {
    let engine = E::start();
    let bench = Bench::on(&engine.url());
    let to = destination(&engine.url(), "value");
    let answer = |ended: Ended| ended.json();
    let accepted = |token: &'static str, value: &[u8]| {
        answer(put(&bench, &to, value, &["--token", token, "--json"]).expect_code(0))
    };
    assert_eq!(accepted("33", b"")["watermark"], 33);
    assert_eq!(get(&bench, &to), "");
    assert_eq!(accepted("34", b"a\0b\xff\n")["watermark"], 34);
    let shown = bench.command(["get", &to]).output().unwrap();
    assert_eq!(shown.stdout, b"a\0b\xff\n");
    put(&bench, &to, b"stale", &["--token", "33"]).expect_code(77);
    let raised = bench.fencelock(["raise", &to, "--token", "40", "--json"]);
    assert_eq!(raised.expect_code(0).json()["watermark"], 40);
    for command in ["raise", "delete"] {
        bench
            .fencelock([command, &to, "--token", "39"])
            .expect_code(77);
    }
    // 2^62 out of nowhere, and the resource still works.
    let bad = (1_u64 << 62).to_string();
    put(&bench, &to, b"bad", &["--token", &bad]).expect_code(64);
    bench
        .fencelock(["delete", &to, "--token", "40"])
        .expect_code(0);
    bench.fencelock(["get", &to]).expect_code(66);
    put(&bench, &to, b"older", &["--token", "39"]).expect_code(77);
    let big = vec![b'x'; 600_000];
    put(&bench, &to, &big, &["--token", "41"]).expect_code(0);
    assert_eq!(get(&bench, &to).len(), big.len());
    // A neighbour whose name only looks alike.
    bench
        .fencelock(["get", &destination(&engine.url(), "value2")])
        .expect_code(66);
}

pub(super) fn operators_see_and_take_locks<E: Engine>() {
    let engine = E::start();
    let bench = Bench::on(&engine.url());
    let a = acquire(&bench, "deploy/a", &["--ttl", "10m", "--label", "by hand"]);
    acquire(&bench, "deploy", &["--ttl", "10m"]);
    acquire(&bench, "Deploy", &["--ttl", "10m"]);
    let listed = bench
        .fencelock(["list", "deploy", "--json"])
        .expect_code(0)
        .out;
    let states: Vec<Value> = listed
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let names: Vec<&str> = states.iter().map(|state| text(&state["name"])).collect();
    assert_eq!(names, ["deploy", "deploy/a"]);
    let state = bench.show("deploy/a");
    assert_eq!(state["last_token"], a["token"]);
    assert_eq!(state["holders"][0]["label"], "by hand");
    assert!(!listed.contains(text(&a["holder"])), "{listed}");

    bench.fencelock(["break", "deploy/a"]).expect_code(0);
    let token = number(&a["token"]).to_string();
    bench
        .fencelock([
            "renew",
            "deploy/a",
            "--holder",
            text(&a["holder"]),
            "--token",
            &token,
        ])
        .expect_code(76);
    bench.fencelock(["prune", "--idle", "1ms"]).expect_code(0);
    let next = acquire(&bench, "deploy/a", &[]);
    assert!(number(&next["token"]) > number(&a["token"]));
    assert!(bench.is_held("deploy"));

    let least = number(&next["token"]) + 1_000;
    bench.fencelock(["break", "deploy/a"]).expect_code(0);
    bench
        .fencelock(["repair", "deploy/a", "--min-token", &least.to_string()])
        .expect_code(0);
    assert!(number(&acquire(&bench, "deploy/a", &[])["token"]) > least);

    let doctor = bench.fencelock(["doctor", "--json"]);
    assert!([0, 78].contains(&doctor.code), "{doctor:?}");
    assert!(doctor.out.lines().count() > 1, "{doctor:?}");
}

/// `fencelock demo`: real processes, a real SIGSTOP beyond the lease, and the stale write refused.
pub(super) fn the_demo_shows_a_real_pause<E: Engine>() {
    let engine = E::start();
    let bench = Bench::on(&engine.url());
    let to = destination(&engine.url(), "today");
    let demo = bench.fencelock(["demo", "--dest", &to]).expect_code(0);
    assert!(demo.out.contains("REFUSED"), "{}", demo.out);
    let unfenced = bench.fencelock(["demo", "--dest", &to, "--without-fencing"]);
    assert!(!unfenced.out.contains("REFUSED"), "{unfenced:?}");
}

/// The program of the documentation, eight at once.
pub(super) fn two_values_are_changed_under_one_lock<E: Engine>() {
    let engine = E::start();
    let store = engine.url();
    let (from, to) = (destination(&store, "alice"), destination(&store, "bob"));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let moved = runtime.block_on(async {
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let (store, from, to) = (store.clone(), from.clone(), to.clone());
            all.spawn(async move { super::two_values::transfer(&store, &from, &to, 5).await });
        }
        all.join_all().await
    });
    for moved in moved {
        assert!(moved.unwrap(), "nobody was overtaken");
    }
    let bench = Bench::on(&store);
    let account = |place: &str| -> Value { serde_json::from_str(&get(&bench, place)).unwrap() };
    let (alice, bob) = (account(&from), account(&to));
    assert_eq!(
        (&alice["balance"], &bob["balance"]),
        (&(-40).into(), &40.into())
    );
    assert_eq!(alice["transfers"], bob["transfers"]);
}
