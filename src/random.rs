//! The one place that draws randomness: ids from a cryptographic generator, and jitter.

use rand::Rng as _;
use std::time::Duration;

/// 128 random bits from a generator seeded by the operating system.
pub(crate) fn id() -> [u8; 16] {
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
    #[expect(
        clippy::disallowed_methods,
        reason = "this is the one place that draws randomness"
    )]
    rand::rng().random_range(low..=high)
}
