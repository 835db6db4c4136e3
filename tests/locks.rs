//! What every engine shares, on the memory store: waiting, renewal, loss, cancellation.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use fencelock::clock::Clock;
use fencelock::memory::{FencedMemory, MemoryStore};
use fencelock::{Error, ErrorKind, Fenced, Fencing, FencingToken, LockName, Locks, LostReason};

const LONG: Duration = Duration::from_secs(20);

/// Locks on a store whose clock, and theirs, a test moves.
fn locks_and_clock() -> (Locks, Clock) {
    let clock = Clock::adjustable();
    let store = MemoryStore::with_clock(clock.clone());
    (Locks::builder(store).clock(clock.clone()).build(), clock)
}

#[tokio::test]
async fn a_released_lock_is_granted_again_with_a_larger_token() {
    let locks = Locks::new(MemoryStore::new());
    let first = locks.acquire("a").await.unwrap();
    assert!(locks.try_acquire("a").await.unwrap().is_none());
    let token = first.token();
    first.release().await.unwrap();
    let second = locks.try_acquire("a").await.unwrap().unwrap();
    assert!(second.token() > token);
}

#[tokio::test]
async fn waiting_ends_at_its_bound_and_names_the_holder() {
    let locks = Locks::new(MemoryStore::new());
    let _held = locks.acquire("a").label("nightly run").await.unwrap();
    let error = locks
        .acquire("a")
        .wait(Duration::from_millis(50))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(
        error.to_string().contains("label=\"nightly run\""),
        "{error}"
    );
}

#[tokio::test]
async fn waiters_of_one_process_are_served_in_order() {
    let locks = Locks::new(MemoryStore::new());
    let held = locks.acquire("a").await.unwrap();
    let order = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for i in 0..8 {
        let mut acquire = locks.acquire("a").wait(LONG).into_future();
        // The first poll takes the place in line.
        let first = std::future::poll_fn(|cx| Poll::Ready(acquire.as_mut().poll(cx))).await;
        assert!(first.is_pending());
        let order = Arc::clone(&order);
        tasks.push(tokio::spawn(async move {
            let guard = acquire.await.unwrap();
            order.lock().unwrap().push(i);
            guard.release().await.unwrap();
        }));
    }
    held.release().await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), (0..8).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_dropped_guard_is_released_without_a_runtime_in_its_thread() {
    let locks = Locks::new(MemoryStore::new());
    let guard = locks.acquire("a").await.unwrap();
    std::thread::spawn(move || drop(guard)).join().unwrap();
    locks.drain().await;
    assert!(locks.try_acquire("a").await.unwrap().is_some());
}

#[tokio::test]
async fn a_dropped_guard_is_released_even_where_its_locks_are_gone() {
    let store = Arc::new(MemoryStore::new());
    let locks = Locks::from_arc(store.clone());
    let guard = locks.acquire("a").await.unwrap();
    drop((guard, locks));
    let others = Locks::from_arc(store);
    drop(others.acquire("a").wait(LONG).await.unwrap());
}

#[tokio::test]
async fn a_lapsed_lock_is_lost_for_good_and_the_next_holder_fences_it() {
    let (locks, clock) = locks_and_clock();
    let store = Fenced::new(FencedMemory::new());
    let old = locks
        .acquire("a")
        .ttl(Duration::from_secs(1))
        .no_renew()
        .await
        .unwrap();
    old.check().unwrap();
    let paused_fence = old.fence();
    clock.advance(Duration::from_secs(2));
    assert_eq!(old.check().unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(old.remaining(), Some(Duration::ZERO));
    assert_eq!(old.lost().await, LostReason::Unconfirmed);
    let new = locks.try_acquire("a").await.unwrap().unwrap();
    assert!(new.token() > old.token());
    store.put("r", "new", &new).await.unwrap();
    assert_eq!(
        store.put("r", "old", &old).await.unwrap_err().kind(),
        ErrorKind::Lost
    );
    let refused = store.put("r", "old", paused_fence).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced);
    assert_eq!(refused.watermark(), Some(new.token()));
    assert_eq!(old.release().await.unwrap_err().kind(), ErrorKind::Lost);
    new.check().unwrap();
}

