//! What fencelock's threads share, under every order of their steps.
//!
//! The queue, the held lease and the keeper are compiled here once more, from the same files, with
//! shuttle's mutexes and atomics in the place of the standard library's: once as they are, and once
//! for each defect that `build.rs` plants. What is tokio's (`Notify`, `Semaphore`) is not taken apart:
//! each of its operations is one step.

mod store;
mod surroundings;

pub(crate) use surroundings::{backoff, clock, driver, error, lease, name, runtime, sync, token};

macro_rules! variant {
    ($variant:ident) => {
        #[allow(dead_code, unused_imports, unreachable_pub)]
        pub mod $variant {
            pub(crate) mod queue {
                include!(concat!(
                    env!("OUT_DIR"),
                    "/",
                    stringify!($variant),
                    "/queue.rs"
                ));
            }
            pub(crate) mod held {
                include!(concat!(
                    env!("OUT_DIR"),
                    "/",
                    stringify!($variant),
                    "/held.rs"
                ));
            }
            pub(crate) mod keeper {
                include!(concat!(
                    env!("OUT_DIR"),
                    "/",
                    stringify!($variant),
                    "/keeper.rs"
                ));
            }
            include!("models.rs");
        }
    };
}

variant!(sound);
variant!(uncounted_place);
variant!(unkept_hint);
variant!(unheard_loss);
variant!(early_news);
variant!(stale_alarm);
