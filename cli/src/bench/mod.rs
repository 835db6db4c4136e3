//! `fencelock bench`: what a store costs. Absolute figures are the machine's and the moment's; compare
//! rows of one run.
//!
//! It works in a place of its own, as `torture` does, and takes it away.

use std::path::Path;
use std::time::Duration;

use clap::Args;
use fencelock::clock::Clock;
use fencelock::open::without_secrets;
use fencelock::{Fenced, LockName, Locks, ResourceName};
use serde_json::{Value, json};

use crate::duration::parse_positive;
use crate::exit_codes;
use crate::failure::{Failure, Result, say};
use crate::output;
use crate::signals::{Signals, exit_code};
use crate::torture::janitor::Janitor;
use crate::torture::plan::Arm;
use crate::torture::site::Site;

/// The longest time of one row.
const DURATION_MAX: Duration = Duration::from_secs(60);

/// How long the leases of the bench last: it needs none of them renewed.
const TTL: Duration = Duration::from_secs(30);

/// The most that is measured in one row.
const SAMPLES_MAX: usize = 100_000;

/// The value that is written.
const VALUE_BYTES: usize = 1024;

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Where values are written: a directory, or a store URL without a key [default: the store]
    #[arg(long, value_name = "DEST")]
    dest: Option<String>,

    /// How long each row is measured
    #[arg(long, value_name = "DUR", default_value = "2s", value_parser = parse_positive)]
    #[arg(allow_hyphen_values = true)]
    duration: Duration,

    /// How many tasks work at once in the row of many
    #[arg(long, value_name = "N", default_value_t = 16)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    tasks: u32,
}

/// One row: how often something was done in how long, and how long it took each time.
#[derive(Debug, PartialEq, Eq)]
struct Row {
    name: &'static str,
    what: String,
    count: usize,
    took: Duration,
    p50: Duration,
    p99: Duration,
}

/// Measures, and prints a table.
pub(crate) async fn bench(given: Option<&str>, args: BenchArgs, json: bool) -> Result<u8> {
    if args.duration > DURATION_MAX {
        return Err(Failure::usage(format!(
            "--duration {} is too long; expected at most {} for each row",
            output::human(args.duration),
            output::human(DURATION_MAX)
        )));
    }
    let mut signals = Signals::listen()?;
    let dests: Vec<String> = args.dest.clone().into_iter().collect();
    let site = Site::set(given, None, &dests, Janitor::start()?)?;
    let measured = tokio::select! {
        signal = signals.ending() => Err(signal),
        rows = measure(&site, &args) => Ok(rows),
    };
    let (store, dest) = match site.storages.first() {
        Some(storage) => (site.store.shown.clone(), storage.shown.clone()),
        None => (site.store.shown.clone(), String::new()),
    };
    site.clear().await?;
    let rows = match measured {
        Ok(rows) => rows?,
        Err(signal) => {
            say("interrupted; the run has left nothing behind");
            return Ok(exit_code(signal));
        }
    };
    if json {
        output::object(&as_json(&store, &dest, &args, &rows))?;
    } else {
        output::line(as_text(&store, &dest, &rows).trim_end())?;
    }
    Ok(exit_codes::OK)
}

async fn measure(site: &Site, args: &BenchArgs) -> Result<Vec<Row>> {
    let locks = open(&site.store.url).await?;
    // A client of its own, as another process would be.
    let other = open(&site.store.url).await?;
    let Some(place) = site.storages.first() else {
        return Err(Failure::new(
            exit_codes::INDETERMINATE,
            "there is no storage",
        ));
    };
    let name = |what: &str| LockName::new(&format!("{}/{what}", site.mark.as_str()));
    let one = name("one")?;
    let mut rows = vec![pairs(&locks, &one, args.duration).await?];
    let mut many = Vec::new();
    for task in 0..args.tasks {
        many.push(name(&format!("many-{task}"))?);
    }
    rows.push(side_by_side(&locks, many, args.duration).await?);
    rows.push(hand_over([&locks, &other], &name("hand-over")?, args.duration).await?);
    let (storage, _) = fencelock::open::destination(&place.storage.dest).await?;
    let resource = ResourceName::new(&place.storage.name(Arm::Raise, "bench", 0))?;
    rows.extend(values(&locks, &name("values")?, &storage, &resource, args.duration).await?);
    if let Some(path) = place.own_directory() {
        rows.push(plain_file(&path, args.duration)?);
    }
    Ok(rows)
}

