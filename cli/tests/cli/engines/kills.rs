//! Who writes is killed in the middle of it, or the server is: before the effect, after it and before
//! its answer, between watermark and value, in the middle of a value. Whoever comes next goes on, and
//! nothing is there by half.
//!
//! A write is caught on its way by the value that it brings, which every protocol here sends as it
//! is: so a new storage needs nothing but a line in the list.

use fencelock_testbed::proxy::Proxy;
use rustix::process::Signal;

use super::engine::{Engine, Served};
use super::stores::{destination, get, put};
use crate::bench::{Bench, Ended, LIMIT, Running, eventually, now};

/// How a process ends that was killed with -9.
const KILLED: i32 = 1009;

/// A holder's write.
fn fence(token: u64, holder: char, seq: u64) -> String {
    let holder = holder.to_string().repeat(32);
    format!("v1:{token}:{holder}:test/r/job:{seq}")
}

/// A storage whose writers are far away: what they send can be held.
struct Away<E> {
    engine: E,
    proxy: Proxy,
    near: Bench,
    far: Bench,
    to: String,
    far_to: String,
}

impl<E: Served> Away<E> {
    /// With "first" as the value, by holder a with token 33.
    fn new() -> Self {
        let engine = E::start();
        let proxy = Proxy::start(([127, 0, 0, 1], engine.port()).into());
        let far = engine.url_at(proxy.address());
        let away = Self {
            near: Bench::on(&engine.url()),
            far: Bench::on(&far),
            to: destination(&engine.url(), "report"),
            far_to: destination(&far, "report"),
            engine,
            proxy,
        };
        assert!(away.put(b"first", &fence(33, 'a', 1)));
        away
    }

    /// Whether it was applied, or had been before.
    fn put(&self, value: &[u8], fence: &str) -> bool {
        let put = put(&self.near, &self.to, value, &["--fence", fence, "--json"]);
        put.expect_code(0).json()["applied"] == true
    }

    fn refused(&self, fence: &str) {
        put(&self.near, &self.to, b"stale", &["--fence", fence]).expect_code(77);
    }

    fn raise(&self, fence: &str) -> String {
        let args = ["raise", self.to.as_str(), "--fence", fence];
        self.near.fencelock(args).expect_code(0).out
    }

    fn value(&self) -> String {
        get(&self.near, &self.to)
    }

    fn is(&self, value: &str) -> bool {
        // A storage that comes back refuses to be read at first.
        let ended = self.near.fencelock(["get", &self.to]);
        ended.code == 0 && ended.out == value
    }

    /// A process far away that writes.
    fn writing(&self, value: &[u8], fence: &str) -> Running {
        let file = self.far.path("value");
        std::fs::write(&file, value).unwrap();
        let mut command = self.far.command(["put", &self.far_to, "--fence", fence]);
        Running::start(command.arg(file))
    }

    /// The same, whose request is held at `pattern`, before its effect.
    fn held(&self, value: &[u8], fence: &str, pattern: &[u8]) -> Running {
        self.proxy.hold_request(pattern);
        let writer = self.writing(value, fence);
        self.proxy.await_swallowed(LIMIT);
        writer
    }

    /// The same, whose effect is there, and the answer on its way.
    fn unanswered(&self, value: &str, fence: &str) -> Running {
        self.proxy.hold_answer(value.as_bytes());
        let writer = self.writing(value.as_bytes(), fence);
        self.proxy.await_swallowed(LIMIT);
        eventually("the effect shows", || self.is(value));
        writer
    }

    /// Whatever is on its way never arrives.
    fn lose(&self) {
        self.proxy.cut();
        self.proxy.pass();
    }

    fn await_server(&self) {
        eventually("the server is used again", || {
            let again = ["acquire", "again", "--ttl", "2s"];
            self.near.fencelock(again).code == 0
        });
    }
}

fn kill(writer: Running) -> Ended {
    writer.signal(Signal::KILL);
    writer.end().expect_code(KILLED)
}

/// With its server gone, it may have noticed, and ended as one that does not know.
fn kill_unsure(writer: Running) {
    writer.signal(Signal::KILL);
    let ended = writer.end();
    assert!(matches!(ended.code, KILLED | 69 | 70), "{ended:?}");
}

pub(super) fn a_writer_killed_before_its_effect_has_none<E: Served>() {
    let away = Away::<E>::new();
    let mine = fence(33, 'a', 2);
    kill(away.held(b"second", &mine, b"second"));
    away.lose();
    assert_eq!(away.value(), "first");
    assert!(away.put(b"second", &mine), "it had not been applied");
    assert_eq!(away.value(), "second");
}

pub(super) fn a_killed_writers_request_that_arrives_late_is_refused<E: Served>() {
    let away = Away::<E>::new();
    let mine = fence(33, 'a', 2);
    kill(away.held(b"second", &mine, b"second"));
    assert_eq!(away.raise(&fence(34, 'b', 1)), "first");
    assert!(away.put(b"third", &fence(34, 'b', 2)));
    away.proxy.pass();
    eventually("it has arrived", || away.proxy.open_connections() == 0);
    for _ in 0..5 {
        assert_eq!(away.value(), "third");
    }
    away.refused(&mine);
    assert!(away.put(b"fourth", &fence(34, 'b', 3)));
}

pub(super) fn a_writer_killed_before_its_answer_has_written_once<E: Served>() {
    let away = Away::<E>::new();
    let mine = fence(33, 'a', 2);
    kill(away.unanswered("second", &mine));
    away.lose();
    assert!(!away.put(b"second", &mine), "it had been applied");
    assert_eq!(away.raise(&fence(34, 'b', 1)), "second");
    assert!(away.put(b"third", &fence(34, 'b', 2)));
    away.refused(&mine);
    assert_eq!(away.value(), "third");
}

