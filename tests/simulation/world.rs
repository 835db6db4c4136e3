//! One world: several processes and a network on one thread, with time and chance from a seed.
//!
//! What may run is chosen by the seed at every step; time passes where nothing can run, and a little
//! in between. A paused process runs nothing while its clock goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use fencelock::simulation::{self, Work};

/// Process 0 is the network and what lies beyond it: never paused, with the clock of the store.
pub(crate) const NETWORK: usize = 0;

/// More steps than any schedule needs.
const STEPS_MAX: u64 = 400_000;

/// More time than any schedule needs.
const TIME_MAX: Duration = Duration::from_secs(3_600);

/// The wall clock at the start.
const EPOCH_US: u64 = 1_700_000_000_000_000;

pub(crate) type Local = Pin<Box<dyn Future<Output = ()>>>;

/// splitmix64.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A process's clock, and when it does not run.
pub(crate) struct Process {
    pub(crate) clock: Arc<AtomicU64>,
    offset_ns: u64,
    /// How fast its clock goes, in millionths of the true rate.
    ppm: u64,
}

pub(crate) struct World {
    state: Mutex<State>,
    ready: Arc<Mutex<BTreeSet<usize>>>,
    pub(crate) processes: Vec<Process>,
    /// From here on nothing goes wrong any more.
    pub(crate) calm: Duration,
    /// A step in how many pauses a process; 0 for none.
    pause_odds: u64,
    /// Steps between two orders of priority; 0 where each step draws evenly.
    reshuffle: u64,
}

struct State {
    now: u64,
    rng: Rng,
    timers: BTreeMap<(u64, u64), Waker>,
    next_timer: u64,
    spawned: Vec<(usize, Work)>,
    current: usize,
    paused_until: Vec<u64>,
    pauses: Vec<u64>,
    log: String,
    violations: Vec<String>,
    steps: u64,
    trace: u64,
}