#[tokio::test]
async fn the_keeper_renews_past_many_ttls() {
    let locks = Locks::new(MemoryStore::new());
    let guard = locks
        .acquire("a")
        .ttl(Duration::from_millis(200))
        .await
        .unwrap();
    let token = guard.token();
    tokio::time::sleep(Duration::from_secs(1)).await;
    guard.check().unwrap();
    assert_eq!(guard.token(), token);
    assert!(locks.try_acquire("a").await.unwrap().is_none());
}

#[test]
fn renewal_goes_on_while_the_users_executor_is_blocked() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let locks = Locks::new(MemoryStore::new());
        let guard = locks
            .acquire("a")
            .ttl(Duration::from_millis(300))
            .await
            .unwrap();
        std::thread::sleep(Duration::from_secs(1));
        guard.check().unwrap();
    });
}

#[tokio::test]
async fn a_broken_lock_is_noticed_and_its_holder_told_once() {
    let locks = Locks::new(MemoryStore::new());
    let guard = locks
        .acquire("a")
        .ttl(Duration::from_millis(300))
        .await
        .unwrap();
    let before = locks.break_lock("a").await.unwrap().unwrap();
    assert_eq!(before.holders.len(), 1);
    assert_eq!(guard.lost().await, LostReason::NotHeld);
    assert!(guard.lost_token().is_cancelled());
    let next = locks.try_acquire("a").await.unwrap().unwrap();
    assert!(next.token() > guard.token());
}

#[tokio::test]
async fn the_longest_hold_ends_a_stuck_holder() {
    let locks = Locks::new(MemoryStore::new());
    let guard = locks
        .acquire("a")
        .max_hold(Duration::from_millis(50))
        .await
        .unwrap();
    assert_eq!(guard.lost().await, LostReason::MaxHold);
    guard.release().await.unwrap();
    assert!(locks.try_acquire("a").await.unwrap().is_some());
}

#[tokio::test]
async fn the_shortest_hold_outlives_an_early_release() {
    let (locks, clock) = locks_and_clock();
    let guard = locks
        .acquire("tick")
        .min_hold(Duration::from_secs(60))
        .await
        .unwrap();
    guard.release().await.unwrap();
    assert!(locks.try_acquire("tick").await.unwrap().is_none());
    clock.advance(Duration::from_secs(59));
    assert!(locks.try_acquire("tick").await.unwrap().is_none());
    clock.advance(Duration::from_secs(2));
    assert!(locks.try_acquire("tick").await.unwrap().is_some());
}

#[tokio::test]
async fn work_is_cancelled_when_the_lock_is_lost() {
    let locks = Locks::new(MemoryStore::new());
    let breaker = locks.clone();
    let result: Result<(), Error> = locks
        .acquire("a")
        .ttl(Duration::from_millis(300))
        .run(async |_guard| {
            breaker.break_lock("a").await?;
            std::future::pending().await
        })
        .await;
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test]
async fn the_users_error_outranks_a_failed_release() {
    #[derive(Debug)]
    enum Mine {
        Work,
        Lock,
    }
    impl From<Error> for Mine {
        fn from(_: Error) -> Self {
            Self::Lock
        }
    }
    let locks = Locks::new(MemoryStore::new());
    let breaker = locks.clone();
    let result: Result<(), Mine> = locks
        .with_lock("a", async |_guard| {
            breaker.break_lock("a").await?;
            Err(Mine::Work)
        })
        .await;
    assert!(matches!(result, Err(Mine::Work)));
    let fine: Result<u64, Mine> = locks
        .with_lock("a", async |guard| Ok(guard.token().get()))
        .await;
    assert_eq!(fine.unwrap(), 2);
}

