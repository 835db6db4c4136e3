//! How a run is told of, in text and in JSON.

use std::collections::BTreeMap;
use std::time::Duration;

use fencelock::FencingToken;
use serde_json::{Value, json};

use super::own::OwnKind;
use super::place::{join, split};
use super::plan::{Fault, Lane, Plan};
use super::{Outcome, Told, list};
use crate::output::{self, human};

/// Words in the names of URL options that hold secrets. Those options are left out of what is told, and
/// all others are kept, for a run without them would be another.
const SECRET: [&str; 5] = ["pass", "pwd", "secret", "credential", "auth"];

/// The same, as whole names.
const SECRET_NAMES: [&str; 3] = ["token", "user", "cert_key"];

/// A URL without its user part and its secret options.
fn shown(url: &str) -> String {
    let plain = fencelock::open::without_secrets(url);
    let (_, options) = split(url);
    let kept: Vec<(&str, &str)> = options
        .into_iter()
        .filter(|(key, _)| {
            let key = key.to_ascii_lowercase();
            !SECRET.iter().any(|secret| key.contains(secret))
                && !SECRET_NAMES.contains(&key.as_str())
        })
        .collect();
    let url = join(&plain, &kept);
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=%@+".contains(c);
    if url.chars().all(is_plain) {
        url
    } else {
        // A shell takes ? and & for its own.
        format!("'{}'", url.replace('\'', "'\\''"))
    }
}

/// The command that repeats a run, without what may be secret.
pub(super) fn command(
    plan: &Plan,
    own: Option<OwnKind>,
    store: Option<&str>,
    dests: &[String],
) -> String {
    use clap::ValueEnum as _;
    let mut words = vec!["fencelock torture".to_owned()];
    match own.and_then(|own| own.to_possible_value()) {
        Some(own) => words.push(format!("--own {}", own.get_name())),
        None => words.push(format!("--store {}", shown(store.unwrap_or_default()))),
    }
    for dest in dests {
        words.push(format!("--dest {}", shown(dest)));
    }
    let joined = |items: Vec<String>| items.join(",");
    let faults = joined(plan.faults.iter().map(Fault::to_string).collect());
    let lanes = joined(plan.lanes.iter().map(Lane::to_string).collect());
    words.push(format!(
        "--seed {} --duration {} --ttl {} --clients {} --locks {} --faults {faults} --workloads {lanes}",
        plan.seed,
        human(plan.duration).replace(' ', ""),
        human(plan.ttl).replace(' ', ""),
        plan.clients,
        plan.locks
    ));
    if let Some(updates) = plan.updates {
        words.push(format!("--updates {updates}"));
    }
    if let [arm] = plan.arms.as_slice() {
        words.push(format!("--arm {arm}"));
    }
    words.join(" ")
}

fn tokens(tokens: &[u64]) -> Vec<Value> {
    let known = tokens.iter().filter_map(|t| FencingToken::new(*t).ok());
    known.map(output::token).collect()
}

pub(super) fn as_json(told: &Told<'_>) -> Value {
    let (verdict, plan) = (told.verdict, told.plan);
    let faults: BTreeMap<String, u64> = plan
        .faults
        .iter()
        .map(|fault| {
            (
                fault.to_string(),
                told.played.faults.get(fault).copied().unwrap_or(0),
            )
        })
        .collect();
    let arms: BTreeMap<String, Value> = verdict
        .arms
        .iter()
        .map(|(arm, figures)| {
            let figures = json!({
                "acknowledged": figures.acknowledged,
                "lost": figures.lost,
                "lost_percent": figures.lost_percent(),
                "refused": figures.refused,
                "indeterminate": figures.indeterminate,
                "settled": figures.settled,
            });
            (arm.to_string(), figures)
        })
        .collect();
    let violations: Vec<Value> = verdict
        .violations
        .iter()
        .map(|violation| {
            json!({
                "promise": violation.promise,
                "workload": violation.lane.to_string(),
                "arm": violation.arm.map(|arm| arm.to_string()),
                "object": violation.object,
                "evidence": violation.evidence,
                "tokens": tokens(&violation.tokens),
                "at_ms": violation.at_us.map(|t| t / 1_000),
            })
        })
        .collect();
    json!({
        "store": told.store,
        "seed": plan.seed,
        "operations": verdict.operations,
        "grants": verdict.grants,
        "overlaps": verdict.overlaps,
        "faults": faults,
        "arms": arms,
        "violations": violations,
        "violations_total": verdict.violations_total,
        "held": told.outcome == Outcome::Held,
        "proved_nothing": match told.outcome {
            Outcome::ProvedNothing(why) => Some(why),
            _ => None,
        },
        "duration_ms": told.played.took_us / 1_000,
        "ttl_ms": output::millis(plan.ttl),
        "clients": plan.clients,
        "locks": plan.locks,
        "command": told.command,
    })
}

pub(super) fn as_text(told: &Told<'_>) -> String {
    let (verdict, plan) = (told.verdict, told.plan);
    let mut text = format!(
        "{} operations, {} grants, {} of them overtaken while they wrote, in {}\n",
        verdict.operations,
        verdict.grants,
        verdict.overlaps,
        human(Duration::from_millis(told.played.took_us / 1_000))
    );
    let faults: Vec<String> = plan
        .faults
        .iter()
        .map(|fault| {
            format!(
                "{fault} {}",
                told.played.faults.get(fault).copied().unwrap_or(0)
            )
        })
        .collect();
    text.push_str(&format!("faults: {}\n\n", list(&faults)));
    let head = [
        "ARM",
        "ACKNOWLEDGED",
        "LOST",
        "LOST %",
        "REFUSED",
        "UNKNOWN",
        "OF THEM DONE",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for (arm, figures) in &verdict.arms {
        rows.push(vec![
            arm.to_string(),
            figures.acknowledged.to_string(),
            figures.lost.to_string(),
            format!("{:.2}", figures.lost_percent()),
            figures.refused.to_string(),
            figures.indeterminate.to_string(),
            figures.settled.to_string(),
        ]);
    }
    text.push_str(&output::table(&rows));
    text.push('\n');
    for violation in verdict.violations.iter().take(10) {
        let object = violation.object.as_deref().unwrap_or("lock");
        text.push_str(&format!(
            "{} broken in {} ({object}): {}\n",
            violation.promise, violation.lane, violation.evidence
        ));
    }
    if verdict.violations_total > 10 {
        text.push_str(&format!("and {} more\n", verdict.violations_total - 10));
    }
    text.push_str(&match told.outcome {
        Outcome::Held => "held: the raise arm lost nothing, and no promise was broken\n".to_owned(),
        Outcome::Violated => format!("VIOLATED: {} times\n", verdict.violations_total),
        Outcome::ProvedNothing(why) => format!("proved nothing: {why}\n"),
    });
    text.push_str(&format!("again: {}\n", told.command));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_keeps_the_options_of_its_urls_and_none_of_their_secrets() {
        for (url, kept) in [
            ("redis://u:canary@h:1/2", "redis://h:1/2"),
            (
                "redis://h?tokens=counter&password=canary&insecure=true",
                "'redis://h?tokens=counter&insecure=true'",
            ),
            ("nats://h?token=canary&user=canary", "nats://h"),
            ("postgres://h/db?PassWord=canary", "postgres://h/db"),
            (
                "s3://b/p?endpoint=http://h:1",
                "'s3://b/p?endpoint=http://h:1'",
            ),
            ("/it's", "'/it'\\''s'"),
        ] {
            assert_eq!(shown(url), kept);
        }
    }
}
