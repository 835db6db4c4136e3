//! A client process: enters critical sections, and tells its parent what it does before and after it
//! does it. It is a careful program, which looks at its lock right before it writes; whatever
//! overtakes it does so after that look.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io::{self, BufRead as _, Read as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fencelock::{ErrorKind, Fence, Fenced, FencingToken, LockGuard, LockName, Locks, ResourceName};
use rustix::process::{Signal, getpid, kill_process, set_parent_process_death_signal};

use super::dice::Dice;
use super::history::{Event, LINE_MAX_BYTES, Op, Point, Watch};
use super::plan::{Arm, Fault, Lane, Orders};
use super::value::{self, Digest, Line};
use crate::exit_codes;
use crate::failure::{Failure, Result};

/// The hidden first argument that makes the executable be a client.
pub(crate) const ARG: &str = "__torture-client";

/// The longest value that is read: more than all sections of a run make.
pub(crate) const VALUE_MAX_BYTES: u64 = 8 << 20;

/// How many halves of others' updates one section completes at the most: their ids have to fit into
/// one line of the history.
const COMPLETED_MAX: usize = 40;

/// How long what is left to the background may take at the end.
const DRAIN_LIMIT: Duration = Duration::from_secs(2);

/// How many of a hundred sections are paused at a chosen point, die at one, or send a write twice.
const PAUSED_PERCENT: u64 = 14;
const DYING_PERCENT: u64 = 3;
const DUPLICATED_PERCENT: u64 = 20;

/// How many outlast their lease, and need it renewed.
const LONG_PERCENT: u64 = 6;

/// Is a client.
pub(crate) fn main(_: impl Iterator<Item = OsString>) -> Failure {
    match start() {
        Ok(()) => Failure::quiet(exit_codes::OK),
        Err(failure) => failure,
    }
}

fn start() -> Result<()> {
    // A run that is killed leaves no client behind, stopped or not.
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|e| Failure::system("the death signal cannot be set", e))?;
    let mut line = String::new();
    io::stdin()
        .lock()
        .read_line(&mut line)
        .map_err(|e| Failure::system("standard input", e))?;
    let orders: Orders = serde_json::from_str(&line)
        .map_err(|_| Failure::usage(format!("{ARG} is internal to fencelock torture")))?;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    // The parent closes our input when the run is over.
    std::thread::spawn(move || {
        let _ = io::stdin().lock().read_to_end(&mut Vec::new());
        stopped.store(true, Ordering::Relaxed);
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| Failure::system("the runtime cannot be started", e))?;
    runtime.block_on(async {
        let watch = Watch::started_at(orders.start_nanos);
        match Client::open(orders, watch.clone(), stop).await {
            Ok(client) => client.run().await,
            Err(failure) => tell(&Event::Failed {
                t: watch.now(),
                message: failure.to_string(),
            }),
        }
    })
}

struct Client {
    orders: Orders,
    watch: Watch,
    dice: Dice,
    locks: Locks,
    storages: Vec<Fenced>,
    /// How many updates this life has begun.
    updates: u64,
    stop: Arc<AtomicBool>,
}

/// What goes wrong in one section, decided at its beginning.
#[derive(Clone, Copy)]
struct Fate {
    pause: Option<Point>,
    death: Option<Point>,
    duplicate: Option<Duplicate>,
    /// How long it takes between reading and writing.
    thought: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Duplicate {
    /// The same write twice at once.
    AtOnce,
    /// The same write again after a later one of the same holder.
    Late,
}

/// What an arm has read in a section, and goes on from.
struct Draft {
    arm: Arm,
    /// By object.
    values: Vec<Vec<u8>>,
}

/// A write as it is sent, and sent again.
#[derive(Clone)]
struct Write {
    object: usize,
    op: Op,
    ops: Vec<Op>,
    len: u64,
    body: Vec<u8>,
    fence: Fence,
}

impl Client {
    async fn open(orders: Orders, watch: Watch, stop: Arc<AtomicBool>) -> Result<Self> {
        let locks = Locks::open(&orders.store).await?;
        let mut storages = Vec::new();
        for storage in &orders.storages {
            storages.push(fencelock::open::destination(&storage.dest).await?.0);
        }
        let stream = u64::from(orders.client) << 32 | u64::from(orders.life);
        Ok(Self {
            dice: Dice::new(orders.seed, stream),
            orders,
            watch,
            locks,
            storages,
            updates: 0,
            stop,
        })
    }