#[tokio::test]
async fn work_under_a_lock_can_be_spawned() {
    let locks = Locks::new(MemoryStore::new());
    let store = Fenced::new(FencedMemory::new());
    let task = tokio::spawn(async move {
        locks
            .with_lock("a", async |guard| {
                store.put("r", "v", guard).await?;
                Ok::<_, Error>(guard.token())
            })
            .await
    });
    assert_eq!(task.await.unwrap().unwrap(), FencingToken::MIN);
}

#[tokio::test]
async fn permits_are_counted_and_capacities_must_agree() {
    let locks = Locks::new(MemoryStore::new());
    let one = locks.acquire("a").permits(2).await.unwrap();
    let two = locks.try_acquire("a").permits(2).await.unwrap().unwrap();
    assert!(locks.try_acquire("a").permits(2).await.unwrap().is_none());
    let error = locks.try_acquire("a").permits(3).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    one.release().await.unwrap();
    two.release().await.unwrap();
    drop(locks.try_acquire("a").permits(3).await.unwrap().unwrap());
}

#[tokio::test]
async fn bad_arguments_are_refused_before_anything_happens() {
    let locks = Locks::new(MemoryStore::new());
    let secs = Duration::from_secs;
    for (acquire, said) in [
        (locks.acquire(""), "lock name is empty"),
        (locks.acquire("a".repeat(513)), "bytes=513"),
        (locks.acquire("a").ttl(Duration::ZERO), "ttl=0ns"),
        (locks.acquire("a").ttl(Duration::MAX), "TTL is out of range"),
        (locks.acquire("a").permits(0), "permits=0"),
        (locks.acquire("a").permits(1_001), "permits=1001"),
        (
            locks.acquire("a").label("x".repeat(257)),
            "label is too long",
        ),
        (locks.acquire("a").max_hold(secs(0)), "longest hold"),
        (
            locks.acquire("a").max_hold(secs(1)).min_hold(secs(2)),
            "longest hold",
        ),
        (locks.acquire("a").no_expiry().detached(), "stay for ever"),
    ] {
        let error = acquire.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{said}");
        assert!(error.to_string().contains(said), "{error}");
    }
    assert_eq!(locks.list("", None, 10).await.unwrap(), []);
}

#[tokio::test]
async fn a_holder_that_met_a_higher_watermark_makes_the_next_token_larger() {
    let locks = Locks::new(MemoryStore::new());
    let store = Fenced::new(FencedMemory::new());
    // The engine has lost its data: the resource has seen a token that the lock has not minted.
    store
        .put("r", "v", FencingToken::new(1_000).unwrap())
        .await
        .unwrap();
    let guard = locks.acquire("a").await.unwrap();
    let refused = store.put("r", "w", &guard).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Fenced);
    guard.check().unwrap();
    locks.drain().await;
    guard.release().await.unwrap();
    let next = locks.acquire("a").await.unwrap();
    assert!(next.token().get() > 1_000);
    store.put("r", "w", &next).await.unwrap();
}

#[tokio::test]
async fn each_write_of_a_guard_is_another_than_the_one_before() {
    let locks = Locks::new(MemoryStore::new());
    let store = Fenced::new(FencedMemory::new());
    let guard = locks.acquire("a").await.unwrap();
    for value in ["v", "w", "x"] {
        let written = store.put("r", value, &guard).await.unwrap();
        assert!(
            written.applied,
            "{value} passed for a repeat of the one before"
        );
    }
    // What was shown once can be sent again, and is the same write.
    let fence = guard.fence();
    assert!(store.put("r", "y", &fence).await.unwrap().applied);
    assert!(!store.put("r", "y", &fence).await.unwrap().applied);
}

