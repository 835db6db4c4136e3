//! `fencelock torture`: real processes under real faults, on a store of the user's, and a checker that
//! holds what happened against the promises.
//!
//! All arms run at once: each critical section does its work three times, on values of each arm's own,
//! under the same grant and with the same faults. So the unfenced twin of a run is its control: where
//! it loses nothing, nothing was proved.

mod check;
pub(crate) mod client;
mod dice;
mod finals;
mod history;
pub(crate) mod janitor;
mod own;
mod page;
pub(crate) mod place;
pub(crate) mod plan;
mod proxy;
mod report;
mod route;
pub(crate) mod site;
mod stage;
mod told;
mod value;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use fencelock::Locks;
use fencelock::lease::HolderId;

use self::check::{Finals, Rules, Verdict};
use self::finals::{Ends, finals};
use self::history::Watch;
use self::janitor::Janitor;
use self::own::{Own, OwnKind};
use self::plan::{Arm, ArmChoice, Fault, Lane, Plan};
use self::route::Route;
use self::site::{Server, Site};
use self::stage::{Cut, Played, Stage};
use crate::duration::parse_positive;
use crate::env;
use crate::exit_codes;
use crate::failure::{Failure, Result, say};
use crate::output::{self, human};
use crate::signals::{Signals, exit_code};
use crate::store::StoreUrl;

#[cfg(test)]
pub(crate) use history::fuzz::history as fuzz_history;

/// The longest run: a history is kept in memory.
const DURATION_MAX: Duration = Duration::from_secs(24 * 3600);

/// The TTLs of a run: long enough for an engine, short enough to be outlasted.
const TTL_MIN: Duration = Duration::from_millis(200);
const TTL_MAX: Duration = Duration::from_secs(30);

/// How long a server of our own may take to be ready.
const READY_LIMIT: Duration = Duration::from_secs(30);
const READY_LOOK: Duration = Duration::from_millis(100);

const SECTIONS_DEFAULT: u64 = 20_000;

