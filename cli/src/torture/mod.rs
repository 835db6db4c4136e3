//! `fencelock torture`: real processes under real faults, on a store of the user's, and a checker that
//! holds what happened against the promises.
//!
//! All arms run at once: each critical section does its work three times, on values of each arm's own,
//! under the same grant and with the same faults. So the unfenced twin of a run is its control: where
//! it loses nothing, nothing was proved.

mod check;
pub(crate) mod client;
mod dice;
mod history;
pub(crate) mod janitor;
mod own;
pub(crate) mod place;
pub(crate) mod plan;
mod proxy;
mod report;
mod route;
pub(crate) mod site;
mod stage;
mod value;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fencelock::lease::HolderId;
use fencelock::{Fenced, FencingToken, Locks};
use serde_json::{Value, json};

use self::check::{Finals, Verdict};
use self::history::Watch;
use self::own::{Own, OwnKind};
use self::plan::{Arm, ArmChoice, Fault, Lane, Plan, Storage};
use self::route::Route;
use self::site::{Server, Site};
use self::stage::{Cut, Played, Stage};
use crate::duration::parse_positive;
use crate::exit_codes;
use crate::failure::{Failure, Result, say};
use crate::output::{self, human};
use crate::signals::{Signals, exit_code};
use crate::store::StoreUrl;

/// The longest run: a history is kept in memory.
const DURATION_MAX: Duration = Duration::from_secs(24 * 3600);

/// The TTLs of a run: long enough for an engine, short enough to be outlasted.
const TTL_MIN: Duration = Duration::from_millis(200);
const TTL_MAX: Duration = Duration::from_secs(30);

/// How long a server of our own may take to be ready.
const READY_LIMIT: Duration = Duration::from_secs(30);
const READY_LOOK: Duration = Duration::from_millis(100);

/// How long the lock of a workload may take to be had when the run is over, beyond its TTL.
const FINAL_WAIT: Duration = Duration::from_secs(15);

const SECTIONS_DEFAULT: u64 = 10_000;

#[derive(Debug, Args)]
pub(crate) struct TortureArgs {
    /// Where the values go: a directory, or a store URL without a key; a second one is for the
    /// workload over two storages [default: the store, and files]
    #[arg(long, value_name = "DEST")]
    dest: Vec<String>,

    /// How many client processes contend
    #[arg(long, value_name = "N", default_value_t = 6)]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=64))]
    clients: u32,

    /// How long the clients work
    #[arg(long, value_name = "DUR", default_value = "30s", value_parser = parse_positive)]
    #[arg(allow_hyphen_values = true)]
    duration: Duration,

    /// How long a lease lasts without renewal; what the engine rounds it up to, where it does
    #[arg(long, value_name = "DUR", default_value = "1s", value_parser = parse_positive)]
    #[arg(allow_hyphen_values = true)]
    ttl: Duration,

    /// Repeats the faults of another run; the interleaving is the machine's
    #[arg(long, value_name = "N")]
    seed: Option<u64>,

    /// How the clients write
    #[arg(long, value_name = "ARM", value_enum, default_value = "all")]
    arm: ArmChoice,

    /// What goes wrong, separated by commas [default: all that is possible here]
    #[arg(long, value_name = "FAULT", value_enum, value_delimiter = ',')]
    faults: Vec<Fault>,

    /// What the clients do, separated by commas [default: all]
    #[arg(long, value_name = "WORKLOAD", value_enum, value_delimiter = ',')]
    workloads: Vec<Lane>,

    /// How many critical sections all clients enter together at the most
    #[arg(long, value_name = "N", default_value_t = SECTIONS_DEFAULT)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    sections: u64,

    /// Start a private server instead of using --store, so that it can be paused and killed too
    #[arg(long, value_name = "ENGINE", value_enum)]
    own: Option<OwnKind>,

    /// Write the report to this HTML file
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

/// All that a run has at hand.
struct Scene {
    site: Site,
    own: Option<Own>,
}

/// How a run ended, for all who tell of it.
pub(crate) struct Told<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) store: &'a str,
    pub(crate) storages: Vec<&'a str>,
    pub(crate) played: &'a Played,
    pub(crate) verdict: &'a Verdict,
    pub(crate) outcome: Outcome,
    /// The command that repeats it.
    pub(crate) command: String,
}

/// What a run has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Held,
    Violated,
    ProvedNothing(&'static str),
}

