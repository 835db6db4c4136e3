//! `fencelock show`, `list` and `watch`: who holds what, since when, until when.

use std::time::Duration;

use fencelock::lease::{HolderState, LockState};
use fencelock::{LockName, Locks};
use serde_json::{Value, json};

use crate::exit_codes;
use crate::failure::{Failure, Result};
use crate::output;
use crate::store::StoreUrl;

/// How many locks are asked for at a time.
const PAGE: usize = 256;

/// How much of a name `list` shows; the whole of it is in `show` and in the JSON.
const NAME_COLUMNS: usize = 40;

/// How often `watch` looks where no hint comes.
const LOOK: Duration = Duration::from_secs(1);

/// Prints the state of one lock. A name that was never held is no error: it is free.
pub(crate) async fn show(store: &StoreUrl, name: &LockName, json: bool) -> Result<u8> {
    let locks = store.open().await?;
    let state = state_of(&locks, name).await?;
    if json {
        output::object(&as_json(&state))?;
    } else {
        output::line(as_text(&state).trim_end())?;
    }
    Ok(exit_codes::OK)
}

/// Prints the state of all locks whose names begin with `prefix`. Damaged records hide no sound one,
/// but fail the command in the end.
pub(crate) async fn list(store: &StoreUrl, prefix: &str, json: bool) -> Result<u8> {
    let locks = store.open().await?;
    let mut rows = Vec::new();
    let mut damaged = Vec::new();
    let mut after = None;
    loop {
        let page = locks.list(prefix, after.as_ref(), PAGE).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.name.clone());
        let is_last = page.len() < PAGE;
        for state in page {
            if let Some(damage) = &state.damage {
                damaged.push(damage.clone());
            }
            if json {
                output::object(&as_json(&state))?;
            } else {
                rows.extend(as_rows(&state));
            }
        }
        if is_last {
            break;
        }
    }
    if !rows.is_empty() {
        let head = [
            "NAME", "TOKEN", "HOLDER", "SINCE", "EXPIRES", "LABEL", "TRACE",
        ];
        rows.insert(0, head.map(str::to_owned).to_vec());
        if rows
            .iter()
            .skip(1)
            .all(|row| row.last().is_none_or(|id| id == "-"))
        {
            rows.iter_mut().for_each(|row| drop(row.pop()));
        }
        output::line(output::table(&rows).trim_end())?;
    }
    let Some(first) = damaged.first() else {
        return Ok(exit_codes::OK);
    };
    let summary = match damaged.len() {
        1 => format!("a record cannot be read: {first}"),
        n => format!("{n} records cannot be read, and doctor tells of each; the first: {first}"),
    };
    Err(Failure::new(exit_codes::DAMAGED, summary))
}

