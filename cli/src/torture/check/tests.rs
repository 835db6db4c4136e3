//! Seeded violations: a history that holds, and what the checker says of it with one thing wrong.

use super::*;
use crate::torture::client;
use crate::torture::history::Point;
use crate::torture::value::{Line, appended, counted};

/// Writes a history as clients would.
#[derive(Clone, Default)]
struct Run {
    now: u64,
    entries: Vec<Entry>,
    finals: Finals,
}

fn op(client: u32, number: u64) -> Op {
    Op {
        client,
        life: 0,
        number,
    }
}

fn line(op: Op, token: u64, seq: u64) -> Line {
    Line {
        op,
        token,
        seq,
        delta: 0,
    }
}

impl Run {
    fn tick(&mut self) -> u64 {
        self.now += 10;
        self.now
    }

    fn tell(&mut self, client: u32, event: Event) {
        self.entries.push(Entry {
            client,
            life: 0,
            page: 0,
            event,
        });
    }

    fn grant(&mut self, lane: Lane, client: u32, token: u64) {
        let (asked, t) = (self.tick(), self.tick());
        let until = t + 1_000;
        self.tell(
            client,
            Event::Granted {
                t,
                asked,
                lane,
                // The update that it was asked for, one for each grant.
                op: op(client, 1_000_000 + t),
                token,
                until,
            },
        );
    }

    fn value(&self, arm: Arm, object: &'static str) -> Vec<u8> {
        let last = self.finals.get(&(arm, object, 0)).cloned().flatten();
        last.unwrap_or_default().value
    }

    fn set(&mut self, arm: Arm, object: &'static str, value: Vec<u8>) {
        let last = Final {
            value,
            // What a storage says that keeps its promises.
            watermark: Some(i64::MAX.cast_unsigned()),
            writer: None,
        };
        self.finals.insert((arm, object, 0), Some(last));
    }

    fn read(&mut self, lane: Lane, client: u32, token: u64, arm: Arm, object: &'static str) {
        let value = self.value(arm, object);
        let (len, last) = client::measured(lane, &value).unwrap();
        let (sent, t) = (self.tick(), self.tick());
        let event = Event::Read {
            t,
            sent,
            lane,
            token,
            arm,
            object: object.to_owned(),
            outcome: "ok".to_owned(),
            len,
            last,
            digest: crate::torture::value::Digest::of(&value),
        };
        self.tell(client, event);
    }

    /// Sends a write of `lines` that was answered so; its effect is the caller's matter.
    #[expect(clippy::too_many_arguments, reason = "each is one word of an event")]
    fn write(
        &mut self,
        lane: Lane,
        client: u32,
        arm: Arm,
        object: &str,
        lines: &[Line],
        len: u64,
        copy: u32,
        answer: Option<&str>,
    ) {
        let (sent, t) = (self.tick(), self.tick());
        let last = lines.last().unwrap();
        self.tell(
            client,
            Event::Sent {
                t: sent,
                lane,
                token: last.token,
                seq: last.seq,
                arm,
                object: object.to_owned(),
                op: last.op,
                ops: lines.iter().map(|line| line.op).collect(),
                len,
                copy,
            },
        );
        if let Some(answer) = answer {
            self.tell(
                client,
                Event::Answered {
                    t,
                    arm,
                    object: object.to_owned(),
                    op: last.op,
                    copy,
                    outcome: answer.to_owned(),
                },
            );
        }
    }

    fn end(&mut self, lane: Lane, client: u32, token: u64, outcome: &str) {
        let (sent, t) = (self.tick(), self.tick());
        let outcome = outcome.to_owned();
        self.tell(
            client,
            Event::Ended {
                t,
                sent,
                lane,
                token,
                outcome,
            },
        );
    }

    /// A whole section that appends one line to the list of an arm.
    fn append(&mut self, client: u32, token: u64, number: u64, arm: Arm) {
        self.grant(Lane::List, client, token);
        self.read(Lane::List, client, token, arm, "list");
        let line = line(op(client, number), token, 1);
        let value = appended(&self.value(arm, "list"), &[line]);
        let len = count(crate::torture::value::lines(&value).unwrap().len());
        self.write(Lane::List, client, arm, "list", &[line], len, 0, Some("ok"));
        self.set(arm, "list", value);
        self.end(Lane::List, client, token, "released");
    }

