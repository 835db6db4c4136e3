//! What the values say of S1 to S11, and which updates were lost.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::super::client::{halves, measured};
use super::super::history::{Forgery, Op};
use super::super::plan::{Arm, Lane};
use super::super::value::{self, Digest, Line};
use super::{Done, Figures, Final, Finals, Sorted, Verdict, Violation, count};

/// One object of an arm, and all that was done to it.
struct Object<'a> {
    lane: Lane,
    arm: Arm,
    name: &'static str,
    done: &'a Done<'a>,
    /// Updates that were acknowledged here.
    acknowledged: BTreeSet<Op>,
    /// Updates whose every attempt here is known to have had no effect.
    refused: HashSet<(Op, u64)>,
}

/// Checks a page of a workload in an arm.
pub(super) fn check(
    lane: Lane,
    arm: Arm,
    page: u32,
    sorted: &Sorted<'_>,
    finals: &Finals,
    verdict: &mut Verdict,
) {
    let nothing = Done::default();
    let mut lists: Vec<Vec<Line>> = Vec::new();
    let mut objects = Vec::new();
    for (name, _) in lane.objects() {
        let done = sorted.objects.get(&(arm, *name, page));
        let object = Object::of(lane, arm, name, done.unwrap_or(&nothing));
        if arm != Arm::Unfenced {
            object.never_back(verdict);
            object.check_forged(verdict);
        }
        let last = finals.get(&(arm, *name, page)).and_then(Option::as_ref);
        if let Some(last) = last.filter(|_| arm != Arm::Unfenced) {
            object.check_watermark(last, verdict);
        }
        let last = last.map(|last| last.value.as_slice());
        match last.map(|value| (value, measured(lane, value))) {
            Some((value, Some(_))) if lane == Lane::Counter => {
                object.check_counter(value, verdict);
            }
            Some((value, Some(_))) => {
                let lines = value::lines(value).unwrap_or_default();
                object.check_list(&lines, verdict);
                lists.push(lines);
            }
            Some((value, None)) => {
                let evidence = format!("the value at the end is torn: {} bytes", value.len());
                object.violate(verdict, "S2", evidence, Vec::new(), None);
            }
            // The run says that it could not be read.
            None => {}
        }
        for (token, t) in &object.done.unreadable {
            let evidence = "a value was read that no client had written".to_owned();
            object.violate(verdict, "S2", evidence, vec![*token], Some(*t));
        }
        objects.push(object);
    }
    if arm == Arm::Raise && lists.len() == lane.objects().len() {
        whole(lane, &objects, &lists, sorted, verdict);
    }
}

impl<'a> Object<'a> {
    fn of(lane: Lane, arm: Arm, name: &'static str, done: &'a Done<'a>) -> Self {
        let writes = &done.writes;
        let mut acknowledged = BTreeSet::new();
        let mut possible: HashSet<(Op, u64)> = HashSet::new();
        for write in writes {
            if write.is_acknowledged() {
                acknowledged.extend(write.ops);
            }
            if write.is_acknowledged() || write.is_unknown() {
                possible.extend(write.ops.iter().map(|op| (*op, write.token)));
            }
        }
        let refused = writes
            .iter()
            .flat_map(|write| write.ops.iter().map(|op| (*op, write.token)))
            .filter(|attempt| !possible.contains(attempt))
            .collect();
        Self {
            lane,
            arm,
            name,
            done,
            acknowledged,
            refused,
        }
    }

    /// S1: after a token was acknowledged, no smaller one is accepted.
    fn never_back(&self, verdict: &mut Verdict) {
        let writes = self.done.writes.iter().filter(|write| write.is_applied());
        let writes = writes.filter_map(|w| Some((w.sent, w.answer?.0, w.token)));
        let raises = self.done.reads.iter().filter(|_| self.arm == Arm::Raise);
        let raises = raises.map(|read| (read.sent, read.t, read.token));
        let mut by_sent: Vec<(u64, u64, u64)> = writes.chain(raises).collect();
        let mut by_answer = by_sent.clone();
        by_sent.sort_unstable();
        by_answer.sort_unstable_by_key(|(_, answered, _)| *answered);
        let mut before = by_answer.into_iter().peekable();
        let mut highest = 0;
        for (sent, _, token) in by_sent {
            while let Some((_, _, seen)) = before.next_if(|(_, answered, _)| *answered < sent) {
                highest = highest.max(seen);
            }
            if token < highest {
                let evidence =
                    format!("the token {token} was accepted after {highest} had been acknowledged");
                self.violate(verdict, "S1", evidence, vec![token, highest], Some(sent));
            }
        }
    }

