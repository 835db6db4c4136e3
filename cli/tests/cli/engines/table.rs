//! The table of what each engine gives, in `docs/backends/README.md`: measured here, engine by
//! engine, and compared with the page. `FENCELOCK_BLESS=1`, with one test thread, writes it anew.

use std::path::Path;
use std::time::{Duration, Instant};

use fencelock::lease::{
    AcquireRequest, Attempt, Durability, Expiry, Grant, LeaseRef, Renewal, StoreProfile,
    TokenSource,
};
use fencelock::{LeaseStore, Locks, Ttl};
use fencelock_testbed::proxy::Proxy;
use rustix::process::Signal;

use super::engine::{Engine, Served};
use crate::bench::{Bench, Running, now, within};

/// How soon a waiter that is told of a release has the lock, on a busy machine.
const WOKEN: Duration = Duration::from_secs(1);

/// For engines whose store is a server: with what goes over the wire.
pub(super) fn the_table_is_what_was_measured<E: Served>() {
    let engine = E::start();
    let proxy = Proxy::start(([127, 0, 0, 1], engine.port()).into());
    let url = engine.url_at(proxy.address());
    compare(&row::<E>(&engine, |runtime| {
        Trips::count(runtime, &url, &proxy).to_string()
    }));
}

/// For engines without a network.
pub(super) fn the_table_of_a_local_store_is_what_was_measured<E: Engine>() {
    compare(&row::<E>(&E::start(), |_| "none".to_owned()));
}

fn row<E: Engine>(
    engine: &E,
    trips: impl FnOnce(&tokio::runtime::Runtime) -> String,
) -> [String; 10] {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let locks = runtime.block_on(Locks::open(&engine.url())).unwrap();
    let store = &**locks.store();
    let profile = store.profile().clone();
    let least = runtime.block_on(shortest_ttl(store));
    [
        profile.kind.to_owned(),
        runtime.block_on(tokens(store)).to_owned(),
        expiry(&profile).to_owned(),
        runtime.block_on(after_the_lapse(store, least)).to_owned(),
        killed(engine, &profile).to_owned(),
        runtime.block_on(waiting(&locks)).to_owned(),
        trips(&runtime),
        format!("{least:?}"),
        runtime.block_on(permits(store)).to_owned(),
        durability(&profile).to_owned(),
    ]
}

/// What three grants in a row have for tokens, which has to be what the profile says.
async fn tokens(store: &dyn LeaseStore) -> &'static str {
    let mut all = Vec::new();
    for _ in 0..3 {
        let request = request("tokens");
        let grant = take(store, &request).await;
        all.push(grant.token.get());
        give(store, &request, &grant).await;
    }
    let steps: Vec<u64> = all.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let said = store.profile().tokens;
    match (said, all[0]) {
        (TokenSource::Counter, 0..1_000_000) if steps == [1, 1] => "a counter",
        // Microseconds since 1970, in this century.
        (TokenSource::Clock, 1_700_000_000_000_000..) => "the store's clock, or the last plus one",
        (TokenSource::Revision, 0..1_000_000) if steps.iter().all(|step| *step > 0) => {
            "the store's revision of the grant"
        }
        _ => panic!("{said:?} does not give {all:?}"),
    }
}

fn expiry(profile: &StoreProfile) -> &'static str {
    match profile.expiry {
        Expiry::Engine => "the store's clock",
        Expiry::Host => "the host's clock, through suspends",
        Expiry::Observation => "each waiter's own clock",
    }
}

fn durability(profile: &StoreProfile) -> &'static str {
    match profile.durability {
        Durability::D0Memory => "D0",
        Durability::D1ProcessCrash => "D1, a crash of the server",
        Durability::D2PowerLoss => "D2, power loss",
        Durability::D3Failover => "D3, the loss of a server",
    }
}

async fn shortest_ttl(store: &dyn LeaseStore) -> Duration {
    let mut short = request("short");
    short.ttl = Ttl::new(Ttl::MIN).unwrap();
    let grant = take(store, &short).await;
    let given = grant.ttl.duration().unwrap();
    assert_eq!(given, store.profile().ttl_min.max(Ttl::MIN));
    given
}

/// Whether one try after the lapse is enough.
async fn after_the_lapse(store: &dyn LeaseStore, least: Duration) -> &'static str {
    let mut first = request("lapse");
    first.ttl = Ttl::new(least).unwrap();
    take(store, &first).await;
    // What an engine may add to a lease.
    let margin = Duration::from_secs(4);
    tokio::time::sleep(least + margin).await;
    match store.acquire(&request("lapse")).await.unwrap() {
        Attempt::Granted(_) => "one try",
        Attempt::Held(_) => "after watching for a TTL",
    }
}

/// What a lock whose holder was killed waits for.
fn killed<E: Engine>(engine: &E, profile: &StoreProfile) -> &'static str {
    if !profile.sees_dead_holders {
        return "at its TTL";
    }
    let bench = Bench::on(&engine.url());
    let flags = ["--ttl", "10m"];
    let mut holder = Running::start(&mut bench.run_sh("killed", &flags, "echo; sleep 1000"));
    holder.line();
    holder.signal(Signal::KILL);
    within(Duration::from_secs(5), "it is free", || {
        !bench.is_held("killed")
    });
    "at once"
}

