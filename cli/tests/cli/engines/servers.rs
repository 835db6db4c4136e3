//! Cases of every store that is a server.

use std::time::Duration;

use fencelock_testbed::port::Port;
use fencelock_testbed::proxy::Proxy;
use rustix::process::Signal;

use super::engine::Served;
use super::stores::{acquire, destination, get, number, put, seconds, text};
use crate::bench::{Bench, Ended, Running, ended, eventually, now};

/// How long a command may take on a server that does not answer.
const END: Duration = Duration::from_secs(10);

/// What starting a process may add to that on a busy machine.
const START: Duration = Duration::from_secs(5);

#[track_caller]
fn expect_unanswered(started: std::time::Instant, ended: Ended) {
    assert!(matches!(ended.code, 69 | 70), "{ended:?}");
    assert!(
        started.elapsed() < END + START,
        "{:?} {ended:?}",
        started.elapsed()
    );
}

pub(super) fn a_lost_answer_is_found_by_the_same_command<E: Served>() {
    let engine = E::start();
    let proxy = Proxy::start(([127, 0, 0, 1], engine.port()).into());
    let direct = Bench::on(&engine.url());
    let through = Bench::on(&engine.url_at(proxy.address()));
    // So slow that the effect is seen before the answer arrives.
    proxy.delay(Duration::from_millis(300));
    let mut command = through.command(["acquire", "job", "--wait", "25s", "--json"]);
    let asking = Running::start(&mut command);
    eventually("the grant is seen", || direct.is_held("job"));
    proxy.cut();
    proxy.delay(Duration::ZERO);
    let lease = asking.end().expect_code(0).json();
    let state = direct.show("job");
    assert_eq!(state["holders"].as_array().unwrap().len(), 1, "{state}");
    assert_eq!(state["last_token"], lease["token"]);
    assert_eq!(state["holders"][0]["token"], lease["token"]);
    direct.fencelock(["acquire", "job"]).expect_code(75);
}

pub(super) fn a_silent_server_ends_every_command_in_time<E: Served>() {
    let mut engine = E::start();
    let bench = Bench::on(&engine.url());
    let to = destination(&engine.url(), "report");
    let lease = acquire(&bench, "job", &["--ttl", "10m"]);
    let token = number(&lease["token"]).to_string();
    put(&bench, &to, b"before", &["--fence", text(&lease["fence"])]).expect_code(0);
    engine.server().pause();
    let holder = ["--holder", text(&lease["holder"]), "--token", &token];
    let with_holder = |command: &'static str| {
        let mut all = vec![command, "job"];
        all.extend(holder);
        all
    };
    let commands = [
        vec!["acquire", "other"],
        vec!["run", "other", "--", "true"],
        with_holder("renew"),
        with_holder("release"),
        vec!["show", "job"],
        vec!["list"],
        vec!["break", "job"],
        vec!["raise", &to, "--token", &token],
        vec!["get", &to],
    ];
    let started = now();
    let all: Vec<Running> = commands
        .iter()
        .map(|args| Running::start(&mut bench.command(args)))
        .collect();
    for running in all {
        expect_unanswered(started, running.end());
    }
    let started = now();
    let fence = ["--fence", text(&lease["fence"])];
    expect_unanswered(started, put(&bench, &to, b"during", &fence));
    engine.server().resume();
    // Whatever was sent may have arrived, and nothing is stuck.
    eventually("the server is used again", || {
        bench.fencelock(["acquire", "again", "--ttl", "2s"]).code == 0
    });
    let released = bench.fencelock(with_holder("release"));
    assert!(matches!(released.code, 0 | 76), "{released:?}");
    let next = acquire(&bench, "job", &[]);
    assert!(number(&next["token"]) > number(&lease["token"]));
}

pub(super) fn a_holder_stops_its_command_before_a_silent_server_could_grant_again<E: Served>() {
    let mut engine = E::start();
    let bench = Bench::on(&engine.url());
    let ttl = 3 * engine.ttl_min();
    let script = "echo $FENCELOCK_TOKEN; exec sleep 1000";
    let flags = ["--ttl", &seconds(ttl), "--kill-after", "1s"];
    let mut holder = Running::start(&mut bench.run_sh("job", &flags, script));
    let former: u64 = holder.line().parse().unwrap();
    engine.server().pause();
    let paused = now();
    let stopped = holder.end().expect_code(76);
    // Its last renewal was before the pause, so its lease ends before this.
    assert!(paused.elapsed() < ttl + START, "{:?}", paused.elapsed());
    assert!(stopped.err.contains("lost"), "{}", stopped.err);
    engine.server().resume();
    let script = "echo $FENCELOCK_TOKEN";
    let next = ended(&mut bench.run_sh("job", &["--wait", "25s"], script)).expect_code(0);
    assert!(next.out.trim().parse::<u64>().unwrap() > former, "{next:?}");
}

