//! Private servers and a faulty network for tests.
//!
//! Every server is a child process on a port of its own in a temporary directory, and ends with
//! its value, with a panic, or with the test's process. A server that is not installed fails the
//! test and names the Debian package, unless `FENCELOCK_TEST_SKIP` lists the server's name
//! (`redis,postgres`): a test begins with [`skip!`], so that nothing is left out unseen.
//!
//! Whatever goes wrong here panics: this is test code.

pub mod etcd;
pub mod http;
pub mod mysql;
pub mod nats;
pub mod pgbouncer;
pub mod port;
pub mod postgres;
pub mod process;
pub mod proxy;
pub mod redis;
pub mod s3;

use std::time::{Duration, Instant};

/// The variable that names the servers whose tests are left out, with commas between.
pub const SKIP: &str = "FENCELOCK_TEST_SKIP";

/// True where tests of `server` are to be left out, which is then said on stderr.
#[must_use]
pub fn skipped(server: &str) -> bool {
    let listed = std::env::var(SKIP).is_ok_and(|list| list.split(',').any(|s| s.trim() == server));
    if listed {
        eprintln!("skipped: {SKIP} names {server}");
    }
    listed
}

/// Ends the calling test where `FENCELOCK_TEST_SKIP` names the server.
#[macro_export]
macro_rules! skip {
    ($server:literal) => {
        if $crate::skipped($server) {
            return;
        }
    };
}

/// A point in time that a wait must not pass.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    at: Instant,
}

impl Deadline {
    /// The deadline that lies `limit` from now.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "a test waits in real time")]
    pub fn after(limit: Duration) -> Self {
        Self {
            at: Instant::now() + limit,
        }
    }

    /// The time left; zero where it has passed.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "a test waits in real time")]
    pub fn left(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// True where it has passed.
    #[must_use]
    pub fn passed(self) -> bool {
        self.left().is_zero()
    }
}

/// Asks until `done` says yes, for what no event announces.
///
/// # Panics
/// Where it never does within `limit`; `what` says what was awaited.
pub fn eventually(what: &str, limit: Duration, mut done: impl FnMut() -> bool) {
    let deadline = Deadline::after(limit);
    while !done() {
        assert!(!deadline.passed(), "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
