//! The values at the end.

use std::sync::Arc;
use std::time::Duration;

use fencelock::{Fenced, LockGuard, Locks};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::check::{Final, Finals};
use super::client::VALUE_MAX_BYTES;
use super::plan::{Arm, Lane, Plan, Storage, lock_of, pages};
use crate::failure::say;

/// How long the lock of a workload may take to be had when the run is over, beyond its TTL.
const FINAL_WAIT: Duration = Duration::from_secs(15);

/// How many locks are looked at at once.
const AT_ONCE: usize = 16;

/// How often a value is asked for, and the pause in between.
const TRIES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(500);

/// Where the values are, and under which locks.
pub(super) struct Ends {
    pub(super) locks: Locks,
    /// What the names of the locks begin with.
    pub(super) names: String,
    pub(super) storages: Vec<(Storage, Fenced)>,
    pub(super) arms: Vec<Arm>,
    pub(super) ttl: Duration,
}

/// The values when all is over, each workload's read under its lock: whatever was on its way is settled.
pub(super) async fn finals(ends: Ends, plan: &Plan, took_us: u64) -> Finals {
    let ends = Arc::new(ends);
    let places = Arc::new(Semaphore::new(AT_ONCE));
    let mut readers = JoinSet::new();
    for lane in &plan.lanes {
        for set in 0..plan.locks {
            let (ends, places, lane) = (Arc::clone(&ends), Arc::clone(&places), *lane);
            let pages = pages(set, plan.locks, took_us);
            readers.spawn(async move {
                // It is never closed.
                let _place = places.acquire().await;
                ends.of(lane, set, &pages).await
            });
        }
    }
    let mut finals = Finals::new();
    while let Some(read) = readers.join_next().await {
        match read {
            Ok(read) => finals.extend(read),
            Err(error) => say(&format!("the values cannot be read at the end: {error}")),
        }
    }
    finals
}

impl Ends {
    /// Those under one lock.
    async fn of(&self, lane: Lane, set: u32, pages: &[u32]) -> Finals {
        let mut finals = Finals::new();
        let lock = lock_of(lane, set);
        let guard = self
            .locks
            .acquire(format!("{}{lock}", self.names).as_str())
            .ttl(self.ttl.max(FINAL_WAIT))
            .wait(self.ttl * 2 + FINAL_WAIT)
            .await;
        let guard = match guard {
            Ok(guard) => Some(guard),
            Err(error) => {
                say(&format!(
                    "the lock {lock} is not to be had at the end: {error}"
                ));
                None
            }
        };
        for page in pages {
            for arm in &self.arms {
                for (object, storage) in lane.objects() {
                    let Some((place, fenced)) = self.storages.get(*storage) else {
                        continue;
                    };
                    let name = place.name(*arm, object, *page);
                    let value = match settled(fenced, &name, *arm, guard.as_ref()).await {
                        Ok(value) => Some(value),
                        Err(error) => {
                            say(&format!("{name} cannot be read at the end: {error}"));
                            None
                        }
                    };
                    finals.insert((*arm, *object, *page), value);
                }
            }
        }
        if let Some(guard) = guard {
            // It is about to be taken away.
            let _ = guard.release().await;
        }
        finals
    }
}

/// Reads a value, again where a server that has just been tortured does not serve yet.
async fn settled(
    fenced: &Fenced,
    name: &str,
    arm: Arm,
    guard: Option<&LockGuard>,
) -> fencelock::Result<Final> {
    for _ in 1..TRIES {
        match read(fenced, name, arm, guard).await {
            Ok(value) => return Ok(value),
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
    read(fenced, name, arm, guard).await
}

/// Reads a value as it was left. Where the arm raises, a raise comes first, which settles what is on
/// its way; and the watermark is that from before it.
async fn read(
    fenced: &Fenced,
    name: &str,
    arm: Arm,
    guard: Option<&LockGuard>,
) -> fencelock::Result<Final> {
    let seen = fenced.get(name).await?;
    let watermark = seen
        .watermark
        .as_ref()
        .map(|watermark| watermark.token.get());
    // Nobody has touched it.
    let untouched = seen.value.is_none() && watermark.is_none();
    let last = match guard {
        Some(guard) if arm == Arm::Raise && !untouched => fenced.raise(name, guard).await?,
        _ => seen,
    };
    let writer = last.writer.map(|writer| writer.get());
    let value = match last.value {
        Some(body) => body.into_bytes(VALUE_MAX_BYTES)?.to_vec(),
        None => Vec::new(),
    };
    Ok(Final {
        value,
        watermark,
        writer,
    })
}
