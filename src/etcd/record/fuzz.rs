//! What fuzzing asks of a lock's record and of its holders.

use super::{Holder, Record, SeenHolder, SeenRecord};
use crate::lease::HolderId;
use crate::name::LockName;

/// The input is the value of either; the first byte says at which revision it was read.
pub(crate) fn record(bytes: &[u8]) {
    let Some((at, value)) = bytes.split_first() else {
        return;
    };
    let at = i64::from(*at) - 1;
    let Ok(name) = LockName::new("payment-export") else {
        return;
    };
    let seen = SeenRecord::read(value, at, &name);
    crate::fuzzing::assert_corrupt(&seen);
    if let Ok(seen) = seen {
        let last = seen.last();
        crate::fuzzing::assert_corrupt(&last);
        let again = seen.record.encode();
        let again = again.and_then(|json| SeenRecord::read(&json, at, &name));
        assert_eq!(again.and_then(|again| again.last()).ok(), last.ok());
    }
    if let Ok(holder) = serde_json::from_slice::<Holder>(value) {
        held(holder, at);
    }
    let _ = serde_json::from_slice::<Record>(value);
}

fn held(holder: Holder, at: i64) {
    let again = holder.encode().ok();
    let again: Option<Holder> = again.and_then(|json| serde_json::from_slice(&json).ok());
    assert_eq!(again.map(|again| again.info()), Some(holder.info()));
    let seen = SeenHolder {
        key: Vec::new(),
        id: HolderId::from_bytes([7; 16]),
        made_at: at,
        at,
        lease: 1,
        holder,
    };
    let shown = seen.state(None);
    crate::fuzzing::assert_corrupt(&shown);
    if let Ok(shown) = shown {
        assert_eq!(seen.token().ok(), Some(shown.token));
        assert!(seen.holder.released || seen.is(&seen.id, Some(shown.token)));
    }
}