/// Prints the state of one lock whenever it changes, until interrupted.
pub(crate) async fn watch(store: &StoreUrl, name: &LockName, json: bool) -> Result<u8> {
    let locks = store.open().await?;
    // Made before the first look, so that no change between the two is missed.
    let mut hints = locks.watch(name).await?;
    let mut seen: Option<Value> = None;
    loop {
        let state = state_of(&locks, name).await?;
        let change = without_clocks(&state);
        if seen.as_ref() != Some(&change) {
            if json {
                output::object(&as_json(&state))?;
            } else {
                output::line(&as_line(&state))?;
            }
            seen = Some(change);
        }
        tokio::select! {
            () = hints.changed() => {}
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

async fn state_of(locks: &Locks, name: &LockName) -> Result<LockState> {
    let state = locks.inspect(name).await?;
    Ok(state.unwrap_or_else(|| LockState::new(name.clone(), None)))
}

/// A lock as JSON. Never the holder ids: they are secrets.
pub(crate) fn as_json(state: &LockState) -> Value {
    let mut object = json!({
        "name": state.name.as_str(),
        "capacity": state.capacity,
        "last_token": output::token_or_null(state.last_token),
        "holders": state.holders.iter().map(holder_as_json).collect::<Vec<_>>(),
    });
    if let (Some(damage), Some(fields)) = (&state.damage, object.as_object_mut()) {
        fields.insert("damage".to_owned(), json!(damage));
    }
    object
}

fn holder_as_json(holder: &HolderState) -> Value {
    json!({
        "token": output::token(holder.token),
        "label": holder.info.label,
        "host": holder.info.host,
        "pid": holder.info.pid,
        "since": output::utc(holder.info.since_unix_us),
        "ttl_ms": holder.ttl.as_millis(),
        "expires_in_ms": output::millis_or_null(holder.expires_in),
        "trace_id": holder.info.trace_id,
    })
}

/// What makes one state another: all but what the passing of time and renewals move.
fn without_clocks(state: &LockState) -> Value {
    let holders: Vec<Value> = state
        .holders
        .iter()
        .map(|h| json!([output::token(h.token), h.tag.to_string()]))
        .collect();
    json!([output::token_or_null(state.last_token), holders])
}

fn as_text(state: &LockState) -> String {
    let mut rows = vec![pair("name", output::name(&state.name))];
    let Some(last) = state.last_token else {
        rows.push(pair("state", "never held".to_owned()));
        return output::table(&rows);
    };
    let held = match (state.holders.len(), state.capacity) {
        (0, _) => "free".to_owned(),
        (n, Some(capacity)) if capacity > 1 => format!("held, {n} of {capacity} permits"),
        _ => "held".to_owned(),
    };
    rows.push(pair("state", held));
    rows.push(pair("last_token", last.to_string()));
    for holder in &state.holders {
        rows.push(pair("", String::new()));
        rows.push(pair("token", holder.token.to_string()));
        rows.push(pair("host", holder.info.host.clone()));
        rows.push(pair("pid", holder.info.pid.to_string()));
        rows.push(pair("since", output::utc(holder.info.since_unix_us)));
        rows.push(pair("ttl", ttl(holder)));
        rows.push(pair("expires_in", expiry(holder)));
        rows.extend(holder.info.label.clone().map(|label| pair("label", label)));
        rows.extend(holder.info.trace_id.clone().map(|id| pair("trace_id", id)));
    }
    output::table(&rows)
}

fn as_rows(state: &LockState) -> Vec<Vec<String>> {
    let dash = || "-".to_owned();
    let name = output::cut(output::name(&state.name), NAME_COLUMNS);
    if state.holders.is_empty() {
        let last = state.last_token.map_or_else(dash, |t| t.to_string());
        let what = if state.damage.is_some() {
            "unreadable"
        } else {
            "free"
        };
        let what = what.to_owned();
        return vec![vec![name, last, what, dash(), dash(), dash(), dash()]];
    }
    let row = |holder: &HolderState| {
        vec![
            name.clone(),
            holder.token.to_string(),
            format!("{}:{}", holder.info.host, holder.info.pid),
            output::utc(holder.info.since_unix_us),
            expiry(holder),
            holder.info.label.clone().unwrap_or_else(dash),
            holder.info.trace_id.clone().unwrap_or_else(dash),
        ]
    };
    state.holders.iter().map(row).collect()
}

/// One line of `watch`.
fn as_line(state: &LockState) -> String {
    let now = output::utc(fencelock::clock::unix_micros());
    let last = state
        .last_token
        .map_or("none".to_owned(), |t| t.to_string());
    if state.holders.is_empty() {
        return format!("{now} free last_token={last}");
    }
    let holders: Vec<String> = state
        .holders
        .iter()
        .map(|holder| {
            let label = holder
                .info
                .label
                .as_ref()
                .map_or(String::new(), |label| format!(" label={label:?}"));
            let trace = holder
                .info
                .trace_id
                .as_ref()
                .map_or(String::new(), |id| format!(" trace_id={id}"));
            format!(
                "token={} host={} pid={}{label}{trace}",
                holder.token,
                output::clean(&holder.info.host),
                holder.info.pid
            )
        })
        .collect();
    output::clean(&format!("{now} held {}", holders.join("; "))).into_owned()
}

fn ttl(holder: &HolderState) -> String {
    let ttl = holder.ttl.duration();
    ttl.map_or("none".to_owned(), output::human)
}

fn expiry(holder: &HolderState) -> String {
    holder.expires_in.map_or("never".to_owned(), output::human)
}

fn pair(key: &str, value: String) -> Vec<String> {
    vec![key.to_owned(), value]
}