    async fn run(mut self) -> Result<()> {
        tell(&Event::Ready {
            t: self.watch.now(),
        })?;
        for _ in 0..self.orders.sections {
            if self.stop.load(Ordering::Relaxed) || self.watch.now() >= self.orders.until_us {
                break;
            }
            let lanes = self.orders.lanes.clone();
            if let Some(lane) = self.dice.pick(&lanes) {
                self.section(lane).await?;
            }
            let rest = self.dice.between(Duration::ZERO, Duration::from_millis(10));
            tokio::time::sleep(rest).await;
        }
        // What is not given back lapses.
        let _ = tokio::time::timeout(DRAIN_LIMIT, self.locks.drain()).await;
        Ok(())
    }

    /// One critical section: acquire, read, think, look, write, release.
    async fn section(&mut self, lane: Lane) -> Result<()> {
        let fate = self.fate(lane);
        let ttl = Duration::from_micros(self.orders.ttl_us);
        let asked = self.watch.now();
        let name = format!("{}{lane}", self.orders.locks);
        let name = LockName::new(&name)?;
        // Not all at the lock whose holder is paused, and some until it lapses.
        let wait = self.dice.between(ttl / 20, ttl * 3 / 2);
        let guard = match self.locks.acquire(&name).ttl(ttl).wait(wait).await {
            Ok(guard) => guard,
            Err(error) => {
                tell(&Event::NotGranted {
                    t: self.watch.now(),
                    lane,
                    kind: error.kind().as_str().to_owned(),
                })?;
                let rest = self.dice.between(Duration::ZERO, ttl / 50);
                tokio::time::sleep(rest).await;
                return Ok(());
            }
        };
        let (t, until) = self.belief(&guard);
        let token = guard.token().get();
        tell(&Event::Granted {
            t,
            asked,
            lane,
            token,
            until,
        })?;
        let op = self.update();
        let mut drafts = Vec::new();
        let arms = self.orders.arms.clone();
        for arm in self.dice.shuffled(&arms) {
            if let Some(draft) = self.read(lane, arm, &guard).await? {
                drafts.push(draft);
            }
        }
        tell(&Event::Thinking {
            t: self.watch.now(),
            lane,
            token,
        })?;
        tokio::time::sleep(fate.thought).await;
        self.meet(fate, lane, token, Point::BeforeCheck)?;

        let (t, until) = self.belief(&guard);
        let good = guard.check().is_ok();
        tell(&Event::Checked {
            t,
            lane,
            token,
            good,
            until,
        })?;
        if !good {
            return self.end(lane, guard, true).await;
        }
        self.meet(fate, lane, token, Point::BeforeWrite)?;
        let mut is_first = true;
        for mut draft in drafts {
            for object in 0..lane.objects().len() {
                let written = self
                    .write(lane, &guard, &mut draft, object, op, fate)
                    .await?;
                if is_first && written != Written::Nothing {
                    is_first = false;
                    self.meet(fate, lane, token, Point::BetweenWrites)?;
                }
                if written == Written::Refused {
                    break;
                }
            }
        }
        self.meet(fate, lane, token, Point::BeforeRelease)?;
        self.end(lane, guard, false).await
    }

    /// Adds the update `op` to one object of an arm, where it belongs there, and completes what others
    /// left half done.
    async fn write(
        &mut self,
        lane: Lane,
        guard: &LockGuard,
        draft: &mut Draft,
        object: usize,
        op: Op,
        fate: Fate,
    ) -> Result<Written> {
        let Some(write) = compose(lane, guard, draft, object, op) else {
            return Ok(Written::Nothing);
        };
        let arm = draft.arm;
        let token = guard.token().get();
        let (outcome, _) = match fate.duplicate {
            Some(Duplicate::AtOnce) => tokio::try_join!(
                self.send(lane, token, arm, &write, 0),
                self.send(lane, token, arm, &write, 1)
            )?,
            _ => (self.send(lane, token, arm, &write, 0).await?, true),
        };
        if !outcome {
            return Ok(Written::Refused);
        }
        set(&mut draft.values, object, write.body.clone());
        if fate.duplicate == Some(Duplicate::Late) {
            // A second update of the same holder, and then the first one's packet again.
            let second = Op {
                // Beyond the numbers of the updates themselves, and the same object's.
                number: op.number + 1,
                ..op
            };
            if let Some(later) = compose(lane, guard, draft, object, second)
                && self.send(lane, token, arm, &later, 0).await?
            {
                self.send(lane, token, arm, &write, 1).await?;
            }
        }
        Ok(Written::Accepted)
    }

