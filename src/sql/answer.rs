//! The answers of the functions and procedures that do a lock's and a storage's work in a database.

use std::time::Duration;

use crate::body::Body;
use crate::error::{Error, Result};
use crate::fence::{Domain, HolderTag, Snapshot, Written};
use crate::info;
use crate::lease::{Attempt, Contention, Grant, HolderState, LockState, PERMITS_MAX, Ttl};
use crate::name::LockName;
use crate::sql::number::{sequence, token};
use crate::token::Watermark;

/// The longest time that a database is told in microseconds: 200 years.
const MICROS_MAX: i64 = 200 * 365 * 86_400 * 1_000_000;

/// A row of an answer, whichever client read it. A column that is not of the kind asked for is
/// `Corrupt`: the tables and functions are then of another version.
pub(crate) trait Columns {
    fn flag(&self, i: usize) -> Result<bool>;
    fn small(&self, i: usize) -> Result<Option<i32>>;
    fn number(&self, i: usize) -> Result<Option<i64>>;
    fn bytes(&self, i: usize) -> Result<Option<Vec<u8>>>;
    /// Bytes or a text, of which UTF-8 is expected.
    fn text(&self, i: usize) -> Result<Option<String>>;

    /// A number that is never NULL.
    fn a_number(&self, i: usize) -> Result<i64> {
        self.number(i)?.ok_or_else(|| missing(i))
    }

    /// Bytes that are never NULL.
    fn some_bytes(&self, i: usize) -> Result<Vec<u8>> {
        self.bytes(i)?.ok_or_else(|| missing(i))
    }
}

/// Makes a client's row one whose columns `$get` reads.
macro_rules! columns {
    ($row:ty, $get:path) => {
        impl $crate::sql::answer::Columns for $row {
            fn flag(&self, i: usize) -> Result<bool> {
                $get(self, i)
            }

            fn small(&self, i: usize) -> Result<Option<i32>> {
                $get(self, i)
            }

            fn number(&self, i: usize) -> Result<Option<i64>> {
                $get(self, i)
            }

            fn bytes(&self, i: usize) -> Result<Option<Vec<u8>>> {
                $get(self, i)
            }

            fn text(&self, i: usize) -> Result<Option<String>> {
                $get(self, i)
            }
        }
    };
}
pub(crate) use columns;

fn missing(i: usize) -> Error {
    Error::corrupt(
        "the database's answer lacks a value; are fencelock's tables those of this version?",
    )
    .with("column", i)
}

/// An answer to an acquire: columns `outcome`, `token`, `ttl_ms`, `capacity`, `free_us`, `info`, of which
/// an outcome has its own.
pub(crate) fn attempt(row: &impl Columns, permits: u32) -> Result<Attempt> {
    match row.text(0)?.as_deref() {
        Some("granted") => Ok(Attempt::Granted(Grant {
            token: token(row.a_number(1)?)?,
            ttl: ttl(row.a_number(2)?)?,
        })),
        Some("held") => Ok(Attempt::Held(Contention {
            free_in: Some(micros(row.a_number(4)?)),
            holder: Some(info::from_bytes(&row.some_bytes(5)?)),
        })),
        Some("capacity") => {
            let present = capacity(row.small(3)?.ok_or_else(|| missing(3))?)?;
            Err(Error::invalid(
                "the lock is held with another capacity; ask for the same number of permits, or wait until it is free",
            )
            .with("permits", permits)
            .with("capacity", present))
        }
        _ => Err(Error::corrupt(
            "the database's answer to an acquire is unknown; are fencelock's tables those of this version?",
        )),
    }
}

/// The states of an answer with one row for each holder, names together: columns `name`, `capacity`,
/// `last_token`, and of a holder `token`, `tag`, `ttl_ms`, `left_us`, `info`, NULL where nobody holds.
pub(crate) fn states<R: Columns>(rows: &[R]) -> Result<Vec<LockState>> {
    let mut states: Vec<LockState> = Vec::new();
    for row in rows {
        let name = String::from_utf8(row.some_bytes(0)?)
            .map_err(|_| Error::corrupt("a stored lock name is not UTF-8"))?;
        if states.last().is_none_or(|last| last.name.as_str() != name) {
            let last_token = row.number(2)?.map(token).transpose()?;
            let name = LockName::new(&name)
                .map_err(|error| Error::corrupt("a stored lock name is none").with_source(error))?;
            let mut state = LockState::new(name, last_token);
            state.capacity = row.small(1)?.map(capacity).transpose()?;
            states.push(state);
        }
        let (Some(held), Some(state)) = (row.number(3)?, states.last_mut()) else {
            continue;
        };
        state.holders.push(HolderState {
            token: token(held)?,
            tag: tag(&row.some_bytes(4)?)?,
            ttl: ttl(row.a_number(5)?)?,
            expires_in: Some(micros(row.a_number(6)?)),
            info: info::from_bytes(&row.some_bytes(7)?),
        });
    }
    Ok(states)
}