/// Whether a waiter is told of a release.
async fn waiting(locks: &Locks) -> &'static str {
    let store = &**locks.store();
    let woken = store.profile().wakes_waiters;
    for _ in 0..3 {
        let held = request("waiting");
        let grant = take(store, &held).await;
        let waiter = locks.acquire("waiting").wait(Duration::from_secs(60));
        let release = async {
            // The waiter has asked by then, and waits.
            tokio::time::sleep(Duration::from_millis(500)).await;
            give(store, &held, &grant).await;
            now()
        };
        let (guard, released): (_, Instant) = tokio::join!(waiter.into_future(), release);
        let took = released.elapsed();
        guard.unwrap().release().await.unwrap();
        assert!(!woken || took < WOKEN, "a waiter was told after {took:?}");
    }
    if woken { "told" } else { "polls" }
}

async fn permits(store: &dyn LeaseStore) -> &'static str {
    let mut answers = Vec::new();
    for _ in 0..3 {
        let mut request = request("permits");
        request.permits = 2;
        answers.push(matches!(
            store.acquire(&request).await,
            Ok(Attempt::Granted(_))
        ));
    }
    match answers[..] {
        [true, true, false] => "yes",
        [true, false, false] => "no",
        _ => panic!("two permits granted {answers:?}"),
    }
}

/// How many times one after the other the network is crossed both ways, which a slow network shows.
struct Trips {
    first: u128,
    again: u128,
    renewal: u128,
    release: u128,
}

/// What a slow network takes in each direction: far more than a server needs for an answer.
const DELAY: Duration = Duration::from_millis(75);

impl Trips {
    fn count(runtime: &tokio::runtime::Runtime, url: &str, proxy: &Proxy) -> Self {
        runtime.block_on(async {
            let locks = Locks::open(url).await.unwrap();
            let store = &**locks.store();
            // Connections are made, and scripts and statements are known.
            pair(store, "warm").await;
            proxy.delay(DELAY);
            let mut all = Vec::new();
            for round in 0..3 {
                let name = format!("trips-{round}");
                let [first, renewal, release] = pair(store, &name).await;
                let [again, ..] = pair(store, &name).await;
                all.push([first, again, renewal, release]);
            }
            proxy.delay(Duration::ZERO);
            // A busy machine only adds: the least is meant.
            let least = |i: usize| all.iter().map(|trips| trips[i]).min().unwrap();
            Self {
                first: least(0),
                again: least(1),
                renewal: least(2),
                release: least(3),
            }
        })
    }
}

impl std::fmt::Display for Trips {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            first,
            again,
            renewal,
            release,
        } = self;
        if first == again {
            write!(f, "{first}, {renewal}, {release}")
        } else {
            write!(f, "{first} ({again} again), {renewal}, {release}")
        }
    }
}

/// The trips of an acquire, a renewal and a release.
async fn pair(store: &dyn LeaseStore, name: &str) -> [u128; 3] {
    let request = request(name);
    let trips = |since: Instant| since.elapsed().as_millis() / (2 * DELAY).as_millis();
    let started = now();
    let grant = take(store, &request).await;
    let acquire = trips(started);
    let started = now();
    let answers = store.renew(&[(lease(&request, &grant), request.ttl)]).await;
    let renewal = trips(started);
    assert!(matches!(answers[..], [Renewal::Renewed]), "{answers:?}");
    let started = now();
    give(store, &request, &grant).await;
    [acquire, renewal, trips(started)]
}

fn request(name: &str) -> AcquireRequest {
    AcquireRequest::new(
        name.parse().unwrap(),
        Ttl::new(Duration::from_secs(600)).unwrap(),
    )
}

fn lease(request: &AcquireRequest, grant: &Grant) -> LeaseRef {
    LeaseRef {
        name: request.name.clone(),
        holder: request.holder,
        token: Some(grant.token),
    }
}

async fn take(store: &dyn LeaseStore, request: &AcquireRequest) -> Grant {
    match store.acquire(request).await.unwrap() {
        Attempt::Granted(grant) => grant,
        Attempt::Held(by) => panic!("held by {by:?}"),
    }
}

async fn give(store: &dyn LeaseStore, request: &AcquireRequest, grant: &Grant) {
    let lease = lease(request, grant);
    store.release(&lease, Duration::ZERO).await.unwrap();
}

/// Compares a row with the page, or writes it.
fn compare(cells: &[String; 10]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/backends/README.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let kind = &cells[0];
    let start = format!("| [{kind}]({kind}.md) |");
    let measured = format!("{start} {} |", cells[1..].join(" | "));
    let written = page.lines().find(|line| line.starts_with(&start));
    if written == Some(&measured) {
        return;
    }
    if std::env::var_os("FENCELOCK_BLESS").is_none() {
        panic!("docs/backends/README.md says\n{written:?}, and measured was\n{measured}");
    }
    let written = written.unwrap_or_else(|| panic!("no row begins with {start}"));
    std::fs::write(&path, page.replace(written, &measured)).unwrap();
}