    /// Sends a write and tells of it. True where it was acknowledged.
    async fn send(
        &self,
        lane: Lane,
        token: u64,
        arm: Arm,
        write: &Write,
        copy: u32,
    ) -> Result<bool> {
        let Some((object, storage)) = lane.objects().get(write.object) else {
            return Ok(false);
        };
        let (name, fenced) = self.resource(arm, object, *storage)?;
        tell(&Event::Sent {
            t: self.watch.now(),
            lane,
            token,
            seq: write.fence.seq().unwrap_or(0),
            arm,
            object: (*object).to_owned(),
            op: write.op,
            ops: write.ops.clone(),
            len: write.len,
            copy,
        })?;
        let answer = fenced.put(&name, write.body.clone(), &write.fence).await;
        let outcome = match &answer {
            Ok(written) if written.applied => "ok",
            Ok(_) => "repeated",
            Err(error) => error.kind().as_str(),
        };
        tell(&Event::Answered {
            t: self.watch.now(),
            arm,
            object: (*object).to_owned(),
            op: write.op,
            copy,
            outcome: outcome.to_owned(),
        })?;
        Ok(answer.is_ok())
    }

    /// Reads all objects of an arm; `None` where one cannot be read.
    async fn read(&self, lane: Lane, arm: Arm, guard: &LockGuard) -> Result<Option<Draft>> {
        let mut values = Vec::new();
        for (object, storage) in lane.objects() {
            let (name, fenced) = self.resource(arm, object, *storage)?;
            let sent = self.watch.now();
            let snapshot = match arm {
                Arm::Raise => fenced.raise(&name, guard).await,
                Arm::Unfenced | Arm::Naive => fenced.get(&name).await,
            };
            let value = snapshot.and_then(|snapshot| match snapshot.value {
                Some(body) => Ok(body.into_bytes(VALUE_MAX_BYTES)?.to_vec()),
                None => Ok(Vec::new()),
            });
            let (outcome, seen) = match &value {
                Ok(value) => match measured(lane, value) {
                    Some(seen) => ("ok", Some(seen)),
                    None => ("unreadable", None),
                },
                Err(error) => (error.kind().as_str(), None),
            };
            let (len, last) = seen.unwrap_or_default();
            tell(&Event::Read {
                t: self.watch.now(),
                sent,
                lane,
                token: guard.token().get(),
                arm,
                object: (*object).to_owned(),
                outcome: outcome.to_owned(),
                len,
                last,
                digest: value.as_deref().map_or(0, Digest::of),
            })?;
            match (value, seen) {
                (Ok(value), Some(_)) => values.push(value),
                _ => return Ok(None),
            }
        }
        Ok(Some(Draft { arm, values }))
    }

    async fn end(&self, lane: Lane, guard: LockGuard, is_lost: bool) -> Result<()> {
        let token = guard.token().get();
        let sent = self.watch.now();
        let outcome = if is_lost {
            drop(guard);
            ErrorKind::Lost.as_str()
        } else {
            match guard.release().await {
                Ok(()) => "released",
                Err(error) => error.kind().as_str(),
            }
        };
        tell(&Event::Ended {
            t: self.watch.now(),
            sent,
            lane,
            token,
            outcome: outcome.to_owned(),
        })
    }

    /// The present time, and until when the holder believes in its lock.
    fn belief(&self, guard: &LockGuard) -> (u64, u64) {
        let now = self.watch.now();
        let left = guard.remaining().unwrap_or_default().as_micros();
        (
            now,
            now.saturating_add(u64::try_from(left).unwrap_or(u64::MAX)),
        )
    }

    fn resource(&self, arm: Arm, object: &str, storage: usize) -> Result<(ResourceName, &Fenced)> {
        let (Some(place), Some(fenced)) = (
            self.orders.storages.get(storage),
            self.storages.get(storage),
        ) else {
            return Err(Failure::usage(format!(
                "{ARG}: there is no storage {storage}"
            )));
        };
        Ok((ResourceName::new(&place.name(arm, object))?, fenced))
    }

