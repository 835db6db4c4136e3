//! The cases that every backend passes, for those outside this crate too.
//!
//! A backend's test file names a harness and gets one named test for each case, so that the first
//! failure does not hide the rest:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use fencelock::clock::Clock;
//! use fencelock::conformance::LeaseHarness;
//! use fencelock::memory::MemoryStore;
//! use fencelock::{LeaseStore, LockName};
//!
//! struct Harness {
//!     store: MemoryStore,
//!     clock: Clock,
//! }
//!
//! impl Harness {
//!     fn new() -> Self {
//!         let clock = Clock::adjustable();
//!         Self { store: MemoryStore::with_clock(clock.clone()), clock }
//!     }
//! }
//!
//! #[async_trait::async_trait]
//! impl LeaseHarness for Harness {
//!     fn clients(&self) -> [Arc<dyn LeaseStore>; 2] {
//!         [Arc::new(self.store.clone()), Arc::new(self.store.clone())]
//!     }
//!     async fn expire(&self, _: &LockName, ttl: Duration) {
//!         self.clock.advance(ttl);
//!     }
//! }
//!
//! fencelock::lease_conformance!(Harness::new());
//! # fn main() {}
//! ```
//!
//! [`lease_conformance!`](crate::lease_conformance) and
//! [`fence_conformance!`](crate::fence_conformance) take an expression that is evaluated anew for
//! each case, within the case's own tokio runtime, and may `.await`. Each case works on fresh data
//! through **two clients**, as two hosts would. A case that needs a hook that the harness does not
//! have fails, unless the harness skips it by name.
//!
//! The suite was itself tested by breaking the memory engine: a case that no defect made fail was
//! not kept.
#![doc = include_str!("cases.md")]
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a case reports by panicking, as any test does"
)]

pub mod faults;
pub mod fence;
pub mod lease;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::fence::FencedStore;
use crate::lease::{LeaseStore, Ttl};
use crate::name::{LockName, ResourceName};
use crate::token::FencingToken;

/// How long one case may take before it counts as hanging.
const CASE_MAX: Duration = Duration::from_secs(180);

/// One case, as a table shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Case {
    /// The name of the test.
    pub name: &'static str,
    /// The promises that it holds the backend to, as `docs/guarantees` numbers them.
    pub promises: &'static str,
    /// What it proves, in a sentence.
    pub proves: &'static str,
}

/// What the lock cases need of a backend's tests.
#[async_trait]
pub trait LeaseHarness: Send + Sync {
    /// Two clients of the same data, which nobody else uses and which is empty at first: a new
    /// directory, a new key prefix, a new schema. Called once.
    fn clients(&self) -> [Arc<dyn LeaseStore>; 2];

    /// Returns once every grant of `name` that was given at most `ttl` has lapsed, for both
    /// clients. Longer grants stay. Moves a clock, changes the stored expiry, or waits.
    async fn expire(&self, name: &LockName, ttl: Duration);

    /// The TTL of grants that a case lets lapse. Long enough that none lapses by itself where an
    /// operation is slow; a harness that waits in [`expire`](Self::expire) makes it short.
    fn short_ttl(&self) -> Duration {
        Duration::from_secs(5)
    }

    /// Ends the clients and whatever else the declared durability covers (their process, the
    /// server), and gives two new clients of the same data. Not asked of a store that declares
    /// [`D0Memory`](crate::lease::Durability::D0Memory).
    async fn restart(&self) -> Option<[Arc<dyn LeaseStore>; 2]> {
        None
    }

    /// A client for which the last token of `name` is `token`: written into the data behind the
    /// engine's back, or a new store that begins there.
    async fn with_last_token(
        &self,
        name: &LockName,
        token: FencingToken,
    ) -> Option<Arc<dyn LeaseStore>> {
        let _ = (name, token);
        None
    }

    /// The names of cases that this backend cannot pass, and should say so where people choose it.
    fn skips(&self) -> &'static [&'static str] {
        &[]
    }
}

/// What the storage cases need of a backend's tests.
#[async_trait]
pub trait FenceHarness: Send + Sync {
    /// Two clients of the same data, which nobody else uses and which is empty at first. Called
    /// once.
    fn clients(&self) -> [Arc<dyn FencedStore>; 2];

    /// A resource that the storage takes, for a stem of lowercase letters and `-`.
    fn resource(&self, stem: &str) -> ResourceName {
        ResourceName::new(stem).expect("BUG: a stem is a valid name")
    }

    /// The size of a large value, in bytes.
    fn large_value_bytes(&self) -> usize {
        3 << 20
    }

