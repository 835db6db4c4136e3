//! What fuzzing asks of what JetStream says of a stream.

use serde_json::Value;

use super::{ID, Info};
use crate::error::ErrorKind;

pub(crate) fn stream(bytes: &[u8]) {
    let Ok(info) = serde_json::from_slice::<Info>(bytes) else {
        return;
    };
    let told: Value = serde_json::from_slice(bytes).unwrap_or_default();
    if told.get("ts").and_then(Value::as_str) == info.ts.as_deref() {
        keeps_what_it_takes(&info, &told);
        has_one_clock(&info, &told);
    }
    assert!(
        !info.config.metadata.contains_key(ID) || info.config.metadata.get(ID) == Some(&info.id())
    );
}

/// A bucket that is taken loses no record, as the settings read by another eye say.
fn keeps_what_it_takes(info: &Info, told: &Value) {
    let config = told.get("config").unwrap_or(&Value::Null);
    let word = |key: &str| config.get(key).and_then(Value::as_str).unwrap_or_default();
    let number = |key: &str| config.get(key).and_then(Value::as_i64).unwrap_or(0);
    let is_on = |key: &str| config.get(key).and_then(Value::as_bool) == Some(true);
    let is_there = |key: &str| config.get(key).is_some_and(|value| !value.is_null());
    match info.config.check("b", None) {
        Ok(()) => {
            assert_eq!((word("storage"), word("retention")), ("file", "limits"));
            assert!(number("max_age") <= 0, "its records expire");
            let drops = number("max_msgs") > 0 || number("max_bytes") > 0;
            assert!(!drops || word("discard") == "new", "it drops old records");
            assert!(!is_there("mirror") && !is_there("subject_transform"));
            let sources = config.get("sources").and_then(Value::as_array);
            assert!(sources.is_none_or(Vec::is_empty), "it is a copy");
            assert!(!is_on("no_ack") && !is_on("sealed") && word("persist_mode") != "async");
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}"),
    }
    let replicas = info.config.num_replicas;
    let another = info.config.check("b", Some(replicas.wrapping_add(1)));
    assert!(another.is_err(), "another number of replicas was asked for");
}

/// Of a stream that several servers keep together, only who leads tells the time.
fn has_one_clock(info: &Info, told: &Value) {
    let cluster = told.get("cluster").unwrap_or(&Value::Null);
    let has = |key: &str| cluster.get(key).and_then(Value::as_str).is_some();
    match info.clock() {
        Ok(clock) => {
            assert!(told.get("ts").is_some());
            assert_eq!(clock.since_ns.is_some(), has("leader_since"));
            assert!(!has("raft_group") || clock.since_ns.is_some());
        }
        Err(error) => assert!(
            matches!(
                error.kind(),
                ErrorKind::Corrupt | ErrorKind::Unavailable | ErrorKind::Unsupported
            ),
            "{error}"
        ),
    }
}