async fn open(url: &str) -> Result<Locks> {
    Locks::open(url).await.map_err(|error| {
        let shown = without_secrets(url);
        Failure::opening(&error, url.starts_with("file:")).within(&shown)
    })
}

/// Acquire and release, one after another.
async fn pairs(locks: &Locks, name: &LockName, duration: Duration) -> Result<Row> {
    let mut sampler = Sampler::start(duration);
    while sampler.goes_on() {
        let began = sampler.now();
        locks.acquire(name).ttl(TTL).await?.release().await?;
        sampler.took(began);
    }
    Ok(sampler.row("pairs", "acquire and release, one client"))
}

/// Acquire and release, many at once, each its own lock.
async fn side_by_side(locks: &Locks, names: Vec<LockName>, duration: Duration) -> Result<Row> {
    let what = format!(
        "acquire and release, {} tasks with a lock each",
        names.len()
    );
    let began = Sampler::start(duration);
    let tasks: Vec<_> = names
        .into_iter()
        .map(|name| {
            let locks = locks.clone();
            tokio::spawn(async move {
                let mut sampler = Sampler::start(duration);
                while sampler.goes_on() {
                    let began = sampler.now();
                    locks.acquire(&name).ttl(TTL).await?.release().await?;
                    sampler.took(began);
                }
                Ok::<_, fencelock::Error>(sampler.samples)
            })
        })
        .collect();
    let mut all = began;
    for task in tasks {
        let samples = task
            .await
            .map_err(|e| Failure::system("a task", std::io::Error::other(e)))??;
        all.samples.extend(samples);
    }
    Ok(all.row("pairs-many", &what))
}

/// From the beginning of a release to the grant of whoever waits for it.
async fn hand_over(clients: [&Locks; 2], name: &LockName, duration: Duration) -> Result<Row> {
    let mut sampler = Sampler::start(duration);
    let [mut holder, mut waiter] = clients;
    let mut guard = holder.acquire(name).ttl(TTL).await?;
    while sampler.goes_on() {
        let waiting = waiter.clone();
        let wanted = name.clone();
        let task = tokio::spawn(async move { waiting.acquire(&wanted).ttl(TTL).await });
        // Until it certainly waits: a queue is not seen from outside.
        tokio::time::sleep(SETTLE).await;
        let began = sampler.now();
        guard.release().await?;
        guard = task
            .await
            .map_err(|e| Failure::system("a task", std::io::Error::other(e)))??;
        sampler.took(began);
        std::mem::swap(&mut holder, &mut waiter);
    }
    guard.release().await?;
    Ok(sampler.row(
        "hand-over",
        "from a release to the waiter's grant, two clients",
    ))
}

/// How long a waiter may take to wait.
const SETTLE: Duration = Duration::from_millis(20);

/// Reads, raises and fenced writes of one value.
async fn values(
    locks: &Locks,
    name: &LockName,
    storage: &Fenced,
    resource: &ResourceName,
    duration: Duration,
) -> Result<Vec<Row>> {
    let guard = locks.acquire(name).ttl(TTL).await?;
    let value = vec![b'x'; VALUE_BYTES];
    let mut puts = Sampler::start(duration);
    while puts.goes_on() {
        let began = puts.now();
        storage.put(resource, value.clone(), &guard).await?;
        puts.took(began);
    }
    let mut raises = Sampler::start(duration);
    while raises.goes_on() {
        let began = raises.now();
        drained(storage.raise(resource, &guard).await?)?;
        raises.took(began);
    }
    let mut gets = Sampler::start(duration);
    while gets.goes_on() {
        let began = gets.now();
        drained(storage.get(resource).await?)?;
        gets.took(began);
    }
    guard.release().await?;
    Ok(vec![
        puts.row("put", "a fenced write of 1 KiB"),
        raises.row("raise", "a raise, which reads it"),
        gets.row("get", "a read that shows no token"),
    ])
}

fn drained(snapshot: fencelock::fence::Snapshot) -> Result<()> {
    if let Some(body) = snapshot.value {
        body.into_bytes(1 << 20)?;
    }
    Ok(())
}