    /// S3: the watermark is as durable as what it guards, so at the end it is not below the token of
    /// any write or raise that was acknowledged, nor below that of the value.
    fn check_watermark(&self, last: &Final, verdict: &mut Verdict) {
        let writes = self.done.writes.iter();
        let writes = writes.filter(|write| write.is_acknowledged());
        let writes = writes.map(|write| (write.token, write.sent));
        let raises = self.done.reads.iter().filter(|_| self.arm == Arm::Raise);
        let raises = raises.map(|read| (read.token, read.sent));
        let told = writes.chain(raises).max();
        let watermark = last.watermark.unwrap_or(0);
        if let Some((token, sent)) = told.filter(|(token, _)| *token > watermark) {
            let evidence = format!(
                "the watermark at the end is {watermark}, and {token} had been acknowledged"
            );
            self.violate(verdict, "S3", evidence, vec![watermark, token], Some(sent));
        }
        if let Some(writer) = last.writer.filter(|writer| *writer > watermark) {
            let evidence = format!(
                "the watermark at the end is {watermark}, and the value is of the token {writer}"
            );
            self.violate(verdict, "S3", evidence, vec![watermark, writer], None);
        }
    }

    /// S9 and S11: what no storage may take is refused.
    fn check_forged(&self, verdict: &mut Verdict) {
        for forged in &self.done.forged {
            if !matches!(forged.outcome, "ok" | "repeated") {
                continue;
            }
            let (promise, evidence) = match forged.what {
                Forgery::Domain => ("S9", "a fence of another lock was accepted"),
                Forgery::Number => ("S11", "a number that no lock tells was accepted"),
            };
            let (evidence, tokens) = (evidence.to_owned(), vec![forged.token]);
            self.violate(verdict, promise, evidence, tokens, Some(forged.t));
        }
    }

    fn check_list(&self, lines: &[Line], verdict: &mut Verdict) {
        let mut seen: HashMap<Op, u64> = HashMap::new();
        for line in lines {
            *seen.entry(line.op).or_default() += 1;
        }
        let lost: Vec<Op> = self
            .acknowledged
            .iter()
            .filter(|op| !seen.contains_key(op))
            .copied()
            .collect();
        self.settle(verdict, count(lost.len()), |op| seen.contains_key(&op));
        if self.arm != Arm::Raise {
            return;
        }
        for op in lost {
            self.lost(verdict, op);
        }
        for (op, times) in seen.into_iter().filter(|(_, times)| *times > 1) {
            let evidence = format!("the update {op} is there {times} times");
            self.violate(verdict, "S6", evidence, self.tokens_of(op), None);
        }
        self.check_order(lines, verdict);
        self.check_writers(lines, verdict);
        self.check_copies(verdict);
        self.check_reads(lines, verdict);
    }

    /// S4 and S7: the value itself says in which order writes were accepted.
    fn check_order(&self, lines: &[Line], verdict: &mut Verdict) {
        for (before, after) in lines.iter().zip(lines.iter().skip(1)) {
            let tokens = vec![before.token, after.token];
            if after.token < before.token {
                let evidence = format!(
                    "the update {} with the token {} was accepted after {} with {}",
                    after.op, after.token, before.op, before.token
                );
                self.violate(verdict, "S4", evidence, tokens, None);
            } else if after.token == before.token && after.seq < before.seq {
                let evidence = format!(
                    "of the token {}, the sequence {} was accepted after {}",
                    after.token, after.seq, before.seq
                );
                self.violate(verdict, "S7", evidence, tokens, None);
            }
        }
    }

    /// S8 and S10: each line is of a write that was sent and not refused, all of a token are one
    /// client's.
    fn check_writers(&self, lines: &[Line], verdict: &mut Verdict) {
        let mut senders: HashMap<(Op, u64), (u32, u32)> = HashMap::new();
        for write in &self.done.writes {
            for op in write.ops {
                senders.insert((*op, write.token), (write.client, write.life));
            }
        }
        let mut holders: HashMap<u64, (u32, u32)> = HashMap::new();
        for line in lines {
            let tokens = vec![line.token];
            let Some(sender) = senders.get(&(line.op, line.token)) else {
                let evidence = format!("nobody wrote the update {} with its token", line.op);
                self.violate(verdict, "S2", evidence, tokens, None);
                continue;
            };
            let holder = *holders.entry(line.token).or_insert(*sender);
            if holder != *sender {
                let evidence = format!(
                    "with the token {} both client {} and client {} wrote",
                    line.token, holder.0, sender.0
                );
                self.violate(verdict, "S8", evidence, tokens.clone(), None);
            }
            if self.refused.contains(&(line.op, line.token)) {
                let evidence = format!("the update {} was refused, and is there", line.op);
                self.violate(verdict, "S10", evidence, tokens, None);
            }
        }
    }

