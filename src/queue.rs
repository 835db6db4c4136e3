//! Waiting in line within one process: for each name, tasks queue in order, and only the first of
//! them contends at the engine.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, Semaphore, SemaphorePermit};

use crate::name::LockName;

const SHARDS: usize = 16;

/// The lines of all names that somebody waits for; nothing is kept for a name without waiters.
#[derive(Debug)]
pub(crate) struct Queues {
    shards: Vec<Mutex<HashMap<LockName, Arc<Line>>>>,
    hasher: RandomState,
    waiters: AtomicUsize,
}

#[derive(Debug)]
struct Line {
    // Tokio's semaphore serves in the order of arrival.
    turn: Semaphore,
    freed: Notify,
    places: AtomicUsize,
}

/// A place in one name's line; leaving is dropping it.
#[derive(Debug)]
pub(crate) struct Place<'q> {
    queues: &'q Queues,
    name: LockName,
    line: Arc<Line>,
}

impl Queues {
    pub(crate) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            hasher: RandomState::new(),
            waiters: AtomicUsize::new(0),
        }
    }

    /// True where a newcomer has to queue behind somebody.
    pub(crate) fn has_waiters(&self, name: &LockName) -> bool {
        self.waiters.load(Ordering::Acquire) > 0
            && self.shard(name).is_some_and(|s| s.contains_key(name))
    }

    /// Tells the first in line that this process gave the lock up.
    pub(crate) fn freed(&self, name: &LockName) {
        if self.waiters.load(Ordering::Acquire) > 0
            && let Some(shard) = self.shard(name)
            && let Some(line) = shard.get(name)
        {
            line.freed.notify_one();
        }
    }

    /// How many places there are, and lines of names.
    #[cfg(feature = "simulation")]
    pub(crate) fn load(&self) -> (usize, usize) {
        let lines = self.shards.iter().map(|shard| {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.len()
        });
        (self.waiters.load(Ordering::Acquire), lines.sum())
    }

    /// Joins the line at its end.
    pub(crate) fn join(&self, name: &LockName) -> Place<'_> {
        self.waiters.fetch_add(1, Ordering::AcqRel);
        let new = || {
            Arc::new(Line {
                turn: Semaphore::new(1),
                freed: Notify::new(),
                places: AtomicUsize::new(0),
            })
        };
        let line = match self.shard(name) {
            Some(mut shard) => {
                let line = Arc::clone(shard.entry(name.clone()).or_insert_with(new));
                // Counted under the shard's lock: a leaver must not remove the line in between.
                line.places.fetch_add(1, Ordering::AcqRel);
                line
            }
            None => new(),
        };
        Place {
            queues: self,
            name: name.clone(),
            line,
        }
    }

    fn shard(&self, name: &LockName) -> Option<MutexGuard<'_, HashMap<LockName, Arc<Line>>>> {
        let hash = usize::try_from(self.hasher.hash_one(name) >> 32).unwrap_or(0);
        let shard = self.shards.get(hash % SHARDS)?;
        // The maps are whole at every unlock, so a panic elsewhere does not spoil them.
        Some(shard.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Place<'_> {
    /// Waits to be the first in line. Cancel safe: leaving loses the place.
    pub(crate) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        self.line.turn.acquire().await.ok()
    }

    /// Resolves when this process gave the lock up since the last call. Cancel safe.
    pub(crate) async fn freed(&self) {
        self.line.freed.notified().await;
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(mut shard) = self.queues.shard(&self.name) {
            let last = self.line.places.fetch_sub(1, Ordering::AcqRel) == 1;
            if let Entry::Occupied(entry) = shard.entry(self.name.clone())
                && last
            {
                entry.remove();
            }
        }
        self.queues.waiters.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn turns_come_in_order_and_nothing_is_left_behind() {
        let queues = Queues::new();
        let name: LockName = "a".parse().unwrap();
        let (first, second, third) = (queues.join(&name), queues.join(&name), queues.join(&name));
        let turn = first.turn().await.unwrap();
        let mut second_turn = Box::pin(second.turn());
        let mut third_turn = Box::pin(third.turn());
        assert!(futures_poll(&mut second_turn).is_none());
        assert!(futures_poll(&mut third_turn).is_none());
        drop(turn);
        assert!(futures_poll(&mut third_turn).is_none());
        assert!(futures_poll(&mut second_turn).is_some());
        drop((second_turn, third_turn));
        drop((first, second, third));
        assert!(!queues.has_waiters(&name));
        assert!(queues.shards.iter().all(|s| s.lock().unwrap().is_empty()));
    }

    fn futures_poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(future).poll(&mut context) {
            std::task::Poll::Ready(value) => Some(value),
            std::task::Poll::Pending => None,
        }
    }
}
