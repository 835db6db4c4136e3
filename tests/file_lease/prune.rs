//! Clean-up.

use super::*;

#[tokio::test]
async fn a_prune_removes_what_is_idle_and_no_token_comes_again() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    // More than a record reserves when it begins, so that the floor had to be raised since.
    let mut last = cycle(&a, "idle").await;
    for _ in 0..100 {
        last = cycle(&a, "idle").await;
    }
    let held_request = request("held", LONG);
    let grant = granted(&a, &held_request).await;
    let day = Duration::from_secs(86_400);
    assert_eq!(
        (
            b.prune(day).await.unwrap().removed,
            b.prune(day).await.unwrap().kept
        ),
        (0, 2)
    );
    let pruned = b.prune(Duration::ZERO).await.unwrap();
    assert_eq!((pruned.removed, pruned.kept), (1, 1));
    assert!(!record_path(dir.path(), "idle").exists());
    assert!(matches!(
        renewal(&a, &lease(&held_request, &grant), held_request.ttl).await,
        Renewal::Renewed
    ));
    assert!(cycle(&a, "idle").await > last);
    // What a dead process left goes with it.
    drop(a);
    fs::write(dir.path().join("live").join("0".repeat(32)), "").unwrap();
    assert_eq!(b.prune(Duration::ZERO).await.unwrap().removed, 2);
    assert_eq!(fs::read_dir(dir.path().join("live")).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn fifty_acquirers_and_a_prune_never_overlap_nor_go_back() {
    let dir = tempfile::tempdir().unwrap();
    let inside = Arc::new(AtomicU64::new(0));
    let highest = Arc::new(AtomicU64::new(0));
    let mut tasks = Vec::new();
    for _ in 0..50 {
        let store = FileStore::open(dir.path()).unwrap();
        let (inside, highest) = (inside.clone(), highest.clone());
        tasks.push(tokio::spawn(async move {
            let mut rounds = 0;
            while rounds < 5 {
                let mut watch = store.watch(&name("a")).await.unwrap();
                let request = request("a", LONG);
                let grant = match store.acquire(&request).await {
                    Ok(Attempt::Granted(grant)) => grant,
                    Ok(Attempt::Held(_)) => {
                        soon(watch.changed()).await;
                        continue;
                    }
                    // On a slow disk, the syncs of fifty new records may take longer than one waits.
                    Err(e) if e.kind() == ErrorKind::Unavailable => continue,
                    Err(e) => panic!("{e}"),
                };
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders");
                let before = highest.swap(grant.token.get(), Ordering::SeqCst);
                assert!(grant.token.get() > before, "{} after {before}", grant.token);
                inside.fetch_sub(1, Ordering::SeqCst);
                let lease = lease(&request, &grant);
                while let Err(e) = store.release(&lease, Duration::ZERO).await {
                    assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
                }
                rounds += 1;
            }
        }));
    }
    let pruner = FileStore::open(dir.path()).unwrap();
    let mut removed = 0;
    while !tasks.iter().all(tokio::task::JoinHandle::is_finished) {
        removed += pruner.prune(Duration::ZERO).await.unwrap().removed;
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert!(removed > 0, "nothing was pruned, so nothing was proved");
}
