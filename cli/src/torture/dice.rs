//! Choices that a seed repeats: SplitMix64 (Steele, Lea and Flood, 2014), whose every state is good
//! and whose streams are told apart by their seeds. Nothing here is a secret.

use std::time::Duration;

/// What the golden ratio contributes to each step.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A stream of choices.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    /// The stream number `stream` of a seed.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut dice = Self(seed ^ stream.wrapping_mul(0xd6e8_feb8_6659_fd93));
        dice.next();
        dice
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(STEP);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`; 0 where that is 0. The bias is far below what matters here.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next().checked_rem(limit).unwrap_or(0)
    }

    /// True in `percent` of the cases.
    pub(crate) fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// A duration from `low` on and below `high`, in whole microseconds.
    pub(crate) fn between(&mut self, low: Duration, high: Duration) -> Duration {
        let span = high.saturating_sub(low).as_micros();
        low + Duration::from_micros(self.below(u64::try_from(span).unwrap_or(u64::MAX)))
    }

    /// One of the items.
    pub(crate) fn pick<T: Copy>(&mut self, items: &[T]) -> Option<T> {
        let count = u64::try_from(items.len()).unwrap_or(u64::MAX);
        let at = usize::try_from(self.below(count)).unwrap_or(0);
        items.get(at).copied()
    }

    /// The items in another order.
    pub(crate) fn shuffled<T: Copy>(&mut self, items: &[T]) -> Vec<T> {
        let mut left = items.to_vec();
        let mut order = Vec::with_capacity(left.len());
        while !left.is_empty() {
            let count = u64::try_from(left.len()).unwrap_or(1);
            let at = usize::try_from(self.below(count)).unwrap_or(0);
            order.push(left.swap_remove(at));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_its_choices_and_its_streams_differ() {
        let stream = |seed, stream| {
            let mut dice = Dice::new(seed, stream);
            (0..4).map(|_| dice.next()).collect::<Vec<_>>()
        };
        assert_eq!(stream(7, 1), stream(7, 1));
        assert_ne!(stream(7, 1), stream(7, 2));
        assert_ne!(stream(7, 1), stream(8, 1));
    }

    #[test]
    fn durations_stay_in_their_bounds() {
        let mut dice = Dice::new(1, 1);
        let (low, high) = (Duration::from_millis(5), Duration::from_millis(9));
        for _ in 0..1_000 {
            let drawn = dice.between(low, high);
            assert!(drawn >= low && drawn < high);
        }
        assert_eq!(dice.between(high, low), high);
    }
}