/// Columns `applied`, `token`, `holder`, `seq`, `domain`.
pub(crate) fn written(row: &impl Columns) -> Result<Written> {
    let watermark = watermark(row, 1)?
        .ok_or_else(|| Error::corrupt("the database's answer to a write has no watermark"))?;
    Ok(if row.flag(0)? {
        Written::applied(watermark)
    } else {
        Written::repeated(watermark)
    })
}

/// Columns `token`, `holder`, `seq`, `domain`, `value`, `writer` from `first` on.
pub(crate) fn snapshot(row: &impl Columns, first: usize) -> Result<Snapshot> {
    let value = row.bytes(first + 4)?.map(Body::from);
    let writer = row.number(first + 5)?.map(token).transpose()?;
    Ok(Snapshot::new(value, watermark(row, first)?, writer))
}

/// Columns `token`, `holder`, `seq`, `domain` from `first` on.
fn watermark(row: &impl Columns, first: usize) -> Result<Option<Watermark>> {
    let Some(number) = row.number(first)? else {
        return Ok(None);
    };
    let holder = row.bytes(first + 1)?.map(|bytes| tag(&bytes));
    let domain = row.text(first + 3)?.map(|text| {
        text.parse::<Domain>()
            .map_err(|error| Error::corrupt("a stored lock domain is malformed").with_source(error))
    });
    Ok(Some(Watermark {
        token: token(number)?,
        holder: holder.transpose()?,
        seq: sequence(row.a_number(first + 2)?)?,
        domain: domain.transpose()?,
    }))
}

fn capacity(number: i32) -> Result<u32> {
    u32::try_from(number)
        .ok()
        .filter(|capacity| (1..=PERMITS_MAX).contains(capacity))
        .ok_or_else(|| Error::corrupt("a stored capacity is out of range").with("capacity", number))
}

fn tag(bytes: &[u8]) -> Result<HolderTag> {
    bytes
        .try_into()
        .map(HolderTag::from_bytes)
        .map_err(|_| Error::corrupt("a stored holder tag is not 16 bytes"))
}

/// A TTL as the database is told it; none where it has no end.
pub(crate) fn millis(ttl: Ttl) -> Option<i64> {
    ttl.as_millis().and_then(|ms| i64::try_from(ms).ok())
}

pub(crate) fn ttl(millis: i64) -> Result<Ttl> {
    Ttl::new(Duration::from_millis(u64::try_from(millis).unwrap_or(0)))
        .map_err(|error| Error::corrupt("a stored TTL is out of range").with_source(error))
}

pub(crate) fn in_micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos().div_ceil(1_000)).map_or(MICROS_MAX, |us| us.min(MICROS_MAX))
}

