//! What a section writes: its own update, and what others left half done.

use std::collections::HashSet;

use fencelock::{Fence, FencingToken, LockGuard};

use super::super::history::Op;
use super::super::plan::{Arm, Lane};
use super::super::value::{self, Line};

/// How many halves of others' updates one section completes at the most: their ids have to fit into
/// one line of the history.
const COMPLETED_MAX: usize = 40;

/// What an arm has read in a section, and goes on from.
pub(super) struct Draft {
    pub(super) arm: Arm,
    /// By object.
    pub(super) values: Vec<Vec<u8>>,
}

/// A write as it is sent, and sent again.
#[derive(Clone)]
pub(super) struct Write {
    pub(super) object: usize,
    pub(super) op: Op,
    pub(super) ops: Vec<Op>,
    pub(super) len: u64,
    pub(super) body: Vec<u8>,
    pub(super) fence: Fence,
}

/// The write that adds `op` to an object, and completes there what others left half done.
pub(super) fn compose(
    lane: Lane,
    guard: &LockGuard,
    draft: &Draft,
    object: usize,
    op: Op,
) -> Option<Write> {
    let old = draft.values.get(object)?;
    let token = guard.token();
    let line = |fence: &Fence, op, delta| Line {
        op,
        token: token.get(),
        seq: fence.seq().unwrap_or(0),
        delta,
    };
    let fence = || match draft.arm {
        // The same number in everybody's hands refuses nobody.
        Arm::Unfenced => Fence::from(FencingToken::MIN),
        Arm::Naive => Fence::from(token),
        Arm::Raise => guard.fence(),
    };
    if lane == Lane::Counter {
        let (number, _) = value::counter(old)?;
        let fence = fence();
        return Some(Write {
            object,
            op,
            ops: vec![op],
            len: number + 1,
            body: value::counted(number + 1, &line(&fence, op, 0)),
            fence,
        });
    }
    let all: Vec<Vec<Line>> = draft
        .values
        .iter()
        .map(|value| value::lines(value))
        .collect::<Option<_>>()?;
    let mut missing = missing(lane, &all, object, op);
    let halves = halves(lane, op);
    if halves.contains(&object) {
        missing.push((op, delta(lane, op, object)));
    }
    if missing.is_empty() {
        return None;
    }
    let fence = fence();
    let more: Vec<Line> = missing
        .into_iter()
        .map(|(op, delta)| line(&fence, op, delta))
        .collect();
    let len = all.get(object).map_or(0, Vec::len) + more.len();
    Some(Write {
        object,
        op,
        ops: more.iter().map(|line| line.op).collect(),
        len: u64::try_from(len).unwrap_or(u64::MAX),
        body: value::appended(old, &more),
        fence,
    })
}

/// The updates of others than `own` that are in another object of theirs and not in this one.
fn missing(lane: Lane, all: &[Vec<Line>], object: usize, own: Op) -> Vec<(Op, i64)> {
    let here: HashSet<Op> = all
        .get(object)
        .map(|lines| lines.iter().map(|line| line.op).collect())
        .unwrap_or_default();
    let mut missing = Vec::new();
    for (at, lines) in all.iter().enumerate() {
        if at == object {
            continue;
        }
        for line in lines {
            let belongs = line.op != own && halves(lane, line.op).contains(&object);
            if belongs && !here.contains(&line.op) {
                missing.push((line.op, delta(lane, line.op, object)));
            }
        }
    }
    missing.truncate(COMPLETED_MAX);
    missing
}

/// The objects that an update belongs to.
pub(crate) fn halves(lane: Lane, op: Op) -> Vec<usize> {
    match lane {
        Lane::Counter | Lane::List => vec![0],
        Lane::Pair => vec![0, 1],
        Lane::Bank => {
            let from = usize::try_from(op.number / 2 % 3).unwrap_or(0);
            vec![from, (from + 1) % 3]
        }
    }
}

/// What an update moves at an object of a bank: away from its first, and to its second.
fn delta(lane: Lane, op: Op, object: usize) -> i64 {
    let amount = i64::try_from(op.number % 9 + 1).unwrap_or(1);
    match (lane, halves(lane, op).first()) {
        (Lane::Bank, Some(from)) if *from == object => -amount,
        (Lane::Bank, _) => amount,
        _ => 0,
    }
}

/// The length of a list or the number of a counter, and whose update was the last.
pub(crate) fn measured(lane: Lane, value: &[u8]) -> Option<(u64, Option<Op>)> {
    if lane == Lane::Counter {
        let (number, line) = value::counter(value)?;
        return Some((number, line.map(|line| line.op)));
    }
    let lines = value::lines(value)?;
    let len = u64::try_from(lines.len()).ok()?;
    Some((len, lines.last().map(|line| line.op)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_left_half_done_is_found_and_a_transfer_moves_nothing_in_all() {
        let op = |number| Op {
            client: 1,
            life: 0,
            number,
        };
        let line = |op, object| Line {
            op,
            token: 1,
            seq: 1,
            delta: delta(Lane::Bank, op, object),
        };
        for number in [2, 4, 6, 20] {
            let halves = halves(Lane::Bank, op(number));
            let sum: i64 = halves
                .iter()
                .map(|object| delta(Lane::Bank, op(number), *object))
                .sum();
            assert_eq!(sum, 0);
        }
        // Of two transfers from the second account to the third, one came only half way.
        let all = [
            vec![],
            vec![line(op(2), 1), line(op(8), 1)],
            vec![line(op(2), 2)],
        ];
        assert_eq!(missing(Lane::Bank, &all, 2, op(4)), [(op(8), 9)]);
        assert_eq!(missing(Lane::Bank, &all, 2, op(8)), []);
        assert_eq!(missing(Lane::Bank, &all, 1, op(4)), []);
        assert_eq!(missing(Lane::Bank, &all, 0, op(4)), []);
    }
}
