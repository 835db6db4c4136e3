//! Opening a store, and what a process that is stopped in the middle of something keeps others from.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::sync::Barrier;

use rustix::io::Errno;

use super::*;
use crate::file::faults::{Plan, arm, steps_of};
use crate::file::lease::FileStore;
use crate::file::records::{Halt, Pace};
use crate::lease::{AcquireRequest, Attempt, LeaseRef, Ttl};

fn request(name: &str) -> AcquireRequest {
    AcquireRequest::new(
        name.parse().unwrap(),
        Ttl::new(Duration::from_secs(3_600)).unwrap(),
    )
}

fn acquire(store: &FileStore, request: &AcquireRequest, pace: Pace) -> Result<u64, Halt> {
    match store.engine().acquire(request, pace)? {
        Attempt::Granted(grant) => Ok(grant.token.get()),
        Attempt::Held(by) => panic!("held by {by:?}"),
    }
}

fn try_cycle(store: &FileStore, name: &str, pace: Pace) -> Result<u64, Halt> {
    let request = request(name);
    let token = acquire(store, &request, pace)?;
    let lease = LeaseRef {
        name: request.name.clone(),
        holder: request.holder,
        token: None,
    };
    store.engine().release(&lease, Duration::ZERO, pace)?;
    Ok(token)
}

fn cycle(store: &FileStore, name: &str) -> u64 {
    try_cycle(store, name, Pace::patient()).unwrap()
}