pub(super) fn a_writer_killed_between_watermark_and_value_keeps_older_ones_out<E: Served>() {
    let away = Away::<E>::new();
    let theirs = fence(34, 'b', 2);
    assert_eq!(away.raise(&fence(34, 'b', 1)), "first");
    kill(away.held(b"second", &theirs, b"second"));
    away.lose();
    away.refused(&fence(33, 'a', 2));
    assert_eq!(away.raise(&fence(35, 'c', 1)), "first");
    away.refused(&theirs);
    assert!(away.put(b"third", &fence(35, 'c', 2)));
    assert_eq!(away.value(), "third");
}

pub(super) fn a_writer_killed_in_the_middle_of_a_value_leaves_the_former_one<E: Served>() {
    let away = Away::<E>::new();
    let mine = fence(33, 'a', 2);
    let whole = format!("{}the end", "x".repeat(600_000));
    kill(away.held(whole.as_bytes(), &mine, b"the end"));
    assert_eq!(away.value(), "first");
    away.lose();
    assert_eq!(away.value(), "first");
    assert!(away.put(whole.as_bytes(), &mine), "it had not been applied");
    assert!(away.value() == whole);
    // Whatever else a storage sends of one write, piece by piece: it was all there but for that.
    for (token, pattern) in (34..).step_by(2).zip(E::COMMITS) {
        let mine = fence(token, 'a', 1);
        let other = format!("{token}{whole}");
        kill(away.held(other.as_bytes(), &mine, pattern));
        away.lose();
        assert!(away.value() == whole);
        assert!(away.put(whole.as_bytes(), &fence(token + 1, 'b', 1)));
        away.refused(&mine);
    }
}

pub(super) fn a_server_killed_before_an_effect_has_the_former_value<E: Served>() {
    let mut away = Away::<E>::new();
    let mine = fence(33, 'a', 2);
    let writer = away.held(b"second", &mine, b"second");
    away.engine.server().kill();
    kill_unsure(writer);
    away.lose();
    away.engine.kill_and_restart();
    away.await_server();
    assert_eq!(away.value(), "first");
    away.refused(&fence(32, 'c', 1));
    assert!(away.put(b"second", &mine), "it had not been applied");
}

pub(super) fn a_server_killed_before_its_answer_has_the_new_value<E: Served>() {
    let mut away = Away::<E>::new();
    let mine = fence(33, 'a', 2);
    let writer = away.unanswered("second", &mine);
    away.engine.server().kill();
    kill_unsure(writer);
    away.lose();
    away.engine.kill_and_restart();
    away.await_server();
    assert_eq!(away.value(), "second");
    assert!(!away.put(b"second", &mine), "it had been applied");
    // The next holder is killed with the server, right after it was told of its raise.
    assert_eq!(away.raise(&fence(34, 'b', 1)), "second");
    away.engine.kill_and_restart();
    away.await_server();
    away.refused(&fence(33, 'a', 3));
    assert!(away.put(b"third", &fence(34, 'b', 2)));
    assert_eq!(away.value(), "third");
}

/// Of every store, with a network or without: killed after ever more of the time that a write takes.
pub(super) fn a_writer_killed_at_any_moment_leaves_a_whole_value<E: Engine>() {
    const ROUNDS: u32 = 16;
    let engine = E::start();
    let bench = Bench::on(&engine.url());
    let to = destination(&engine.url(), "report");
    let value = |round: u32| char::from(b'a' + u8::try_from(round).unwrap()).to_string();
    let whole = |round: u32| value(round).repeat(600_000);
    let writing = |round: u32| {
        let file = bench.path("value");
        std::fs::write(&file, whole(round)).unwrap();
        let mine = fence(33, 'a', u64::from(round) + 1);
        Running::start(bench.command(["put", &to, "--fence", &mine]).arg(file))
    };
    let started = now();
    writing(0).end().expect_code(0);
    let mut takes = started.elapsed();
    let mut killed = 0;
    for round in 1..=ROUNDS {
        let writer = writing(round);
        std::thread::sleep(takes * (round % 4 + 1) / 4);
        writer.signal(Signal::KILL);
        let code = writer.end().code;
        assert!(matches!(code, 0 | KILLED), "{code}");
        if code == KILLED {
            killed += 1;
        } else {
            // A write takes less now, on a machine that is less busy.
            takes = takes * 2 / 3;
        }
        let seen = get(&bench, &to);
        let applied = seen == whole(round);
        assert!(applied || seen == whole(round - 1), "{}", seen.len());
        assert!(applied || code == KILLED, "what was acknowledged is there");
        // The watermark is as the value: nobody older writes, and the same again is no other.
        put(&bench, &to, b"old", &["--fence", &fence(32, 'c', 9)]).expect_code(77);
        let again = fence(33, 'a', u64::from(round) + 1);
        let again = ["--fence", &again, "--json"];
        let again = put(&bench, &to, whole(round).as_bytes(), &again).expect_code(0);
        // What was on its way to a server may have arrived since it was looked for.
        assert!(!applied || again.json()["applied"] == false, "{again:?}");
        assert!(get(&bench, &to) == whole(round));
    }
    assert!(killed > 1, "some are killed on their way");
    let next = fence(34, 'b', 1);
    let raised = bench.fencelock(["raise", &to, "--fence", &next]);
    assert!(raised.expect_code(0).out == whole(ROUNDS));
    put(&bench, &to, b"old", &["--fence", &fence(33, 'a', 99)]).expect_code(77);
}
