//! What is written to standard output: lines for people, and JSON with one object a line.

use std::borrow::Cow;
use std::io::{self, Write as _};
use std::time::{Duration, UNIX_EPOCH};

use fencelock::{FencingToken, LockName};
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

/// A lock's name for people. One that a terminal cannot show, or that looks like another, is written
/// as a shell reads it: `$'a\nb'`.
pub(crate) fn name(name: &LockName) -> String {
    let text = name.as_str();
    let plain = !text.contains(hostile) && text.trim() == text && !text.starts_with("$'");
    if plain { text.to_owned() } else { quoted(text) }
}

/// The text in the quotes of bash(1), zsh(1) and POSIX.1-2024 that take escapes.
fn quoted(text: &str) -> String {
    let mut quoted = "$'".to_owned();
    for c in text.chars() {
        match c {
            '\'' | '\\' => quoted.extend(['\\', c]),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            '\r' => quoted.push_str("\\r"),
            c if hostile(c) => {
                // Octal: it takes three digits at most, whatever follows.
                for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                    quoted.push_str(&format!("\\{byte:03o}"));
                }
            }
            c => quoted.push(c),
        }
    }
    quoted.push('\'');
    quoted
}

/// The text, cut to `columns` where it is longer.
pub(crate) fn cut(text: String, columns: usize) -> String {
    if text.chars().count() <= columns {
        return text;
    }
    let mut cut: String = text.chars().take(columns.saturating_sub(1)).collect();
    cut.push('…');
    cut
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
    fn a_name_that_cannot_be_shown_is_what_a_shell_reads() {
        let shown = |text: &str| name(&LockName::new(text).unwrap());
        for text in ["a b", "it's", "Größe", "a\\b", "$x", "-x"] {
            assert_eq!(shown(text), text);
        }
        for text in [
            "a\nb",
            "a\tb\r",
            "\u{1b}[31m7",
            "it's\n",
            "\\\n",
            " a",
            "a ",
            "$'a'",
            "\u{202e}é1\u{7f}1",
        ] {
            let shown = shown(text);
            assert!(!shown.contains(hostile), "{shown:?}");
            let script = format!("printf %s {shown}");
            let printed = std::process::Command::new("bash")
                .args(["-c", &script])
                .output();
            assert_eq!(String::from_utf8(printed.unwrap().stdout).unwrap(), text);
        }
    }

    #[test]
    fn what_is_too_long_for_its_column_is_cut() {
        assert_eq!(cut("lock".to_owned(), 4), "lock");
        assert_eq!(cut("locks".to_owned(), 4), "loc…");
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