    /// S7: a write that was sent twice is applied once.
    fn check_copies(&self, verdict: &mut Verdict) {
        let mut applied: HashMap<Op, u32> = HashMap::new();
        for write in self.done.writes.iter().filter(|write| write.is_applied()) {
            let times = applied.entry(write.op).or_default();
            *times += 1;
            if *times > 1 {
                let evidence = format!("the write of the update {} was applied twice", write.op);
                let at = write.answer.map(|(t, _)| t);
                self.violate(verdict, "S7", evidence, vec![write.token], at);
            }
        }
    }

    /// S5 and S6: what was raised and read is a beginning of what is there at last, and all that
    /// follows has a token that is not smaller.
    fn check_reads(&self, lines: &[Line], verdict: &mut Verdict) {
        let mut digests = vec![Digest::of(b"")];
        let mut digest = Digest::new();
        digests.extend(lines.iter().map(|line| digest.add_line(line)));
        // The smallest token from each line on.
        let mut smallest = vec![u64::MAX; lines.len() + 1];
        let mut least = u64::MAX;
        for (at, line) in lines.iter().enumerate().rev() {
            least = least.min(line.token);
            if let Some(place) = smallest.get_mut(at) {
                *place = least;
            }
        }
        for read in &self.done.reads {
            let at = usize::try_from(read.len).unwrap_or(usize::MAX);
            match digests.get(at) {
                Some(digest) if *digest == read.digest => {}
                _ => {
                    let evidence = format!(
                        "{} lines were read with the token {}, and the value at the end does not begin with them",
                        read.len, read.token
                    );
                    self.violate(verdict, "S6", evidence, vec![read.token], Some(read.t));
                }
            }
            if let Some(later) = smallest.get(at).filter(|later| **later < read.token) {
                let evidence = format!(
                    "after the token {} had been raised and read, a write with {later} changed the value",
                    read.token
                );
                let tokens = vec![read.token, *later];
                self.violate(verdict, "S5", evidence, tokens, Some(read.t));
            }
        }
    }

    /// A counter says who counted last, so each number has one update.
    fn check_counter(&self, last: &[u8], verdict: &mut Verdict) {
        let (number, line) = value::counter(last).unwrap_or_default();
        let mut seen: BTreeMap<u64, Op> = BTreeMap::new();
        if self.arm != Arm::Raise {
            let lost = count(self.acknowledged.len()).saturating_sub(number);
            self.settle(verdict, lost, |op| line.is_some_and(|line| line.op == op));
            return;
        }
        let readings = self.done.reads.iter().map(|read| (read.len, read.last));
        let at_last = std::iter::once((number, line.map(|line| line.op)));
        for (number, op) in readings.chain(at_last) {
            let Some(op) = op else {
                continue;
            };
            let first = *seen.entry(number).or_insert(op);
            if first != op {
                let evidence =
                    format!("the number {number} is both of the update {first} and of {op}");
                self.violate(verdict, "S6", evidence, self.tokens_of(op), None);
            }
        }
        let mut lost = 0;
        // The number, the token and the time of each acknowledged update.
        let mut counted: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for write in self
            .done
            .writes
            .iter()
            .filter(|write| write.is_acknowledged())
        {
            let is_there =
                write.len <= number && seen.get(&write.len).is_none_or(|op| *op == write.op);
            let before = counted.insert(write.len, (write.token, write.sent));
            let is_twice = before.is_some_and(|(token, _)| token != write.token);
            if !is_there || is_twice {
                lost += 1;
                self.lost(verdict, write.op);
            }
        }
        self.settle(verdict, lost, |op| seen.values().any(|known| *known == op));
        for ((_, (before, _)), (_, (after, at))) in counted.iter().zip(counted.iter().skip(1)) {
            if after < before {
                let evidence = format!("the token {after} counted after {before} had counted");
                self.violate(verdict, "S4", evidence, vec![*before, *after], Some(*at));
            }
        }
        let mut smallest: BTreeMap<u64, u64> = BTreeMap::new();
        let mut least = u64::MAX;
        for (number, (token, _)) in counted.iter().rev() {
            least = least.min(*token);
            smallest.insert(*number, least);
        }
        for read in &self.done.reads {
            let later = smallest.range(read.len + 1..).next();
            if let Some((_, later)) = later.filter(|(_, later)| **later < read.token) {
                let evidence = format!(
                    "after the token {} had been raised and read, one with {later} counted",
                    read.token
                );
                let tokens = vec![read.token, *later];
                self.violate(verdict, "S5", evidence, tokens, Some(read.t));
            }
        }
        self.check_copies(verdict);
        let sent: HashSet<Op> = self.done.writes.iter().map(|write| write.op).collect();
        let refused: HashSet<Op> = self.refused.iter().map(|(op, _)| *op).collect();
        for op in seen.values() {
            if !sent.contains(op) {
                let evidence = format!("nobody wrote the update {op}, which counted");
                self.violate(verdict, "S2", evidence, Vec::new(), None);
            } else if refused.contains(op) && !self.acknowledged.contains(op) {
                let evidence = format!("the update {op} was refused, and counted");
                self.violate(verdict, "S10", evidence, self.tokens_of(*op), None);
            }
        }
    }