    fn update(&mut self) -> Op {
        self.updates += 1;
        Op {
            client: self.orders.client,
            life: self.orders.life,
            // Leaves a number for a second update of the same section.
            number: self.updates * 2,
        }
    }

    /// Always draws the same number of times, so that a fault that is left out changes no other.
    fn fate(&mut self, lane: Lane) -> Fate {
        let point = |dice: &mut Dice| match dice.below(10) {
            0 => Point::BeforeCheck,
            1..=6 => Point::BeforeWrite,
            7..=8 => Point::BetweenWrites,
            _ => Point::BeforeRelease,
        };
        let has = |fault| self.orders.faults.contains(&fault);
        let (pauses, dies, doubles) = (has(Fault::Pause), has(Fault::Kill), has(Fault::Duplicate));
        let ttl = Duration::from_micros(self.orders.ttl_us);
        let dice = &mut self.dice;
        // Some take longer than a lease lasts without its renewals.
        let thoughts = (
            dice.between(ttl / 100, ttl / 8),
            dice.between(ttl, ttl * 5 / 2),
        );
        let thought = if dice.chance(LONG_PERCENT) {
            thoughts.1
        } else {
            thoughts.0
        };
        let pause = (dice.chance(PAUSED_PERCENT), point(dice));
        let death = (dice.chance(DYING_PERCENT), point(dice));
        let duplicate = (dice.chance(DUPLICATED_PERCENT), dice.chance(50));
        let single = matches!(lane, Lane::Counter | Lane::List);
        Fate {
            thought,
            pause: (pauses && pause.0).then_some(pause.1),
            death: (dies && death.0).then_some(death.1),
            duplicate: (doubles && duplicate.0).then_some(if duplicate.1 && single {
                Duplicate::Late
            } else {
                Duplicate::AtOnce
            }),
        }
    }

    /// Pauses or dies, where this is the point for it.
    fn meet(&mut self, fate: Fate, lane: Lane, token: u64, point: Point) -> Result<()> {
        let t = self.watch.now();
        let cannot = |e| Failure::system("the client cannot signal itself", e);
        if fate.death == Some(point) {
            tell(&Event::Dying { t, lane, point })?;
            kill_process(getpid(), Signal::KILL).map_err(cannot)?;
        }
        if fate.pause == Some(point) {
            let ttl = Duration::from_micros(self.orders.ttl_us);
            let pause = self.dice.between(ttl * 6 / 5, ttl * 3);
            tell(&Event::Paused {
                t,
                lane,
                token,
                point,
                for_us: u64::try_from(pause.as_micros()).unwrap_or(u64::MAX),
            })?;
            kill_process(getpid(), Signal::STOP).map_err(cannot)?;
            tell(&Event::Woke {
                t: self.watch.now(),
            })?;
        }
        Ok(())
    }
}

/// What became of a write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Written {
    /// There was nothing to write to this object.
    Nothing,
    Accepted,
    Refused,
}

/// The write that adds `op` to an object, and completes there what others left half done.
fn compose(lane: Lane, guard: &LockGuard, draft: &Draft, object: usize, op: Op) -> Option<Write> {
    let old = draft.values.get(object)?;
    let token = guard.token();
    let line = |fence: &Fence, op, delta| Line {
        op,
        token: token.get(),
        seq: fence.seq().unwrap_or(0),
        delta,
    };
    let fence = || match draft.arm {
        // The same number in everybody's hands refuses nobody.
        Arm::Unfenced => Fence::from(FencingToken::MIN),
        Arm::Naive => Fence::from(token),
        Arm::Raise => guard.fence(),
    };
    if lane == Lane::Counter {
        let (number, _) = value::counter(old)?;
        let fence = fence();
        return Some(Write {
            object,
            op,
            ops: vec![op],
            len: number + 1,
            body: value::counted(number + 1, &line(&fence, op, 0)),
            fence,
        });
    }
    let all: Vec<Vec<Line>> = draft
        .values
        .iter()
        .map(|value| value::lines(value))
        .collect::<Option<_>>()?;
    let mut missing = missing(lane, &all, object, op);
    let halves = halves(lane, op);
    if halves.contains(&object) {
        missing.push((op, delta(lane, op, object)));
    }
    if missing.is_empty() {
        return None;
    }
    let fence = fence();
    let more: Vec<Line> = missing
        .into_iter()
        .map(|(op, delta)| line(&fence, op, delta))
        .collect();
    let len = all.get(object).map_or(0, Vec::len) + more.len();
    Some(Write {
        object,
        op,
        ops: more.iter().map(|line| line.op).collect(),
        len: u64::try_from(len).unwrap_or(u64::MAX),
        body: value::appended(old, &more),
        fence,
    })
}

