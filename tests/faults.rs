//! Locks over a store that loses answers, stalls and fails: what the promises say then.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use fencelock::clock::{Clock, unix_micros};
use fencelock::conformance::faults::{Faults, FaultyLease, Op, Strike};
use fencelock::memory::MemoryStore;
use fencelock::{ErrorKind, FencingToken, LeaseStore, Locks, LostReason};

const LONG: Duration = Duration::from_secs(20);
const LOST_ANSWER: Strike = Strike::After(ErrorKind::Indeterminate);
const NOT_SENT: Strike = Strike::Before(ErrorKind::Unavailable);

/// Locks over a faulty store, its script, and locks of another client of the same data.
fn faulty() -> (Locks, Faults, Locks) {
    let data: Arc<dyn LeaseStore> = Arc::new(MemoryStore::new());
    let store = FaultyLease::new(Arc::clone(&data));
    let faults = store.faults().clone();
    let locks = Locks::builder(store)
        .request_limit(Duration::from_millis(200))
        .patience(Duration::from_millis(800))
        .build();
    (locks, faults, Locks::from_arc(data))
}

#[tokio::test]
async fn a_grant_whose_answer_was_lost_is_found_again_with_its_token() {
    let (locks, faults, others) = faulty();
    faults.next(Op::Acquire, LOST_ANSWER);
    let guard = locks.try_acquire("a").await.unwrap().unwrap();
    assert_eq!(faults.calls(Op::Acquire), 2);
    let seen = others.inspect("a").await.unwrap().unwrap();
    assert_eq!(seen.last_token, Some(guard.token()));
    assert_eq!(guard.token().get(), 1, "one grant, one token");
    assert_eq!(seen.holders.len(), 1);
}

