//! What fuzzing asks of a lock's object.

use super::{MAGIC, Record, checksum};
use crate::name::LockName;

/// The input is an object; and the content of one, for which a checksum is made; and a first line that
/// says how the object of the rest is then damaged: pairs of a place and what its byte is changed by.
pub(crate) fn lock(bytes: &[u8]) {
    read(bytes);
    read(&body(bytes));
    let (damage, json) = crate::fuzzing::split_line(bytes);
    damaged(damage, &body(json));
}

fn body(json: &[u8]) -> Vec<u8> {
    let mut body = format!("{MAGIC}{}\n", checksum(json)).into_bytes();
    body.extend_from_slice(json);
    body.push(b'\n');
    body
}

fn read(body: &[u8]) {
    let Some(name) = Record::name_in(body) else {
        return;
    };
    let record = Record::decode(&name, body);
    crate::fuzzing::assert_corrupt(&record);
    let Ok(record) = record else { return };
    let again = record
        .encode()
        .and_then(|body| Record::decode(&name, &body));
    assert!(matches!(again, Ok(again) if again == record));
    let left = vec![std::time::Duration::MAX; record.holders.len()];
    assert!(
        record.show(&name, &left).is_ok(),
        "what is sound can be shown"
    );
    let _ = record.contention(&left);
    if let Ok(other) = LockName::new("another") {
        assert!(other == name || Record::decode(&other, body).is_err());
    }
}

/// A checksum finds every change.
fn damaged(damage: &[u8], body: &[u8]) {
    let Ok(sound) = Record::parse(body) else {
        return;
    };
    let mut changed = body.to_vec();
    for pair in damage.chunks_exact(2) {
        if let [at, change] = *pair
            && let Some(byte) = changed.get_mut(usize::from(at))
        {
            *byte ^= change;
        }
    }
    assert!(
        changed == body || Record::parse(&changed).is_err(),
        "{sound:?}"
    );
}
