//! What the tasks of the processes do: everything that a user may, with chance as the user.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use fencelock::{Error, ErrorKind, Fenced, LockGuard, Locks, Result};

use crate::link::{Link, decode, encode};
use crate::world::World;

/// A lock, its resource, and its capacity. `b` is the lock whose engine lost its data: its resource
/// remembers larger tokens. `s` guards nothing.
pub(crate) const NAMES: [(&str, u32); 3] = [("a", 1), ("b", 1), ("s", 2)];

/// One process, as its tasks see it.
#[derive(Clone)]
pub(crate) struct Actor {
    pub(crate) process: usize,
    pub(crate) world: Arc<World>,
    pub(crate) link: Link,
    pub(crate) locks: Locks,
    pub(crate) fenced: Fenced,
    pub(crate) ids: Rc<Cell<u32>>,
    /// Watermarks that this process met while its lease was good (L10).
    pub(crate) met: Rc<RefCell<BTreeMap<&'static str, u64>>>,
}

/// What came of an acquire.
enum Got {
    Guard(LockGuard),
    Nothing,
}

impl Actor {
    pub(crate) async fn run(self, turns: u64) {
        for _ in 0..turns {
            self.world.sleep(self.world.millis(60)).await;
            self.turn().await;
        }
    }

    async fn turn(&self) {
        let world = &self.world;
        let (name, permits) = NAMES[[0, 0, 0, 1, 2][world.below(5) as usize]];
        let met = self.met.borrow().get(name).copied();
        match world.below(24) {
            0 => {
                self.heard(name, "break", self.locks.break_lock(name).await.map(drop));
                return;
            }
            1 => {
                let idle = world.millis(500);
                self.heard(name, "prune", self.locks.prune(idle).await.map(drop));
                return;
            }
            2..=5 => return self.run_under(name, permits).await,
            _ => {}
        }
        match self.acquire(name, permits).await {
            Got::Nothing => {}
            Got::Guard(guard) => {
                self.observe(name, permits, &guard);
                let token = guard.token().get();
                if met.is_some_and(|met| token <= met) {
                    world.violation(format_args!(
                        "L10: {token} of {name} though {met:?} was met"
                    ));
                }
                self.work(name, &guard).await;
                self.end(name, guard).await;
            }
        }
    }

    fn ttl(&self) -> Duration {
        let ttls = [100, 150, 400, 1_200];
        Duration::from_millis(ttls[self.world.below(4) as usize])
    }

    /// Asks in one of the ways that there are; perhaps without the patience to see the answer.
    async fn acquire(&self, name: &'static str, permits: u32) -> Got {
        let world = &self.world;
        let patience = match world.below(5) {
            0 => 1 + world.below(12),
            _ => u64::MAX,
        };
        if world.chance(5) {
            let asked = self
                .locks
                .try_acquire(name)
                .ttl(self.ttl())
                .permits(permits);
            return match patient(patience, asked.into_future()).await {
                None => self.abandoned(name),
                Some(Ok(Some(guard))) => Got::Guard(guard),
                Some(Ok(None)) => Got::Nothing,
                Some(Err(error)) => self.failed(name, &error),
            };
        }
        let mut asked = self.locks.acquire(name).ttl(self.ttl()).permits(permits);
        let wait = match world.below(6) {
            0 => Some(Duration::ZERO),
            1 => None,
            2 => Some(world.millis(3_000)),
            _ => Some(world.millis(300)),
        };
        asked = match wait {
            Some(wait) => asked.wait(wait),
            None => asked.wait_forever(),
        };
        if world.chance(5) {
            asked = asked.min_hold(world.millis(300));
        }
        if world.chance(5) {
            asked = asked.max_hold(Duration::from_millis(300) + world.millis(300));
        }
        if world.chance(6) {
            asked = asked.no_renew();
        }
        let (since, pauses) = (world.now(), world.pauses(self.process));
        let answer = patient(patience, asked.into_future()).await;
        let took = Duration::from_nanos(world.now() - since);
        if let Some(wait) = wait
            && world.pauses(self.process) == pauses
            && took > wait + Duration::from_secs(3)
        {
            world.violation(format_args!("{name}: a wait of {wait:?} took {took:?}"));
        }
        match answer {
            None => self.abandoned(name),
            Some(Ok(guard)) => Got::Guard(guard),
            Some(Err(error)) => self.failed(name, &error),
        }
    }

    fn abandoned(&self, name: &str) -> Got {
        self.world.note(format_args!("abandoned {name}"));
        self.link.oracle.lock().unwrap().seen.abandoned += 1;
        Got::Nothing
    }

    fn failed(&self, name: &str, error: &Error) -> Got {
        self.heard(
            name,
            "acquire",
            Err(Error::new(error.kind(), error.to_string())),
        );
        Got::Nothing
    }

