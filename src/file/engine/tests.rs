//! What can only be tried from within: other boots, other clocks, and a disk that fails.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::io::Errno;

use super::*;
use crate::file::faults::{Plan, arm, steps_of};
use crate::file::lease::FileStore;
use crate::file::records::lock_at_once;
use crate::file::safe;

const HOUR: Duration = Duration::from_secs(3_600);
const WRITE: &str = "write a slot";
const SYNC: &str = "sync the slots";

fn name() -> LockName {
    "a".parse().unwrap()
}

fn request() -> AcquireRequest {
    AcquireRequest::new(name(), Ttl::new(HOUR).unwrap())
}

fn detached() -> AcquireRequest {
    let mut request = request();
    request.detached = true;
    request
}

fn token(number: u64) -> FencingToken {
    FencingToken::new(number).unwrap()
}

fn in_boot(dir: &Path, boot: &str) -> FileStore {
    FileStore::options().host(boot, "time").open(dir).unwrap()
}

fn try_acquire(store: &FileStore, request: &AcquireRequest) -> Result<Attempt, Halt> {
    store.engine().acquire(request, Pace::patient())
}

fn granted(store: &FileStore, request: &AcquireRequest) -> u64 {
    match try_acquire(store, request).unwrap() {
        Attempt::Granted(grant) => grant.token.get(),
        Attempt::Held(by) => panic!("held by {by:?}"),
    }
}

fn held(store: &FileStore, request: &AcquireRequest) -> Contention {
    match try_acquire(store, request).unwrap() {
        Attempt::Granted(grant) => panic!("granted {grant:?}"),
        Attempt::Held(by) => by,
    }
}

fn lease(request: &AcquireRequest) -> LeaseRef {
    LeaseRef {
        name: request.name.clone(),
        holder: request.holder,
        token: None,
    }
}

fn release(store: &FileStore, request: &AcquireRequest) {
    let done = store
        .engine()
        .release(&lease(request), Duration::ZERO, Pace::patient());
    assert_eq!(done.unwrap(), Release::Released);
}

fn cycle(store: &FileStore) -> u64 {
    let request = request();
    let token = granted(store, &request);
    release(store, &request);
    token
}

fn kind<T: std::fmt::Debug>(done: Result<T, Halt>) -> ErrorKind {
    match done.unwrap_err() {
        Halt::Failed(e) => e.kind(),
        Halt::WouldWait => panic!("a patient operation would not wait"),
    }
}

// Boots.

#[test]
fn no_holder_survives_a_reboot_and_the_next_token_follows_the_reservation() {
    let dir = tempfile::tempdir().unwrap();
    let before = in_boot(dir.path(), "one");
    let first = detached();
    assert_eq!(granted(&before, &first), 1);
    held(&before, &request());
    let after = in_boot(dir.path(), "two");
    let shown = after
        .engine()
        .inspect(&name(), Pace::Inline)
        .unwrap()
        .unwrap();
    assert!(shown.holders.is_empty());
    let renewed = after
        .engine()
        .renew(&lease(&first), first.ttl, Pace::Inline)
        .unwrap();
    assert!(matches!(renewed, Renewal::Lost));
    assert_eq!(granted(&after, &request()), 17);
}

#[test]
fn a_holder_that_lives_refutes_a_reboot() {
    let dir = tempfile::tempdir().unwrap();
    let host = in_boot(dir.path(), "one");
    granted(&host, &request());
    let container = in_boot(dir.path(), "two");
    assert_eq!(
        kind(try_acquire(&container, &request())),
        ErrorKind::Unsupported
    );
    drop(host);
    granted(&container, &request());
}

#[test]
fn what_power_loss_does_to_the_state_is_no_damage() {
    for filler in [0, 0xff] {
        let dir = tempfile::tempdir().unwrap();
        granted(&in_boot(dir.path(), "one"), &detached());
        let record = fs::OpenOptions::new()
            .write(true)
            .open(dir.path().join("locks/a"))
            .unwrap();
        record.write_all_at(&[filler; 8_192], 8_192).unwrap();
        let same_boot = in_boot(dir.path(), "one");
        assert_eq!(
            kind(try_acquire(&same_boot, &request())),
            ErrorKind::Corrupt
        );
        let after = in_boot(dir.path(), "two");
        assert_eq!(cycle(&after), 17);
        assert_eq!(cycle(&after), 18);
    }
}

