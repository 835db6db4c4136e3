//! Pages that are compiled with the library, so that their code cannot go stale.

/// What fencelock promises, numbered.
pub mod guarantees {
    #![doc = include_str!("guarantees.md")]
}

/// What it cannot do for you.
pub mod limitations {
    #![doc = include_str!("limitations.md")]
}

/// What it tells of itself: events, spans and metrics.
pub mod observability {
    #![doc = include_str!("observability.md")]
}

/// How to bring fencelock to a store of your own.
#[cfg(all(feature = "conformance", feature = "memory"))]
pub mod writing_a_backend {
    #![doc = include_str!("writing_a_backend.md")]
}
