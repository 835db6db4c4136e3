//! Waiting: who is woken, and who is not.

use super::*;

#[tokio::test]
async fn a_waiter_hears_of_a_release_by_another_store() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let first = request("a", LONG);
    let grant = granted(&a, &first).await;
    let mut watch = b.watch(&name("a")).await.unwrap();
    held(&b, &request("a", LONG)).await;
    let waiting = tokio::spawn(async move { watch.changed().await });
    a.release(&lease(&first, &grant), Duration::ZERO)
        .await
        .unwrap();
    soon(waiting).await.unwrap();
    granted(&b, &request("a", LONG)).await;
}

#[tokio::test]
async fn a_waiter_hears_of_a_change_that_came_while_it_did_not_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let mut watch = b.watch(&name("a")).await.unwrap();
    cycle(&a, "a").await;
    soon(watch.changed()).await;
    cycle(&a, "a").await;
    soon(watch.changed()).await;
}

#[tokio::test]
async fn a_waiter_is_left_alone_while_nothing_changes() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    granted(&a, &request("a", LONG)).await;
    let mut watch = b.watch(&name("a")).await.unwrap();
    cycle(&a, "another").await;
    held(&b, &request("a", LONG)).await;
    let quiet = tokio::time::timeout(Duration::from_millis(500), watch.changed()).await;
    assert!(quiet.is_err(), "woken for nothing");
}

#[tokio::test]
async fn a_waiter_hears_of_a_lapse() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Clock::adjustable();
    let store = FileStore::options()
        .clock(clock.clone())
        .open(dir.path())
        .unwrap();
    granted(&store, &request("a", LONG)).await;
    let mut watch = store.watch(&name("a")).await.unwrap();
    let waiting = tokio::spawn(async move { watch.changed().await });
    clock.advance(LONG);
    soon(waiting).await.unwrap();
}

#[tokio::test]
async fn many_waiters_of_one_store_all_hear() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let mut waiting = Vec::new();
    for n in 0..40 {
        let mut watch = b
            .watch(&name(if n % 2 == 0 { "a" } else { "b" }))
            .await
            .unwrap();
        waiting.push(tokio::spawn(async move { watch.changed().await }));
    }
    cycle(&a, "a").await;
    cycle(&a, "b").await;
    for one in waiting {
        soon(one).await.unwrap();
    }
}
