//! The run itself: starts the clients, hears what they tell, and does to them and to what lies between
//! them and the engine what the seed says.

use std::collections::BTreeMap;
use std::future::pending;
use std::io::{self, IsTerminal as _, Write as _};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;

use super::client;
use super::dice::Dice;
use super::history::{Entry, Event, Watch};
use super::janitor::Janitor;
use super::own::Own;
use super::plan::{Fault, Lane, Orders, Plan, Storage};
use super::proxy::{Mode, Proxy};
use super::route::Route;
use crate::exit_codes;
use crate::failure::{Failure, Result};
use crate::signals::Signals;

/// How long clients may take to end their last sections, beyond two TTLs: the longest that a request of
/// an engine takes, and some.
const GRACE: Duration = Duration::from_secs(12);

/// How often a client that should be awake is told so again.
const INSISTENCE: Duration = Duration::from_millis(50);

/// The least that a client is paused for, so that it has stopped before it is woken.
const PAUSE_MIN: Duration = Duration::from_millis(20);

/// How long a client that ended waits for its next life, and one that could not begin.
const REBIRTH: Duration = Duration::from_millis(100);
const REBIRTH_FAILED: Duration = Duration::from_millis(500);

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

/// A client's place, which several processes fill one after another.
struct Seat {
    process: Option<Child>,
    /// Kept open until the run is over.
    input: Option<ChildStdin>,
    pid: Option<Pid>,
    life: u32,
    sections: u64,
    nap: Option<Nap>,
    /// Stopped by us until its `Rouse`.
    stopped: bool,
    proxies: Vec<Proxy>,
    /// What its proxies did, and how much they had harmed before.
    trouble: Option<(Fault, u64)>,
}

/// A pause that a client took by itself, and has not told to be over.
#[derive(Clone, Copy)]
struct Nap {
    lane: Lane,
    token: u64,
    /// When it may be woken at the earliest.
    ripe_us: u64,
    /// Wake it between the next holder's reading and writing.
    is_hunting: bool,
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
    /// When a client last began, and why one could not since.
    began_us: u64,
    failure: Option<String>,
    grants: u64,
    writes: u64,
    route: Route,
    server_is_down: bool,
}

/// What a client said; `None` at its end.
struct Told {
    seat: usize,
    life: u32,
    event: Option<Event>,
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
            began_us: 0,
            failure: None,
            grants: 0,
            writes: 0,
            route,
            server_is_down: false,
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

    /// Starts the next process of a seat.
    async fn bear(&mut self, at: usize) -> Result<()> {
        let cannot = |e: io::Error| Failure::system("a client cannot be started", e);
        let plan = self.stage.plan;
        let Some(seat) = self.seats.get_mut(at) else {
            return Ok(());
        };
        let mut store = self.stage.store.clone();
        let mut storages = self.stage.storages.clone();
        for (server, proxy) in self.route.servers().iter().zip(&seat.proxies) {
            store = Route::through(&store, server, proxy.port());
            for storage in &mut storages {
                storage.dest = Route::through(&storage.dest, server, proxy.port());
            }
        }
        let orders = Orders {
            client: u32::try_from(at).unwrap_or(u32::MAX),
            life: seat.life,
            seed: plan.seed,
            start_nanos: self.stage.watch.start_nanos(),
            until_us: micros(plan.duration),
            ttl_us: micros(plan.ttl),
            sections: seat.sections,
            arms: plan.arms.clone(),
            lanes: plan.lanes.clone(),
            faults: plan.faults.clone(),
            store,
            locks: self.stage.locks.clone(),
            storages,
        };
        // On the main thread: the death signal follows the thread that spawned.
        let mut process = Command::new("/proc/self/exe")
            .arg0("fencelock")
            .arg(client::ARG)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // A terminal's signals are for us, who end the run in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(cannot)?;
        let (Some(mut input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(Failure::new(
                exit_codes::INDETERMINATE,
                "a client has no pipes",
            ));
        };
        let mut line = serde_json::to_vec(&orders).map_err(|e| cannot(io::Error::other(e)))?;
        line.push(b'\n');
        // One that dies at once is noticed by its end.
        let _ = input.write_all(&line).await;
        seat.pid = process
            .id()
            .and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        seat.process = Some(process);
        seat.input = Some(input);
        seat.nap = None;
        seat.stopped = false;
        let (life, teller) = (seat.life, self.teller.clone());
        tokio::spawn(async move {
            let mut lines = BufReader::new(output).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                if let Ok(event) = serde_json::from_str(&line) {
                    let event = Some(event);
                    let seat = at;
                    let _ = teller.send(Told { seat, life, event });
                }
            }
            let _ = teller.send(Told {
                seat: at,
                life,
                event: None,
            });
        });
        Ok(())
    }

