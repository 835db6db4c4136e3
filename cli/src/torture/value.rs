//! The values that the workloads keep: a list whose order is the order of the accepted writes, and
//! a counter that says who counted last.

use super::history::Op;

/// One line of a list: which update, and with which token and sequence it was written. An update
/// that another holder has completed carries that holder's token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) op: Op,
    pub(crate) token: u64,
    pub(crate) seq: u64,
    /// What the update moves, in a bank.
    pub(crate) delta: i64,
}

impl Line {
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let line = Self {
            op: words.next()?.parse().ok()?,
            token: words.next()?.parse().ok()?,
            seq: words.next()?.parse().ok()?,
            delta: words.next()?.parse().ok()?,
        };
        words.next().is_none().then_some(line)
    }

    fn text(&self) -> String {
        format!("{} {} {} {}\n", self.op, self.token, self.seq, self.delta)
    }
}

/// The lines of a list; `None` where the value is none.
pub(crate) fn lines(value: &[u8]) -> Option<Vec<Line>> {
    let text = std::str::from_utf8(value).ok()?;
    if !text.is_empty() && !text.ends_with('\n') {
        return None;
    }
    text.lines().map(Line::parse).collect()
}

/// A list with more lines.
pub(crate) fn appended(value: &[u8], more: &[Line]) -> Vec<u8> {
    let mut longer = value.to_vec();
    for line in more {
        longer.extend_from_slice(line.text().as_bytes());
    }
    longer
}

/// A counter: its number, and whose update made it so. `None` where the value is none.
pub(crate) fn counter(value: &[u8]) -> Option<(u64, Option<Line>)> {
    if value.is_empty() {
        return Some((0, None));
    }
    let text = std::str::from_utf8(value).ok()?;
    let (number, line) = text.strip_suffix('\n')?.split_once(' ')?;
    Some((number.parse().ok()?, Some(Line::parse(line)?)))
}

/// The value of a counter.
pub(crate) fn counted(number: u64, line: &Line) -> Vec<u8> {
    format!("{number} {}", line.text()).into_bytes()
}

/// A digest of bytes (FNV-1a), to compare what was read with a beginning of what is there at last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Digest(u64);

impl Digest {
    pub(crate) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    pub(crate) fn of(bytes: &[u8]) -> u64 {
        let mut digest = Self::new();
        digest.add(bytes);
        digest.0
    }

    pub(crate) fn add_line(&mut self, line: &Line) -> u64 {
        self.add(line.text().as_bytes());
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_round_trip_and_torn_ones_are_none() {
        let op = "1.0.7".parse().unwrap();
        let line = Line {
            op,
            token: 33,
            seq: 2,
            delta: -5,
        };
        let value = appended(&appended(b"", &[line]), &[line]);
        assert_eq!(lines(&value), Some(vec![line, line]));
        assert_eq!(lines(b""), Some(Vec::new()));
        assert_eq!(lines(&value[..value.len() - 1]), None);
        assert_eq!(lines(&value[3..]), None);
        assert_eq!(counter(&counted(9, &line)), Some((9, Some(line))));
        assert_eq!(counter(b""), Some((0, None)));
        assert_eq!(counter(b"9 1.0.7 33"), None);
        let mut digest = Digest::new();
        digest.add_line(&line);
        assert_eq!(digest.add_line(&line), Digest::of(&value));
    }
}
