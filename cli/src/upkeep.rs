//! `fencelock break`, `prune`, `repair` and `doctor`: for operators. None of them lowers a token.

use std::time::Duration;

use fencelock::lease::{Finding, Severity};
use fencelock::{FencingToken, LockName};
use serde_json::json;

use crate::exit_codes;
use crate::failure::{Failure, Result, say};
use crate::fenced::Destination;
use crate::output;
use crate::show;
use crate::store::StoreUrl;

/// Takes a lock from whoever holds it. The evicted holder is fenced: the next token is larger.
pub(crate) async fn break_lock(store: &StoreUrl, name: &LockName, json: bool) -> Result<u8> {
    let locks = store.open().await?;
    let before = locks.break_lock(name).await?;
    if json {
        let evicted = before.map_or_else(
            || json!({"name": name.as_str(), "capacity": null, "last_token": null, "holders": []}),
            |state| show::as_json(&state),
        );
        output::object(&evicted)?;
        return Ok(exit_codes::OK);
    }
    let last = before.as_ref().and_then(|state| state.last_token);
    let next = last.map_or(String::new(), |last| {
        format!("; the next token is larger than {last}")
    });
    let holders = before.map(|state| state.holders).unwrap_or_default();
    if holders.is_empty() {
        output::line(&format!("nobody held it{next}"))?;
    }
    for holder in holders {
        let label = holder
            .info
            .label
            .map_or(String::new(), |label| format!(" label={label:?}"));
        let line = format!(
            "evicted token={} host={} pid={}{label} since={}{next}",
            holder.token,
            holder.info.host,
            holder.info.pid,
            output::utc(holder.info.since_unix_us)
        );
        output::line(&output::clean(&line))?;
    }
    Ok(exit_codes::OK)
}

/// Removes records of locks that nobody has held for `idle`.
pub(crate) async fn prune(store: &StoreUrl, idle: Duration, json: bool) -> Result<u8> {
    let locks = store.open().await?;
    let pruned = locks.prune(idle).await?;
    if json {
        output::object(&json!({"removed": pruned.removed, "kept": pruned.kept}))?;
    } else {
        output::line(&format!("removed {}, kept {}", pruned.removed, pruned.kept))?;
    }
    Ok(exit_codes::OK)
}

/// Makes the next token of a name larger than `floor`, also where its record is damaged.
pub(crate) async fn repair(
    store: &StoreUrl,
    name: &LockName,
    floor: FencingToken,
    json: bool,
) -> Result<u8> {
    let locks = store.open().await?;
    let last = locks.raise_floor(name, floor, true).await?;
    if json {
        output::object(&json!({"name": name.as_str(), "last_token": output::token(last)}))?;
    } else {
        output::line(&format!("the next token is larger than {last}"))?;
    }
    Ok(exit_codes::OK)
}

/// Probes the store and the destinations. Fails where something is bad.
pub(crate) async fn doctor(store: &StoreUrl, dests: &[String], json: bool) -> Result<u8> {
    let (mut problems, mut warnings) = (0, 0);
    let mut code = exit_codes::OK;
    let mut rows = Vec::new();
    let mut report = |place: &str, findings: Result<Vec<Finding>>| -> Result<()> {
        let findings = findings.unwrap_or_else(|failure| {
            // The first cause is what the exit code tells.
            if code == exit_codes::OK {
                code = failure.code();
            }
            vec![Finding::new(Severity::Bad, "open", failure.to_string())]
        });
        for finding in findings {
            match finding.severity {
                Severity::Good => {}
                Severity::Warning => warnings += 1,
                Severity::Bad => problems += 1,
            }
            let severity = severity(finding.severity);
            if json {
                output::object(&json!({
                    "place": place,
                    "severity": severity,
                    "subject": finding.subject,
                    "detail": finding.detail,
                }))?;
            } else {
                rows.push(vec![
                    severity.to_owned(),
                    finding.subject.to_owned(),
                    finding.detail,
                ]);
            }
        }
        if !json {
            output::line(&output::clean(place))?;
            output::line(output::table(&rows).trim_end())?;
            rows.clear();
        }
        Ok(())
    };
    let probed = match store.open().await {
        Ok(locks) => locks.probe().await.map_err(Failure::from),
        Err(failure) => Err(failure),
    };
    report(&store.to_string(), probed)?;
    for dest in dests {
        let probed = match Destination::open(dest).await {
            Ok(destination) => destination.probe().await,
            Err(failure) => Err(failure),
        };
        report(&fencelock::open::without_secrets(dest), probed)?;
    }
    if json {
        if problems > 0 {
            say(&verdict(problems, warnings));
        }
    } else {
        output::line(&verdict(problems, warnings))?;
    }
    match (code, problems) {
        (exit_codes::OK, 1..) => Ok(exit_codes::CONFIG),
        _ => Ok(code),
    }
}

/// The last line: what has to be done.
fn verdict(problems: u32, warnings: u32) -> String {
    let some = |n: u32, what: &str| match n {
        0 => None,
        1 => Some(format!("1 {what}")),
        n => Some(format!("{n} {what}s")),
    };
    let found = [some(problems, "problem"), some(warnings, "warning")];
    let found: Vec<String> = found.into_iter().flatten().collect();
    if found.is_empty() {
        "all good".to_owned()
    } else {
        found.join(", ")
    }
}

fn severity(severity: Severity) -> &'static str {
    match severity {
        Severity::Good => "good",
        Severity::Warning => "warning",
        Severity::Bad => "bad",
    }
}