/// Runs it, and fails where a promise was broken or nothing was proved.
pub(crate) async fn torture(given: Option<&str>, args: TortureArgs, json: bool) -> Result<u8> {
    let own = args.own;
    let mut plan = plan(&args)?;
    let mut signals = Signals::listen()?;
    if let Some(report) = &plan.report {
        // Not after an hour.
        std::fs::write(report, "").map_err(|e| cannot_report(report, &e))?;
    }
    let mut scene = Scene::set(given, own, &args.dest)?;
    let faults = args.faults.is_empty().then_some(());
    let played = match choose_faults(&mut plan, &scene, faults.is_none()) {
        Err(failure) => Err(Cut::Failed(failure)),
        Ok(()) => scene.play(&mut plan, &mut signals, json).await,
    };
    let ended = match played {
        Ok((played, finals)) => {
            let verdict = check::check(&played.entries, &finals, &plan.arms, &plan.lanes);
            Ok((played, verdict, finals))
        }
        Err(cut) => Err(cut),
    };
    let store = scene.site.store.shown.clone();
    let storages = scene.site.storages.iter().map(|place| place.shown.clone());
    let storages: Vec<String> = storages.collect();
    // The server first: what is in it needs no care.
    drop(scene.own);
    scene.site.janitor.server(None);
    scene.site.clear().await?;
    let (played, verdict, finals) = match ended {
        Ok(ended) => ended,
        Err(Cut::Failed(failure)) => return Err(failure),
        Err(Cut::Signal(signal)) => {
            say("interrupted; the run has left nothing behind");
            return Ok(exit_code(signal));
        }
    };
    let told = Told {
        plan: &plan,
        store: &store,
        storages: storages.iter().map(String::as_str).collect(),
        outcome: outcome(&plan, &verdict, &finals),
        command: command(&plan, own, &store, &args.dest),
        played: &played,
        verdict: &verdict,
    };
    if let Some(report) = &plan.report {
        std::fs::write(report, report::html(&told)).map_err(|e| cannot_report(report, &e))?;
    }
    if json {
        output::object(&as_json(&told))?;
    } else {
        output::line(as_text(&told).trim_end())?;
    }
    Ok(match told.outcome {
        Outcome::Held => exit_codes::OK,
        Outcome::Violated => exit_codes::VIOLATED,
        Outcome::ProvedNothing(_) => exit_codes::INDETERMINATE,
    })
}

fn cannot_report(path: &std::path::Path, error: &std::io::Error) -> Failure {
    Failure::usage(format!(
        "the report cannot be written to {}: {error}",
        path.display()
    ))
}

/// Checks what was given, before anything is done.
fn plan(args: &TortureArgs) -> Result<Plan> {
    if args.duration > DURATION_MAX {
        return Err(Failure::usage(format!(
            "--duration {} is too long; expected at most 24 hours",
            human(args.duration)
        )));
    }
    if !(TTL_MIN..=TTL_MAX).contains(&args.ttl) {
        return Err(Failure::usage(format!(
            "--ttl {} is out of range; expected {} to {}, which a pause can outlast",
            human(args.ttl),
            human(TTL_MIN),
            human(TTL_MAX)
        )));
    }
    if args.dest.len() > 2 {
        return Err(Failure::usage(format!(
            "--dest is given {} times; expected at most two storages",
            args.dest.len()
        )));
    }
    let mut lanes = args.workloads.clone();
    if lanes.is_empty() {
        lanes = vec![Lane::Counter, Lane::List, Lane::Bank, Lane::Pair];
    }
    lanes.sort_unstable();
    lanes.dedup();
    let mut faults = args.faults.clone();
    faults.sort_unstable();
    faults.dedup();
    Ok(Plan {
        arms: args.arm.arms(),
        lanes,
        faults,
        clients: args.clients,
        duration: args.duration,
        ttl: args.ttl,
        sections: args.sections,
        seed: args.seed.unwrap_or_else(drawn_seed),
        report: args.report.clone(),
    })
}

/// A seed that is short enough to be typed.
fn drawn_seed() -> u64 {
    let drawn: String = HolderId::random().reveal().chars().take(8).collect();
    u64::from_str_radix(&drawn, 16).unwrap_or(0)
}