    /// A whole section that counts.
    fn count(&mut self, client: u32, token: u64, number: u64) {
        self.grant(Lane::Counter, client, token);
        self.read(Lane::Counter, client, token, Arm::Raise, "counter");
        let line = line(op(client, number), token, 1);
        let before = crate::torture::value::counter(&self.value(Arm::Raise, "counter"));
        let next = before.unwrap().0 + 1;
        self.write(
            Lane::Counter,
            client,
            Arm::Raise,
            "counter",
            &[line],
            next,
            0,
            Some("ok"),
        );
        self.set(Arm::Raise, "counter", counted(next, &line));
        self.end(Lane::Counter, client, token, "released");
    }

    fn check(&self, lane: Lane, arm: Arm) -> Verdict {
        let rules = Rules {
            arms: &[arm],
            lanes: &[lane],
            sets: 1,
            ttl_us: 1_000,
            token_max: i64::MAX.cast_unsigned(),
        };
        check(&self.entries, &self.finals, &rules)
    }

    /// The numbers of the promises that are broken, each once.
    fn broken(&self, lane: Lane) -> Vec<&'static str> {
        let verdict = self.check(lane, Arm::Raise);
        let mut broken: Vec<_> = verdict.violations.iter().map(|v| v.promise).collect();
        broken.sort_unstable();
        broken.dedup();
        broken
    }
}

/// Three holders after each other, on a list.
fn three() -> Run {
    let mut run = Run::default();
    for (client, token) in [(0, 5), (1, 6), (0, 9)] {
        run.append(client, token, token * 2, Arm::Raise);
    }
    run
}

/// A holder that is paused before its write, and the one that takes over.
fn overtaken(answer: Option<&str>, has_effect: bool) -> Run {
    let mut run = three();
    run.grant(Lane::List, 1, 10);
    run.read(Lane::List, 1, 10, Arm::Raise, "list");
    let late = line(op(1, 20), 10, 1);
    run.now += 2_000;
    run.append(0, 11, 22, Arm::Raise);
    run.write(Lane::List, 1, Arm::Raise, "list", &[late], 4, 0, answer);
    if has_effect {
        let value = appended(&run.value(Arm::Raise, "list"), &[late]);
        run.set(Arm::Raise, "list", value);
    }
    run.end(Lane::List, 1, 10, "lost");
    run
}

#[test]
fn a_history_that_holds_is_said_to_hold() {
    let run = three();
    let verdict = run.check(Lane::List, Arm::Raise);
    assert_eq!(verdict.violations, []);
    assert_eq!(
        (verdict.grants, verdict.overlaps, verdict.operations),
        (3, 0, 9)
    );
    let figures = verdict.arms[&Arm::Raise];
    assert_eq!((figures.acknowledged, figures.lost), (3, 0));
    let run = overtaken(Some("fenced"), false);
    let verdict = run.check(Lane::List, Arm::Raise);
    assert_eq!(verdict.violations, []);
    assert_eq!(verdict.overlaps, 1);
    assert_eq!(verdict.arms[&Arm::Raise].refused, 1);
    // Who could not reach the storage any more puts nothing to the proof.
    for answer in [Some("unavailable"), Some("indeterminate"), None] {
        let verdict = overtaken(answer, false).check(Lane::List, Arm::Raise);
        assert_eq!(
            (verdict.overlaps, verdict.violations),
            (0, vec![]),
            "{answer:?}"
        );
    }
    let mut run = Run::default();
    for (client, token) in [(0, 5), (1, 6), (0, 9)] {
        run.count(client, token, token * 2);
    }
    assert_eq!(run.broken(Lane::Counter), [""; 0]);
}

#[test]
fn one_token_twice_breaks_l1() {
    let mut run = three();
    run.append(1, 9, 30, Arm::Raise);
    assert_eq!(run.broken(Lane::List), ["L1", "S8"]);
}