fn prune_all(store: &FileStore) -> u64 {
    // A child that another test of this process is starting shares our descriptors, and so a kernel
    // lock that we have just given up, until it runs its program: then a record is kept as busy.
    let mut removed = 0;
    for _ in 0..1_000 {
        let until = safe::within(WAIT_MAX);
        let pruned = store.engine().prune(Duration::ZERO, until).unwrap();
        removed += pruned.removed;
        if pruned.kept == 0 {
            return removed;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("a record stays busy");
}

fn refused(done: Result<u64, Halt>) -> Error {
    match done {
        Err(Halt::Failed(e)) => e,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_process_stopped_in_the_identity_keeps_out_new_names_and_new_reservations_only() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    cycle(&store, "used-up");
    for _ in 2..=16 {
        cycle(&store, "used-up");
    }
    cycle(&store, "a");
    let path = dir.path().join("store");
    let stopped = File::open(&path).unwrap();
    stopped.lock().unwrap();

    let other = FileStore::open(dir.path()).unwrap();
    for store in [&store, &other] {
        try_cycle(store, "a", Pace::Inline).unwrap();
        let listed = store.engine().list("", None, 10, safe::within(WAIT_MAX));
        assert_eq!(listed.unwrap().len(), 2);
    }
    for name in ["used-up", "new"] {
        let soon = Pace::Until(safe::within(Duration::from_millis(50)));
        let error = refused(try_cycle(&other, name, soon));
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let shown = safe::shown(&fs::canonicalize(&path).unwrap());
        assert!(error.to_string().contains(&shown), "{error}");
    }
    // The floor covers all that is removed, which can be seen without the lock.
    assert_eq!(prune_all(&other), 3);

    drop(stopped);
    assert!(cycle(&other, "used-up") > 16);
    assert!(cycle(&other, "new") > 16);
}

#[test]
fn a_store_is_opened_while_its_identity_is_half_written() {
    let dir = tempfile::tempdir().unwrap();
    let realm = FileStore::open(dir.path())
        .unwrap()
        .engine()
        .records
        .root
        .realm()
        .to_owned();
    let writer = File::options()
        .read(true)
        .write(true)
        .open(dir.path().join("store"))
        .unwrap();
    writer.lock().unwrap();
    writer.write_all_at(b"half", 4096).unwrap();
    let opened = FileStore::open(dir.path()).unwrap();
    assert_eq!(opened.engine().records.root.realm(), realm);
    drop(writer);
    assert_eq!(cycle(&opened, "a"), 1);
}

#[test]
fn a_record_that_is_given_its_name_late_starts_above_what_was_pruned_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    // What a creator that is stopped before it gives the record its name has in hand.
    arm(Some(Plan::FailOnce(3, Errno::IO)));
    refused(try_cycle(&store, "a", Pace::patient()));
    arm(None);
    let record = dir.path().join("locks/a");
    let in_hand = fs::read(&record).unwrap();

    let last = cycle(&store, "a");
    assert_eq!(prune_all(&store), 1);
    safe::create_whole(&record, &in_hand).unwrap();
    assert!(cycle(&store, "a") > last);
}

#[test]
fn a_creation_that_fails_anywhere_is_gone_on_with_and_tells_no_token_twice() {
    let dir = tempfile::tempdir().unwrap();
    let steps = steps_of(|| {
        let store = FileStore::open(dir.path().join("whole")).unwrap();
        arm(None);
        acquire(&store, &request("a"), Pace::patient()).unwrap();
    });
    for at in 0..steps.len() {
        let dir = dir.path().join(at.to_string());
        let store = FileStore::open(&dir).unwrap();
        let before = cycle(&store, "z");
        arm(Some(Plan::FailFrom(at, Errno::IO)));
        let failed = acquire(&store, &request("a"), Pace::patient());
        arm(None);
        drop(store);
        let store = FileStore::open(&dir).unwrap();
        let token = cycle(&store, "a");
        assert!(
            token > before && failed.map_or(true, |first| first < token),
            "{at}"
        );
        assert!(cycle(&store, "b") > 16, "{at}");
    }
}

#[test]
fn an_identity_that_is_lost_from_a_store_without_records_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let last = cycle(&store, "a");
    prune_all(&store);
    drop(store);
    fs::remove_file(dir.path().join("store")).unwrap();
    let error = FileStore::open(dir.path()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("mend=N"), "{error}");
    let least = FencingToken::new(last).unwrap();
    let store = FileStore::options().mend(least).open(dir.path()).unwrap();
    assert!(cycle(&store, "a") > last);
}

#[test]
fn a_store_whose_maker_died_before_its_directories_is_finished() {
    let dir = tempfile::tempdir().unwrap();
    let made = FileStore::open(dir.path()).unwrap();
    let realm = made.engine().records.root.realm().to_owned();
    drop(made);
    for parts in [&["live"][..], &["locks", "live"]] {
        for part in parts {
            fs::remove_dir_all(dir.path().join(part)).unwrap();
        }
        let store = FileStore::open(dir.path()).unwrap();
        assert_eq!(store.engine().records.root.realm(), realm);
        cycle(&store, "a");
    }
    // And one that died before the identity had its name.
    let dir = tempfile::tempdir().unwrap();
    arm(Some(Plan::FailOnce(0, Errno::IO)));
    FileStore::open(dir.path()).unwrap_err();
    arm(None);
    assert_eq!(cycle(&FileStore::open(dir.path()).unwrap(), "a"), 1);
}

#[test]
fn many_that_start_at_once_make_one_store() {
    const STARTERS: usize = 50;
    for _ in 0..10 {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/store");
        let start = Barrier::new(STARTERS);
        let mut tokens: Vec<u64> = std::thread::scope(|scope| {
            let starters: Vec<_> = (0..STARTERS)
                .map(|n| {
                    let (path, start) = (&path, &start);
                    scope.spawn(move || {
                        start.wait();
                        let store = FileStore::open(path).unwrap();
                        let name = format!("lock-{}", n % 7);
                        let mut request = request(&name);
                        request.permits = u32::try_from(STARTERS).unwrap();
                        acquire(&store, &request, Pace::patient()).unwrap()
                    })
                })
                .collect();
            starters.into_iter().map(|s| s.join().unwrap()).collect()
        });
        tokens.sort_unstable();
        tokens.dedup();
        assert_eq!(tokens.len(), STARTERS, "reservations never overlap");
    }
}