#[test]
fn a_boot_whose_first_grant_fails_anywhere_leaves_a_sound_record() {
    let mut struck = true;
    let mut at = 0;
    while struck {
        let dir = tempfile::tempdir().unwrap();
        granted(&in_boot(dir.path(), "one"), &detached());
        // As after a power loss.
        let record = fs::OpenOptions::new()
            .write(true)
            .open(dir.path().join("locks/a"))
            .unwrap();
        record.write_all_at(&[0xff; 8_192], 8_192).unwrap();
        let store = in_boot(dir.path(), "two");
        arm(Some(Plan::FailFrom(at, Errno::IO)));
        struck = try_acquire(&store, &request()).is_err();
        arm(None);
        drop(store);
        assert!(cycle(&in_boot(dir.path(), "two")) >= 17, "struck at {at}");
        assert!(cycle(&in_boot(dir.path(), "three")) >= 17, "struck at {at}");
        at += 1;
    }
    assert!(at > 5, "{at}");
}

#[test]
fn where_the_boot_is_unknown_each_token_is_synced() {
    let dir = tempfile::tempdir().unwrap();
    let store = in_boot(dir.path(), "");
    for expected in 1..=5 {
        let steps = steps_of(|| assert_eq!(cycle(&store), expected));
        assert!(steps.contains(&SYNC) || expected == 1, "{steps:?}");
    }
    let informed = in_boot(dir.path(), "one");
    assert_eq!(
        kind(try_acquire(&informed, &request())),
        ErrorKind::Unsupported
    );
}

#[test]
fn where_the_boot_is_unknown_a_grant_of_an_earlier_one_ends() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Clock::adjustable();
    clock.advance(Ttl::MAX * 2);
    let long_up = FileStore::options()
        .host("", "time")
        .clock(clock)
        .open(dir.path())
        .unwrap();
    granted(&long_up, &detached());
    granted(&in_boot(dir.path(), ""), &request());
}

// Reservations.

#[test]
fn a_token_is_told_after_the_floor_and_the_reservation_are_durable() {
    let dir = tempfile::tempdir().unwrap();
    let store = in_boot(dir.path(), "one");
    let first = steps_of(|| assert_eq!(cycle(&store), 1));
    let floor = [WRITE, SYNC, WRITE];
    let created = ["write a new file", "sync the directory"];
    let (state, reservation) = ([WRITE, WRITE], [WRITE, SYNC, WRITE]);
    let (grant, release) = ([WRITE, WRITE], [WRITE, WRITE]);
    // The first raise of a store makes sure of the identity's name too.
    let begun = [&["sync the directory"], &floor[..], &state, &reservation].concat();
    assert_eq!(first, [&created[..], &begun, &grant, &release].concat());
    let second = steps_of(|| assert_eq!(cycle(&store), 2));
    assert_eq!(second, [grant, release].concat());
    for expected in 3..=16 {
        assert_eq!(cycle(&store), expected);
    }
    let beyond = steps_of(|| assert_eq!(cycle(&store), 17));
    assert_eq!(
        beyond,
        [&floor[..], &reservation, &grant, &release].concat()
    );
}

#[test]
fn a_busy_lock_syncs_once_for_thousands_of_grants() {
    let dir = tempfile::tempdir().unwrap();
    let store = in_boot(dir.path(), "one");
    let steps = steps_of(|| (1..=9_000).for_each(|expected| assert_eq!(cycle(&store), expected)));
    let syncs = steps.iter().filter(|step| **step == SYNC).count();
    // 16, 32, ... 4096, 4096: each two syncs.
    assert!(syncs <= 21, "{syncs}");
}

#[test]
fn what_would_wait_is_left_undone_inline() {
    let dir = tempfile::tempdir().unwrap();
    let store = in_boot(dir.path(), "one");
    let inline = || store.engine().acquire(&request(), Pace::Inline);
    assert!(matches!(inline(), Err(Halt::WouldWait)), "a new record");
    for _ in 1..=16 {
        cycle(&store);
    }
    let steps = steps_of(|| assert!(matches!(inline(), Err(Halt::WouldWait)), "a reservation"));
    assert!(steps.is_empty(), "{steps:?}");
    let locked = fs::File::open(dir.path().join("locks/a")).unwrap();
    locked.lock().unwrap();
    assert!(matches!(inline(), Err(Halt::WouldWait)), "a busy record");
}

