//! What the tests of this engine share.

use std::time::Duration;

use fencelock::lease::{AcquireRequest, Attempt, Grant, HolderId, LeaseRef, Ttl};
use fencelock::redis::RedisStore;
use fencelock::redis::client::Client;
use fencelock::{Error, LeaseStore, LockName};
use fencelock_testbed::proxy::Proxy;
use fencelock_testbed::redis::Redis;

pub(crate) fn client(redis: &Redis) -> Client {
    Client::open(redis.url()).unwrap()
}

/// The key that the engine keeps a lock's record under.
pub(crate) fn record_key(name: &LockName) -> String {
    format!("{{fencelock:{}}}:lock", name.encoded())
}

/// A server, a store behind a proxy, and another that reaches the server directly.
pub(crate) struct Lab {
    pub(crate) redis: Redis,
    pub(crate) proxy: Proxy,
    pub(crate) store: RedisStore,
    pub(crate) other: RedisStore,
}

impl Lab {
    pub(crate) async fn new() -> Self {
        Self::with(&[], "").await
    }

    pub(crate) async fn with(args: &[&str], options: &str) -> Self {
        let redis = Redis::with(args);
        let proxy = Proxy::start(redis.address());
        let through = format!("redis://{}?{options}", proxy.address());
        let store = RedisStore::open(&through).await.unwrap();
        let direct = format!("{}?{options}", redis.url());
        let other = RedisStore::open(&direct).await.unwrap();
        // The server knows the scripts from here on: a request is the script's, not the question
        // whether it is known.
        let request = request("scripts");
        let grant = take(&other, &request).await;
        let lease = lease(&request, &grant);
        other.renew(&[(lease.clone(), request.ttl)]).await;
        other.release(&lease, Duration::ZERO).await.unwrap();
        Self {
            redis,
            proxy,
            store,
            other,
        }
    }
}

pub(crate) fn lock(name: &str) -> LockName {
    LockName::new(name).unwrap()
}

pub(crate) fn request(name: &str) -> AcquireRequest {
    request_for(name, Duration::from_secs(600))
}

pub(crate) fn request_for(name: &str, ttl: Duration) -> AcquireRequest {
    AcquireRequest::new(lock(name), Ttl::new(ttl).unwrap())
}

/// Acquires what is free.
pub(crate) async fn take(store: &RedisStore, request: &AcquireRequest) -> Grant {
    match store.acquire(request).await.unwrap() {
        Attempt::Granted(grant) => grant,
        Attempt::Held(by) => panic!("held by {by:?}"),
    }
}

/// Asks for what is held.
pub(crate) async fn refused(store: &RedisStore, request: &AcquireRequest) {
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

/// The same request by somebody else.
pub(crate) fn another(request: &AcquireRequest) -> AcquireRequest {
    let mut another = request.clone();
    another.holder = HolderId::random();
    another
}

pub(crate) async fn grants(store: &RedisStore, name: &str) -> usize {
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
