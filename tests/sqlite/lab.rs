//! What the tests of this engine share.

use std::error::Error as _;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fencelock::lease::{AcquireRequest, Attempt, Contention, Grant, LeaseRef, LeaseStore, Ttl};
use fencelock::lease::{Release, Renewal};
use fencelock::sqlite::rusqlite::Connection;
use fencelock::sqlite::{FencedSqlite, SqliteStore};
use fencelock::{Error, FencingToken, LockName};
use tempfile::TempDir;

/// Everything has to end within this time, whatever others do.
pub(crate) const END: Duration = Duration::from_secs(10);

pub(crate) const LONG: Duration = Duration::from_secs(600);

/// A database of its own, not made yet.
pub(crate) struct Data(TempDir);

impl Data {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn dir(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path().join("app.db")
    }

    pub(crate) async fn store(&self) -> SqliteStore {
        SqliteStore::open(self.path()).await.unwrap()
    }

    pub(crate) async fn values(&self) -> FencedSqlite {
        FencedSqlite::open(self.path()).await.unwrap()
    }

    /// A connection of the user's own, which waits for nobody.
    pub(crate) fn connect(&self) -> Connection {
        let connection = Connection::open(self.path()).unwrap();
        connection.busy_timeout(Duration::ZERO).unwrap();
        connection
    }
}

pub(crate) fn name(text: &str) -> LockName {
    text.parse().unwrap()
}

pub(crate) fn token(number: u64) -> FencingToken {
    FencingToken::new(number).unwrap()
}

pub(crate) fn request(text: &str, ttl: Duration) -> AcquireRequest {
    AcquireRequest::new(name(text), Ttl::new(ttl).unwrap())
}

pub(crate) fn long(text: &str) -> AcquireRequest {
    request(text, LONG)
}

pub(crate) async fn granted(store: &SqliteStore, request: &AcquireRequest) -> Grant {
    match store.acquire(request).await.unwrap() {
        Attempt::Granted(grant) => grant,
        Attempt::Held(by) => panic!("held by {by:?}"),
    }
}

pub(crate) async fn held(store: &SqliteStore, request: &AcquireRequest) -> Contention {
    match store.acquire(request).await.unwrap() {
        Attempt::Granted(grant) => panic!("granted {grant:?}"),
        Attempt::Held(by) => by,
    }
}

pub(crate) fn lease(request: &AcquireRequest, grant: &Grant) -> LeaseRef {
    LeaseRef {
        name: request.name.clone(),
        holder: request.holder,
        token: Some(grant.token),
    }
}

pub(crate) async fn renewal(store: &SqliteStore, lease: &LeaseRef) -> Renewal {
    let ttl = Ttl::new(LONG).unwrap();
    store.renew(&[(lease.clone(), ttl)]).await.pop().unwrap()
}

/// Takes a lock and gives it up; its token.
pub(crate) async fn cycle(store: &SqliteStore, text: &str) -> u64 {
    let request = long(text);
    let grant = granted(store, &request).await;
    let lease = lease(&request, &grant);
    let released = store.release(&lease, Duration::ZERO).await;
    assert_eq!(released.unwrap(), Release::Released);
    grant.token.get()
}

/// What `work` yields, and how long it took; fails where it does not end in time.
pub(crate) async fn in_time<T>(work: impl Future<Output = T>) -> (T, Duration) {
    #[expect(clippy::disallowed_methods, reason = "a test measures real time")]
    let started = Instant::now();
    let done = tokio::time::timeout(END, work).await;
    (done.expect("it ends within 10 s"), started.elapsed())
}

/// An error with its causes.
pub(crate) fn whole(error: &Error) -> String {
    let mut text = format!("{error} / {error:?}");
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(" / {error} / {error:?}");
        cause = error.source();
    }
    text
}

/// What the shell of SQLite says to `script`, which has to succeed.
pub(crate) fn shell(path: &Path, script: &str) -> String {
    let program = fencelock_testbed::process::program("sqlite3", "sqlite3", "sqlite3", &[]);
    // A comment at the beginning would be taken for an option.
    let script = script
        .strip_prefix("--")
        .map_or(script.to_owned(), |rest| format!("\n--{rest}"));
    fencelock_testbed::process::run(
        std::process::Command::new(program)
            .args(["-batch", "-bail"])
            .arg(path)
            .arg(script),
    )
}
