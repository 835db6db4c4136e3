//! The run itself: starts the clients, hears what they tell, and does to them and to what lies between
//! them and the engine what the seed says.

mod nemesis;
mod progress;
mod seat;
mod shown;

use std::collections::BTreeMap;
use std::future::pending;
use std::time::Duration;

use rustix::process::Signal;
use tokio::sync::mpsc;

use self::seat::{Nap, Seat};
use self::shown::Shown;
use super::dice::Dice;
use super::history::{Entry, Event, Watch};
use super::janitor::Janitor;
use super::own::Own;
use super::plan::{Fault, Plan, Storage, set_of};
use super::proxy::Proxy;
use super::route::Route;
use crate::exit_codes;
use crate::failure::{Failure, Result};
use crate::signals::Signals;

/// How long clients may take to end their last sections, beyond two TTLs: the longest that a request of
/// an engine takes, and some.
const GRACE: Duration = Duration::from_secs(12);

/// The least that a client is paused for, so that it has stopped before it is woken.
const PAUSE_MIN: Duration = Duration::from_millis(20);

/// How long clients may fail to begin, one after another, before the run is given up: longer than a
/// server takes to recover from a kill.
const FAILURE_LIMIT: Duration = Duration::from_secs(20);

/// How long a wait is that nothing bounds.
const IDLE: Duration = Duration::from_secs(1);

/// What the run is played with.
pub(crate) struct Stage<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) watch: Watch,
    /// The store's URL, and what the names of the locks begin with.
    pub(crate) store: String,
    pub(crate) locks: String,
    pub(crate) storages: Vec<Storage>,
    /// The server of our own, and the janitor, who has to know its process.
    pub(crate) own: Option<(&'a mut Own, &'a mut Janitor)>,
}

/// What it came to.
#[derive(Debug, Default)]
pub(crate) struct Played {
    pub(crate) entries: Vec<Entry>,
    pub(crate) faults: BTreeMap<Fault, u64>,
    /// How long it took until all clients had ended.
    pub(crate) took_us: u64,
}

/// What ends a run before its time.
#[derive(Debug)]
pub(crate) enum Cut {
    /// A signal asked for it.
    Signal(Signal),
    Failed(Failure),
}

impl From<Failure> for Cut {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// What is due at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Wake(usize, u32),
    Rouse(usize, u32),
    Bear(usize),
    Strike,
    Kill,
    Network,
    Calm(usize),
    Server,
    ServerBack,
    Progress,
    End,
    Grace,
}

struct Play<'a> {
    stage: Stage<'a>,
    dice: Dice,
    seats: Vec<Seat>,
    due: BTreeMap<(u64, u64), Due>,
    dues: u64,
    played: Played,
    told: mpsc::UnboundedReceiver<Told>,
    teller: mpsc::UnboundedSender<Told>,
    is_ending: bool,
    /// When a client last began or was granted a lock, and why one could not begin since.
    worked_us: u64,
    failure: Option<String>,
    grants: u64,
    writes: u64,
    route: Route,
    server_is_down: bool,
    /// When the server came back last.
    server_back_us: u64,
    shown: Shown,
}

/// What a client said; `None` at its end.
struct Told {
    seat: usize,
    life: u32,
    /// With the page that it is about.
    event: Option<(u32, Event)>,
}

impl<'a> Stage<'a> {
    /// Plays the run to its end.
    pub(crate) async fn play(self, signals: &mut Signals) -> Result<Played, Cut> {
        let (teller, told) = mpsc::unbounded_channel();
        let route = Route::of(&self.store, &self.storages);
        let mut play = Play {
            dice: Dice::new(self.plan.seed, 0),
            stage: self,
            seats: Vec::new(),
            due: BTreeMap::new(),
            dues: 0,
            played: Played::default(),
            told,
            teller,
            is_ending: false,
            worked_us: 0,
            failure: None,
            grants: 0,
            writes: 0,
            route,
            server_is_down: false,
            server_back_us: 0,
            shown: Shown::default(),
        };
        let ended = play.run(signals).await;
        play.clear_progress();
        // Dropped clients are killed, whatever happened.
        ended.map(|()| play.played)
    }
}

