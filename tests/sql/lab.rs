//! What the tests of the SQL servers share. What differs is in the `lab` of each.

use std::error::Error as _;
use std::future::Future;
use std::time::{Duration, Instant};

use fencelock::lease::{AcquireRequest, Attempt, Grant, LeaseRef, LeaseStore, Ttl};
use fencelock::{Error, ErrorKind, FencingToken, Locks};

use crate::lab::{SERVER, Store, try_store};

/// Everything has to end within this time, whatever the server does.
pub(crate) const END: Duration = Duration::from_secs(10);

/// What must not be seen anywhere.
pub(crate) const CANARY: &str = "canary-Xq7";

/// True where tests of this server are to be left out.
pub(crate) fn skipped() -> bool {
    fencelock_testbed::skipped(SERVER)
}

pub(crate) async fn store(url: &str) -> Store {
    try_store(url).await.unwrap()
}

pub(crate) async fn locks(url: &str) -> Locks {
    Locks::open(url).await.unwrap()
}

pub(crate) fn request(name: &str, ttl: Duration) -> AcquireRequest {
    AcquireRequest::new(name.parse().unwrap(), Ttl::new(ttl).unwrap())
}

pub(crate) fn long(name: &str) -> AcquireRequest {
    request(name, Duration::from_secs(600))
}

pub(crate) async fn granted(store: &Store, request: &AcquireRequest) -> Grant {
    match store.acquire(request).await.unwrap() {
        Attempt::Granted(grant) => grant,
        Attempt::Held(by) => panic!("held by {by:?}"),
    }
}

pub(crate) fn lease(request: &AcquireRequest, grant: &Grant) -> LeaseRef {
    LeaseRef {
        name: request.name.clone(),
        holder: request.holder,
        token: Some(grant.token),
    }
}

/// How many hold the lock.
pub(crate) async fn holders(store: &Store, name: &str) -> usize {
    let state = store.inspect(&name.parse().unwrap()).await.unwrap();
    state.map_or(0, |state| state.holders.len())
}

/// What `work` yields, and how long it took; fails where it does not end in time.
pub(crate) async fn in_time<T>(work: impl Future<Output = T>) -> (T, Duration) {
    #[expect(clippy::disallowed_methods, reason = "a test measures real time")]
    let started = Instant::now();
    let done = tokio::time::timeout(END, work).await;
    (done.expect("it ends within 10 s"), started.elapsed())
}

/// An error in all its forms, with its causes.
pub(crate) fn whole(error: &Error) -> String {
    let mut text = format!("{error} / {error:?}");
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(" / {error} / {error:?}");
        cause = error.source();
    }
    text
}

/// The message with which opening fails: in time, of this kind, with these words, and without the
/// password.
pub(crate) async fn refused(url: &str, kind: ErrorKind, said: &str) -> String {
    let (opened, _) = in_time(Locks::open(url)).await;
    let error = opened.unwrap_err();
    let whole = whole(&error);
    assert_eq!(error.kind(), kind, "{whole}");
    assert!(error.to_string().contains(said), "{whole}");
    assert!(!whole.contains(CANARY), "{whole}");
    error.to_string()
}

pub(crate) fn token(number: u64) -> FencingToken {
    FencingToken::new(number).unwrap()
}
