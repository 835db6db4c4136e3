//! The one place that reads time.
//!
//! Lease arithmetic uses `CLOCK_BOOTTIME` on Linux, which goes on while the machine is suspended:
//! `std::time::Instant` is `CLOCK_MONOTONIC` there and stands still, so that a lease would look
//! young after a laptop or a virtual machine slept (clock_gettime(2); rust-lang/rust#87906). The
//! wall clock is read for display and for the bound on token jumps, never to decide a lease.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A point on the host's suspend-aware monotonic clock, in nanoseconds since an arbitrary start.
///
/// Comparable within one boot of one host only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tick(u64);

impl Tick {
    /// A tick that no clock reaches: 584 years after boot.
    pub const NEVER: Self = Self(u64::MAX);

    /// A tick from nanoseconds since boot.
    #[must_use]
    pub fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since boot.
    #[must_use]
    pub fn as_nanos(self) -> u64 {
        self.0
    }

    /// The time from `earlier` to this tick, or zero where `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// This tick plus `duration`; [`Tick::NEVER`] where that overflows.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

/// A source of [`Tick`]s. Cheap to clone; clones share their offset.
///
/// [`Clock::system`] is what production uses. [`Clock::adjustable`] is the same clock with an
/// offset that a test moves forward, to let a lease lapse without waiting for it.
#[derive(Clone, Debug, Default)]
pub struct Clock(Source);

#[derive(Clone, Debug, Default)]
enum Source {
    #[default]
    System,
    /// The system's plus this many nanoseconds.
    Adjustable(Arc<AtomicU64>),
    /// What a test says.
    #[cfg(feature = "simulation")]
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// The host's clock.
    #[must_use]
    pub fn system() -> Self {
        Self(Source::System)
    }

    /// The host's clock plus an offset, at first zero, that [`advance`](Self::advance) moves.
    #[must_use]
    pub fn adjustable() -> Self {
        Self(Source::Adjustable(Arc::default()))
    }

    /// A clock that shows `nanos` and nothing else.
    #[cfg(feature = "simulation")]
    #[doc(hidden)]
    #[must_use]
    pub fn manual(nanos: Arc<AtomicU64>) -> Self {
        Self(Source::Manual(nanos))
    }

    /// Moves this clock and its clones forward. Does nothing on a [`Clock::system`].
    pub fn advance(&self, by: Duration) {
        if let Source::Adjustable(offset) = &self.0 {
            let by = u64::try_from(by.as_nanos()).unwrap_or(u64::MAX);
            offset.fetch_add(by, Ordering::SeqCst);
        }
    }

    /// The present tick.
    #[must_use]
    pub fn now(&self) -> Tick {
        match &self.0 {
            Source::System => Tick(boottime_ns()),
            Source::Adjustable(offset) => {
                Tick(boottime_ns().saturating_add(offset.load(Ordering::SeqCst)))
            }
            #[cfg(feature = "simulation")]
            Source::Manual(nanos) => Tick(nanos.load(Ordering::SeqCst)),
        }
    }
}

/// Microseconds since the Unix epoch on this host's wall clock; 0 before the epoch.
#[must_use]
pub fn unix_micros() -> u64 {
    #[cfg(feature = "simulation")]
    if let Some(world) = crate::simulation::current() {
        return world.unix_micros();
    }
    #[expect(
        clippy::disallowed_methods,
        reason = "this is the one place that reads the wall clock"
    )]
    let now = SystemTime::now();
    now.duration_since(UNIX_EPOCH)
        .map(|d| u64::try_from(d.as_micros()).unwrap_or(u64::MAX))
        .unwrap_or(0)
}

#[cfg(any(target_os = "linux", target_os = "android"))]
const SUSPEND_AWARE: rustix::time::ClockId = rustix::time::ClockId::Boottime;
// Darwin's CLOCK_MONOTONIC goes on during sleep; other systems' may not.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
const SUSPEND_AWARE: rustix::time::ClockId = rustix::time::ClockId::Monotonic;

fn boottime_ns() -> u64 {
    let t = rustix::time::clock_gettime(SUSPEND_AWARE);
    let secs = u64::try_from(t.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(t.tv_nsec).unwrap_or(0);
    secs.saturating_mul(1_000_000_000).saturating_add(nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adjustable_clock_moves_with_its_clones() {
        let clock = Clock::adjustable();
        let twin = clock.clone();
        let before = twin.now();
        clock.advance(Duration::from_secs(3600));
        assert!(twin.now().since(before) >= Duration::from_secs(3600));
    }

    #[test]
    fn ticks_saturate() {
        assert_eq!(Tick::NEVER.after(Duration::from_secs(1)), Tick::NEVER);
        assert_eq!(
            Tick::from_nanos(1).since(Tick::from_nanos(2)),
            Duration::ZERO
        );
        assert_eq!(Tick::from_nanos(1).after(Duration::MAX), Tick::NEVER);
    }
}