pub(crate) fn micros(micros: i64) -> Duration {
    Duration::from_micros(u64::try_from(micros).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    /// One column.
    #[derive(Clone)]
    enum Cell {
        Null,
        Flag(bool),
        Number(i64),
        Bytes(Vec<u8>),
    }

    struct Row(Vec<Cell>);

    impl Columns for Row {
        fn flag(&self, i: usize) -> Result<bool> {
            match self.0.get(i) {
                Some(Cell::Flag(flag)) => Ok(*flag),
                _ => Err(missing(i)),
            }
        }

        fn small(&self, i: usize) -> Result<Option<i32>> {
            Ok(self.number(i)?.map(|number| i32::try_from(number).unwrap()))
        }

        fn number(&self, i: usize) -> Result<Option<i64>> {
            match self.0.get(i) {
                Some(Cell::Number(number)) => Ok(Some(*number)),
                Some(Cell::Null) => Ok(None),
                _ => Err(missing(i)),
            }
        }

        fn bytes(&self, i: usize) -> Result<Option<Vec<u8>>> {
            match self.0.get(i) {
                Some(Cell::Bytes(bytes)) => Ok(Some(bytes.clone())),
                Some(Cell::Null) => Ok(None),
                _ => Err(missing(i)),
            }
        }

        fn text(&self, i: usize) -> Result<Option<String>> {
            Ok(self
                .bytes(i)?
                .map(|bytes| String::from_utf8(bytes).unwrap()))
        }
    }

    fn holder(name: &str, token: i64) -> Vec<Cell> {
        vec![
            Cell::Bytes(name.into()),
            Cell::Number(2),
            Cell::Number(9),
            Cell::Number(token),
            Cell::Bytes(vec![7; 16]),
            Cell::Number(1_500),
            Cell::Number(250_000),
            Cell::Bytes(b"{}".to_vec()),
        ]
    }

    #[test]
    fn rows_of_one_name_are_one_state() {
        let mut free = holder("c", 0);
        free.splice(3.., vec![Cell::Null; 5]);
        let rows = [holder("a", 7), holder("a", 9), holder("b", 8), free];
        let states = states(&rows.map(Row)).unwrap();
        let seen: Vec<_> = states
            .iter()
            .map(|state| {
                let tokens = state.holders.iter().map(|holder| holder.token.get());
                (state.name.as_str(), tokens.collect::<Vec<_>>())
            })
            .collect();
        assert_eq!(seen, [("a", vec![7, 9]), ("b", vec![8]), ("c", vec![])]);
        let first = states.first().unwrap();
        assert_eq!(first.last_token.unwrap().get(), 9);
        assert_eq!(first.capacity, Some(2));
        let held = first.holders.first().unwrap();
        assert_eq!(held.ttl.duration(), Some(Duration::from_millis(1_500)));
        assert_eq!(held.expires_in, Some(Duration::from_millis(250)));
        assert_eq!(held.tag, HolderTag::from_bytes([7; 16]));
    }

    #[test]
    fn a_row_that_nobody_could_have_written_is_corrupt() {
        for (i, strange) in [
            (0, Cell::Bytes(vec![0xff])),
            (0, Cell::Null),
            (1, Cell::Number(-5)),
            (1, Cell::Number(0)),
            (2, Cell::Number(0)),
            (3, Cell::Number(-1)),
            (4, Cell::Bytes(vec![7; 15])),
            (4, Cell::Null),
            (5, Cell::Number(0)),
            (6, Cell::Null),
            (7, Cell::Flag(true)),
        ] {
            let mut row = holder("a", 7);
            row.splice(i..=i, [strange]);
            let error = states(&[Row(row)]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "column {i}: {error}");
        }
    }

    #[test]
    fn an_acquire_is_granted_held_or_refused_and_nothing_else() {
        let row = |outcome: &str| {
            let mut row = vec![Cell::Bytes(outcome.into())];
            row.extend([34, 1_500, 2, 250_000].map(Cell::Number));
            row.push(Cell::Bytes(b"{}".to_vec()));
            Row(row)
        };
        let granted = attempt(&row("granted"), 1).unwrap();
        assert!(matches!(granted, Attempt::Granted(grant) if grant.token.get() == 34));
        let held = attempt(&row("held"), 1).unwrap();
        assert!(matches!(
            held,
            Attempt::Held(Contention { free_in: Some(left), .. }) if left == Duration::from_millis(250)
        ));
        let error = attempt(&row("capacity"), 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(
            error.to_string().contains("permits=1 capacity=2"),
            "{error}"
        );
        let error = attempt(&row("perhaps"), 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
    }

    fn watermark_row(domain: &str) -> Vec<Cell> {
        vec![
            Cell::Flag(false),
            Cell::Number(34),
            Cell::Bytes(vec![7; 16]),
            Cell::Number(5),
            Cell::Bytes(domain.into()),
            Cell::Bytes(b"value".to_vec()),
            Cell::Number(33),
        ]
    }

    #[test]
    fn watermarks_and_values_are_read_and_a_strange_one_is_corrupt() {
        let row = Row(watermark_row("mysql/r/a"));
        let repeated = written(&row).unwrap();
        assert!(!repeated.applied);
        assert_eq!(repeated.watermark.token.get(), 34);
        assert_eq!(repeated.watermark.seq, 5);
        assert_eq!(
            repeated.watermark.holder,
            Some(HolderTag::from_bytes([7; 16]))
        );
        let seen = snapshot(&row, 1).unwrap();
        assert_eq!(seen.watermark.unwrap(), repeated.watermark);
        assert_eq!(seen.writer.unwrap().get(), 33);
        assert_eq!(seen.value.unwrap().into_bytes(9).unwrap(), "value");

        let none = snapshot(&Row(vec![Cell::Null; 6]), 0).unwrap();
        assert!(none.watermark.is_none() && none.value.is_none() && none.writer.is_none());

        let mut without = watermark_row("mysql/r/a");
        without.splice(1..=1, [Cell::Null]);
        for strange in [watermark_row("no domain"), without] {
            let error = written(&Row(strange)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        }
    }

    #[test]
    fn times_are_rounded_up_and_have_an_end() {
        assert_eq!(in_micros(Duration::from_nanos(1)), 1);
        assert_eq!(in_micros(Duration::MAX), MICROS_MAX);
        assert_eq!(micros(-5), Duration::ZERO);
        assert_eq!(millis(Ttl::NONE), None);
    }
}