#[test]
fn a_smaller_token_after_a_larger_one_breaks_l2_or_l6() {
    let mut run = Run::default();
    run.grant(Lane::List, 0, 5);
    run.end(Lane::List, 0, 5, "released");
    let mut same = run.clone();
    run.grant(Lane::List, 1, 4);
    run.end(Lane::List, 1, 4, "released");
    assert_eq!(run.broken(Lane::List), ["L2"]);
    same.grant(Lane::List, 0, 4);
    same.end(Lane::List, 0, 4, "released");
    assert_eq!(same.broken(Lane::List), ["L6"]);
}

#[test]
fn a_grant_while_another_is_believed_in_breaks_l4_unless_its_holder_is_dead() {
    let mut run = Run::default();
    run.grant(Lane::List, 0, 5);
    let mut dead = run.clone();
    run.grant(Lane::List, 1, 6);
    run.end(Lane::List, 1, 6, "released");
    run.end(Lane::List, 0, 5, "lost");
    assert_eq!(run.broken(Lane::List), ["L4"]);
    let t = dead.tick();
    let (lane, point) = (Lane::List, Point::BeforeWrite);
    dead.tell(0, Event::Dying { t, lane, point });
    dead.grant(Lane::List, 1, 6);
    dead.end(Lane::List, 1, 6, "released");
    assert_eq!(dead.broken(Lane::List), [""; 0]);
}

#[test]
fn who_dies_while_it_gives_its_lock_back_believes_no_more() {
    let mut run = Run::default();
    run.grant(Lane::List, 0, 5);
    let t = run.tick();
    let (lane, token) = (Lane::List, 5);
    run.tell(0, Event::Releasing { t, lane, token });
    run.grant(Lane::List, 1, 6);
    let t = run.tick();
    run.tell(0, Event::Killed { t });
    run.end(Lane::List, 1, 6, "released");
    assert_eq!(run.broken(Lane::List), [""; 0]);
}

#[test]
fn a_look_that_succeeds_after_the_next_grant_breaks_l4() {
    let mut run = Run::default();
    run.grant(Lane::List, 0, 5);
    run.now += 2_000;
    run.grant(Lane::List, 1, 6);
    let t = run.tick();
    let event = Event::Checked {
        t,
        lane: Lane::List,
        token: 5,
        good: true,
        until: t + 50,
    };
    run.tell(0, event);
    assert_eq!(run.broken(Lane::List), ["L4"]);
}

#[test]
fn a_release_of_what_is_anothers_breaks_l5() {
    let mut run = Run::default();
    run.grant(Lane::List, 0, 5);
    run.now += 2_000;
    run.grant(Lane::List, 1, 6);
    run.end(Lane::List, 0, 5, "released");
    assert_eq!(run.broken(Lane::List), ["L5"]);
}

#[test]
fn an_accepted_stale_write_breaks_s1_s4_and_s5() {
    let run = overtaken(Some("ok"), true);
    assert_eq!(run.broken(Lane::List), ["S1", "S4", "S5"]);
    // And where it replaced the value, the other's update is lost.
    let mut run = overtaken(Some("ok"), false);
    let kept = appended(
        &three().value(Arm::Raise, "list"),
        &[line(op(1, 20), 10, 1)],
    );
    run.set(Arm::Raise, "list", kept);
    assert_eq!(run.broken(Lane::List), ["S1", "S5", "S6"]);
    let verdict = run.check(Lane::List, Arm::Raise);
    assert_eq!(verdict.arms[&Arm::Raise].lost, 1);
    let lost = |v: &&Violation| v.evidence.contains("is lost");
    let lost: Vec<_> = verdict.violations.iter().filter(lost).collect();
    assert_eq!(lost.len(), 1);
    assert_eq!(lost[0].tokens, [11]);
}

#[test]
fn the_same_without_fencing_is_a_loss_and_no_violation() {
    let mut run = Run::default();
    run.append(0, 5, 2, Arm::Unfenced);
    run.append(1, 6, 2, Arm::Unfenced);
    let first = appended(b"", &[line(op(0, 2), 5, 1)]);
    run.set(Arm::Unfenced, "list", first);
    let verdict = run.check(Lane::List, Arm::Unfenced);
    assert_eq!(verdict.violations, []);
    let figures = verdict.arms[&Arm::Unfenced];
    assert_eq!((figures.acknowledged, figures.lost), (2, 1));
    assert!((figures.lost_percent() - 50.0).abs() < f64::EPSILON);
}

