//! The one place that draws randomness: ids from a cryptographic generator, and jitter.

use rand::Rng as _;
use std::time::Duration;

/// 128 random bits from a generator seeded by the operating system.
pub(crate) fn id() -> [u8; 16] {
    #[cfg(feature = "simulation")]
    if let Some(world) = crate::simulation::current() {
        let bits = (u128::from(world.random()) << 64) | u128::from(world.random());
        return bits.to_le_bytes();
    }
    #[expect(
        clippy::disallowed_methods,
        reason = "this is the one place that draws randomness"
    )]
    rand::rng().random()
}

/// A duration drawn evenly from `low..=high`; `low` where the range is empty.
pub(crate) fn between(low: Duration, high: Duration) -> Duration {
    if high <= low {
        return low;
    }
    #[cfg(feature = "simulation")]
    if let Some(world) = crate::simulation::current() {
        let nanos = u64::try_from((high - low).as_nanos()).unwrap_or(u64::MAX);
        return low + Duration::from_nanos(world.random() % nanos.max(1));
    }
    #[expect(
        clippy::disallowed_methods,
        reason = "this is the one place that draws randomness"
    )]
    rand::rng().random_range(low..=high)
}