/// The updates of others than `own` that are in another object of theirs and not in this one.
fn missing(lane: Lane, all: &[Vec<Line>], object: usize, own: Op) -> Vec<(Op, i64)> {
    let here: HashSet<Op> = all
        .get(object)
        .map(|lines| lines.iter().map(|line| line.op).collect())
        .unwrap_or_default();
    let mut missing = Vec::new();
    for (at, lines) in all.iter().enumerate() {
        if at == object {
            continue;
        }
        for line in lines {
            let belongs = line.op != own && halves(lane, line.op).contains(&object);
            if belongs && !here.contains(&line.op) {
                missing.push((line.op, delta(lane, line.op, object)));
            }
        }
    }
    missing.truncate(COMPLETED_MAX);
    missing
}

/// The objects that an update belongs to.
pub(super) fn halves(lane: Lane, op: Op) -> Vec<usize> {
    match lane {
        Lane::Counter | Lane::List => vec![0],
        Lane::Pair => vec![0, 1],
        Lane::Bank => {
            let from = usize::try_from(op.number / 2 % 3).unwrap_or(0);
            vec![from, (from + 1) % 3]
        }
    }
}

/// What an update moves at an object of a bank: away from its first, and to its second.
fn delta(lane: Lane, op: Op, object: usize) -> i64 {
    let amount = i64::try_from(op.number % 9 + 1).unwrap_or(1);
    match (lane, halves(lane, op).first()) {
        (Lane::Bank, Some(from)) if *from == object => -amount,
        (Lane::Bank, _) => amount,
        _ => 0,
    }
}

/// The length of a list or the number of a counter, and whose update was the last.
pub(super) fn measured(lane: Lane, value: &[u8]) -> Option<(u64, Option<Op>)> {
    if lane == Lane::Counter {
        let (number, line) = value::counter(value)?;
        return Some((number, line.map(|line| line.op)));
    }
    let lines = value::lines(value)?;
    let len = u64::try_from(lines.len()).ok()?;
    Some((len, lines.last().map(|line| line.op)))
}

fn set(values: &mut [Vec<u8>], at: usize, value: Vec<u8>) {
    if let Some(place) = values.get_mut(at) {
        *place = value;
    }
}

/// One line to the parent, in one piece.
fn tell(event: &Event) -> Result<()> {
    let mut line = serde_json::to_vec(event)
        .map_err(|e| Failure::system("an event cannot be told", io::Error::other(e)))?;
    line.push(b'\n');
    if line.len() > LINE_MAX_BYTES {
        return Err(Failure::new(
            exit_codes::INDETERMINATE,
            format!(
                "an event is too long to be told in one piece: {} bytes",
                line.len()
            ),
        ));
    }
    loop {
        match rustix::io::write(io::stdout(), &line) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Failure::system("standard output", error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_left_half_done_is_found_and_a_transfer_moves_nothing_in_all() {
        let op = |number| Op {
            client: 1,
            life: 0,
            number,
        };
        let line = |op, object| Line {
            op,
            token: 1,
            seq: 1,
            delta: delta(Lane::Bank, op, object),
        };
        for number in [2, 4, 6, 20] {
            let halves = halves(Lane::Bank, op(number));
            let sum: i64 = halves
                .iter()
                .map(|object| delta(Lane::Bank, op(number), *object))
                .sum();
            assert_eq!(sum, 0);
        }
        // Of two transfers from the second account to the third, one came only half way.
        let all = [
            vec![],
            vec![line(op(2), 1), line(op(8), 1)],
            vec![line(op(2), 2)],
        ];
        assert_eq!(missing(Lane::Bank, &all, 2, op(4)), [(op(8), 9)]);
        assert_eq!(missing(Lane::Bank, &all, 2, op(8)), []);
        assert_eq!(missing(Lane::Bank, &all, 1, op(4)), []);
        assert_eq!(missing(Lane::Bank, &all, 0, op(4)), []);
    }
}
