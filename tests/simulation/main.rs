//! The core under seeded schedules: several processes over one memory store and its fenced values, a
//! network that goes wrong, pauses past the TTL, clocks that differ, and futures that are dropped.
//!
//! One seed is one history. A schedule that breaks a promise is printed with the command that repeats
//! it. `FENCELOCK_SCHEDULES=N` runs so many, `FENCELOCK_SEED=N` the one of that seed.

#![expect(
    clippy::as_conversions,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a test that cannot go on has to fail, its helpers included"
)]

mod actor;
mod link;
mod oracle;
mod world;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fencelock::clock::Clock;
use fencelock::fence::{Domain, Fence, HolderTag};
use fencelock::memory::{FencedMemory, MemoryStore};
use fencelock::simulation::Unfinished;
use fencelock::{Fenced, FencedStore as _, FencingToken, LeaseStore as _, Locks};
use tokio::sync::oneshot;

use actor::Actor;
use link::{Link, at_once, encode};
use oracle::Seen;
use world::{Local, NETWORK, World};

const IDLE: Unfinished = Unfinished {
    kept: 0,
    background: 0,
    waiters: 0,
    lines: 0,
};

/// The token that the resource of `b` remembers from before its engine lost its data.
const FORMER: u64 = 1_000;

struct Outcome {
    history: String,
    violations: Vec<String>,
    seen: Seen,
}

fn play(seed: u64) -> Outcome {
    let world = World::new(seed);
    let oracle: oracle::Shared = Arc::default();
    let clock = Clock::manual(Arc::clone(&world.processes[NETWORK].clock));
    let link = Link {
        world: Arc::clone(&world),
        oracle: Arc::clone(&oracle),
        locks: MemoryStore::with_clock(clock),
        values: FencedMemory::new(),
        odds: [0, 4, 10, 30][world.below(4) as usize],
    };
    remember_a_former_life(&link);
    let ids = Rc::new(Cell::new(0));
    let mut work: Vec<(usize, Local)> = Vec::new();
    let mut ends = Vec::new();
    let mut all = Vec::new();
    for (process, of) in world.processes.iter().enumerate().skip(1) {
        let request_limit = Duration::from_millis(50 + world.below(300));
        let locks = Locks::builder(link.clone())
            .clock(Clock::manual(Arc::clone(&of.clock)))
            .request_limit(request_limit)
            .patience(request_limit * 3)
            .build();
        let actor = Actor {
            process,
            world: Arc::clone(&world),
            link: link.clone(),
            locks: locks.clone(),
            fenced: Fenced::new(link.clone()),
            ids: Rc::clone(&ids),
            met: Rc::new(RefCell::default()),
        };
        all.push((process, locks));
        for _ in 0..1 + world.below(3) {
            let (actor, turns) = (actor.clone(), 1 + world.below(5));
            let (ended, end) = oneshot::channel::<()>();
            ends.push(end);
            work.push((
                process,
                Box::pin(async move {
                    actor.run(turns).await;
                    drop(ended);
                }),
            ));
        }
    }
    work.push((
        NETWORK,
        Box::pin(async move {
            for end in ends {
                let _ = end.await;
            }
            wind_up(&link, all).await;
        }),
    ));
    world.run(work, || oracle.lock().unwrap().look(&world));
    let seen = oracle.lock().unwrap().seen;
    let (history, violations) = world.history();
    Outcome {
        history,
        violations,
        seen,
    }
}

/// The resource of `b` has seen larger tokens than its lock will grant.
fn remember_a_former_life(link: &Link) {
    let domain = Domain::new("memory", &link.locks.profile().realm, &"b".parse().unwrap());
    let token = FencingToken::new(FORMER).unwrap();
    let fence = Fence::new(token, HolderTag::from_bytes([7; 16]), domain).with_seq(1);
    let resource = "b".parse().unwrap();
    let answer = at_once(link.values.put(&resource, encode(&[]).into(), &fence));
    let mut oracle = link.oracle.lock().unwrap();
    oracle.put(&link.world, "b", &[], &fence, &answer);
}

/// Everything comes to rest: nothing is kept, nobody waits, and no lease lives on.
async fn wind_up(link: &Link, all: Vec<(usize, Locks)>) {
    let world = &link.world;
    for (_, locks) in &all {
        locks.drain().await;
    }
    // Longer than the longest TTL, than what is still on its way, and than an abandoned acquire needs to
    // notice.
    world.sleep_on(NETWORK, Duration::from_secs(20)).await;
    for (process, locks) in &all {
        locks.drain().await;
        let left = locks.unfinished();
        if left != IDLE {
            world.violation(format_args!("p{process} is not idle: {left:?}"));
        }
    }
    link.oracle.lock().unwrap().finish(world);
    for (name, _) in actor::NAMES {
        let state = at_once(link.locks.inspect(&name.parse().unwrap())).unwrap();
        if state.is_some_and(|state| !state.holders.is_empty()) {
            world.violation(format_args!("{name} is held when all is over"));
        }
    }
}

fn variable(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().expect("a number"))
}

/// Plays `seeds` on every core, and says what they met.
fn play_all(seeds: std::ops::Range<u64>) -> (Seen, u64) {
    let next = AtomicU64::new(seeds.start);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let parts: Vec<(Seen, u64)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let (mut sum, mut lost) = (Seen::default(), 0);
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed >= seeds.end {
                            return (sum, lost);
                        }
                        let outcome = play(seed);
                        if !outcome.violations.is_empty() {
                            // The others need not go on.
                            next.store(seeds.end, Ordering::Relaxed);
                            fail(seed, &outcome);
                        }
                        lost += u64::from(outcome.seen.lost_unfenced > 0);
                        sum.add(outcome.seen);
                    }
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| {
                worker
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    });
    parts.into_iter().fold(Default::default(), |mut all, part| {
        all.0.add(part.0);
        (all.0, all.1 + part.1)
    })
}

fn fail(seed: u64, outcome: &Outcome) -> ! {
    let tail: Vec<_> = outcome.history.lines().rev().take(80).collect();
    let tail: Vec<_> = tail.into_iter().rev().collect();
    panic!(
        "seed {seed} broke {:#?}\n{}\nrepeat it by: FENCELOCK_SEED={seed} cargo test --all-features --test simulation schedules -- --nocapture",
        outcome.violations,
        tail.join("\n"),
    );
}

#[test]
fn schedules_keep_every_promise() {
    if let Some(seed) = variable("FENCELOCK_SEED") {
        let outcome = play(seed);
        println!("{}", outcome.history);
        assert!(outcome.violations.is_empty(), "{:#?}", outcome.violations);
        return;
    }
    let long = std::env::var_os("FENCELOCK_LONG").is_some();
    let count = if long { 1_000_000 } else { 10_000 };
    let count = variable("FENCELOCK_SCHEDULES").unwrap_or(count);
    let (seen, lost) = play_all(0..count);
    println!("{count} schedules, {lost} of which lose an update without fencing: {seen:?}");
    // They proved something: without fencing, updates are lost.
    assert!(lost * 50 >= count, "{lost} of {count} lose without fencing");
    for (what, often) in seen.each() {
        assert!(often * 20 >= count, "{what}: {often} in {count} schedules");
    }
}

#[test]
fn one_seed_is_one_history() {
    let mut different = 0;
    for seed in 0..40 {
        let (first, second) = (play(seed), play(seed));
        assert_eq!(first.history, second.history, "seed {seed}");
        different += u64::from(first.history != play(seed + 1).history);
    }
    assert_eq!(different, 40, "every seed is another history");
}
