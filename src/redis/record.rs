//! What the scripts say of a record: its state, and what is wrong with it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::answer::Words;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::HolderTag;
use crate::lease::{HolderId, HolderState, LeaseInfo, LockState, Ttl};
use crate::name::LockName;
use crate::token::{CLOCK_JUMP_MAX_US, FencingToken, check_jump};

/// What people see of a holder, as it is stored.
#[derive(Serialize, Deserialize)]
pub(super) struct Info {
    #[serde(default)]
    host: String,
    #[serde(default)]
    pid: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    label: Option<String>,
    #[serde(default)]
    since_us: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    trace_id: Option<String>,
}

impl Info {
    pub(super) fn of(info: &LeaseInfo) -> Self {
        Self {
            host: info.host.clone(),
            pid: info.pid,
            label: info.label.clone(),
            since_us: info.since_unix_us,
            trace_id: info.trace_id.clone(),
        }
    }

    pub(super) fn encode(&self) -> String {
        // Strings and numbers always encode; and it is for people only.
        serde_json::to_string(self).unwrap_or_default()
    }

    pub(super) fn decode(text: &str) -> LeaseInfo {
        let mut info = LeaseInfo::default();
        if let Ok(stored) = serde_json::from_str::<Self>(text) {
            info.host = stored.host;
            info.pid = stored.pid;
            info.label = stored.label;
            info.since_unix_us = stored.since_us;
            info.trace_id = stored.trace_id;
        }
        info
    }
}

/// The answer of the inspecting script.
pub(super) fn state(name: &LockName, mut words: Words) -> Result<Option<LockState>> {
    match words.text().as_str() {
        "none" => return Ok(None),
        "state" => {}
        other => return Err(trouble(other, &mut words, name)),
    }
    if words.text() != name.as_str() {
        return Err(corrupt("it is the record of another name", name));
    }
    let mut state = LockState::new(name.clone(), Some(token(&mut words)?));
    state.capacity = u32::try_from(words.number()?).ok().filter(|n| *n > 0);
    while let Some(id) = words.next() {
        let id = String::from_utf8(id)
            .ok()
            .and_then(|id| id.parse::<HolderId>().ok());
        let id = id.ok_or_else(|| corrupt("a holder's id is illegible", name))?;
        let token = token(&mut words)?;
        let expires_in = Duration::from_micros(words.number()?);
        let ttl = Ttl::new(Duration::from_millis(words.number()?))
            .map_err(|_| corrupt("a holder's TTL is out of range", name))?;
        let _state = words.text();
        state.holders.push(HolderState {
            token,
            tag: HolderTag::of(&id),
            ttl,
            expires_in: Some(expires_in),
            info: Info::decode(&words.text()),
        });
    }
    state.holders.sort_by_key(|holder| holder.token);
    Ok(Some(state))
}

/// What a script answers instead where it does not do its work.
pub(super) fn trouble(first: &str, words: &mut Words, name: &LockName) -> Error {
    match first {
        "corrupt" => corrupt(&words.text(), name),
        "exhausted" => Error::new(
            ErrorKind::Exhausted,
            "the fencing tokens of this name are used up",
        )
        .with("last", words.text()),
        other => corrupt("the script's answer is unknown", name)
            .with("answer", format_args!("{other:?}")),
    }
}

pub(super) fn corrupt(what: &str, name: &LockName) -> Error {
    Error::corrupt(format!(
        "the lock's record on the redis server is damaged: {what}; repair it with a floor for its tokens"
    ))
    .with("name", format_args!("{name:?}"))
}

/// The refusal of a floor that is out of bounds, by the server's clock.
pub(super) fn far(words: &mut Words, shown: Option<FencingToken>) -> Error {
    let (last, limit) = (words.text(), words.number().unwrap_or(0));
    let last = last.parse::<FencingToken>().ok();
    let error = shown.and_then(|token| {
        let now_us = limit.saturating_sub(CLOCK_JUMP_MAX_US);
        check_jump(last, token, now_us).err()
    });
    error.unwrap_or_else(|| {
        Error::invalid("fencing token is implausibly far ahead and was refused")
            .with("limit", limit)
    })
}

pub(super) fn token(words: &mut Words) -> Result<FencingToken> {
    FencingToken::new(words.number()?)
        .map_err(|e| Error::corrupt("the redis script answered with a bad token").with_source(e))
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_comes_back_and_nonsense_is_empty() {
        let info = LeaseInfo {
            host: "h\u{0}\n\"".to_owned(),
            pid: 7,
            label: Some("nightly π".to_owned()),
            since_unix_us: 1,
            trace_id: None,
        };
        assert_eq!(Info::decode(&Info::of(&info).encode()), info);
        assert_eq!(Info::decode("nonsense"), LeaseInfo::default());
    }
}