    /// Ends the clients and whatever else the storage's data survives, and gives two new clients
    /// of the same data.
    async fn restart(&self) -> Option<[Arc<dyn FencedStore>; 2]> {
        None
    }

    /// The names of cases that this storage cannot pass, and should say so where people choose it.
    fn skips(&self) -> &'static [&'static str] {
        &[]
    }
}

/// Runs one case in a runtime of its own. `body` answers whether the case was skipped by name.
fn block_on(case: &str, body: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a tokio runtime starts");
    runtime.block_on(async {
        assert!(
            tokio::time::timeout(CASE_MAX, body).await.is_ok(),
            "case={case} did not end within {CASE_MAX:?}"
        );
    });
}

/// True where the harness skips `case`. A skipped name that is no case is a mistake.
fn skipped(cases: &[Case], skips: &[&str], case: &str) -> bool {
    for skip in skips {
        assert!(
            cases.iter().any(|known| known.name == *skip),
            "the harness skips a case that does not exist: {skip:?}"
        );
    }
    skips.contains(&case)
}

fn missing_hook(hook: &str) -> ! {
    panic!("the case needs the harness hook `{hook}`; write it, or skip the case by name")
}

/// The TTL of grants that are to outlast their case.
fn long_ttl() -> Ttl {
    Ttl::new(Duration::from_secs(600)).expect("BUG: 600 s is within range")
}

/// A token, from a number that is one.
fn token(number: u64) -> FencingToken {
    FencingToken::new(number).expect("BUG: the number is in range")
}

/// Names that some engine somewhere confused: 24 of them, 24 locks.
fn odd_names() -> Vec<String> {
    let long = "x".repeat(511);
    let names = [
        "a", "A", "a/b", "a_b", "a:0", "a:fence", "{a}", "../a", ".", "..", " ", "a ", "a%2Fb",
        "a\\b", "a\nb", "a\0b", "é", "e\u{301}", "*", "a'; --", "🔒", "=61",
    ];
    let mut names: Vec<String> = names.map(str::to_owned).into();
    names.push(format!("{long}1"));
    names.push(format!("{long}2"));
    names
}

#[cfg(all(test, feature = "memory"))]
mod tests {
    use super::*;

    fn table(title: &str, cases: &[Case]) -> String {
        let mut text = format!("\n# {title}\n\n| Case | Promises | Proves |\n|---|---|---|\n");
        for case in cases {
            text += &format!(
                "| `{}` | {} | {} |\n",
                case.name, case.promises, case.proves
            );
        }
        text
    }

    /// Write the new table with `FENCELOCK_BLESS=1`.
    #[test]
    fn the_table_in_the_docs_is_the_list_of_cases() {
        let expected = table("Lock cases", lease::CASES) + &table("Storage cases", fence::CASES);
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/conformance/cases.md");
        if std::env::var_os("FENCELOCK_BLESS").is_some() {
            std::fs::write(path, &expected).unwrap();
        }
        assert_eq!(std::fs::read_to_string(path).unwrap(), expected);
    }

    #[test]
    fn names_of_cases_are_unique() {
        for cases in [lease::CASES, fence::CASES] {
            let mut names: Vec<_> = cases.iter().map(|case| case.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), cases.len());
        }
    }

    /// A harness over one store, without hooks.
    struct Bare(&'static [&'static str]);

    #[async_trait]
    impl LeaseHarness for Bare {
        fn clients(&self) -> [Arc<dyn LeaseStore>; 2] {
            let store = crate::memory::MemoryStore::new();
            [Arc::new(store.clone()), Arc::new(store)]
        }

        async fn expire(&self, _: &LockName, _: Duration) {}

        fn skips(&self) -> &'static [&'static str] {
            self.0
        }
    }

    const NEEDS_A_HOOK: &str = "tokens_end_at_the_ceiling_and_never_wrap";

    #[test]
    #[should_panic(expected = "needs the harness hook `with_last_token`")]
    fn a_missing_hook_fails_the_case() {
        lease::run(NEEDS_A_HOOK, async { Bare(&[]) });
    }

    #[test]
    fn a_case_is_skipped_by_its_name() {
        lease::run(NEEDS_A_HOOK, async { Bare(&[NEEDS_A_HOOK]) });
    }

    #[test]
    #[should_panic(expected = "skips a case that does not exist")]
    fn a_misspelt_skip_fails() {
        lease::run(NEEDS_A_HOOK, async { Bare(&["tokens_end"]) });
    }

    #[test]
    #[should_panic(expected = "no lock case of this name")]
    fn a_misspelt_case_fails() {
        lease::run("tokens_end", async { Bare(&[]) });
    }

    #[test]
    fn there_are_twenty_four_odd_names() {
        let mut names = odd_names();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 24);
    }
}
