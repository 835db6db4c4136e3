//! The store's clock, which nobody can ask for the time: what the store notes beside an object that
//! is written now is read instead.
//!
//! Such a reading is a whole second, rounded down, of *some* server of the store. The margin that is
//! added to each TTL covers that second, and as much as the clocks of two servers may differ. What
//! follows from it is in `docs/decisions/0009-leases-by-the-stores-own-timestamps.md`.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::clock::{Clock, Tick};
use crate::error::Result;

/// How fine a time is that a store notes.
pub(super) const GRAIN: Duration = Duration::from_secs(1);

/// One look at the store's clock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    /// What the store noted, in microseconds since the Unix epoch.
    pub(super) noted_us: u64,
    /// Before the object was written.
    pub(super) asked: Tick,
    /// After it was read.
    pub(super) answered: Tick,
}

/// What a client knows of the store's clock.
#[derive(Debug)]
pub(super) struct StoreClock {
    clock: Clock,
    margin: Duration,
    /// Nothing is judged by the store's clock: its users chose so, or it was seen to be wrong.
    distrusted: AtomicBool,
    last: Mutex<Option<Reading>>,
    /// Held by whoever looks, so that one look serves all who ask meanwhile.
    looking: tokio::sync::Mutex<()>,
}

impl StoreClock {
    pub(super) fn new(clock: Clock, margin: Duration, distrusted: bool) -> Self {
        Self {
            clock,
            margin,
            distrusted: AtomicBool::new(distrusted),
            last: Mutex::new(None),
            looking: tokio::sync::Mutex::new(()),
        }
    }

    /// True while leases are judged by it.
    pub(super) fn is_trusted(&self) -> bool {
        !self.distrusted.load(Ordering::Relaxed)
    }

    /// The last reading.
    pub(super) fn last(&self) -> Option<Reading> {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reading that was begun after this call, by `look`, which writes an object and says when
    /// the store noted that to have been.
    ///
    /// Cancel safe.
    pub(super) async fn read(&self, look: impl Future<Output = Result<u64>>) -> Result<Reading> {
        let wanted = self.clock.now();
        let _turn = self.looking.lock().await;
        if let Some(last) = self.last()
            && last.asked > wanted
        {
            return Ok(last);
        }
        let asked = self.clock.now();
        let noted_us = look.await?;
        let reading = Reading {
            noted_us,
            asked,
            answered: self.clock.now(),
        };
        self.note(reading);
        Ok(reading)
    }

    /// Keeps the reading, and compares it with the one before: a clock that runs back, jumps, or
    /// whose servers differ by more than the margin allows decides nothing any more.
    fn note(&self, reading: Reading) {
        let before = self
            .last
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .replace(reading);
        if let Some(before) = before
            && !agrees(&before, &reading, self.margin)
        {
            self.distrust("it ran back, or jumped");
        }
    }

    /// Judges nothing by this clock any more.
    pub(super) fn distrust(&self, why: &'static str) {
        if !self.distrusted.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                why,
                "the object store's clock is not steady, or its servers' clocks differ; leases are judged by observation from now on"
            );
        }
    }
}

impl Reading {
    /// What the store's clock shows at most at `now`, whichever server is asked.
    pub(super) fn latest_us(&self, now: Tick, margin: Duration) -> u64 {
        let passed = slack(now.since(self.asked));
        self.noted_us
            .saturating_add(micros(passed.saturating_add(margin)))
    }

    /// What it shows at `now`, to the second.
    pub(super) fn likely_us(&self, now: Tick) -> u64 {
        self.noted_us
            .saturating_add(micros(now.since(self.answered)))
    }
}

/// True where both readings can be of one clock that is steady up to 2 %, and of servers that
/// differ by no more than the margin allows for.
fn agrees(before: &Reading, reading: &Reading, margin: Duration) -> bool {
    let most = before.latest_us(reading.answered, margin);
    let passed = reading.asked.since(before.answered);
    let least = before
        .noted_us
        .saturating_add(micros(passed * 100 / 102))
        .saturating_sub(micros(margin));
    (least..=most).contains(&reading.noted_us)
}

/// `duration` on a clock that is 2 % fast.
pub(super) fn slack(duration: Duration) -> Duration {
    duration.saturating_add(duration / 50)
}

pub(super) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARGIN: Duration = Duration::from_secs(3);

    fn reading(noted_s: u64, asked_ms: u64, answered_ms: u64) -> Reading {
        Reading {
            noted_us: noted_s * 1_000_000,
            asked: Tick::from_nanos(asked_ms * 1_000_000),
            answered: Tick::from_nanos(answered_ms * 1_000_000),
        }
    }

    #[test]
    fn readings_of_a_steady_clock_agree() {
        let first = reading(1_000, 500, 700);
        for (noted, at) in [(1_000, 800), (1_010, 10_500), (1_101, 100_000)] {
            assert!(agrees(&first, &reading(noted, at, at + 100), MARGIN));
        }
    }

    #[test]
    fn a_clock_that_steps_is_found_out() {
        let first = reading(1_000, 500, 700);
        for (noted, at) in [
            (996, 800),
            (1_014, 10_000),
            (1_006, 10_000),
            (1_104, 90_000),
        ] {
            assert!(
                !agrees(&first, &reading(noted, at, at + 100), MARGIN),
                "noted={noted} at={at}"
            );
        }
    }

    #[test]
    fn distrust_is_for_good() {
        let clock = StoreClock::new(Clock::system(), MARGIN, false);
        clock.note(reading(1_000, 500, 700));
        assert!(clock.is_trusted());
        clock.note(reading(900, 800, 900));
        assert!(!clock.is_trusted());
        clock.note(reading(900, 910, 920));
        assert!(!clock.is_trusted());
    }

    #[tokio::test]
    async fn a_reading_serves_those_who_asked_before_it_began() {
        let clock = StoreClock::new(Clock::system(), MARGIN, false);
        let looks = std::sync::atomic::AtomicU64::new(0);
        let look = async || {
            tokio::time::sleep(Duration::from_millis(20)).await;
            looks.fetch_add(1, Ordering::Relaxed);
            Ok(crate::clock::unix_micros())
        };
        // The first looks at once; the others wait for it, and share the second look.
        let all = futures_util::future::join_all((0..9).map(|_| clock.read(look())));
        assert!(all.await.iter().all(Result::is_ok));
        assert_eq!(looks.load(Ordering::Relaxed), 2);
    }
}