/// All faults that are possible here, or a refusal of one that was asked for and is not.
fn choose_faults(plan: &mut Plan, scene: &Scene, is_asked: bool) -> Result<()> {
    let site = &scene.site;
    let has_route = !Route::of(&site.store.url, &site.storages())
        .servers()
        .is_empty();
    let has_own = scene.own.is_some();
    if !is_asked {
        plan.faults = vec![Fault::Pause, Fault::Kill, Fault::Duplicate];
        if has_route {
            plan.faults
                .extend([Fault::Drop, Fault::Delay, Fault::Swallow]);
        }
        if has_own {
            plan.faults.extend([Fault::ServerPause, Fault::ServerKill]);
        }
        return Ok(());
    }
    for fault in &plan.faults {
        if fault.is_of_the_network() && !has_route {
            return Err(Failure::usage(format!(
                "--faults {fault} needs a server that a proxy can stand in front of: one host, on this host or with insecure=true, without TLS; {} is none",
                site.store.shown
            )));
        }
        if fault.is_of_the_server() && !has_own {
            return Err(Failure::usage(format!(
                "--faults {fault} is only for a server that torture started itself; add --own ENGINE"
            )));
        }
    }
    Ok(())
}

impl Scene {
    fn set(given: Option<&str>, own: Option<OwnKind>, dests: &[String]) -> Result<Self> {
        let own = own.map(Own::start).transpose()?;
        let server = own.as_ref().map(|own| Server {
            url: own.url(),
            dir: own.dir(),
        });
        let mut site = Site::set(given, server.as_ref(), dests)?;
        site.janitor.server(own.as_ref().and_then(Own::pid));
        Ok(Self { site, own })
    }

    /// The run, and the values at its end.
    async fn play(
        &mut self,
        plan: &mut Plan,
        signals: &mut Signals,
        json: bool,
    ) -> Result<(Played, Finals), Cut> {
        let locks = tokio::select! {
            signal = signals.ending() => return Err(Cut::Signal(signal)),
            locks = self.ready() => locks?,
        };
        let storages = self.site.storages();
        let mut opened = Vec::new();
        for place in &self.site.storages {
            let opening = fencelock::open::destination(&place.storage.dest).await;
            let in_files = place.url.starts_with("file:");
            let (fenced, _) =
                opening.map_err(|e| Failure::opening(&e, in_files).within(&place.shown))?;
            opened.push(fenced);
        }
        // Some engines give no shorter lease.
        plan.ttl = plan.ttl.max(locks.profile().ttl_min);
        let names = format!("{}/", self.site.mark.as_str());
        if !json {
            let said = format!(
                "seed {}: {} clients for {}, TTL {}, faults {}",
                plan.seed,
                plan.clients,
                human(plan.duration),
                human(plan.ttl),
                list(&plan.faults)
            );
            output::line(&said).map_err(Failure::from)?;
        }
        let stage = Stage {
            plan,
            watch: Watch::start(),
            store: self.site.store.url.clone(),
            locks: names.clone(),
            storages: storages.clone(),
            own: self.own.as_mut().map(|own| (own, &mut self.site.janitor)),
        };
        let played = stage.play(signals).await?;
        tokio::select! {
            signal = signals.ending() => Err(Cut::Signal(signal)),
            finals = finals(plan, &locks, &names, &storages, &opened) => Ok((played, finals)),
        }
    }

    /// The store, once it answers.
    async fn ready(&self) -> Result<Locks> {
        let url = StoreUrl::resolve(Some(&self.site.store.url))?;
        let Some(own) = &self.own else {
            return url.open().await;
        };
        let clock = fencelock::clock::Clock::system();
        let started = clock.now();
        loop {
            match Locks::open(url.reveal()).await {
                Ok(locks) => return Ok(locks),
                Err(error) if clock.now().since(started) > READY_LIMIT => {
                    let log = format!("the server is not ready; it logged: {}", own.log());
                    return Err(Failure::from(error).within(&log));
                }
                Err(_) => tokio::time::sleep(READY_LOOK).await,
            }
        }
    }
}

