//! What people see of a holder, as databases keep it: the bytes of a JSON object, readable in any
//! client, and independent of the database's encoding, which need not be UTF-8.

use serde::{Deserialize, Serialize};

use crate::lease::LeaseInfo;

#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Info {
    host: String,
    pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    label: Option<String>,
    since_unix_us: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
}

pub(crate) fn to_bytes(info: &LeaseInfo) -> Vec<u8> {
    let info = Info {
        host: info.host.clone(),
        pid: info.pid,
        label: info.label.clone(),
        since_unix_us: info.since_unix_us,
        trace_id: info.trace_id.clone(),
    };
    // Text and numbers always serialise, and an empty info decides nothing.
    serde_json::to_vec(&info).unwrap_or_default()
}

/// Whatever cannot be read is shown as unknown: it decides nothing.
pub(crate) fn from_bytes(bytes: &[u8]) -> LeaseInfo {
    let info: Info = serde_json::from_slice(bytes).unwrap_or_default();
    LeaseInfo {
        host: info.host,
        pid: info.pid,
        label: info.label,
        since_unix_us: info.since_unix_us,
        trace_id: info.trace_id,
    }
}

/// What fuzzing asks of it: what was read is written again as it is.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    let info = from_bytes(bytes);
    assert_eq!(from_bytes(&to_bytes(&info)), info);
}
