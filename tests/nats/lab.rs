//! What the tests of this engine share.

use std::time::{Duration, Instant};

use fencelock::lease::{AcquireRequest, Attempt, Grant, HolderId, LeaseRef, Release, Ttl};
use fencelock::nats::NatsStore;
use fencelock::{Error, ErrorKind, LeaseStore, LockName};
use fencelock_testbed::nats::Nats;
use fencelock_testbed::proxy::Proxy;

/// What an operation takes at most.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

/// The subject of a lock's record.
pub(crate) fn record(bucket: &str, store: &NatsStore, name: &str) -> String {
    let (realm, name) = (&store.profile().realm, lock(name).encoded());
    format!("$KV.{bucket}.{realm}.lock.{name}")
}

#[expect(clippy::disallowed_methods, reason = "a test measures real time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

pub(crate) fn unsure(error: &Error) {
    let kind = error.kind();
    let unsure = matches!(kind, ErrorKind::Indeterminate | ErrorKind::Unavailable);
    assert!(unsure, "{error:?}");
}

/// A server, a store behind a proxy, and another that reaches the server directly.
pub(crate) struct Lab {
    pub(crate) nats: Nats,
    pub(crate) proxy: Proxy,
    pub(crate) store: NatsStore,
    pub(crate) other: NatsStore,
}

impl Lab {
    pub(crate) async fn new() -> Self {
        let nats = Nats::start();
        let proxy = Proxy::start(nats.address());
        let through = format!("nats://{}", proxy.address());
        let store = NatsStore::open(&through).await.unwrap();
        let other = NatsStore::open(&nats.url()).await.unwrap();
        // The store opened one connection to look around, and makes the one that it keeps now.
        take(&store, &request("warm")).await;
        Self {
            nats,
            proxy,
            store,
            other,
        }
    }
}

pub(crate) fn lock(name: &str) -> LockName {
    LockName::new(name).unwrap()
}

pub(crate) fn secs(secs: u64) -> Ttl {
    Ttl::new(Duration::from_secs(secs)).unwrap()
}

pub(crate) fn millis(millis: u64) -> Ttl {
    Ttl::new(Duration::from_millis(millis)).unwrap()
}

pub(crate) fn request(name: &str) -> AcquireRequest {
    AcquireRequest::new(lock(name), secs(600))
}

/// Acquires what is free.
pub(crate) async fn take(store: &NatsStore, request: &AcquireRequest) -> Grant {
    match store.acquire(request).await.unwrap() {
        Attempt::Granted(grant) => grant,
        Attempt::Held(by) => panic!("held by {by:?}"),
    }
}

/// Asks for what is held.
pub(crate) async fn refused(store: &NatsStore, request: &AcquireRequest) {
    let attempt = store.acquire(request).await.unwrap();
    assert!(matches!(attempt, Attempt::Held(_)), "{attempt:?}");
}

pub(crate) fn lease(request: &AcquireRequest, grant: &Grant) -> LeaseRef {
    LeaseRef {
        name: request.name.clone(),
        holder: request.holder,
        token: Some(grant.token),
    }
}

pub(crate) async fn give(store: &NatsStore, request: &AcquireRequest, grant: &Grant) {
    let lease = lease(request, grant);
    let answer = store.release(&lease, Duration::ZERO).await.unwrap();
    assert_eq!(answer, Release::Released);
}

/// The same request by somebody else.
pub(crate) fn another(request: &AcquireRequest) -> AcquireRequest {
    let mut another = request.clone();
    another.holder = HolderId::random();
    another
}

pub(crate) async fn grants(store: &NatsStore, name: &str) -> usize {
    let state = store.inspect(&lock(name)).await.unwrap();
    state.map_or(0, |state| state.holders.len())
}

/// The whole chain of an error, as a log shows it.
pub(crate) fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
