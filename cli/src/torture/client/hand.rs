//! One of the client's hands: enters one section after another, under locks and on values of its set.

use std::sync::Arc;
use std::time::Duration;

use fencelock::fence::Domain;
use fencelock::{ErrorKind, Fence, Fenced, FencingToken, LockGuard, LockName, ResourceName};
use rustix::process::{Signal, getpid, kill_process};

use super::super::dice::Dice;
use super::super::history::{Event, Forgery, Op, Point};
use super::super::plan::{Arm, Fault, Lane, lock_of, page_of};
use super::super::value::Digest;
use super::update::{Draft, Write, compose, measured};
use super::{ARG, Client, VALUE_MAX_BYTES, tell};
use crate::failure::{Failure, Result};

/// How many of a hundred sections are paused at a chosen point, or die at one, in a process with one
/// hand; with more, each of them does so more rarely, and the process as often.
const PAUSED_PERCENT: u64 = 14;
const DYING_PERCENT: u64 = 3;

/// How many of a hundred sections send a write twice, or show what has to be refused.
const DUPLICATED_PERCENT: u64 = 20;
const FORGED_PERCENT: u64 = 4;

/// How many outlast their lease, and need it renewed.
const LONG_PERCENT: u64 = 6;

/// How many of a hundred sections, and of acquires that brought no grant, look at the lock from
/// outside.
const LOOKING_PERCENT: u64 = 5;
const LOOKING_AFTER_PERCENT: u64 = 30;

/// A number that no lock tells, and one that all of them can express.
const FORGED_TOKEN: u64 = 1 << 62;

/// One of a client's hands.
pub(super) struct Hand {
    client: Arc<Client>,
    set: u32,
    /// Where the present section writes.
    page: u32,
    dice: Dice,
}
/// What goes wrong in one section, decided at its beginning.
#[derive(Clone, Copy)]
struct Fate {
    pause: Option<Point>,
    death: Option<Point>,
    duplicate: Option<Duplicate>,
    /// How long it takes between reading and writing.
    thought: Duration,
    is_forging: bool,
    is_looking: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Duplicate {
    /// The same write twice at once.
    AtOnce,
    /// The same write again after a later one of the same holder.
    Late,
}

impl Hand {
    pub(super) fn new(client: Arc<Client>, set: u32) -> Self {
        let orders = &client.orders;
        let stream = u64::from(orders.client) << 48
            | u64::from(orders.life & 0xff_ffff) << 16
            | u64::from(set);
        let dice = Dice::new(orders.seed, stream);
        Self {
            client,
            set,
            page: 0,
            dice,
        }
    }

    /// Enters sections until the run is over.
    pub(super) async fn run(mut self) -> Result<()> {
        while self.client.may_begin() {
            if let Some(lane) = self.dice.pick(&self.client.orders.lanes) {
                self.section(lane).await?;
            }
            let rest = self.dice.between(Duration::ZERO, Duration::from_millis(10));
            tokio::time::sleep(rest).await;
        }
        Ok(())
    }

    fn now(&self) -> u64 {
        self.client.watch.now()
    }

    fn tell(&self, event: &Event) -> Result<()> {
        tell(self.page, event)
    }