#[test]
fn a_reservation_that_was_not_synced_is_made_again_before_its_tokens_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let store = in_boot(dir.path(), "one");
    for _ in 1..=16 {
        cycle(&store);
    }
    // The floor takes steps 0 to 2, the reservation is written in step 3 and synced in step 4.
    arm(Some(Plan::FailOnce(4, Errno::IO)));
    assert_eq!(
        kind(try_acquire(&store, &request())),
        ErrorKind::Unavailable
    );
    let other = in_boot(dir.path(), "one");
    let steps = steps_of(|| assert_eq!(cycle(&other), 17));
    assert!(steps.contains(&SYNC), "{steps:?}");
}

#[test]
fn a_lock_on_a_file_that_lost_its_name_is_no_lock() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    let open = || fs::File::create(&path).unwrap();
    lock_at_once(open(), &path).unwrap();
    let orphan = open();
    fs::remove_file(&path).unwrap();
    assert!(matches!(lock_at_once(orphan, &path), Err(Halt::WouldWait)));
    let orphan = open();
    fs::rename(&path, dir.path().join("other")).unwrap();
    open();
    assert!(matches!(lock_at_once(orphan, &path), Err(Halt::WouldWait)));
}

#[test]
fn whoever_waits_for_a_record_that_is_removed_takes_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = in_boot(dir.path(), "one");
    cycle(&store);
    let path = fs::canonicalize(dir.path()).unwrap().join("locks/a");
    let busy = fs::File::open(&path).unwrap();
    busy.lock().unwrap();
    let is_record = |fd: &fs::DirEntry| fs::read_link(fd.path()).is_ok_and(|to| to == path);
    let opened = || {
        fs::read_dir("/proc/self/fd")
            .unwrap()
            .flatten()
            .filter(is_record)
            .count()
    };
    let token = std::thread::scope(|scope| {
        let waiter = scope.spawn(|| granted(&store, &request()));
        while opened() < 2 {
            std::thread::yield_now();
        }
        fs::remove_file(&path).unwrap();
        drop(busy);
        waiter.join().unwrap()
    });
    assert!(
        token > 16,
        "{token}: a grant on a file that nobody else can find"
    );
    held(&store, &request());
}

// A disk that fails.

/// What is done while the disk fails.
type Deed = fn(&FileStore, &AcquireRequest) -> Result<(), Halt>;

/// Lets the disk fail at each step of `deed` in turn, once and for good, after `prepared` grants,
/// the last of which is `held`.
fn at_each_step(prepared: u64, held: bool, deed: Deed) {
    let mut steps = 0;
    let plans: [fn(usize, Errno) -> Plan; 2] = [Plan::FailFrom, Plan::FailOnce];
    for plan in plans {
        for at in 0.. {
            let dir = tempfile::tempdir().unwrap();
            let store = in_boot(dir.path(), "one");
            let holder = request();
            let mut last = 0;
            for n in 0..prepared {
                last = granted(&store, &holder);
                if n + 1 < prepared || !held {
                    release(&store, &holder);
                }
            }
            arm(Some(plan(at, Errno::NOSPC)));
            let done = deed(&store, &holder);
            arm(None);
            let context = format!("step {at} of the deed after {prepared} grants");
            check_after(&store, &holder, last, held, done.as_ref().err(), &context);
            if done.is_ok() {
                break;
            }
            steps += 1;
        }
    }
    assert!(steps > 1, "the disk never failed");
}