/// What a careful program without fencing does: a new file, synced and renamed.
fn plain_file(dir: &Path, duration: Duration) -> Result<Row> {
    use std::io::Write as _;
    let (new, file) = (dir.join("plain.new"), dir.join("plain"));
    let value = vec![b'x'; VALUE_BYTES];
    let write = || {
        let mut out = std::fs::File::create(&new)?;
        out.write_all(&value)?;
        out.sync_data()?;
        std::fs::rename(&new, &file)?;
        std::fs::File::open(dir)?.sync_all()
    };
    let mut sampler = Sampler::start(duration);
    while sampler.goes_on() {
        let began = sampler.now();
        write().map_err(|e| Failure::system(&file.display().to_string(), e))?;
        sampler.took(began);
    }
    Ok(sampler.row(
        "plain-file",
        "the same written plainly: synced, renamed, directory synced",
    ))
}

/// Measures one row.
struct Sampler {
    clock: Clock,
    began: fencelock::clock::Tick,
    duration: Duration,
    samples: Vec<Duration>,
}

impl Sampler {
    fn start(duration: Duration) -> Self {
        let clock = Clock::system();
        Self {
            began: clock.now(),
            clock,
            duration,
            samples: Vec::new(),
        }
    }

    fn now(&self) -> fencelock::clock::Tick {
        self.clock.now()
    }

    /// At least once, and until the time is over.
    fn goes_on(&self) -> bool {
        self.samples.is_empty()
            || (self.now().since(self.began) < self.duration && self.samples.len() < SAMPLES_MAX)
    }

    fn took(&mut self, began: fencelock::clock::Tick) {
        self.samples.push(self.now().since(began));
    }

    fn row(mut self, name: &'static str, what: &str) -> Row {
        self.samples.sort_unstable();
        let at = |percent: usize| {
            let last = self.samples.len().saturating_sub(1);
            self.samples
                .get(last * percent / 100)
                .copied()
                .unwrap_or_default()
        };
        Row {
            name,
            what: what.to_owned(),
            count: self.samples.len(),
            took: self.now().since(self.began),
            p50: at(50),
            p99: at(99),
        }
    }
}

impl Row {
    /// How often in a second.
    fn rate(&self) -> u64 {
        let count = u128::try_from(self.count).unwrap_or(0);
        let rate = (count * 1_000_000).checked_div(self.took.as_micros());
        u64::try_from(rate.unwrap_or(0)).unwrap_or(u64::MAX)
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn as_json(store: &str, dest: &str, args: &BenchArgs, rows: &[Row]) -> Value {
    let rows: Vec<Value> = rows
        .iter()
        .map(|row| {
            json!({
                "name": row.name,
                "what": row.what,
                "count": row.count,
                "per_second": row.rate(),
                "p50_us": micros(row.p50),
                "p99_us": micros(row.p99),
            })
        })
        .collect();
    json!({"store": store, "dest": dest, "tasks": args.tasks, "rows": rows})
}

fn as_text(store: &str, dest: &str, rows: &[Row]) -> String {
    let head = ["", "A SECOND", "P50 US", "P99 US"].map(str::to_owned);
    let mut table = vec![head.to_vec()];
    for row in rows {
        table.push(vec![
            row.what.clone(),
            row.rate().to_string(),
            micros(row.p50).to_string(),
            micros(row.p99).to_string(),
        ]);
    }
    // The hand-over's rate is that of the measuring.
    if let Some(row) = table.get_mut(3).and_then(|row| row.get_mut(1)) {
        "-".clone_into(row);
    }
    format!(
        "locks in {store}, values in {dest}\n\n{}\nCompare rows of one run: absolute figures are the machine's and the moment's.\n",
        output::table(&table)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_its_rate_and_its_quantiles() {
        let mut sampler = Sampler::start(Duration::from_secs(1));
        sampler.samples = (1..=100).rev().map(Duration::from_micros).collect();
        let mut row = sampler.row("x", "y");
        assert_eq!(
            (row.p50, row.p99),
            (Duration::from_micros(50), Duration::from_micros(99))
        );
        row.took = Duration::from_millis(500);
        assert_eq!(row.rate(), 200);
        let none = Sampler::start(Duration::ZERO).row("x", "y");
        assert_eq!((none.count, none.p99), (0, Duration::ZERO));
    }
}
