//! The file lock engine: its own traps, with real files and real processes.

#![cfg(all(feature = "file", target_os = "linux"))]

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fencelock::clock::Clock;
use fencelock::file::FileStore;
use fencelock::lease::{
    AcquireRequest, Attempt, Contention, Grant, HolderId, LeaseRef, LeaseStore, LockState, Release,
    Renewal, Severity, Ttl,
};
use fencelock::{ErrorKind, FencingToken, LockName, Result};

const LONG: Duration = Duration::from_secs(120);

fn name(text: &str) -> LockName {
    text.parse().unwrap()
}

fn token(number: u64) -> FencingToken {
    FencingToken::new(number).unwrap()
}

fn request(text: &str, ttl: Duration) -> AcquireRequest {
    AcquireRequest::new(name(text), Ttl::new(ttl).unwrap())
}

fn lease(request: &AcquireRequest, grant: &Grant) -> LeaseRef {
    LeaseRef {
        name: request.name.clone(),
        holder: request.holder,
        token: Some(grant.token),
    }
}

async fn granted(store: &FileStore, request: &AcquireRequest) -> Grant {
    match store.acquire(request).await.unwrap() {
        Attempt::Granted(grant) => grant,
        Attempt::Held(by) => panic!("held by {by:?}"),
    }
}

async fn held(store: &FileStore, request: &AcquireRequest) -> Contention {
    match store.acquire(request).await.unwrap() {
        Attempt::Granted(grant) => panic!("granted {grant:?}"),
        Attempt::Held(by) => by,
    }
}

async fn renewal(store: &FileStore, lease: &LeaseRef, ttl: Ttl) -> Renewal {
    store.renew(&[(lease.clone(), ttl)]).await.pop().unwrap()
}

async fn cycle(store: &FileStore, text: &str) -> u64 {
    let request = request(text, LONG);
    let grant = granted(store, &request).await;
    assert_eq!(
        store
            .release(&lease(&request, &grant), Duration::ZERO)
            .await
            .unwrap(),
        Release::Released
    );
    grant.token.get()
}

fn record_path(dir: &Path, text: &str) -> PathBuf {
    dir.join("locks").join(name(text).encoded())
}

#[tokio::test]
async fn tokens_count_up_over_releases_and_stores() {
    let dir = tempfile::tempdir().unwrap();
    let a = FileStore::open(dir.path()).unwrap();
    let b = FileStore::open(dir.path()).unwrap();
    for expected in 1..=200 {
        let store = if expected % 2 == 0 { &a } else { &b };
        assert_eq!(cycle(store, "a").await, expected);
    }
}
