//! The twin for code without a runtime.

use std::time::Duration;

use fencelock::blocking::{Fenced, Locks};
use fencelock::memory::{FencedMemory, MemoryStore};
use fencelock::{Error, ErrorKind};

fn locks() -> Locks {
    fencelock::Locks::new(MemoryStore::new()).into()
}

#[test]
fn a_lock_is_held_renewed_written_under_and_released() {
    let locks = locks();
    let data = Fenced::from(fencelock::Fenced::new(FencedMemory::new()));
    let guard = locks.acquire("a", |a| a.label("work")).unwrap();
    assert!(locks.try_acquire("a", |a| a).unwrap().is_none());
    guard.check().unwrap();
    guard.renew().unwrap();
    data.put("r", "v", &guard).unwrap();
    let raised = data.raise("r", &guard).unwrap();
    assert_eq!(raised.writer, Some(guard.token()));
    guard.release().unwrap();
    let next = locks.try_acquire("a", |a| a).unwrap().unwrap();
    data.delete("r", &next).unwrap();
    assert!(data.get("r").unwrap().value.is_none());
}

#[test]
fn a_wait_is_bounded() {
    let locks = locks();
    let _held = locks.acquire("a", |a| a).unwrap();
    let wait = Duration::from_millis(20);
    let error = locks.acquire("a", |a| a.wait(wait)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
}

#[test]
fn work_that_fails_has_released_when_its_error_is_seen() {
    let locks = locks();
    let failed: Result<(), Error> = locks.with_lock("a", |a| a, |_| Err(Error::invalid("mine")));
    assert_eq!(failed.unwrap_err().to_string(), "mine");
    assert!(locks.try_acquire("a", |a| a).unwrap().is_some());
}

#[test]
fn work_during_which_the_lock_was_lost_is_reported() {
    let locks = locks();
    let lost: Result<(), Error> = locks.with_lock("a", |a| a, |_| locks.break_lock("a").map(drop));
    assert_eq!(lost.unwrap_err().kind(), ErrorKind::Lost);
}

#[test]
fn a_detached_lease_is_renewed_and_released_by_its_secret() {
    let locks = locks();
    let left = locks.acquire("a", |a| a.detached()).unwrap().detach();
    locks.renew(&left.lease(), left.ttl).unwrap();
    locks.release(&left.lease(), Duration::ZERO).unwrap();
    assert!(locks.try_acquire("a", |a| a).unwrap().is_some());
}