fn check_after(
    store: &FileStore,
    holder: &AcquireRequest,
    last: u64,
    was_held: bool,
    failure: Option<&Halt>,
    context: &str,
) {
    let ours = |state: &LockState| {
        let tag = crate::fence::HolderTag::of(&holder.holder);
        state.holders.iter().any(|h| h.tag == tag)
    };
    let state = store.engine().inspect(&name(), Pace::patient()).unwrap();
    match failure {
        Some(Halt::Failed(e)) if e.kind() == ErrorKind::Unavailable => {
            // Nothing was applied: neither is a grant there that was not, nor one gone.
            assert_eq!(state.as_ref().is_some_and(ours), was_held, "{context}: {e}");
            assert!(e.to_string().contains("disk is full"), "{context}: {e}");
        }
        Some(Halt::Failed(e)) => assert_eq!(e.kind(), ErrorKind::Indeterminate, "{context}: {e}"),
        Some(Halt::WouldWait) => panic!("{context}: a patient deed would not wait"),
        None => {}
    }
    let told = state
        .and_then(|s| s.last_token)
        .map_or(0, FencingToken::get);
    assert!(told >= last, "{context}");
    store.engine().break_lock(&name(), Pace::patient()).unwrap();
    assert!(cycle(store) > last, "{context}");
}

#[test]
fn a_failed_first_grant_leaves_none_behind() {
    at_each_step(0, false, |store, holder| {
        try_acquire(store, holder).map(|_| ())
    });
}

#[test]
fn a_failed_grant_leaves_none_behind() {
    at_each_step(2, false, |store, holder| {
        try_acquire(store, holder).map(|_| ())
    });
}

#[test]
fn a_failed_grant_with_a_new_reservation_leaves_none_behind() {
    at_each_step(16, false, |store, holder| {
        try_acquire(store, holder).map(|_| ())
    });
}

#[test]
fn a_failed_renewal_leaves_the_lease() {
    at_each_step(2, true, |store, holder| {
        store
            .engine()
            .renew(&lease(holder), holder.ttl, Pace::patient())
            .map(|_| ())
    });
}

#[test]
fn a_failed_release_leaves_the_lease() {
    at_each_step(2, true, |store, holder| {
        store
            .engine()
            .release(&lease(holder), Duration::ZERO, Pace::patient())
            .map(|_| ())
    });
}

#[test]
fn a_failed_raise_loses_nothing() {
    at_each_step(2, true, |store, _| {
        store
            .engine()
            .raise_floor(&name(), token(50), false, Pace::patient())
            .map(|_| ())
    });
}

#[test]
fn a_prune_on_a_full_disk_still_frees_space() {
    let dir = tempfile::tempdir().unwrap();
    let store = in_boot(dir.path(), "one");
    cycle(&store);
    arm(Some(Plan::FailFrom(0, Errno::NOSPC)));
    let pruned = store.engine().prune(Duration::ZERO, safe::within(HOUR));
    arm(None);
    assert_eq!(pruned.unwrap().removed, 1);
    assert_eq!(cycle(&store), 17);
}

#[test]
fn a_disk_that_fails_while_a_store_is_opened_is_unavailable_and_not_a_wrong_path() {
    for errno in [Errno::NOSPC, Errno::IO] {
        let dir = tempfile::tempdir().unwrap();
        arm(Some(Plan::FailFrom(0, errno)));
        let opened = FileStore::open(dir.path().join("store"));
        arm(None);
        assert_eq!(opened.unwrap_err().kind(), ErrorKind::Unavailable);
    }
    let dir = tempfile::tempdir().unwrap();
    arm(Some(Plan::FailFrom(0, Errno::ROFS)));
    let opened = FileStore::open(dir.path().join("store"));
    arm(None);
    let error = opened.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("remount it"), "{error}");
}

// Network file systems.

#[test]
#[cfg(target_os = "linux")]
fn a_network_file_system_is_refused_when_a_store_is_opened_unless_it_is_allowed() {
    use crate::file::FencedFiles;
    use crate::netfs::{FileSystem, PRETENDED};

    let dir = tempfile::tempdir().unwrap();
    let refused = |error: Error| {
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let text = error.to_string();
        assert!(
            text.contains("allow it") && text.contains("file_system=nfs path="),
            "{text}"
        );
    };
    PRETENDED.set(Some(FileSystem::Network("nfs")));
    refused(FileStore::open(dir.path()).unwrap_err());
    refused(FencedFiles::open(dir.path()).unwrap_err());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    let options = FileStore::options().allow_network_fs(true);
    granted(&options.open(dir.path()).unwrap(), &request());
    FencedFiles::options()
        .allow_network_fs(true)
        .open(dir.path())
        .unwrap();
    PRETENDED.set(None);
    FileStore::open(dir.path()).unwrap();
}