#[tokio::test]
async fn a_grant_that_nobody_heard_of_is_given_back() {
    let (locks, faults, others) = faulty();
    faults.always(Op::Acquire, LOST_ANSWER);
    let error = locks.acquire("a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate);
    assert!(faults.struck() > 1);
    locks.drain().await;
    assert!(others.try_acquire("a").await.unwrap().is_some());
}

#[tokio::test]
async fn a_silent_store_is_reported_in_bounded_time_and_leaves_no_grant() {
    let (locks, faults, others) = faulty();
    faults.always(Op::Acquire, Strike::StallAfter);
    let error = locks.try_acquire("a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate);
    faults.clear();
    locks.drain().await;
    assert!(others.try_acquire("a").await.unwrap().is_some());
}

#[tokio::test]
async fn an_unavailable_store_is_waited_for_but_not_by_a_try() {
    let (locks, faults, _) = faulty();
    faults.next(Op::Acquire, NOT_SENT);
    let error = locks.try_acquire("a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    for _ in 0..3 {
        faults.next(Op::Acquire, NOT_SENT);
    }
    let guard = locks.acquire("a").wait(LONG).await.unwrap();
    guard.check().unwrap();
}

#[tokio::test]
async fn a_store_that_stays_unavailable_ends_even_an_endless_wait() {
    let (locks, faults, _) = faulty();
    faults.always(Op::Acquire, NOT_SENT);
    let error = locks.acquire("a").wait_forever().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}

#[tokio::test]
async fn a_caller_that_is_gone_while_its_answer_is_on_the_way_leaves_no_grant() {
    let (locks, faults, others) = faulty();
    faults.next(Op::Acquire, Strike::StallAfter);
    let mut acquire = locks.acquire("a").into_future();
    let first = std::future::poll_fn(|cx| Poll::Ready(acquire.as_mut().poll(cx))).await;
    assert!(first.is_pending());
    assert!(
        others.try_acquire("a").await.unwrap().is_none(),
        "granted, unheard"
    );
    drop(acquire);
    faults.clear();
    drop(others.acquire("a").wait(LONG).await.unwrap());
}

#[tokio::test]
async fn a_grant_that_comes_too_late_does_not_end_the_wait() {
    let store = FaultyLease::new(Arc::new(MemoryStore::new()));
    let faults = store.faults().clone();
    // With the limits that users have.
    let locks = Locks::new(store);
    faults.next(Op::Acquire, Strike::StallAfter);
    let ttl = Duration::from_millis(200);
    let acquire = locks.acquire("a").ttl(ttl).wait(LONG).into_future();
    let late = async {
        tokio::time::sleep(2 * ttl).await;
        faults.clear();
    };
    let (guard, ()) = tokio::join!(acquire, late);
    assert!(
        guard.unwrap().token() > FencingToken::MIN,
        "a grant of its own"
    );
    // Who only tries is told.
    faults.next(Op::Acquire, Strike::StallAfter);
    let trying = locks.try_acquire("b").ttl(ttl).into_future();
    let late = async {
        tokio::time::sleep(2 * ttl).await;
        faults.clear();
    };
    let (tried, ()) = tokio::join!(trying, late);
    assert_eq!(tried.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test]
async fn renewals_that_are_lost_now_and_then_lose_no_lock() {
    let (locks, faults, _) = faulty();
    let guard = locks
        .acquire("a")
        .ttl(Duration::from_secs(3))
        .await
        .unwrap();
    for strike in [LOST_ANSWER, NOT_SENT, LOST_ANSWER] {
        faults.next(Op::Renew, strike);
    }
    while faults.calls(Op::Renew) < 5 {
        guard.check().unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    guard.check().unwrap();
}

#[tokio::test]
async fn one_renewal_without_any_answer_loses_no_lock() {
    let store = FaultyLease::new(Arc::new(MemoryStore::new()));
    let faults = store.faults().clone();
    // With the limits that users have.
    let locks = Locks::new(store);
    let guard = locks
        .acquire("a")
        .ttl(Duration::from_secs(2))
        .await
        .unwrap();
    faults.next(Op::Renew, Strike::StallBefore);
    while faults.calls(Op::Renew) < 3 {
        guard.check().unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    guard.check().unwrap();
    faults.clear();
}

#[tokio::test]
async fn a_bounded_wait_is_bounded_on_a_silent_store_too() {
    let store = FaultyLease::new(Arc::new(MemoryStore::new()));
    let faults = store.faults().clone();
    let clock = Clock::system();
    let locks = Locks::new(store);
    faults.always(Op::Acquire, Strike::StallBefore);
    let started = clock.now();
    let error = locks
        .acquire("a")
        .wait(Duration::from_millis(100))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate);
    let took = clock.now().since(started);
    assert!(
        took < Duration::from_secs(4),
        "{took:?}, half of the patience"
    );
    faults.clear();
}

#[tokio::test]
async fn waiting_goes_on_without_notifications() {
    let (locks, faults, others) = faulty();
    let held = others.acquire("a").await.unwrap();
    faults.next(Op::Watch, NOT_SENT);
    let waiting = tokio::spawn(locks.acquire("a").wait(LONG).into_future());
    while faults.calls(Op::Watch) == 0 {
        tokio::task::yield_now().await;
    }
    held.release().await.unwrap();
    drop(waiting.await.unwrap().unwrap());
}

#[tokio::test]
async fn a_wait_outlasts_an_outage_of_a_store_that_has_answered() {
    let (locks, faults, others) = faulty();
    let held = others.acquire("a").await.unwrap();
    let waiting = tokio::spawn(locks.acquire("a").wait(LONG).into_future());
    while faults.calls(Op::Watch) == 0 {
        tokio::task::yield_now().await;
    }
    for strike in [NOT_SENT, Strike::StallBefore] {
        faults.always(Op::Acquire, strike);
        // Wake the waiter into the outage, and let it last for longer than the patience.
        others.break_lock("a").await.unwrap();
        drop(others.acquire("a").wait(LONG).await.unwrap().detach());
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        assert!(!waiting.is_finished());
    }
    drop(held);
    others.break_lock("a").await.unwrap();
    faults.clear();
    drop(waiting.await.unwrap().unwrap());
}

#[tokio::test]
async fn an_operator_sees_when_the_lock_was_granted_and_not_when_it_was_asked_for() {
    let (locks, faults, others) = faulty();
    let held = others.acquire("a").await.unwrap();
    let waiting = tokio::spawn(locks.acquire("a").wait(LONG).into_future());
    while faults.calls(Op::Watch) == 0 {
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    let released = unix_micros();
    held.release().await.unwrap();
    let _guard = waiting.await.unwrap().unwrap();
    let seen = others.inspect("a").await.unwrap().unwrap();
    assert!(seen.holders[0].info.since_unix_us >= released);
}

#[tokio::test]
async fn a_holder_whose_renewals_go_unheard_believes_no_longer_than_its_last_answer() {
    let (locks, faults, others) = faulty();
    // Each renewal is applied, so the store keeps the lease for longer than its holder may believe.
    faults.always(Op::Renew, LOST_ANSWER);
    let guard = locks
        .acquire("a")
        .ttl(Duration::from_millis(600))
        .await
        .unwrap();
    let lost = tokio::time::timeout(LONG, guard.lost()).await;
    assert_eq!(lost, Ok(LostReason::Unconfirmed));
    assert!(faults.calls(Op::Renew) >= 2, "it asked more than once");
    assert!(others.try_acquire("a").await.unwrap().is_none());
    faults.clear();
    assert_eq!(guard.check().unwrap_err().kind(), ErrorKind::Lost);
    drop(guard);
    locks.drain().await;
    assert!(others.try_acquire("a").await.unwrap().is_some());
}

#[tokio::test]
async fn belief_ends_before_a_silent_store_would_grant_again() {
    let (locks, faults, others) = faulty();
    let guard = locks
        .acquire("a")
        .ttl(Duration::from_millis(600))
        .await
        .unwrap();
    faults.always(Op::Renew, Strike::StallBefore);
    let next = others.acquire("a").wait(LONG).await.unwrap();
    assert_eq!(guard.check().unwrap_err().kind(), ErrorKind::Lost);
    assert!(next.token() > guard.token());
    faults.clear();
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    next.check().unwrap();
    next.renew().await.unwrap();
}

#[tokio::test]
async fn a_release_whose_answer_was_lost_is_repeated_in_the_background() {
    let (locks, faults, others) = faulty();
    let guard = locks.acquire("a").await.unwrap();
    faults.next(Op::Release, NOT_SENT);
    faults.next(Op::Release, LOST_ANSWER);
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    locks.drain().await;
    assert_eq!(faults.calls(Op::Release), 3);
    assert!(others.try_acquire("a").await.unwrap().is_some());
}

#[tokio::test]
async fn work_that_is_done_is_not_failed_by_an_unconfirmed_release() {
    let (locks, faults, _) = faulty();
    faults.next(Op::Release, NOT_SENT);
    let value: Result<u32, fencelock::Error> = locks.with_lock("a", async |_| Ok(7)).await;
    assert_eq!(value.unwrap(), 7);
}

#[tokio::test]
async fn a_grant_that_comes_later_than_its_ttl_is_no_grant() {
    let (_, _, others) = faulty();
    let store = FaultyLease::new(Arc::clone(others.store()));
    store.faults().next(Op::Acquire, Strike::StallAfter);
    let faults = store.faults().clone();
    let locks = Locks::new(store);
    let mut acquire = locks
        .try_acquire("a")
        .ttl(Duration::from_millis(100))
        .into_future();
    let first = std::future::poll_fn(|cx| Poll::Ready(acquire.as_mut().poll(cx))).await;
    assert!(first.is_pending());
    // Somebody else gets the lock, so the first grant has lapsed. Only then its answer arrives.
    let next = others.acquire("a").wait(LONG).await.unwrap();
    faults.clear();
    let error = acquire.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    locks.drain().await;
    assert!(
        faults.calls(Op::Release) > 0,
        "it is given back all the same"
    );
    next.renew().await.unwrap();
}

#[tokio::test]
async fn a_grant_counts_from_the_sending_and_not_from_the_answer() {
    let clock = Clock::adjustable();
    let data = Arc::new(MemoryStore::with_clock(clock.clone()));
    let store = FaultyLease::new(data);
    let faults = store.faults().clone();
    let locks = Locks::builder(store).clock(clock.clone()).build();
    faults.next(Op::Acquire, Strike::StallAfter);
    let mut acquire = locks
        .acquire("a")
        .ttl(Duration::from_secs(60))
        .no_renew()
        .into_future();
    let first = std::future::poll_fn(|cx| Poll::Ready(acquire.as_mut().poll(cx))).await;
    assert!(first.is_pending());
    clock.advance(Duration::from_secs(30));
    faults.clear();
    let guard = acquire.await.unwrap();
    assert!(guard.remaining().unwrap() < Duration::from_secs(30));
}

#[tokio::test]
async fn giving_back_an_unheard_grant_is_repeated_until_it_is_heard() {
    let (locks, faults, others) = faulty();
    faults.always(Op::Acquire, LOST_ANSWER);
    faults.next(Op::Release, NOT_SENT);
    faults.next(Op::Release, NOT_SENT);
    let error = locks.try_acquire("a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate);
    locks.drain().await;
    assert!(others.try_acquire("a").await.unwrap().is_some());
}

#[tokio::test]
async fn a_stalled_store_never_blocks_the_caller_that_drops_its_guard() {
    let (locks, faults, others) = faulty();
    let guard = locks.acquire("a").await.unwrap();
    faults.always(Op::Release, Strike::StallBefore);
    drop(guard);
    assert!(others.try_acquire("a").await.unwrap().is_none());
    faults.clear();
    drop(others.acquire("a").wait(LONG).await.unwrap());
}

#[tokio::test]
async fn one_waiter_of_a_process_asks_the_engine() {
    let (locks, faults, others) = faulty();
    let held = others.acquire("a").await.unwrap();
    let waiters: Vec<_> = (0..100)
        .map(|_| {
            let locks = locks.clone();
            tokio::spawn(async move {
                let guard = locks.acquire("a").wait(LONG).await.unwrap();
                guard.release().await.unwrap();
            })
        })
        .collect();
    while faults.calls(Op::Watch) == 0 {
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    // At most one question each before it queues, and those of the first in line.
    let asked = faults.calls(Op::Acquire);
    assert!(asked <= 110, "{asked} questions");
    // Who has its turn listens before it asks, and that is one.
    assert_eq!(faults.calls(Op::Watch), 1);
    held.release().await.unwrap();
    for waiter in waiters {
        waiter.await.unwrap();
    }
}
