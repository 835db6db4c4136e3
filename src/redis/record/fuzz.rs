//! What fuzzing asks of the answers about a record, whose words are lines here.

use redis::Value;

use super::{Info, Words, far, state};
use crate::error::ErrorKind;
use crate::fuzzing::split_line;
use crate::name::LockName;
use crate::token::FencingToken;

/// Words as a server may send them: a line each, and others where a line says so.
pub(in crate::redis) fn values(mut bytes: &[u8]) -> Vec<Value> {
    let mut values = Vec::new();
    while !bytes.is_empty() && values.len() < 64 {
        let (line, rest) = split_line(bytes);
        values.push(match line {
            b"!nil" => Value::Nil,
            b"!int" => Value::Int(7),
            b"!list" => Value::Array(vec![Value::Nil]),
            word => match word.strip_prefix(b"+") {
                Some(text) => Value::SimpleString(String::from_utf8_lossy(text).into_owned()),
                None => Value::BulkString(word.to_vec()),
            },
        });
        bytes = rest;
    }
    values
}

pub(crate) fn record(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let info = Info::decode(&text);
    assert_eq!(Info::decode(&Info::of(&info).encode()), info);

    let Ok(name) = LockName::new("payment-export") else {
        return;
    };
    let words = || Words::of(Value::Array(values(bytes)));
    let Ok(mut some) = words() else { return };
    let _ = far(&mut some, FencingToken::new(7).ok());
    let Ok(words) = words() else { return };
    match state(&name, words) {
        Ok(None) => {}
        Ok(Some(state)) => {
            assert!(state.last_token.is_some(), "a record has a token");
            assert_eq!(state.name, name);
            assert!(state.holders.is_sorted_by_key(|holder| holder.token));
        }
        // Used up tokens are no damage.
        Err(error) => assert!(
            matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Exhausted),
            "{error}"
        ),
    }
}