// Time namespaces.

#[test]
fn ticks_of_another_time_namespace_are_not_compared() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Clock::adjustable();
    let within = |namespace: &str| {
        FileStore::options()
            .host("one", namespace)
            .clock(clock.clone())
            .open(dir.path())
            .unwrap()
    };
    let (inner, outer) = (within("inner"), within("outer"));
    granted(&inner, &request());
    clock.advance(HOUR * 2);
    // By the clock it has lapsed, but by whose? Its process lives.
    assert_eq!(held(&outer, &request()).free_in, None);
    drop(inner);
    let tied = request();
    granted(&outer, &tied);
    release(&outer, &tied);

    let inner = within("inner");
    granted(&inner, &detached());
    drop(inner);
    clock.advance(HOUR * 2);
    held(&outer, &request());
    granted(&within("inner"), &request());
}

// Liveness files.

#[test]
fn the_files_of_the_dead_are_reaped_and_those_of_the_living_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let live = Live::new(dir.path().to_owned());
    let id = live.id().unwrap();
    assert_eq!(live.id().unwrap(), id);
    let other = Live::new(dir.path().to_owned());
    let dead = "0".repeat(32);
    fs::write(dir.path().join(&dead), "").unwrap();
    fs::write(dir.path().join("not an id"), "").unwrap();
    assert_eq!(other.count_dead().unwrap(), 1);
    assert!(other.is_alive(&id).unwrap() && live.is_alive(&id).unwrap());
    assert!(!other.is_alive(&dead).unwrap());
    assert_eq!(other.reap().unwrap(), 1);
    assert!(other.is_alive(&id).unwrap() && dir.path().join("not an id").exists());
    drop(live);
    assert!(!other.is_alive(&id).unwrap());
    assert!(!dir.path().join(&id).exists());
}

#[test]
fn a_liveness_file_that_cannot_be_asked_is_not_taken_for_a_dead_ones() {
    let dir = tempfile::tempdir().unwrap();
    let live = Live::new(dir.path().to_owned());
    let id = "1".repeat(32);
    std::os::unix::fs::symlink("/dev/null", dir.path().join(&id)).unwrap();
    live.is_alive(&id).unwrap_err();
    live.reap().unwrap();
}

#[test]
fn stores_that_come_up_while_others_reap_stay_alive() {
    let dir = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let live = Live::new(dir.path().to_owned());
                    let id = live.id().unwrap();
                    let other = Live::new(dir.path().to_owned());
                    other.reap().unwrap();
                    assert!(other.is_alive(&id).unwrap());
                }
            });
        }
    });
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

// Long states, and waiting without notifications.

#[test]
fn a_damaged_list_of_holders_is_corrupt() {
    let dir = tempfile::tempdir().unwrap();
    let store = in_boot(dir.path(), "one");
    for _ in 0..30 {
        let mut request = request();
        request.permits = 30;
        granted(&store, &request);
    }
    let path = dir.path().join("locks/a");
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    for region in [16_384, 16_384 + 8 * 1024 * 1024] {
        file.write_all_at(b"x", region + 100).unwrap();
    }
    assert_eq!(
        kind(store.engine().inspect(&name(), Pace::patient())),
        ErrorKind::Corrupt
    );
}

#[test]
fn what_a_killed_process_left_half_made_is_swept() {
    let dir = tempfile::tempdir().unwrap();
    let store = in_boot(dir.path(), "one");
    let locks = dir.path().join("locks");
    let (old, new) = (locks.join(".0.fence.tmp"), locks.join(".1.fence.tmp"));
    for path in [&old, &new] {
        fs::write(path, "").unwrap();
    }
    let long_ago = std::time::UNIX_EPOCH + Duration::from_secs(1);
    let file = fs::OpenOptions::new().write(true).open(&old).unwrap();
    file.set_modified(long_ago).unwrap();
    store.engine().prune(HOUR, safe::within(HOUR)).unwrap();
    assert!(!old.exists() && new.exists());
}