    fn heard(&self, name: &str, what: &str, answer: Result<()>) {
        let Err(error) = answer else {
            return;
        };
        let kind = error.kind();
        self.world.note(format_args!("{what} {name}: {kind}"));
        if matches!(
            kind,
            ErrorKind::Invalid | ErrorKind::Corrupt | ErrorKind::Exhausted | ErrorKind::Unsupported
        ) {
            self.world.violation(format_args!("{what} {name}: {error}"));
        }
    }

    fn observe(&self, name: &str, permits: u32, guard: &LockGuard) {
        let (token, holder) = (guard.token().get(), *guard.holder());
        self.world.note(format_args!("holds {name} {token}"));
        let mut oracle = self.link.oracle.lock().unwrap();
        oracle.believes(&self.world, name, permits, (holder, token), guard.belief());
    }

    async fn run_under(&self, name: &'static str, permits: u32) {
        let acquire = self.locks.acquire(name).ttl(self.ttl()).permits(permits);
        let wait = self.world.millis(1_000);
        let work = async |guard: &LockGuard| -> Result<()> {
            self.observe(name, permits, guard);
            self.work(name, guard).await;
            Ok(())
        };
        let done = acquire.wait(wait).run(work).await;
        self.heard(name, "with_lock", done);
    }

    /// Adds one to the lock's value, with a fence and without one.
    async fn work(&self, name: &'static str, guard: &LockGuard) {
        let world = &self.world;
        if world.chance(6) {
            self.heard(name, "renew", guard.renew().await);
        }
        if name == "s" {
            return world.sleep(world.millis(400)).await;
        }
        let id = self.ids.get() + 1;
        self.ids.set(id);
        let raised = self.fenced.raise(name, guard).await;
        let snapshot = match raised {
            Ok(snapshot) => snapshot,
            Err(error) => return self.refused(name, guard, &error),
        };
        let mut value = decode(&snapshot.value.unwrap().into_bytes(1 << 20).unwrap());
        let plain = self
            .link
            .call(move |_, oracle| oracle.unfenced(name).clone());
        let plain = plain.await;
        let longest = if world.chance(4) { 700 } else { 60 };
        world.sleep(world.millis(longest)).await;
        value.push(id);
        match self.fenced.put(name, encode(&value), guard).await {
            Ok(_) => self.link.oracle.lock().unwrap().acked(name, id),
            Err(error) => self.refused(name, guard, &error),
        }
        let Ok(mut plain) = plain else {
            return;
        };
        plain.push(id);
        let put = self
            .link
            .call(move |_, oracle| oracle.unfenced(name).clone_from(&plain));
        if put.await.is_ok() {
            let mut oracle = self.link.oracle.lock().unwrap();
            oracle.acked_unfenced(name, id);
        }
    }

    fn refused(&self, name: &'static str, guard: &LockGuard, error: &Error) {
        if let (ErrorKind::Fenced, Some(watermark)) = (error.kind(), error.watermark())
            && guard.check().is_ok()
        {
            self.world.note(format_args!("met {watermark} at {name}"));
            let mut met = self.met.borrow_mut();
            let met = met.entry(name).or_default();
            *met = (*met).max(watermark.get());
            return;
        }
        self.heard(
            name,
            "write",
            Err(Error::new(error.kind(), error.to_string())),
        );
    }

    /// Ends a hold in one of the ways that there are.
    async fn end(&self, name: &str, guard: LockGuard) {
        let world = &self.world;
        if guard.check().is_err() {
            self.link.oracle.lock().unwrap().seen.lost_guards += 1;
        }
        match world.below(8) {
            0 | 1 => drop(guard),
            2 => {
                let gone = patient(1 + world.below(6), Box::pin(guard.release())).await;
                self.heard(name, "release", gone.unwrap_or(Ok(())));
            }
            3 => {
                let left = guard.detach();
                world.sleep(world.millis(200)).await;
                let gone = self.locks.release(&left.lease(), Duration::ZERO).await;
                self.heard(name, "release", gone.map(drop));
            }
            4 => {
                // Whoever sits on a guard keeps it only as long as it is good.
                tokio::select! {
                    biased;
                    _ = guard.lost() => {}
                    () = world.sleep(world.millis(2_000)) => {}
                }
                world.sleep(world.millis(500)).await;
                drop(guard);
            }
            _ => self.heard(name, "release", guard.release().await),
        }
    }
}

/// What `work` yields, or `None` where it needs more than so many polls: it is dropped then.
async fn patient<F: Future + Unpin>(polls: u64, mut work: F) -> Option<F::Output> {
    let mut left = polls;
    std::future::poll_fn(move |context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        let polled = Pin::new(&mut work).poll(context);
        if polled.is_pending() && left == 0 {
            // Dropped at some later poll, so that something happens in between.
            context.waker().wake_by_ref();
        }
        polled.map(Some)
    })
    .await
}
