#![expect(
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test fails by panicking, its helpers included"
)]

use std::path::Path;

use tempfile::TempDir;

use super::*;
use crate::clock::Clock;
use crate::netfs::{FileSystem, PRETENDED};
use crate::sqlite::place::Place;

const NAMESPACE: &str = "time:[1]";

async fn open(dir: &TempDir, boot: &str, time_namespace: &str) -> SqliteStore {
    open_by(dir, boot, time_namespace, Clock::system()).await
}

async fn open_by(dir: &TempDir, boot: &str, time_namespace: &str, clock: Clock) -> SqliteStore {
    let options = SqliteStore::options()
        .host(boot, time_namespace)
        .clock(clock);
    options.open(dir.path().join("app.db")).await.unwrap()
}

fn request() -> AcquireRequest {
    let ttl = Ttl::new(Duration::from_secs(600)).unwrap();
    AcquireRequest::new("a".parse().unwrap(), ttl)
}

async fn granted(store: &SqliteStore, request: &AcquireRequest) -> FencingToken {
    match store.acquire(request).await.unwrap() {
        Attempt::Granted(grant) => grant.token,
        Attempt::Held(by) => panic!("held by {by:?}"),
    }
}

#[tokio::test]
async fn a_reboot_ends_all_grants_and_no_token_is_told_again() {
    let dir = tempfile::tempdir().unwrap();
    let before = open(&dir, "one", NAMESPACE).await;
    let held = request();
    let token = granted(&before, &held).await;
    let after = open(&dir, "two", NAMESPACE).await;
    let state = after.inspect(&held.name).await.unwrap().unwrap();
    assert!(state.holders.is_empty());
    let lease = LeaseRef {
        name: held.name.clone(),
        holder: held.holder,
        token: Some(token),
    };
    let renewed = after.renew(&[(lease.clone(), held.ttl)]).await;
    assert!(matches!(renewed.as_slice(), [Renewal::Lost]), "{renewed:?}");
    let released = after.release(&lease, Duration::ZERO).await.unwrap();
    assert_eq!(released, Release::NotHeld);
    // Its own request is a new one.
    assert!(granted(&after, &held).await > token);
}

#[tokio::test]
async fn ticks_of_another_time_namespace_are_not_compared() {
    let dir = tempfile::tempdir().unwrap();
    // Whose clock is two hours ahead.
    let clock = Clock::adjustable();
    let inside = open_by(&dir, "one", "time:[2]", clock.clone()).await;
    granted(&inside, &request()).await;
    clock.advance(Duration::from_secs(7_200));
    let outside = open_by(&dir, "one", NAMESPACE, clock).await;
    let Attempt::Held(by) = outside.acquire(&request()).await.unwrap() else {
        panic!("granted by another namespace's clock")
    };
    assert_eq!(by.free_in, None);
    outside.break_lock(&request().name).await.unwrap();
    granted(&outside, &request()).await;
}

#[tokio::test]
async fn where_boots_cannot_be_told_apart_a_tick_beyond_any_ttl_is_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Clock::adjustable();
    clock.advance(2 * Ttl::MAX);
    let before = open_by(&dir, "", "", clock).await;
    let token = granted(&before, &request()).await;
    let after = open(&dir, "", "").await;
    assert!(granted(&after, &request()).await > token);
}

#[tokio::test]
async fn after_a_fork_the_parents_database_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(&dir, "one", NAMESPACE).await;
    Arc::get_mut(&mut store.database).unwrap().pretend_forked();
    let error = store.acquire(&request()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("fork"), "{error}");
    let renewed = store.renew(&[]).await;
    assert!(renewed.is_empty());
    // Dropping it closes nothing that is the parent's: its log stays.
    drop(store);
    assert!(dir.path().join("app.db-wal").exists());
}

#[test]
fn a_network_file_system_is_refused_unless_it_is_allowed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    PRETENDED.set(Some(FileSystem::Network("nfs")));
    let refused = Place::open(&path, true, false).unwrap_err();
    let allowed = Place::open(&path, true, true);
    PRETENDED.set(None);
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
    assert!(refused.to_string().contains("nfs"), "{refused}");
    assert_eq!(
        allowed.unwrap().path(),
        std::fs::canonicalize(Path::new(&path)).unwrap()
    );
}

#[tokio::test]
async fn a_database_whose_lock_is_held_at_the_opening_is_unavailable_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("app.db");
    let own = rusqlite::Connection::open(&path).unwrap();
    own.execute_batch("CREATE TABLE mine (x); BEGIN EXCLUSIVE")
        .unwrap();
    let options = SqliteStore::options().busy_timeout(Duration::from_millis(200));
    let error = options.unwrap().open(&path).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    own.execute_batch("COMMIT").unwrap();
    SqliteStore::open(&path).await.unwrap();
}