impl World {
    pub(crate) fn new(seed: u64) -> Arc<Self> {
        let mut rng = Rng::new(seed);
        let count = 1 + usize::try_from(2 + rng.below(3)).unwrap();
        let processes: Vec<_> = (0..count)
            .map(|index| {
                if index == NETWORK {
                    return Process::new(0, 1_000_000);
                }
                // The store's clock may be up to 2 % faster or slower (L4).
                let (slowest, fastest) = (980_393, 1_020_000);
                let ppm = match rng.below(4) {
                    0 => slowest,
                    1 => fastest,
                    _ => slowest + rng.below(fastest - slowest),
                };
                Process::new(rng.below(3_600_000_000_000), ppm)
            })
            .collect();
        let pause_odds = [0, 40, 120, 400][usize::try_from(rng.below(4)).unwrap()];
        let reshuffle = [0, 0, 3, 17][usize::try_from(rng.below(4)).unwrap()];
        let calm = Duration::from_millis(500 + rng.below(5_000));
        let world = Arc::new(Self {
            ready: Arc::default(),
            calm,
            pause_odds,
            reshuffle,
            state: Mutex::new(State {
                now: 0,
                rng,
                timers: BTreeMap::new(),
                next_timer: 0,
                spawned: Vec::new(),
                current: NETWORK,
                paused_until: vec![0; count],
                pauses: vec![0; count],
                log: String::new(),
                violations: Vec::new(),
                steps: 0,
                trace: 0,
            }),
            processes,
        });
        world.set_clocks(0);
        world
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(crate) fn now(&self) -> u64 {
        self.state().now
    }

    pub(crate) fn is_calm(&self) -> bool {
        Duration::from_nanos(self.now()) >= self.calm
    }

    pub(crate) fn below(&self, end: u64) -> u64 {
        self.state().rng.below(end)
    }

    pub(crate) fn chance(&self, one_in: u64) -> bool {
        one_in > 0 && self.below(one_in) == 0
    }

    pub(crate) fn millis(&self, below: u64) -> Duration {
        Duration::from_micros(self.below(below * 1_000))
    }

    pub(crate) fn pauses(&self, process: usize) -> u64 {
        self.state().pauses[process]
    }

    /// Writes one line of the history.
    pub(crate) fn note(&self, line: impl std::fmt::Display) {
        let mut state = self.state();
        let (now, current) = (state.now, state.current);
        writeln!(state.log, "{now} p{current} {line}").unwrap();
    }

    pub(crate) fn violation(&self, what: impl std::fmt::Display) {
        self.note(format_args!("BROKEN {what}"));
        self.state().violations.push(what.to_string());
    }

    /// The whole history so far, and what was broken in it.
    pub(crate) fn history(&self) -> (String, Vec<String>) {
        let state = self.state();
        let log = format!(
            "{}end at {} after {} steps, trace {:x}\n",
            state.log, state.now, state.steps, state.trace
        );
        (log, state.violations.clone())
    }

    pub(crate) fn spawn_on(&self, process: usize, work: Work) {
        self.state().spawned.push((process, work));
    }

    /// Resolves after `duration` on the clock of `process`.
    pub(crate) fn sleep_on(self: &Arc<Self>, process: usize, duration: Duration) -> Sleep {
        let ns = duration.as_nanos() * 1_000_000 / u128::from(self.processes[process].ppm) + 1;
        let ns = u64::try_from(ns).unwrap_or(u64::MAX);
        Sleep {
            world: Arc::clone(self),
            at: self.now().saturating_add(ns),
            timer: None,
        }
    }

    pub(crate) async fn sleep(self: &Arc<Self>, duration: Duration) {
        let process = self.state().current;
        self.sleep_on(process, duration).await;
    }

    fn set_clocks(&self, now: u64) {
        for process in &self.processes {
            process.clock.store(process.shows(now), Ordering::SeqCst);
        }
    }

    fn advance_to(&self, to: u64) {
        let woken = {
            let mut state = self.state();
            state.now = state.now.max(to);
            let after = state.now + 1;
            let later = state.timers.split_off(&(after, 0));
            std::mem::replace(&mut state.timers, later)
        };
        self.set_clocks(self.now());
        woken.into_values().for_each(Waker::wake);
    }

    /// Runs all that there is to run to its end; `look` is called now and then in between.
    pub(crate) fn run(self: &Arc<Self>, work: Vec<(usize, Local)>, look: impl Fn()) {
        let entered = simulation::enter(Rc::new(Here(Arc::clone(self))));
        let mut tasks: BTreeMap<usize, Task> = BTreeMap::new();
        let mut next_task = 0;
        let mut newcomers = work;
        loop {
            for (process, work) in newcomers.drain(..) {
                tasks.insert(next_task, self.task(next_task, process, work));
                next_task += 1;
            }
            if tasks.is_empty() {
                break;
            }
            let Some(id) = self.choose(&tasks) else {
                break;
            };
            if self.chance(4) {
                look();
            }
            let done = {
                let task = tasks.get_mut(&id).unwrap();
                self.state().current = task.process;
                let mut context = Context::from_waker(&task.waker);
                task.work.as_mut().poll(&mut context).is_ready()
            };
            if done {
                // What is dropped with it acts in its process's name.
                tasks.remove(&id);
            }
            self.state().current = NETWORK;
            let spawned = std::mem::take(&mut self.state().spawned);
            newcomers.extend(
                spawned
                    .into_iter()
                    .map(|(process, work)| (process, work as Local)),
            );
        }
        drop(tasks);
        drop(entered);
    }

    fn task(&self, id: usize, process: usize, work: Local) -> Task {
        let ready = Arc::clone(&self.ready);
        ready.lock().unwrap().insert(id);
        Task {
            process,
            work,
            waker: Waker::from(Arc::new(Ready { id, ready })),
        }
    }

    /// The task that runs next; time passes until there is one.
    fn choose(&self, tasks: &BTreeMap<usize, Task>) -> Option<usize> {
        loop {
            let (now, steps) = {
                let mut state = self.state();
                state.steps += 1;
                (state.now, state.steps)
            };
            if steps > STEPS_MAX || u128::from(now) > TIME_MAX.as_nanos() {
                self.violation("the schedule does not come to an end");
                return None;
            }
            if !self.is_calm() && self.chance(self.pause_odds) {
                self.pause();
            }
            if self.chance(8) {
                let by = self.below(3_000_000);
                self.advance_to(now + by);
            }
            let mut ready = self.ready.lock().unwrap();
            ready.retain(|id| tasks.contains_key(id));
            let mut state = self.state();
            let State {
                now, paused_until, ..
            } = &*state;
            let (may_run, waiting): (Vec<usize>, Vec<usize>) = ready
                .iter()
                .partition(|id| paused_until[tasks[id].process] <= *now);
            if may_run.is_empty() {
                let resume = waiting.iter().map(|id| paused_until[tasks[id].process]);
                let timer = state.timers.first_key_value().map(|((at, _), _)| *at);
                let next = resume.chain(timer).min();
                drop((state, ready));
                let Some(next) = next else {
                    self.violation("somebody waits for ever");
                    return None;
                };
                self.advance_to(next);
                continue;
            }
            let chosen = match self.reshuffle {
                0 => may_run[usize::try_from(state.rng.below(may_run.len() as u64)).unwrap()],
                period => {
                    let epoch = steps / period;
                    *may_run
                        .iter()
                        .max_by_key(|id| mix(epoch.wrapping_mul(0x1_0001) ^ **id as u64))
                        .unwrap()
                }
            };
            ready.remove(&chosen);
            state.trace = mix(state.trace ^ chosen as u64);
            return Some(chosen);
        }
    }

    fn pause(&self) {
        let count = self.processes.len() as u64;
        let mut state = self.state();
        let process = usize::try_from(1 + state.rng.below(count - 1)).unwrap();
        if state.paused_until[process] > state.now {
            return;
        }
        let longest = [20, 300, 1_500][usize::try_from(state.rng.below(3)).unwrap()];
        let length = state.rng.below(longest * 1_000_000);
        state.paused_until[process] = state.now + length;
        state.pauses[process] += 1;
        drop(state);
        self.note(format_args!("p{process} is paused for {length} ns"));
    }
}

impl Process {
    fn new(offset_ns: u64, ppm: u64) -> Self {
        Self {
            clock: Arc::default(),
            offset_ns,
            ppm,
        }
    }

