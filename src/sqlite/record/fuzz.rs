//! What fuzzing asks of rows, which anybody with the file can write: SQLite's types are a column's
//! suggestion only.

use rusqlite::types::Value;
use rusqlite::{Connection, params_from_iter};

use super::Holder;
use crate::error::ErrorKind;
use crate::fuzzing::split_line;
use crate::sqlite::error::Halt;
use crate::sqlite::fence::watermark_of;

thread_local! {
    static DATABASE: Option<Connection> = Connection::open_in_memory().ok();
}

/// The values of a row are lines: `i` and a number, `t` and text, `b` and bytes, or nothing.
pub(crate) fn rows(bytes: &[u8]) {
    DATABASE.with(|database| {
        if let Some(database) = database {
            let _ = read(database, bytes);
        }
    });
}

fn values(mut bytes: &[u8]) -> Vec<Value> {
    let mut values = Vec::new();
    for _ in 0..8 {
        let (line, rest) = split_line(bytes);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        values.push(match line.split_first() {
            Some((b'i', number)) => Value::Integer(text(number).parse().unwrap_or(0)),
            Some((b't', rest)) => Value::Text(text(rest)),
            Some((b'b', rest)) => Value::Blob(rest.to_vec()),
            Some((b'f', number)) => Value::Real(text(number).parse().unwrap_or(0.5)),
            _ => Value::Null,
        });
        bytes = rest;
    }
    values
}

fn read(database: &Connection, bytes: &[u8]) -> rusqlite::Result<()> {
    let mut statement = database.prepare_cached("SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8")?;
    let values = values(bytes);
    let mut rows = statement.query(params_from_iter(values.iter()))?;
    let Some(row) = rows.next()? else {
        return Ok(());
    };
    match Holder::read(row) {
        Ok(holder) => {
            assert!(matches!(values.get(2), Some(Value::Integer(ttl)) if *ttl > 0));
            let info = holder.info();
            assert_eq!(crate::info::from_bytes(&crate::info::to_bytes(&info)), info);
        }
        Err(halt) => assert_corrupt(halt),
    }
    match watermark_of(row) {
        // A sequence that went down would let an older write of the holder pass (S7).
        Ok(watermark) => assert!(
            matches!(values.get(2), Some(Value::Integer(seq)) if u64::try_from(*seq) == Ok(watermark.seq))
        ),
        Err(halt) => assert_corrupt(halt),
    }
    Ok(())
}

fn assert_corrupt(halt: Halt) {
    if let Halt::Failed(error) = halt {
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }
}