#[tokio::test]
async fn a_forged_watermark_does_not_keep_a_name_from_being_locked() {
    let locks = Locks::new(MemoryStore::new());
    for name in 0..100 {
        let name = format!("met-{name}");
        let guard = locks.acquire(name.as_str()).await.unwrap();
        Fencing::refused(&&guard, FencingToken::MAX);
        // Before anybody has looked at the number.
        guard.release().await.unwrap();
        locks.drain().await;
        let next = locks.acquire(name.as_str()).wait(LONG).await;
        assert!(next.is_ok(), "{next:?}");
    }
}

#[tokio::test]
async fn a_detached_lease_is_renewed_and_released_from_elsewhere() {
    let locks = Locks::new(MemoryStore::new());
    let guard = locks.acquire("a").detached().await.unwrap();
    let left = guard.detach();
    assert!(locks.try_acquire("a").await.unwrap().is_none());
    let lease = left.lease();
    locks.renew(&lease, left.ttl).await.unwrap();
    locks.release(&lease, Duration::ZERO).await.unwrap();
    assert!(locks.try_acquire("a").await.unwrap().is_some());
    let gone = locks.renew(&lease, left.ttl).await.unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::Lost);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_acquires_at_any_moment_leaves_no_lock_behind() {
    let locks = Locks::new(MemoryStore::new());
    let mut tasks = Vec::new();
    for i in 0..200 {
        let locks = locks.clone();
        tasks.push(tokio::spawn(async move {
            let acquire = locks.acquire("a").wait(LONG).into_future();
            let _ = tokio::time::timeout(Duration::from_micros(i * 20), acquire).await;
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    drop(locks.acquire("a").wait(LONG).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_tasks_never_overlap() {
    let locks = Locks::new(MemoryStore::new());
    let inside = Arc::new(AtomicU32::new(0));
    let last = Arc::new(AtomicU64::new(0));
    let mut tasks = Vec::new();
    for _ in 0..200 {
        let (locks, inside, last) = (locks.clone(), Arc::clone(&inside), Arc::clone(&last));
        tasks.push(tokio::spawn(async move {
            let guard = locks.acquire("a").wait_forever().await.unwrap();
            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
            let token = guard.token().get();
            assert!(last.swap(token, Ordering::SeqCst) < token);
            tokio::task::yield_now().await;
            inside.fetch_sub(1, Ordering::SeqCst);
            guard.release().await.unwrap();
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
}

#[tokio::test]
async fn names_are_exact() {
    let locks = Locks::new(MemoryStore::new());
    let long = "x".repeat(512);
    let names = [
        "a", "A", "a/b", "a:0", "a:fence", "../a", "..", ".", "{a}", "é", "e\u{301}", "-x", "\t",
        " a", "a ", "a\0", "a\n", "a%2fb", "a=2fb", "a_b", "a\\b", "*", "?key=a", &long,
    ];
    let mut guards = Vec::new();
    for name in names {
        let guard = locks.try_acquire(name).await.unwrap();
        guards.push(guard.unwrap_or_else(|| panic!("{name:?} is another lock's name")));
    }
    assert_eq!(guards.len(), 24);
    let listed = locks.list("", None, 100).await.unwrap();
    let mut expected: Vec<LockName> = names.iter().map(|n| n.parse().unwrap()).collect();
    expected.sort();
    assert_eq!(
        listed.into_iter().map(|s| s.name).collect::<Vec<_>>(),
        expected
    );
}

#[test]
fn what_users_hold_can_be_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Locks>();
    shared::<fencelock::LockGuard>();
    shared::<Fenced>();
    shared::<Error>();
}

#[test]
fn nothing_needs_a_runtime_of_the_callers() {
    let locks = Locks::new(MemoryStore::new());
    let guard = pollster::block_on(locks.acquire("a").into_future()).unwrap();
    let waiting = std::thread::spawn(move || {
        pollster::block_on(locks.acquire("a").wait(LONG).into_future())
            .unwrap()
            .token()
    });
    let token = guard.token();
    pollster::block_on(guard.release()).unwrap();
    assert!(waiting.join().unwrap() > token);
}
