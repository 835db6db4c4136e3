//! What the tests of this engine share.

use std::net::SocketAddr;
use std::time::Duration;

use fencelock::etcd::EtcdStore;
use fencelock::etcd::client::{Client, GetOptions};
use fencelock::lease::{AcquireRequest, Attempt, Grant, HolderId, LeaseRef, Release, Ttl};
use fencelock::{Error, LeaseStore, LockName};
use fencelock_testbed::Deadline;
use fencelock_testbed::etcd::Etcd;
use fencelock_testbed::proxy::Proxy;

/// What the keys of a store begin with where nothing is said.
pub(crate) const PREFIX: &str = "fencelock/";

/// The key that the engine keeps a lock's record under.
pub(crate) fn record_key(prefix: &str, name: &LockName) -> String {
    format!("{prefix}lock/{}", name.encoded())
}

/// Waits until every holder of `name` with at most this TTL has lapsed.
pub(crate) async fn lapsed(address: SocketAddr, prefix: &str, name: &LockName, ttl: Duration) {
    let mut client = Client::connect([address.to_string()], None).await.unwrap();
    let key = format!("{prefix}live/{}/", name.encoded());
    // An expired lease is revoked at the server's next look, twice a second.
    let deadline = Deadline::after(ttl + Duration::from_secs(20));
    loop {
        let all = GetOptions::new().with_prefix();
        let answer = client.get(key.as_str(), Some(all)).await.unwrap();
        let short = |text: &str| {
            let (_, rest) = text.split_once(r#""ttl_secs":"#).unwrap();
            let digits = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap();
            digits.parse::<u64>().unwrap() <= ttl.as_secs()
        };
        if !answer.kvs().iter().any(|kv| short(kv.value_str().unwrap())) {
            return;
        }
        assert!(!deadline.passed(), "{name:?} did not lapse within {ttl:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A server, a store behind a proxy, and another that reaches the server directly.
pub(crate) struct Lab {
    pub(crate) etcd: Etcd,
    pub(crate) proxy: Proxy,
    pub(crate) store: EtcdStore,
    pub(crate) other: EtcdStore,
}

impl Lab {
    pub(crate) async fn new() -> Self {
        let etcd = Etcd::start();
        let proxy = Proxy::start(etcd.address());
        let through = format!("etcd://{}", proxy.address());
        let store = EtcdStore::open(&through).await.unwrap();
        let other = EtcdStore::open(&etcd.url()).await.unwrap();
        // The store opened one connection to look around, and makes the one that it keeps now.
        take(&store, &request("warm")).await;
        Self {
            etcd,
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

pub(crate) fn request(name: &str) -> AcquireRequest {
    AcquireRequest::new(lock(name), secs(600))
}

/// Acquires what is free.
pub(crate) async fn take(store: &EtcdStore, request: &AcquireRequest) -> Grant {
    match store.acquire(request).await.unwrap() {
        Attempt::Granted(grant) => grant,
        Attempt::Held(by) => panic!("held by {by:?}"),
    }
}

/// Asks for what is held.
pub(crate) async fn refused(store: &EtcdStore, request: &AcquireRequest) {
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

pub(crate) async fn give(store: &EtcdStore, request: &AcquireRequest, grant: &Grant) {
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

pub(crate) async fn grants(store: &EtcdStore, name: &str) -> usize {
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