    /// One critical section: acquire, read, think, look, write, release.
    async fn section(&mut self, lane: Lane) -> Result<()> {
        let fate = self.fate(lane);
        let ttl = Duration::from_micros(self.client.orders.ttl_us);
        let asked = self.now();
        let orders = &self.client.orders;
        self.page = page_of(self.set, orders.sets, asked);
        let name = format!("{}{}", orders.locks, lock_of(lane, self.set));
        let name = LockName::new(&name)?;
        let op = self.client.update();
        // Not all at the lock whose holder is paused, and some until it lapses.
        let wait = self.dice.between(ttl / 20, ttl * 3 / 2);
        let acquire = self.client.locks.acquire(&name).ttl(ttl).wait(wait);
        let guard = match acquire.label(op.to_string()).await {
            Ok(guard) => guard,
            Err(error) => {
                self.tell(&Event::NotGranted {
                    t: self.now(),
                    lane,
                    op,
                    kind: error.kind().as_str().to_owned(),
                })?;
                if self.dice.chance(LOOKING_AFTER_PERCENT) {
                    self.look(lane, &name).await?;
                }
                let rest = self.dice.between(Duration::ZERO, ttl / 50);
                tokio::time::sleep(rest).await;
                return Ok(());
            }
        };
        let (t, until) = self.belief(&guard);
        let token = guard.token().get();
        self.tell(&Event::Granted {
            t,
            asked,
            lane,
            op,
            token,
            until,
        })?;
        let mut drafts = Vec::new();
        let arms = self.client.orders.arms.clone();
        for arm in self.dice.shuffled(&arms) {
            if let Some(draft) = self.read(lane, arm, &guard).await? {
                drafts.push(draft);
            }
        }
        if fate.is_forging {
            self.forge(lane, &drafts, &guard).await?;
        }
        if fate.is_looking {
            self.look(lane, &name).await?;
        }
        self.tell(&Event::Thinking {
            t: self.now(),
            lane,
            token,
        })?;
        tokio::time::sleep(fate.thought).await;
        self.meet(fate, lane, token, Point::BeforeCheck)?;

        let (t, until) = self.belief(&guard);
        let good = guard.check().is_ok();
        self.tell(&Event::Checked {
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
        self.tell(&Event::Sent {
            t: self.now(),
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
        self.tell(&Event::Answered {
            t: self.now(),
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
            let sent = self.now();
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
            self.tell(&Event::Read {
                t: self.now(),
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

    /// Looks at a lock from outside, as an operator does.
    async fn look(&self, lane: Lane, name: &LockName) -> Result<()> {
        let sent = self.now();
        // What cannot be seen is no evidence.
        let Ok(Some(state)) = self.client.locks.inspect(name).await else {
            return Ok(());
        };
        let holders = state.holders.into_iter();
        let holders = holders.map(|h| (h.info.label.unwrap_or_default(), h.token.get()));
        self.tell(&Event::Seen {
            t: self.now(),
            sent,
            lane,
            holders: holders.collect(),
        })
    }

    /// Shows the storage the fence of another lock, and a number that no lock tells: after a raise,
    /// which has bound the resource to its lock.
    async fn forge(&mut self, lane: Lane, drafts: &[Draft], guard: &LockGuard) -> Result<()> {
        let Some((object, storage)) = self.dice.pick(lane.objects()) else {
            return Ok(());
        };
        let number = Fence::from(FencingToken::new(FORGED_TOKEN)?);
        let own = guard.fence();
        let elsewhere = Domain::new("forged", "elsewhere", &LockName::new("forged")?);
        let mut forged = vec![(Arm::Naive, Forgery::Number, number.clone())];
        if let Some(holder) = own.holder() {
            let other = Fence::new(own.token(), holder, elsewhere);
            let other = other.with_seq(own.seq().unwrap_or(1));
            forged.push((Arm::Raise, Forgery::Domain, other));
        }
        forged.push((Arm::Raise, Forgery::Number, number));
        for (arm, what, fence) in forged {
            if !drafts.iter().any(|draft| draft.arm == arm) {
                continue;
            }
            let (name, fenced) = self.resource(arm, object, storage)?;
            let outcome = match fenced.put(&name, b"forged".to_vec(), &fence).await {
                Ok(_) => "ok",
                Err(error) => error.kind().as_str(),
            };
            self.tell(&Event::Forged {
                t: self.now(),
                lane,
                token: fence.token().get(),
                arm,
                object: object.to_owned(),
                what,
                outcome: outcome.to_owned(),
            })?;
        }
        Ok(())
    }

    async fn end(&self, lane: Lane, guard: LockGuard, is_lost: bool) -> Result<()> {
        let token = guard.token().get();
        let sent = self.now();
        let outcome = if is_lost {
            drop(guard);
            ErrorKind::Lost.as_str()
        } else {
            // Before it is sent: who is killed in it cannot tell any more.
            self.tell(&Event::Releasing {
                t: sent,
                lane,
                token,
            })?;
            match guard.release().await {
                Ok(()) => "released",
                Err(error) => error.kind().as_str(),
            }
        };
        self.tell(&Event::Ended {
            t: self.now(),
            sent,
            lane,
            token,
            outcome: outcome.to_owned(),
        })
    }

    /// The present time, and until when the holder believes in its lock.
    fn belief(&self, guard: &LockGuard) -> (u64, u64) {
        let now = self.now();
        let left = guard.remaining().unwrap_or_default().as_micros();
        (
            now,
            now.saturating_add(u64::try_from(left).unwrap_or(u64::MAX)),
        )
    }

    fn resource(&self, arm: Arm, object: &str, storage: usize) -> Result<(ResourceName, &Fenced)> {
        let (Some(place), Some(fenced)) = (
            self.client.orders.storages.get(storage),
            self.client.storages.get(storage),
        ) else {
            return Err(Failure::usage(format!(
                "{ARG}: there is no storage {storage}"
            )));
        };
        Ok((
            ResourceName::new(&place.name(arm, object, self.page))?,
            fenced,
        ))
    }

    /// Always draws the same number of times, so that a fault that is left out changes no other.
    fn fate(&mut self, lane: Lane) -> Fate {
        let point = |dice: &mut Dice| match dice.below(10) {
            0 => Point::BeforeCheck,
            1..=6 => Point::BeforeWrite,
            7..=8 => Point::BetweenWrites,
            _ => Point::BeforeRelease,
        };
        let has = |fault| self.client.orders.faults.contains(&fault);
        let (pauses, dies, doubles) = (has(Fault::Pause), has(Fault::Kill), has(Fault::Duplicate));
        let forges = has(Fault::Forged);
        let hands = u64::from(self.client.orders.sets);
        let ttl = Duration::from_micros(self.client.orders.ttl_us);
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
        let pause = (dice.below(100 * hands) < PAUSED_PERCENT, point(dice));
        let death = (dice.below(100 * hands) < DYING_PERCENT, point(dice));
        let duplicate = (dice.chance(DUPLICATED_PERCENT), dice.chance(50));
        let (forged, is_looking) = (dice.chance(FORGED_PERCENT), dice.chance(LOOKING_PERCENT));
        let single = matches!(lane, Lane::Counter | Lane::List);
        Fate {
            thought,
            is_forging: forges && forged,
            is_looking,
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
        let t = self.now();
        let cannot = |e| Failure::system("the client cannot signal itself", e);
        if fate.death == Some(point) {
            self.tell(&Event::Dying { t, lane, point })?;
            kill_process(getpid(), Signal::KILL).map_err(cannot)?;
        }
        if fate.pause == Some(point) {
            let ttl = Duration::from_micros(self.client.orders.ttl_us);
            let pause = self.dice.between(ttl * 6 / 5, ttl * 3);
            self.tell(&Event::Paused {
                t,
                lane,
                token,
                point,
                for_us: u64::try_from(pause.as_micros()).unwrap_or(u64::MAX),
            })?;
            kill_process(getpid(), Signal::STOP).map_err(cannot)?;
            self.tell(&Event::Woke { t: self.now() })?;
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

fn set(values: &mut [Vec<u8>], at: usize, value: Vec<u8>) {
    if let Some(place) = values.get_mut(at) {
        *place = value;
    }
}