#[test]
fn a_refused_write_that_is_there_breaks_s10() {
    let run = overtaken(Some("fenced"), true);
    assert_eq!(run.broken(Lane::List), ["S10", "S4", "S5"]);
    let run = overtaken(Some("unavailable"), true);
    assert_eq!(run.broken(Lane::List), ["S10", "S4", "S5"]);
}

#[test]
fn a_write_of_unknown_outcome_is_settled_by_what_is_there() {
    for answer in [None, Some("indeterminate")] {
        for has_effect in [true, false] {
            let mut run = three();
            run.grant(Lane::List, 1, 10);
            run.read(Lane::List, 1, 10, Arm::Raise, "list");
            let line = line(op(1, 20), 10, 1);
            run.write(Lane::List, 1, Arm::Raise, "list", &[line], 4, 0, answer);
            if has_effect {
                let value = appended(&run.value(Arm::Raise, "list"), &[line]);
                run.set(Arm::Raise, "list", value);
            }
            let verdict = run.check(Lane::List, Arm::Raise);
            assert_eq!(verdict.violations, []);
            let figures = verdict.arms[&Arm::Raise];
            assert_eq!(figures.indeterminate, 1);
            assert_eq!(figures.settled, u64::from(has_effect));
        }
    }
}

#[test]
fn a_line_that_is_doubled_invented_or_torn_is_found() {
    let run = three();
    let value = run.value(Arm::Raise, "list");
    let with = |value: Vec<u8>| {
        let mut run = run.clone();
        run.set(Arm::Raise, "list", value);
        run.broken(Lane::List)
    };
    assert_eq!(with(appended(&value, &[line(op(0, 18), 9, 1)])), ["S6"]);
    assert_eq!(with(appended(&value, &[line(op(9, 1), 9, 2)])), ["S2"]);
    assert_eq!(with(value[..value.len() - 2].to_vec()), ["S2"]);
    // What was read is not there any more.
    assert_eq!(with(Vec::new()), ["S6"]);
}

#[test]
fn a_duplicate_that_is_applied_again_breaks_s7() {
    let mut run = three();
    run.grant(Lane::List, 1, 10);
    let (one, two) = (line(op(1, 20), 10, 1), line(op(1, 21), 10, 2));
    run.write(Lane::List, 1, Arm::Raise, "list", &[one], 4, 0, Some("ok"));
    run.write(Lane::List, 1, Arm::Raise, "list", &[two], 5, 0, Some("ok"));
    let good = appended(&run.value(Arm::Raise, "list"), &[one, two]);
    let bad = appended(&run.value(Arm::Raise, "list"), &[one]);
    run.set(Arm::Raise, "list", good);
    let mut repeated = run.clone();
    repeated.write(
        Lane::List,
        1,
        Arm::Raise,
        "list",
        &[one],
        4,
        1,
        Some("repeated"),
    );
    assert_eq!(repeated.broken(Lane::List), [""; 0]);
    run.write(Lane::List, 1, Arm::Raise, "list", &[one], 4, 1, Some("ok"));
    run.set(Arm::Raise, "list", bad);
    assert_eq!(run.broken(Lane::List), ["S6", "S7"]);
    let out_of_order = appended(&three().value(Arm::Raise, "list"), &[two, one]);
    repeated.set(Arm::Raise, "list", out_of_order);
    assert_eq!(repeated.broken(Lane::List), ["S7"]);
}

#[test]
fn a_counter_that_forgets_is_found() {
    let mut run = Run::default();
    run.count(0, 5, 2);
    let before = run.value(Arm::Raise, "counter");
    run.count(1, 6, 2);
    let after = run.value(Arm::Raise, "counter");
    // The last update is gone.
    run.set(Arm::Raise, "counter", before);
    assert_eq!(run.broken(Lane::Counter), ["S6"]);
    // Two holders counted from the same number.
    run.count(0, 7, 4);
    let verdict = run.check(Lane::Counter, Arm::Raise);
    assert!(verdict.arms[&Arm::Raise].lost >= 1);
    assert!(verdict.violations.iter().all(|v| v.promise == "S6"));
    // An older token counted later.
    run.set(Arm::Raise, "counter", after);
    run.count(1, 4, 6);
    assert!(run.broken(Lane::Counter).contains(&"S4"));
    assert!(run.broken(Lane::Counter).contains(&"S1"));
    // Nobody wrote that.
    run.set(Arm::Raise, "counter", counted(9, &line(op(7, 7), 9, 1)));
    assert!(run.broken(Lane::Counter).contains(&"S2"));
}

