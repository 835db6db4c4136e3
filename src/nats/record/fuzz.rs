//! What fuzzing asks of messages, and of the record of a lock in one.

use super::{Answer, Lock, Stored};
use crate::error::ErrorKind;
use crate::nats::bucket::{Clock, unix_ns};

/// An answer of the JetStream API, whole; or the time in one.
pub(crate) fn answer(bytes: &[u8]) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = unix_ns(text);
    }
    let Ok(answer) = serde_json::from_slice::<Answer>(bytes) else {
        return;
    };
    match Stored::of(answer) {
        Ok(stored) => read(&stored),
        Err(error) => assert!(
            matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unavailable),
            "{error}"
        ),
    }
}

/// The body of a message; the first byte is its sequence.
pub(crate) fn record(bytes: &[u8]) {
    let Some((at, body)) = bytes.split_first() else {
        return;
    };
    read(&Stored {
        at: u64::from(*at),
        stamped_ns: 5_000_000_000,
        headers: String::new(),
        body: body.to_vec(),
    });
}

fn read(stored: &Stored) {
    let Some((name, lock)) = Lock::of(stored, None) else {
        return;
    };
    // Whoever writes it next says the same, wherever that is stored.
    let body = lock.encode(&name, false);
    let next = body.map(|body| Stored {
        at: stored.at.saturating_add(9),
        stamped_ns: stored.stamped_ns.saturating_add(9),
        headers: String::new(),
        body: body.to_vec(),
    });
    let again = next.ok().and_then(|next| Lock::of(&next, Some(&name)));
    let tokens = |lock: &Lock| -> Vec<_> {
        let one = |h: &super::Holder| (h.id, h.token, h.stamp, h.ttl, h.released, h.info.clone());
        lock.holders.iter().map(one).collect()
    };
    assert!(matches!(
        &again,
        Some((_, again)) if again.last == lock.last
            && again.capacity == lock.capacity
            && tokens(again) == tokens(&lock)
    ));
    for now_ns in [0, 6_000_000_000, u64::MAX] {
        let clock = Clock {
            now_ns,
            since_ns: None,
        };
        let shown = lock.state(&name, clock);
        assert_eq!(shown.last_token, lock.last);
        let mut left = lock.clone();
        left.drop_lapsed(clock);
        assert!(left.holders.len() <= lock.holders.len());
    }
}