/// The TTL where nobody says one: object stores add seconds to every lease, so that a shorter one
/// would hardly ever be outlasted.
const TTL_DEFAULT: Duration = Duration::from_secs(1);
const TTL_DEFAULT_OBJECTS: Duration = Duration::from_secs(5);

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

    /// How many locks each workload has: each client works under as many at once
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=256))]
    locks: u32,

    /// How long a lease lasts without renewal; what the engine rounds it up to, where it does
    /// [default: 1s, or 5s where locks are in an object store]
    #[arg(long, value_name = "DUR", value_parser = parse_positive)]
    #[arg(allow_hyphen_values = true)]
    ttl: Option<Duration>,

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

    /// Ends the run as soon as each arm has so many updates acknowledged, and late writes have shown
    /// what each is worth; --duration is the limit then
    #[arg(long, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    updates: Option<u64>,

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
    /// The store's URL as it was given.
    given: Option<String>,
    /// The ceiling of the store's tokens.
    token_max: u64,
    /// True once store and storages could be opened.
    is_open: bool,
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
    let mut plan = plan(given, &args)?;
    let mut signals = Signals::listen()?;
    if own.is_some() && given.is_some() && given != std::env::var(env::STORE).ok().as_deref() {
        return Err(Failure::usage(
            "--own ENGINE is a store by itself; leave --store away, or --own",
        ));
    }
    if let Some(path) = &plan.report {
        // Not after an hour.
        page::probe(path)?;
    }
    let mut scene = Scene::set(given, own, &args.dest)?;
    let faults = args.faults.is_empty().then_some(());
    let played = match choose_faults(&mut plan, &scene, faults.is_none()) {
        Err(failure) => Err(Cut::Failed(failure)),
        Ok(()) => scene.play(&mut plan, &mut signals, json).await,
    };
    let ended = match played {
        Ok((played, finals)) => {
            let rules = Rules {
                arms: &plan.arms,
                lanes: &plan.lanes,
                sets: plan.locks,
                ttl_us: u64::try_from(plan.ttl.as_micros()).unwrap_or(u64::MAX),
                token_max: scene.token_max,
            };
            let verdict = check::check(&played.entries, &finals, &rules);
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
    let cleared = scene.site.clear().await;
    if let Err(left) = &cleared
        // In what was never opened there is nothing.
        && scene.is_open
    {
        say(&left.to_string());
    }
    let (played, verdict, finals) = match ended {
        Ok(ended) => ended,
        Err(Cut::Failed(failure)) => return Err(failure),
        Err(Cut::Signal(signal)) => {
            cleared?;
            say("interrupted; the run has left nothing behind");
            return Ok(exit_code(signal));
        }
    };
    let told = Told {
        plan: &plan,
        store: &store,
        storages: storages.iter().map(String::as_str).collect(),
        outcome: outcome(&plan, &verdict, &finals),
        command: told::command(&plan, own, scene.given.as_deref(), &args.dest),
        played: &played,
        verdict: &verdict,
    };
    if json {
        output::object(&told::as_json(&told))?;
    } else {
        output::line(told::as_text(&told).trim_end())?;
    }
    // What was found is told, whatever becomes of the rest.
    let written = plan
        .report
        .as_deref()
        .map_or(Ok(()), |path| page::write(path, &report::html(&told)));
    let code = match told.outcome {
        Outcome::Held => exit_codes::OK,
        Outcome::Violated => exit_codes::VIOLATED,
        Outcome::ProvedNothing(_) => exit_codes::INDETERMINATE,
    };
    match written.and(cleared) {
        Err(failure) if code == exit_codes::OK => Err(failure),
        Err(failure) => {
            say(&failure.to_string());
            Ok(code)
        }
        Ok(()) => Ok(code),
    }
}

/// Checks what was given, before anything is done.
fn plan(given: Option<&str>, args: &TortureArgs) -> Result<Plan> {
    let objects = ["s3:", "gs:", "az:"];
    let in_objects = given.is_some_and(|url| objects.iter().any(|scheme| url.starts_with(scheme)));
    let ttl = args.ttl.unwrap_or(if in_objects && args.own.is_none() {
        TTL_DEFAULT_OBJECTS
    } else {
        TTL_DEFAULT
    });
    if args.duration > DURATION_MAX {
        return Err(Failure::usage(format!(
            "--duration {} is too long; expected at most 24 hours",
            human(args.duration)
        )));
    }
    if !(TTL_MIN..=TTL_MAX).contains(&ttl) {
        return Err(Failure::usage(format!(
            "--ttl {} is out of range; expected {} to {}, which a pause can outlast",
            human(ttl),
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
        ttl,
        locks: args.locks,
        updates: args.updates,
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
        plan.faults = vec![Fault::Pause, Fault::Kill, Fault::Duplicate, Fault::Forged];
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
        let mut janitor = Janitor::start()?;
        let own = own.map(|kind| Own::start(kind, &mut janitor));
        let own = own.transpose()?;
        let server = own.as_ref().map(|own| Server {
            url: own.url(),
            dir: own.dir(),
        });
        let site = Site::set(given, server.as_ref(), dests, janitor)?;
        let given = match own {
            Some(_) => None,
            None => Some(StoreUrl::resolve(given)?.reveal().to_owned()),
        };
        Ok(Self {
            site,
            own,
            given,
            token_max: u64::MAX,
            is_open: false,
        })
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
        self.is_open = true;
        // Some engines give no shorter lease.
        plan.ttl = plan.ttl.max(locks.profile().ttl_min);
        self.token_max = locks.profile().token_max.get();
        let names = format!("{}/", self.site.mark.as_str());
        if !json {
            let said = format!(
                "seed {}: {} clients with {} locks in each workload for {}, TTL {}, faults {}",
                plan.seed,
                plan.clients,
                plan.locks,
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
        let ends = Ends {
            locks,
            names,
            storages: storages.into_iter().zip(opened).collect(),
            arms: plan.arms.clone(),
            ttl: plan.ttl,
        };
        tokio::select! {
            signal = signals.ending() => Err(Cut::Signal(signal)),
            finals = finals(ends, plan, played.took_us) => Ok((played, finals)),
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

fn outcome(plan: &Plan, verdict: &Verdict, finals: &Finals) -> Outcome {
    if verdict.violations_total > 0 {
        return Outcome::Violated;
    }
    if !plan.arms.contains(&Arm::Raise) {
        return Outcome::ProvedNothing(
            "the raise arm did not run, and only it is to lose nothing; say --arm all",
        );
    }
    if !plan.arms.contains(&Arm::Unfenced) {
        return Outcome::ProvedNothing(
            "the unfenced arm did not run, without which nobody knows whether anything could be lost; say --arm all",
        );
    }
    if verdict.grants == 0 {
        return Outcome::ProvedNothing(
            "nobody was granted a lock; give it more time or a longer --ttl, or fewer --clients or --locks",
        );
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
    if control.is_none_or(|control| control.lost == 0) {
        return Outcome::ProvedNothing(
            "the arm without fencing lost nothing, so the faults were too mild; give it more time, or another --ttl: short, but long beside what the store adds to a lease (3 s in object stores)",
        );
    }
    Outcome::Held
}

fn list<T: ToString>(items: &[T]) -> String {
    let items: Vec<String> = items.iter().map(T::to_string).collect();
    items.join(", ")
}
