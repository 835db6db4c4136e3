//! What fuzzing asks of MySQL's rows, whose cells are lines here, and of its refusals.

use mysql_async::prelude::FromValue;
use mysql_async::{ServerError, Value};

use crate::error::{Error, ErrorKind, Result};
use crate::mysql::error::own_refusal;
use crate::sql::answer::columns;
use crate::sql::fuzz::{number, read, rows as rows_of};

struct Cells(Vec<Value>);

columns!(Cells, get);

/// As the client reads a column of a row.
fn get<T: FromValue>(row: &Cells, i: usize) -> Result<T> {
    let strange = || Error::corrupt("not of the expected form").with("column", i);
    let value = row.0.get(i).ok_or_else(strange)?;
    T::from_value_opt(value.clone()).map_err(|_| strange())
}

/// The cells of rows: `i` and a number, `u` and one without a sign, `d` and one with a fraction, `t` and
/// text or bytes (a number too comes so, where a statement is not prepared), or none.
pub(crate) fn rows(bytes: &[u8]) {
    let rows: Vec<Cells> = rows_of(bytes, cell).into_iter().map(Cells).collect();
    read(&rows);
    refused(bytes);
}

fn cell(letter: u8, text: &[u8]) -> Value {
    match letter {
        b'i' => Value::Int(number(text)),
        b'u' => Value::UInt(number(text)),
        b'd' => Value::Double(number(text)),
        b't' => Value::Bytes(text.to_vec()),
        _ => Value::NULL,
    }
}

/// The input is a state and a message, a line each.
fn refused(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (state, message) = text.split_once('\n').unwrap_or_default();
    let error = own_refusal(&ServerError {
        code: 1644,
        message: message.to_owned(),
        state: state.to_owned(),
    });
    let Some(error) = error else { return };
    assert!(state.starts_with("FL"), "only our procedures refuse so");
    // The procedure has rolled back (S10).
    assert!(error.kind() != ErrorKind::Indeterminate, "{error}");
    assert_eq!(state == "FL001", error.kind() == ErrorKind::Fenced);
    for (key, token) in [("token", error.token()), ("watermark", error.watermark())] {
        if let Some(token) = token {
            assert!(message.contains(&format!("{key}={token}")), "{message:?}");
        }
    }
    assert_eq!(error.token().is_some(), error.watermark().is_some());
}