pub(super) fn a_waiter_outlives_the_silence<E: Served>() {
    let mut engine = E::start();
    let bench = Bench::on(&engine.url());
    let lease = acquire(&bench, "job", &["--ttl", &seconds(3 * engine.ttl_min())]);
    let script = "echo $FENCELOCK_TOKEN";
    let waiter = Running::start(&mut bench.run_sh("job", &["--wait", "28s"], script));
    engine.server().pause();
    std::thread::sleep(Duration::from_millis(1_500));
    engine.server().resume();
    let next = waiter.end().expect_code(0);
    let token = next.out.trim().parse::<u64>().unwrap();
    assert!(token > number(&lease["token"]), "{next:?}");
}

pub(super) fn a_waiter_waits_for_a_server_that_is_down_at_the_start<E: Served>() {
    let mut engine = E::start();
    let bench = Bench::on(&engine.url());
    let lease = acquire(&bench, "job", &["--ttl", &seconds(engine.ttl_min())]);
    engine.server().kill();
    let started = now();
    expect_unanswered(started, bench.fencelock(["run", "job", "--", "true"]));
    let bounded = bench.fencelock(["run", "job", "--wait", "1s", "--", "true"]);
    expect_unanswered(started, bounded);
    let script = "echo $FENCELOCK_TOKEN";
    let mut waiter = Running::start(&mut bench.run_sh("job", &["--wait", "28s"], script));
    let said = waiter.said();
    assert!(said.contains("waiting"), "{said}");
    // A signal ends the wait, like that for a lock.
    let mut other = Running::start(&mut bench.command(["acquire", "job", "--wait"]));
    other.said();
    other.signal(Signal::TERM);
    other.end().expect_code(143);
    engine.kill_and_restart();
    let next = waiter.end().expect_code(0);
    let token = next.out.trim().parse::<u64>().unwrap();
    assert!(token > number(&lease["token"]), "{next:?}");
}

pub(super) fn a_killed_server_keeps_what_it_acknowledged<E: Served>() {
    let mut engine = E::start();
    let bench = Bench::on(&engine.url());
    let to = destination(&engine.url(), "report");
    let flags = ["--ttl", E::AWAY];
    let script = format!("echo $FENCELOCK_FENCE; read -r go; echo after | fencelock put '{to}'");
    let mut command = bench.run_sh("held", &flags, &script);
    let mut holder = Running::start(command.stdin(std::process::Stdio::piped()));
    let fence = holder.line();
    let free = acquire(&bench, "free", &["--ttl", "1s"]);
    put(&bench, &to, b"before", &["--fence", &fence]).expect_code(0);

    engine.server().kill();
    let started = now();
    expect_unanswered(started, bench.fencelock(["acquire", "other"]));
    engine.kill_and_restart();
    eventually("the server is used again", || {
        bench.fencelock(["acquire", "again", "--ttl", "2s"]).code == 0
    });

    assert_eq!(get(&bench, &to), "before");
    bench.fencelock(["acquire", "held"]).expect_code(75);
    let next = acquire(&bench, "free", &["--wait", "20s"]);
    assert!(number(&next["token"]) > number(&free["token"]));
    // The holder goes on where it was.
    let mut stdin = holder.process.stdin.take().unwrap();
    std::io::Write::write_all(&mut stdin, b"go\n").unwrap();
    holder.end().expect_code(0);
    assert_eq!(get(&bench, &to), "after\n");
}

pub(super) fn who_cannot_be_reached_is_named_without_the_password<E: Served>() {
    let Some(login) = E::LOGIN else {
        return;
    };
    let engine = E::start();
    let nobody = Port::free();
    let nowhere = engine.url_at(([127, 0, 0, 1], nobody.number()).into());
    let (scheme, rest) = nowhere.split_once("://").unwrap();
    let rest = rest.rsplit_once('@').map_or(rest, |(_, rest)| rest);
    let store = format!("{scheme}://{login}{rest}");
    let bench = Bench::on(&store);
    let started = now();
    let to = destination(&store, "report");
    for args in [
        vec!["acquire", "job"],
        vec!["get", &to],
        vec!["put", &to, "--token", "1"],
        vec!["doctor"],
    ] {
        let ended = bench.fencelock(&args);
        assert!(matches!(ended.code, 69 | 78), "{args:?} {ended:?}");
        let all = format!("{}{}", ended.out, ended.err);
        assert!(!all.contains("canary"), "{all}");
        assert!(
            all.contains("127.0.0.1") || all.contains("reach"),
            "it says what is wrong: {all}"
        );
    }
    assert!(
        started.elapsed() < 4 * (END + START),
        "{:?}",
        started.elapsed()
    );
}