/// The values when all is over, each workload's read under its lock: whatever was on its way is settled.
async fn finals(
    plan: &Plan,
    locks: &Locks,
    names: &str,
    storages: &[Storage],
    opened: &[Fenced],
) -> Finals {
    let mut finals: Finals = BTreeMap::new();
    for lane in &plan.lanes {
        let name = format!("{names}{lane}");
        let wait = plan.ttl * 2 + FINAL_WAIT;
        let guard = locks
            .acquire(&name)
            .ttl(plan.ttl.max(FINAL_WAIT))
            .wait(wait)
            .await;
        let guard = match guard {
            Ok(guard) => Some(guard),
            Err(error) => {
                say(&format!(
                    "the lock of the workload {lane} is not to be had at the end: {error}"
                ));
                None
            }
        };
        for arm in &plan.arms {
            for (object, storage) in lane.objects() {
                let (Some(place), Some(fenced)) = (storages.get(*storage), opened.get(*storage))
                else {
                    continue;
                };
                let read = read(fenced, &place.name(*arm, object), *arm, guard.as_ref()).await;
                let value = match read {
                    Ok(value) => Some(value),
                    Err(error) => {
                        say(&format!(
                            "{arm} {object} cannot be read at the end: {error}"
                        ));
                        None
                    }
                };
                finals.insert((*arm, *object), value);
            }
        }
        if let Some(guard) = guard {
            // It is about to be taken away.
            let _ = guard.release().await;
        }
    }
    finals
}

async fn read(
    fenced: &Fenced,
    name: &str,
    arm: Arm,
    guard: Option<&fencelock::LockGuard>,
) -> fencelock::Result<Vec<u8>> {
    let snapshot = match guard {
        Some(guard) if arm == Arm::Raise => fenced.raise(name, guard).await?,
        _ => fenced.get(name).await?,
    };
    match snapshot.value {
        Some(body) => Ok(body.into_bytes(client::VALUE_MAX_BYTES)?.to_vec()),
        None => Ok(Vec::new()),
    }
}

fn outcome(plan: &Plan, verdict: &Verdict, finals: &Finals) -> Outcome {
    if verdict.violations_total > 0 {
        return Outcome::Violated;
    }
    if finals.values().any(Option::is_none) {
        return Outcome::ProvedNothing("a value could not be read at the end");
    }
    if verdict.overlaps == 0 {
        return Outcome::ProvedNothing(
            "no holder went on to write after another had been granted the lock; give it more time, or another --ttl: short, but long beside what the store adds to a lease (3 s in object stores)",
        );
    }
    let worked = |arm: &&Arm| verdict.arms.get(arm).is_some_and(|f| f.acknowledged > 0);
    if !plan.arms.iter().all(|arm| worked(&arm)) {
        return Outcome::ProvedNothing("an arm got nothing done: no write of its was acknowledged");
    }
    let control = verdict.arms.get(&Arm::Unfenced);
    if plan.arms.contains(&Arm::Unfenced) && control.is_none_or(|control| control.lost == 0) {
        return Outcome::ProvedNothing(
            "the arm without fencing lost nothing, so the faults were too mild; give it more time, or another --ttl: short, but long beside what the store adds to a lease (3 s in object stores)",
        );
    }
    Outcome::Held
}

/// The command that repeats a run, without what may be secret.
fn command(plan: &Plan, own: Option<OwnKind>, store: &str, dests: &[String]) -> String {
    use clap::ValueEnum as _;
    let mut words = vec!["fencelock torture".to_owned()];
    match own.and_then(|own| own.to_possible_value()) {
        Some(own) => words.push(format!("--own {}", own.get_name())),
        None => words.push(format!("--store {store}")),
    }
    for dest in dests {
        words.push(format!("--dest {}", fencelock::open::without_secrets(dest)));
    }
    let joined = |items: Vec<String>| items.join(",");
    let faults = joined(plan.faults.iter().map(Fault::to_string).collect());
    let lanes = joined(plan.lanes.iter().map(Lane::to_string).collect());
    words.push(format!(
        "--seed {} --duration {} --ttl {} --clients {} --faults {faults} --workloads {lanes}",
        plan.seed,
        human(plan.duration).replace(' ', ""),
        human(plan.ttl).replace(' ', ""),
        plan.clients
    ));
    if let [arm] = plan.arms.as_slice() {
        words.push(format!("--arm {arm}"));
    }
    words.join(" ")
}

fn list<T: ToString>(items: &[T]) -> String {
    let items: Vec<String> = items.iter().map(T::to_string).collect();
    items.join(", ")
}

fn tokens(tokens: &[u64]) -> Vec<Value> {
    let known = tokens.iter().filter_map(|t| FencingToken::new(*t).ok());
    known.map(output::token).collect()
}

fn as_json(told: &Told<'_>) -> Value {
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
        "command": told.command,
    })
}

fn as_text(told: &Told<'_>) -> String {
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