    async fn hear(&mut self, told: Told) -> Result<()> {
        let now = self.stage.watch.now();
        let Some(event) = told.event else {
            return self.mourn(told.seat).await;
        };
        let Some(seat) = self.seats.get_mut(told.seat) else {
            return Ok(());
        };
        match &event {
            Event::Ready { .. } => {
                self.began_us = now;
                self.failure = None;
            }
            Event::Failed { message, .. } => {
                self.failure = Some(message.clone());
            }
            Event::Granted { .. } => {
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
                let awake: Vec<(usize, u32)> = self
                    .seats
                    .iter()
                    .enumerate()
                    .filter(|(_, seat)| {
                        seat.nap.is_some_and(|nap| {
                            nap.is_hunting
                                && nap.lane == *lane
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
        self.played.entries.push(Entry {
            client: u32::try_from(told.seat).unwrap_or(u32::MAX),
            life: told.life,
            event,
        });
        let limit = self.began_us.saturating_add(micros(FAILURE_LIMIT));
        if let Some(failure) = &self.failure
            && (now > limit || self.began_us == 0 && now > micros(FAILURE_LIMIT / 4))
        {
            return Err(Failure::new(
                exit_codes::UNAVAILABLE,
                format!("the clients cannot work: {failure}"),
            ));
        }
        Ok(())
    }

    /// A process of a seat has ended.
    async fn mourn(&mut self, at: usize) -> Result<()> {
        let Some(seat) = self.seats.get_mut(at) else {
            return Ok(());
        };
        if let Some(mut process) = seat.process.take() {
            process
                .wait()
                .await
                .map_err(|e| Failure::system("a client cannot be waited for", e))?;
        }
        seat.pid = None;
        seat.input = None;
        seat.nap = None;
        seat.life += 1;
        let is_late = self.stage.watch.now() >= micros(self.stage.plan.duration);
        if self.is_ending || is_late || seat.sections == 0 {
            return Ok(());
        }
        let rest = match self.failure {
            Some(_) => REBIRTH_FAILED,
            None => REBIRTH,
        };
        self.after(rest, Due::Bear(at));
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
        let ttl = self.stage.plan.ttl;
        match due {
            Due::Wake(at, life) => self.wake(at, life),
            Due::Rouse(at, life) => {
                if let Some(seat) = self.seats.get_mut(at)
                    && seat.life == life
                    && seat.stopped
                {
                    seat.stopped = false;
                    self.signal(at, Signal::CONT);
                    let t = self.stage.watch.now();
                    self.note(at, Event::Continued { t });
                }
            }
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
                if let Some(at) = self.victim() {
                    let t = self.stage.watch.now();
                    self.note(at, Event::Stopped { t });
                    self.signal(at, Signal::STOP);
                    let pause = self.dice.between(ttl * 6 / 5, ttl * 5 / 2);
                    if let Some(seat) = self.seats.get_mut(at) {
                        seat.stopped = true;
                        let life = seat.life;
                        self.after(pause, Due::Rouse(at, life));
                    }
                    self.count(Fault::Pause);
                }
                self.again(due);
            }
            Due::Kill if !self.is_ending => {
                if let Some(at) = self.victim() {
                    let t = self.stage.watch.now();
                    self.note(at, Event::Killed { t });
                    self.signal(at, Signal::KILL);
                    self.count(Fault::Kill);
                }
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
            Due::End => self.begin_end().await?,
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

    /// Wakes a client that paused itself; again until it says that it is awake, for it may not have
    /// stopped yet.
    fn wake(&mut self, at: usize, life: u32) {
        let is_asleep = self
            .seats
            .get(at)
            .is_some_and(|seat| seat.life == life && seat.nap.is_some());
        if is_asleep {
            self.signal(at, Signal::CONT);
            self.after(INSISTENCE, Due::Wake(at, life));
        }
    }

    /// A client that is at work.
    fn victim(&mut self) -> Option<usize> {
        let at_work: Vec<usize> = self
            .seats
            .iter()
            .enumerate()
            .filter(|(_, seat)| seat.pid.is_some() && seat.nap.is_none() && !seat.stopped)
            .map(|(at, _)| at)
            .collect();
        self.dice.pick(&at_work)
    }

    /// Sets one of the faults of the network on one client, for a while.
    fn trouble(&mut self) {
        let ttl = self.stage.plan.ttl;
        let faults: Vec<Fault> = self
            .stage
            .plan
            .faults
            .iter()
            .copied()
            .filter(|fault| fault.is_of_the_network())
            .collect();
        let calm: Vec<usize> = self
            .seats
            .iter()
            .enumerate()
            .filter(|(_, seat)| seat.trouble.is_none() && seat.pid.is_some())
            .map(|(at, _)| at)
            .collect();
        let (Some(fault), Some(at)) = (self.dice.pick(&faults), self.dice.pick(&calm)) else {
            return;
        };
        // A short delay, or one that a lease does not outlive.
        let delay = if self.dice.chance(50) {
            self.dice.between(ttl / 50, ttl / 5)
        } else {
            self.dice.between(ttl, ttl * 2)
        };
        let lasts = self.dice.between(ttl / 2, ttl * 3 / 2);
        let Some(seat) = self.seats.get_mut(at) else {
            return;
        };
        seat.trouble = Some((fault, seat.proxies.iter().map(Proxy::hits).sum()));
        for proxy in &seat.proxies {
            match fault {
                Fault::Delay => proxy.set(Mode::Delay(delay)),
                Fault::Swallow => proxy.set(Mode::Swallow),
                _ => proxy.cut(),
            }
        }
        self.after(lasts, Due::Calm(at));
    }

    /// Ends the trouble of a client's network, and counts it where it harmed anything.
    fn calm(&mut self, at: usize) {
        let Some(seat) = self.seats.get_mut(at) else {
            return;
        };
        for proxy in &seat.proxies {
            proxy.set(Mode::Pass);
        }
        if let Some((fault, before)) = seat.trouble.take()
            && seat.proxies.iter().map(Proxy::hits).sum::<u64>() > before
        {
            self.count(fault);
        }
    }

    async fn strike_server(&mut self) -> Result<()> {
        let ttl = self.stage.plan.ttl;
        let faults: Vec<Fault> = self
            .stage
            .plan
            .faults
            .iter()
            .copied()
            .filter(|fault| fault.is_of_the_server())
            .collect();
        let fault = self.dice.pick(&faults);
        let lasts = self.dice.between(ttl / 5, ttl * 3 / 2);
        let Some((own, janitor)) = self.stage.own.as_mut() else {
            return Ok(());
        };
        match fault {
            Some(Fault::ServerKill) => own.kill()?,
            Some(_) => own.pause(),
            None => return Ok(()),
        }
        janitor.server(own.pid());
        self.server_is_down = true;
        self.after(lasts, Due::ServerBack);
        if let Some(fault) = fault {
            self.count(fault);
        }
        Ok(())
    }

    async fn mend_server(&mut self) -> Result<()> {
        if !self.server_is_down {
            return Ok(());
        }
        self.server_is_down = false;
        if let Some((own, janitor)) = self.stage.own.as_mut() {
            own.go_on()?;
            janitor.server(own.pid());
        }
        if !self.is_ending {
            self.again(Due::Server);
        }
        Ok(())
    }

    /// Signals a client's process, which is not reaped before its end was heard of.
    fn signal(&self, at: usize, signal: Signal) {
        if let Some(pid) = self.seats.get(at).and_then(|seat| seat.pid) {
            // It may have ended by itself.
            let _ = kill_process(pid, signal);
        }
    }

    fn note(&mut self, at: usize, event: Event) {
        let life = self.seats.get(at).map_or(0, |seat| seat.life);
        self.played.entries.push(Entry {
            client: u32::try_from(at).unwrap_or(u32::MAX),
            life,
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

    fn progress(&self) {
        if !io::stderr().is_terminal() {
            return;
        }
        let faults: u64 = self.played.faults.values().sum();
        let seconds = self.stage.watch.now() / 1_000_000;
        let all = self.stage.plan.duration.as_secs();
        let stage = if self.is_ending { ", ending" } else { "" };
        // Progress that cannot be shown is no failure.
        let _ = write!(
            io::stderr(),
            "\r\u{1b}[K{seconds} of {all} s: {} grants, {} writes, {faults} faults{stage}",
            self.grants,
            self.writes
        );
    }

    fn clear_progress(&self) {
        if io::stderr().is_terminal() {
            let _ = write!(io::stderr(), "\r\u{1b}[K");
        }
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