    /// The figures, with each update of unknown outcome settled by what is there.
    fn settle(&self, verdict: &mut Verdict, lost: u64, is_there: impl Fn(Op) -> bool) {
        let unknown: BTreeSet<Op> = self
            .done
            .writes
            .iter()
            .filter(|write| write.is_unknown() && !self.acknowledged.contains(&write.op))
            .map(|write| write.op)
            .collect();
        let refused = self
            .done
            .writes
            .iter()
            .filter(|write| write.copy == 0 && matches!(write.answer, Some((_, "fenced"))));
        let figures: &mut Figures = verdict.arms.entry(self.arm).or_default();
        figures.acknowledged += count(self.acknowledged.len());
        figures.lost += lost;
        figures.refused += count(refused.count());
        figures.indeterminate += count(unknown.len());
        figures.settled += count(unknown.into_iter().filter(|op| is_there(*op)).count());
    }

    fn lost(&self, verdict: &mut Verdict, op: Op) {
        let at = self
            .done
            .writes
            .iter()
            .find(|write| write.ops.contains(&op) && write.is_acknowledged())
            .map(|write| write.sent);
        let evidence = format!("the update {op} was acknowledged, and is lost");
        self.violate(verdict, "S6", evidence, self.tokens_of(op), at);
    }

    fn tokens_of(&self, op: Op) -> Vec<u64> {
        let writes = self
            .done
            .writes
            .iter()
            .filter(|write| write.ops.contains(&op));
        let tokens: BTreeSet<u64> = writes.map(|write| write.token).collect();
        tokens.into_iter().collect()
    }

    fn violate(
        &self,
        verdict: &mut Verdict,
        promise: &'static str,
        evidence: String,
        tokens: Vec<u64>,
        at_us: Option<u64>,
    ) {
        verdict.violate(Violation {
            promise,
            lane: self.lane,
            arm: Some(self.arm),
            object: Some(self.name.to_owned()),
            evidence,
            tokens,
            at_us,
        });
    }
}

/// S6 over several objects under one lock: what a holder left half done is completed by the next one
/// that does its whole section.
fn whole(
    lane: Lane,
    objects: &[Object<'_>],
    lists: &[Vec<Line>],
    sorted: &Sorted<'_>,
    verdict: &mut Verdict,
) {
    // Sections of which a write was not acknowledged, or that did not end.
    let mut sections: HashMap<usize, bool> = HashMap::new();
    for write in objects.iter().flat_map(|object| &object.done.writes) {
        if let Some(at) = write.section.filter(|_| write.copy == 0) {
            let ended = sorted.sections.get(at).is_some_and(|s| s.ended.is_some());
            *sections.entry(at).or_insert(ended) &= write.is_acknowledged();
        }
    }
    let complete: HashSet<(Op, u64)> = objects
        .iter()
        .flat_map(|object| &object.done.writes)
        .filter(|write| {
            let at = write.section;
            at.and_then(|at| sections.get(&at))
                .copied()
                .unwrap_or(false)
        })
        .map(|write| (write.op, write.token))
        .collect();
    let here: Vec<HashSet<Op>> = lists
        .iter()
        .map(|lines| lines.iter().map(|line| line.op).collect())
        .collect();
    for (object, lines) in objects.iter().zip(lists) {
        let last = lines
            .iter()
            .rposition(|line| complete.contains(&(line.op, line.token)))
            .unwrap_or(0);
        for line in lines.iter().take(last) {
            let is_half = halves(lane, line.op)
                .into_iter()
                .any(|half| here.get(half).is_some_and(|ops| !ops.contains(&line.op)));
            if is_half {
                let evidence = format!(
                    "half of the update {} is there, and a holder that came later and did all of its section did not complete it",
                    line.op
                );
                object.violate(verdict, "S6", evidence, vec![line.token], None);
            }
        }
    }
}
