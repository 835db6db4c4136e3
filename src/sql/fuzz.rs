//! What fuzzing asks of the rows of an answer, whichever client read them. An administrator may have
//! changed the tables by hand, and their functions may be of another version.

use super::answer::{Columns, attempt, snapshot, states, written};
use crate::error::{ErrorKind, Result};
use crate::fuzzing::{assert_corrupt, split_line};
use crate::lease::{Attempt, LockState, PERMITS_MAX};
use crate::token::{FencingToken, Watermark};

/// The columns of the widest answer.
const COLUMNS: usize = 8;

/// Rows, whose cells are lines of the input: what `cell` makes of a line's letter and the rest of it.
pub(crate) fn rows<C>(mut bytes: &[u8], cell: impl Fn(u8, &[u8]) -> C) -> Vec<Vec<C>> {
    let mut rows = Vec::new();
    while !bytes.is_empty() && rows.len() < 16 {
        let mut row = Vec::with_capacity(COLUMNS);
        for _ in 0..COLUMNS {
            let (line, rest) = split_line(bytes);
            let (letter, text) = line.split_first().unwrap_or((&b'-', &[]));
            row.push(cell(*letter, text));
            bytes = rest;
        }
        rows.push(row);
    }
    rows
}

/// The number in a line; 0 where it is none.
pub(crate) fn number<T: std::str::FromStr + Default>(text: &[u8]) -> T {
    let text = std::str::from_utf8(text).ok();
    text.and_then(|text| text.parse().ok()).unwrap_or_default()
}

/// Reads the rows as each answer.
pub(crate) fn read<R: Columns>(rows: &[R]) {
    let read = states(rows);
    assert_corrupt(&read);
    if let Ok(states) = read {
        every_holder_is_there(&states, rows);
    }
    for row in rows {
        acquired(row);
        let answer = written(row);
        assert_corrupt(&answer);
        if let Ok(answer) = answer {
            assert_eq!(row.flag(0).ok(), Some(answer.applied));
            as_told(&answer.watermark, row, 1);
        }
        for first in 0..3 {
            let seen = snapshot(row, first);
            assert_corrupt(&seen);
            if let Ok(seen) = seen {
                let writer = seen.writer.map(FencingToken::get);
                assert_eq!(told(row, first + 5), Some(writer.map(u64::cast_signed)));
                match seen.watermark {
                    Some(watermark) => as_told(&watermark, row, first),
                    // A token that was read as none would let older writes pass (S1).
                    None => assert_eq!(told(row, first), Some(None)),
                }
            }
        }
    }
}

/// What stands in a column of numbers; `None` where that is none.
fn told(row: &impl Columns, i: usize) -> Option<Option<i64>> {
    row.number(i).ok()
}

fn as_told(watermark: &Watermark, row: &impl Columns, first: usize) {
    let token = watermark.token.get().cast_signed();
    assert_eq!(told(row, first), Some(Some(token)));
    // A sequence that went down would let an older write of the holder pass (S7).
    let seq = i64::try_from(watermark.seq).ok();
    assert_eq!(told(row, first + 2), Some(seq));
    let holder = row.bytes(first + 1).ok().flatten();
    let tag = watermark.holder.as_ref().map(|tag| tag.as_bytes().to_vec());
    assert_eq!(tag, holder);
    let domain = row.text(first + 3).ok().flatten();
    assert_eq!(
        watermark.domain.as_ref().map(|domain| domain.as_str()),
        domain.as_deref()
    );
}

fn every_holder_is_there<R: Columns>(states: &[LockState], rows: &[R]) {
    let held = rows.iter().filter_map(|row| row.number(3).ok().flatten());
    let shown = states.iter().flat_map(|state| &state.holders);
    let tokens = shown.map(|holder| holder.token.get().cast_signed());
    assert!(
        held.eq(tokens),
        "each holder once, in the order of the rows"
    );
    for state in states {
        let capacity = state.capacity.unwrap_or(1);
        assert!((1..=PERMITS_MAX).contains(&capacity), "{capacity}");
        for holder in &state.holders {
            assert!(holder.ttl.duration().is_some() && holder.expires_in.is_some());
        }
    }
    let names = |pair: &[LockState]| matches!(pair, [a, b] if a.name == b.name);
    assert!(!states.windows(2).any(names), "a name's rows are one state");
}

fn acquired(row: &impl Columns) {
    let answer: Result<Attempt> = attempt(row, 1);
    let outcome = row.text(0).ok().flatten();
    match answer {
        Ok(Attempt::Granted(grant)) => {
            assert_eq!(outcome.as_deref(), Some("granted"));
            let token = grant.token.get().cast_signed();
            assert_eq!(told(row, 1), Some(Some(token)));
            let ttl = grant.ttl.as_millis().and_then(|ms| i64::try_from(ms).ok());
            assert_eq!(told(row, 2), Some(ttl));
        }
        Ok(Attempt::Held(contention)) => {
            assert_eq!(outcome.as_deref(), Some("held"));
            assert!(contention.free_in.is_some());
        }
        Err(error) => {
            let wanted = match error.kind() {
                ErrorKind::Invalid => outcome.as_deref() == Some("capacity"),
                kind => kind == ErrorKind::Corrupt,
            };
            assert!(wanted, "{error}");
        }
    }
}
