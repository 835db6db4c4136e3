//! Pauses between tries: decorrelated jitter with a cap, so that many waiters spread out and none
//! of them polls tightly.

use std::time::Duration;

use crate::random;

/// A growing, jittered pause: each is drawn from `floor` to three times the one before, at most
/// `cap`.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    floor: Duration,
    cap: Duration,
    last: Duration,
}

impl Backoff {
    pub(crate) fn new(floor: Duration, cap: Duration) -> Self {
        Self {
            floor,
            cap,
            last: floor,
        }
    }

    pub(crate) fn next(&mut self) -> Duration {
        self.last = random::between(self.floor, self.last.saturating_mul(3)).min(self.cap);
        self.last
    }

    pub(crate) fn reset(&mut self) {
        self.last = self.floor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_stay_between_floor_and_cap() {
        let (floor, cap) = (Duration::from_millis(10), Duration::from_millis(80));
        let mut backoff = Backoff::new(floor, cap);
        let pauses: Vec<_> = (0..200).map(|_| backoff.next()).collect();
        assert!(pauses.iter().all(|p| (floor..=cap).contains(p)));
        assert!(pauses.contains(&cap), "it grows to the cap");
    }
}