    fn shows(&self, now: u64) -> u64 {
        let ns = u128::from(now) * u128::from(self.ppm) / 1_000_000;
        self.offset_ns + u64::try_from(ns).unwrap()
    }
}

struct Task {
    process: usize,
    work: Local,
    waker: Waker,
}

struct Ready {
    id: usize,
    ready: Arc<Mutex<BTreeSet<usize>>>,
}

impl Wake for Ready {
    fn wake(self: Arc<Self>) {
        self.ready.lock().unwrap().insert(self.id);
    }
}

/// What the core sees of the world.
struct Here(Arc<World>);

impl simulation::World for Here {
    fn spawn(&self, work: Work) {
        let process = self.0.state().current;
        self.0.spawn_on(process, work);
    }

    fn sleep(&self, duration: Duration) -> Work {
        let process = self.0.state().current;
        Box::pin(self.0.sleep_on(process, duration))
    }

    fn random(&self) -> u64 {
        self.0.state().rng.next()
    }

    fn unix_micros(&self) -> u64 {
        EPOCH_US + self.0.now() / 1_000
    }
}

/// A timer that is gone when it is dropped.
pub(crate) struct Sleep {
    world: Arc<World>,
    at: u64,
    timer: Option<(u64, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let mut state = this.world.state();
        if let Some(timer) = this.timer.take() {
            state.timers.remove(&timer);
        }
        if state.now >= this.at {
            return Poll::Ready(());
        }
        state.next_timer += 1;
        let timer = (this.at, state.next_timer);
        state.timers.insert(timer, context.waker().clone());
        drop(state);
        this.timer = Some(timer);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(timer) = self.timer {
            self.world.state().timers.remove(&timer);
        }
    }
}