impl Play<'_> {
    async fn run(&mut self, signals: &mut Signals) -> Result<(), Cut> {
        let plan = self.stage.plan;
        for seat in 0..usize::try_from(plan.clients).unwrap_or(1) {
            let mut proxies = Vec::new();
            if plan.faults.iter().any(|fault| fault.is_of_the_network()) {
                for (host, port) in self.route.servers() {
                    let proxy = Proxy::start(host.clone(), *port).await;
                    proxies.push(proxy.map_err(|e| Failure::system("a proxy", e))?);
                }
            }
            self.seats.push(Seat {
                process: None,
                input: None,
                pid: None,
                life: 0,
                sections: plan.sections.div_ceil(u64::from(plan.clients)),
                nap: None,
                stopped: false,
                proxies,
                trouble: None,
            });
            self.bear(seat).await?;
        }
        let end = micros(plan.duration);
        self.at(end, Due::End);
        self.after(IDLE, Due::Progress);
        for (fault, due) in [
            (Fault::Pause, Due::Strike),
            (Fault::Kill, Due::Kill),
            (Fault::Drop, Due::Network),
            (Fault::Delay, Due::Network),
            (Fault::Swallow, Due::Network),
            (Fault::ServerPause, Due::Server),
            (Fault::ServerKill, Due::Server),
        ] {
            if plan.has(fault) && !self.due.values().any(|known| *known == due) {
                self.again(due);
            }
        }
        loop {
            if self.seats.iter().all(|seat| seat.process.is_none()) && self.is_over() {
                // Where all sections were done before the time was over.
                self.is_ending = true;
                self.mend_server().await?;
                self.played.took_us = self.stage.watch.now();
                return Ok(());
            }
            let wait = self.next_due();
            tokio::select! {
                biased;
                signal = signals.ending() => return Err(Cut::Signal(signal)),
                told = self.told.recv() => {
                    if let Some(told) = told {
                        self.hear(told).await?;
                    }
                }
                () = rest(wait) => self.act().await?,
            }
        }
    }

    fn is_over(&self) -> bool {
        self.is_ending || self.seats.iter().all(|seat| seat.sections == 0)
    }

    async fn hear(&mut self, told: Told) -> Result<()> {
        let now = self.stage.watch.now();
        let Some((page, event)) = told.event else {
            return self.mourn(told.seat).await;
        };
        let Some(seat) = self.seats.get_mut(told.seat) else {
            return Ok(());
        };
        match &event {
            Event::Forged { .. } => self.count(Fault::Forged),
            Event::Ready { .. } => {
                self.worked_us = now;
                self.failure = None;
            }
            Event::Failed { message, .. } => {
                self.failure = Some(message.clone());
            }
            Event::Granted { .. } => {
                self.worked_us = now;
                self.failure = None;
                self.grants += 1;
                seat.sections = seat.sections.saturating_sub(1);
            }
            Event::Sent { copy, .. } => {
                self.writes += 1;
                if *copy > 0 {
                    self.count(Fault::Duplicate);
                }
            }
            Event::Dying { .. } => self.count(Fault::Kill),
            Event::Paused {
                lane,
                token,
                for_us,
                ..
            } => {
                seat.nap = Some(Nap {
                    lane: *lane,
                    set: set_of(page, self.stage.plan.locks),
                    token: *token,
                    ripe_us: now + micros(PAUSE_MIN),
                    // The worst moment to wake: the next holder has read, and not yet written.
                    is_hunting: self.dice.chance(60),
                });
                self.at(now + for_us, Due::Wake(told.seat, told.life));
                self.count(Fault::Pause);
            }
            Event::Woke { .. } => seat.nap = None,
            Event::Thinking { lane, token, .. } => {
                let set = set_of(page, self.stage.plan.locks);
                let awake: Vec<(usize, u32)> = self
                    .seats
                    .iter()
                    .enumerate()
                    .filter(|(_, seat)| {
                        seat.nap.is_some_and(|nap| {
                            nap.is_hunting
                                && nap.lane == *lane
                                && nap.set == set
                                && nap.token < *token
                                && nap.ripe_us <= now
                        })
                    })
                    .map(|(at, seat)| (at, seat.life))
                    .collect();
                for (at, life) in awake {
                    self.wake(at, life);
                }
            }
            _ => {}
        }
        self.shown.hear(page, &event);
        self.played.entries.push(Entry {
            client: u32::try_from(told.seat).unwrap_or(u32::MAX),
            life: told.life,
            page,
            event,
        });
        if !self.is_ending && self.shown.is_enough(self.stage.plan) {
            self.begin_end().await?;
        }
        let limit = self.worked_us.saturating_add(micros(FAILURE_LIMIT));
        if let Some(failure) = &self.failure
            && (now > limit || self.worked_us == 0 && now > micros(FAILURE_LIMIT / 4))
        {
            return Err(Failure::new(
                exit_codes::UNAVAILABLE,
                format!("the clients cannot work: {failure}"),
            ));
        }
        Ok(())
    }

    /// Does what is due.
    async fn act(&mut self) -> Result<()> {
        let now = self.stage.watch.now();
        while let Some(first) = self.due.first_entry() {
            if first.key().0 > now {
                break;
            }
            let due = first.remove();
            self.perform(due).await?;
        }
        Ok(())
    }

    async fn perform(&mut self, due: Due) -> Result<()> {
        match due {
            Due::Wake(at, life) => self.wake(at, life),
            Due::Rouse(at, life) => self.rouse(at, life),
            Due::Bear(at) if !self.is_ending => {
                if self
                    .seats
                    .get(at)
                    .is_some_and(|seat| seat.process.is_none())
                {
                    self.bear(at).await?;
                }
            }
            Due::Bear(_) => {}
            Due::Strike if !self.is_ending => {
                self.pause_one();
                self.again(due);
            }
            Due::Kill if !self.is_ending => {
                self.kill_one();
                self.again(due);
            }
            Due::Network if !self.is_ending => {
                self.trouble();
                self.again(due);
            }
            Due::Calm(at) => self.calm(at),
            Due::Server if !self.is_ending => self.strike_server().await?,
            Due::ServerBack => self.mend_server().await?,
            Due::Strike | Due::Kill | Due::Network | Due::Server => {}
            Due::Progress => {
                self.progress();
                self.after(IDLE, Due::Progress);
            }
            Due::End if !self.is_ending => self.begin_end().await?,
            Due::End => {}
            Due::Grace => {
                for at in 0..self.seats.len() {
                    let t = self.stage.watch.now();
                    if self.seats.get(at).is_some_and(|seat| seat.pid.is_some()) {
                        self.note(at, Event::Killed { t });
                        self.signal(at, Signal::KILL);
                    }
                }
            }
        }
        Ok(())
    }

    /// Nothing goes wrong any more, and the clients end what they have begun.
    async fn begin_end(&mut self) -> Result<()> {
        self.is_ending = true;
        self.mend_server().await?;
        for at in 0..self.seats.len() {
            self.calm(at);
            if let Some(seat) = self.seats.get_mut(at) {
                seat.input = None;
                let life = seat.life;
                let (nap, stopped) = (seat.nap.is_some(), seat.stopped);
                if nap {
                    self.wake(at, life);
                }
                if stopped {
                    self.after(Duration::ZERO, Due::Rouse(at, life));
                }
            }
        }
        let grace = self.stage.plan.ttl * 2 + GRACE;
        self.after(grace, Due::Grace);
        Ok(())
    }

    fn note(&mut self, at: usize, event: Event) {
        let life = self.seats.get(at).map_or(0, |seat| seat.life);
        self.played.entries.push(Entry {
            client: u32::try_from(at).unwrap_or(u32::MAX),
            life,
            page: 0,
            event,
        });
    }

    fn count(&mut self, fault: Fault) {
        *self.played.faults.entry(fault).or_default() += 1;
    }

    /// The next of a kind of fault, at a time that the seed says.
    fn again(&mut self, due: Due) {
        let ttl = self.stage.plan.ttl;
        let wait = match due {
            Due::Strike => self.dice.between(ttl / 2, ttl * 2),
            Due::Kill => self.dice.between(ttl, ttl * 4),
            Due::Network => self.dice.between(ttl / 5, ttl),
            _ => self.dice.between(ttl * 3, ttl * 6),
        };
        self.after(wait, due);
    }

    fn after(&mut self, wait: Duration, due: Due) {
        let at = self.stage.watch.now().saturating_add(micros(wait));
        self.at(at, due);
    }

    fn at(&mut self, at_us: u64, due: Due) {
        self.dues += 1;
        self.due.insert((at_us, self.dues), due);
    }

    fn next_due(&self) -> Option<Duration> {
        let (at, _) = self.due.keys().next()?;
        Some(Duration::from_micros(
            at.saturating_sub(self.stage.watch.now()),
        ))
    }
}

async fn rest(wait: Option<Duration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait).await,
        None => pending().await,
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
