//! What fuzzing asks of PostgreSQL's rows, whose cells are lines here, and of its refusals.

use std::error::Error as StdError;

use bytes::BytesMut;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type};

use crate::error::{Error, ErrorKind, Result};
use crate::postgres::error::own_refusal_of;
use crate::sql::answer::columns;
use crate::sql::fuzz::{number, read, rows as rows_of};

/// A value as the protocol brings it: its type, and its bytes.
struct Cell(Type, Option<Vec<u8>>);

struct Cells(Vec<Cell>);

columns!(Cells, get);

/// As the client reads a column of a row.
fn get<'a, T: FromSql<'a>>(row: &'a Cells, i: usize) -> Result<T> {
    let strange = || Error::corrupt("not of the expected form").with("column", i);
    let Cell(ty, raw) = row.0.get(i).ok_or_else(strange)?;
    if !T::accepts(ty) {
        return Err(strange());
    }
    T::from_sql_nullable(ty, raw.as_deref()).map_err(|_| strange())
}

/// The cells of rows: `i` and a number, `s` and a smaller one, `f` and a flag, `t` and text, `b` and
/// bytes, and the same in capitals for no value of that type; `r` and the raw bytes of a number.
pub(crate) fn rows(bytes: &[u8]) {
    let rows: Vec<Cells> = rows_of(bytes, cell).into_iter().map(Cells).collect();
    read(&rows);
    refused(bytes);
}

fn cell(letter: u8, text: &[u8]) -> Cell {
    let ty = match letter.to_ascii_lowercase() {
        b'i' | b'r' => Type::INT8,
        b's' => Type::INT4,
        b'f' => Type::BOOL,
        b't' => Type::TEXT,
        _ => Type::BYTEA,
    };
    let raw = match letter {
        b'i' => sent(&number::<i64>(text), &ty),
        b's' => sent(&number::<i32>(text), &ty),
        b'f' => sent(&(text == b"t"), &ty),
        b'r' | b't' | b'b' => Some(text.to_vec()),
        _ => None,
    };
    Cell(ty, raw)
}

fn sent(value: &dyn ToSql, ty: &Type) -> Option<Vec<u8>> {
    let mut bytes = BytesMut::new();
    let sent: Result<IsNull, Box<dyn StdError + Sync + Send>> =
        value.to_sql_checked(ty, &mut bytes);
    sent.is_ok().then(|| bytes.to_vec())
}

/// The input is a code, a message and a detail, a line each.
fn refused(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.splitn(3, '\n');
    let code = lines.next().unwrap_or_default();
    let message = lines.next().unwrap_or_default();
    let detail = lines.next();
    let Some(error) = own_refusal_of(code, message, detail) else {
        return;
    };
    assert!(code.starts_with("FL"), "only our functions refuse so");
    // The function has rolled back (S10).
    assert!(error.kind() != ErrorKind::Indeterminate, "{error}");
    assert_eq!(code == "FL001", error.kind() == ErrorKind::Fenced);
    let detail = detail.unwrap_or_default();
    for (key, token) in [("token", error.token()), ("watermark", error.watermark())] {
        if let Some(token) = token {
            assert!(detail.contains(&format!("{key}={token}")), "{detail:?}");
        }
    }
    assert_eq!(error.token().is_some(), error.watermark().is_some());
}
