//! What is written to standard output: lines for people, and JSON with one object a line.

use std::borrow::Cow;
use std::io::{self, Write as _};
use std::time::{Duration, UNIX_EPOCH};

use fencelock::FencingToken;
use serde_json::{Value, json};

/// Numbers below this one are exact in a double, which is what most readers of JSON make of them.
const EXACT_IN_A_DOUBLE: u64 = 1 << 53;

/// Makes untrusted text safe for a terminal: control characters, and those that reorder text, are
/// shown as escapes.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    if !text.contains(hostile) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if hostile(c) {
            safe.extend(c.escape_default());
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

fn hostile(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A token: a number where a double holds it exactly, else a string.
pub(crate) fn token(token: FencingToken) -> Value {
    if token.get() < EXACT_IN_A_DOUBLE {
        json!(token.get())
    } else {
        json!(token.to_string())
    }
}

/// A token that may be missing.
pub(crate) fn token_or_null(t: Option<FencingToken>) -> Value {
    t.map_or(Value::Null, token)
}

/// A duration in whole milliseconds.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A duration that may be missing, in whole milliseconds.
pub(crate) fn millis_or_null(duration: Option<Duration>) -> Value {
    duration.map_or(Value::Null, |d| json!(millis(d)))
}

/// A duration for people: whole seconds, or milliseconds where it is short.
pub(crate) fn human(duration: Duration) -> String {
    let rounded = if duration < Duration::from_secs(10) {
        Duration::from_millis(millis(duration))
    } else {
        Duration::from_secs(duration.as_secs())
    };
    humantime::format_duration(rounded).to_string()
}

/// A wall clock reading as RFC 3339 text in UTC.
pub(crate) fn utc(unix_us: u64) -> String {
    // The year 9999 is where RFC 3339 ends.
    const LAST_US: u64 = 253_402_300_799_000_000;
    let at = UNIX_EPOCH + Duration::from_micros(unix_us.min(LAST_US));
    humantime::format_rfc3339_millis(at).to_string()
}

/// Writes one line.
pub(crate) fn line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Writes one object on a line of its own. JSON lets some characters that drive a terminal stand
/// as they are; they are escaped too, which means the same to its readers.
pub(crate) fn object(value: &Value) -> io::Result<()> {
    line(&escaped(&value.to_string()))
}

fn escaped(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if hostile(c) {
            // All of them take one UTF-16 unit, and all stand inside of strings.
            text.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            text.push(c);
        }
    }
    text
}

/// Lines up cells in columns; the last column is not padded. Control characters are escaped.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = Vec::new();
    let rows: Vec<Vec<Cow<'_, str>>> = rows
        .iter()
        .map(|row| row.iter().map(|cell| clean(cell)).collect())
        .collect();
    for row in &rows {
        widths.resize(widths.len().max(row.len()), 0);
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            if !line.is_empty() {
                line.push_str("  ");
            }
            line.push_str(cell);
            let padding = width.saturating_sub(cell.chars().count());
            line.extend(std::iter::repeat_n(' ', padding));
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_above_a_doubles_precision_are_strings() {
        let t = |n| token(FencingToken::new(n).unwrap());
        assert_eq!(t((1 << 53) - 1).to_string(), "9007199254740991");
        assert_eq!(t(1 << 53).to_string(), "\"9007199254740992\"");
    }

    #[test]
    fn a_name_cannot_drive_the_terminal() {
        assert_eq!(
            clean("a\u{1b}[2Jb\nc\u{202e}d"),
            "a\\u{1b}[2Jb\\nc\\u{202e}d"
        );
        assert_eq!(clean("Größe π 锁"), "Größe π 锁");
    }

    #[test]
    fn escaped_json_means_the_same() {
        let value = json!({"name": "a\u{9b}2J\u{7f}\n\u{202e}é锁"});
        let text = escaped(&value.to_string());
        assert!(!text.contains(hostile), "{text:?}");
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
    }

    #[test]
    fn times_are_utc_text() {
        assert_eq!(utc(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(utc(1_796_000_000_123_456), "2026-11-30T00:53:20.123Z");
        assert!(utc(u64::MAX).starts_with("9999-12-31T"));
    }
}