#[test]
fn half_an_update_that_a_later_holder_left_so_breaks_s6() {
    let mut run = Run::default();
    let write = |run: &mut Run, client, object: &'static str, line: Line, answer| {
        run.write(
            Lane::Pair,
            client,
            Arm::Raise,
            object,
            &[line],
            1,
            0,
            answer,
        );
        let value = appended(&run.value(Arm::Raise, object), &[line]);
        run.set(Arm::Raise, object, value);
    };
    let (half, whole) = (line(op(0, 2), 5, 1), line(op(1, 2), 6, 1));
    run.set(Arm::Raise, "pair-b", Vec::new());
    run.grant(Lane::Pair, 0, 5);
    write(&mut run, 0, "pair-a", half, Some("ok"));
    let t = run.tick();
    run.tell(0, Event::Killed { t });
    // Nobody came after it: so far, it may yet be completed.
    assert_eq!(run.broken(Lane::Pair), [""; 0]);
    run.grant(Lane::Pair, 1, 6);
    write(&mut run, 1, "pair-a", whole, Some("ok"));
    let mut died = run.clone();
    write(&mut run, 1, "pair-b", whole, Some("ok"));
    run.end(Lane::Pair, 1, 6, "released");
    assert_eq!(run.broken(Lane::Pair), ["S6"]);
    // Nor did one that died itself.
    let t = died.tick();
    died.tell(1, Event::Killed { t });
    assert_eq!(died.broken(Lane::Pair), [""; 0]);
}

#[test]
fn violations_are_counted_beyond_those_that_are_kept() {
    let mut run = Run::default();
    for n in 0..u32::try_from(KEPT_MAX).unwrap() + 5 {
        run.grant(Lane::List, n, 5);
        run.end(Lane::List, n, 5, "released");
    }
    let verdict = run.check(Lane::List, Arm::Raise);
    assert_eq!(verdict.violations.len(), KEPT_MAX);
    assert_eq!(verdict.violations_total, count(KEPT_MAX) + 4);
}

/// What is seen of the lists' lock from outside: for which updates, and with which tokens.
fn look(run: &mut Run, holders: &[(Op, u64)]) {
    let (sent, t) = (run.tick(), run.tick());
    let holders = holders.iter().map(|(op, token)| (op.to_string(), *token));
    let event = Event::Seen {
        t,
        sent,
        lane: Lane::List,
        holders: holders.collect(),
    };
    run.tell(3, event);
}

/// The update that the last grant was asked for.
fn asked_for(run: &Run) -> Op {
    let granted = run
        .entries
        .iter()
        .rev()
        .find_map(|entry| match entry.event {
            Event::Granted { op, .. } => Some(op),
            _ => None,
        });
    granted.unwrap()
}

#[test]
fn a_second_grant_of_one_acquire_breaks_l7_and_two_holders_break_l3() {
    let mut run = Run::default();
    run.grant(Lane::List, 0, 5);
    let first = asked_for(&run);
    look(&mut run, &[(first, 5)]);
    assert_eq!(run.broken(Lane::List), [""; 0]);
    let mut other = run.clone();
    look(&mut other, &[(first, 6)]);
    assert_eq!(other.broken(Lane::List), ["L7"]);
    let mut twice = run.clone();
    look(&mut twice, &[(first, 4), (first, 5)]);
    assert_eq!(twice.broken(Lane::List), ["L7"]);
    look(&mut run, &[(first, 5), (op(1, 2), 6)]);
    assert_eq!(run.broken(Lane::List), ["L3"]);
}

