//! The file lock engine: its own traps, with real files and real processes.

#![cfg(all(feature = "file", target_os = "linux"))]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests and their helpers fail by panicking, and children talk on their standard output"
)]

mod damage;
mod grants;
mod names;
mod opening;
mod processes;
mod prune;
mod trouble;
mod waiting;

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fencelock::clock::Clock;
use fencelock::file::{FencedFiles, FileStore};
use fencelock::lease::{
    AcquireRequest, Attempt, Contention, Grant, HolderId, LeaseRef, LeaseStore, LockState, Release,
    Renewal, Severity, Ttl,
};
use fencelock::{ErrorKind, FencingToken, LockName, Locks, LostReason};

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

fn two(dir: &Path) -> (FileStore, FileStore) {
    (FileStore::open(dir).unwrap(), FileStore::open(dir).unwrap())
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

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), what)
        .await
        .expect("nothing happened")
}