#[test]
fn a_grant_of_an_acquire_that_failed_long_ago_breaks_l7() {
    let mut run = Run::default();
    let t = run.tick();
    let (lane, op) = (Lane::List, op(1, 2));
    let kind = "timeout".to_owned();
    run.tell(1, Event::NotGranted { t, lane, op, kind });
    run.now += 10_000_000;
    // It was on its way, and lapses or is given back.
    look(&mut run, &[(op, 5)]);
    assert_eq!(run.broken(Lane::List), [""; 0]);
    run.now += 15_000_000;
    let mut killed = run.clone();
    look(&mut run, &[(op, 5)]);
    assert_eq!(run.broken(Lane::List), ["L7"]);
    // A server that starts anew may give leases their whole TTL again.
    let t = killed.tick();
    killed.tell(u32::MAX, Event::ServerKilled { t });
    look(&mut killed, &[(op, 5)]);
    assert_eq!(killed.broken(Lane::List), [""; 0]);
    killed.now += 25_000_000;
    look(&mut killed, &[(op, 5)]);
    assert_eq!(killed.broken(Lane::List), ["L7"]);
}

#[test]
fn a_smaller_token_after_the_server_was_killed_breaks_l8() {
    let mut run = three();
    let t = run.tick();
    run.tell(u32::MAX, Event::ServerKilled { t });
    run.append(1, 8, 30, Arm::Raise);
    assert!(run.broken(Lane::List).contains(&"L8"));
}

#[test]
fn a_token_of_zero_or_above_the_ceiling_breaks_l9() {
    for token in [0, u64::MAX] {
        let mut run = Run::default();
        run.grant(Lane::List, 0, token);
        assert_eq!(run.broken(Lane::List), ["L9"]);
    }
}

#[test]
fn a_watermark_below_what_was_acknowledged_or_below_its_value_breaks_s3() {
    let seen = |watermark, writer| {
        let mut run = three();
        let last = run.finals.get_mut(&(Arm::Raise, "list", 0)).unwrap();
        let last = last.as_mut().unwrap();
        (last.watermark, last.writer) = (watermark, writer);
        run.broken(Lane::List)
    };
    assert_eq!(seen(Some(9), Some(9)), [""; 0]);
    assert_eq!(seen(Some(8), Some(8)), ["S3"]);
    assert_eq!(seen(Some(9), Some(10)), ["S3"]);
    assert_eq!(seen(None, None), ["S3"]);
}

#[test]
fn a_forged_write_that_is_accepted_breaks_s9_or_s11() {
    for (what, promise) in [(Forgery::Domain, "S9"), (Forgery::Number, "S11")] {
        for outcome in ["invalid", "domain-mismatch", "fenced", "indeterminate"] {
            assert_eq!(forged(what, outcome), [""; 0], "{outcome}");
        }
        assert_eq!(forged(what, "ok"), [promise]);
        assert_eq!(forged(what, "repeated"), [promise]);
    }
}

fn forged(what: Forgery, outcome: &str) -> Vec<&'static str> {
    let mut run = three();
    let t = run.tick();
    let event = Event::Forged {
        t,
        lane: Lane::List,
        token: 1 << 62,
        arm: Arm::Raise,
        object: "list".to_owned(),
        what,
        outcome: outcome.to_owned(),
    };
    run.tell(1, event);
    run.broken(Lane::List)
}

#[test]
fn locks_and_values_of_other_sets_and_pages_are_others() {
    let mut run = three();
    let mut elsewhere = three();
    for entry in &mut elsewhere.entries {
        entry.page = 1;
        // At the same time, with the same tokens, by other clients.
        entry.client += 10;
    }
    run.entries.append(&mut elsewhere.entries);
    let value = elsewhere.finals.remove(&(Arm::Raise, "list", 0)).unwrap();
    run.finals.insert((Arm::Raise, "list", 1), value);
    let check = |sets| {
        let rules = Rules {
            arms: &[Arm::Raise],
            lanes: &[Lane::List],
            sets,
            ttl_us: 1_000,
            token_max: i64::MAX.cast_unsigned(),
        };
        check(&run.entries, &run.finals, &rules)
    };
    assert_eq!(check(2).violations, []);
    // Two pages of one lock: each token is told twice.
    assert!(check(1).violations.iter().any(|v| v.promise == "L1"));
}
