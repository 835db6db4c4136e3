//! Stuck, full and shut out.

use super::processes::Process;
use super::*;

#[tokio::test]
async fn a_kernel_lock_that_is_never_released_is_unavailable_not_a_hang() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    cycle(&store, "a").await;
    let stuck = fs::File::open(record_path(dir.path(), "a")).unwrap();
    stuck.lock().unwrap();
    let error = soon(store.acquire(&request("a", LONG))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let leases: Vec<_> = (0..5)
        .map(|_| {
            let holder = HolderId::random();
            (
                LeaseRef {
                    name: name("a"),
                    holder,
                    token: None,
                },
                Ttl::DEFAULT,
            )
        })
        .collect();
    // All five at the same time, not one after the other.
    for answer in soon(store.renew(&leases)).await {
        assert!(matches!(answer, Renewal::Unknown(_)), "{answer:?}");
    }
    assert_eq!(cycle(&store, "b").await, 17);
    drop(stuck);
    assert_eq!(cycle(&store, "a").await, 2);
}

#[tokio::test]
async fn whoever_uses_locks_hears_which_file_is_stuck_and_how_to_find_by_whom() {
    let dir = tempfile::tempdir().unwrap();
    let locks = Locks::new(FileStore::open(dir.path()).unwrap());
    let guard = locks.acquire("a").await.unwrap();
    let stuck = fs::File::open(record_path(dir.path(), "a")).unwrap();
    stuck.lock().unwrap();
    for error in [
        soon(locks.try_acquire("a").into_future())
            .await
            .unwrap_err(),
        soon(locks.inspect("a")).await.unwrap_err(),
        soon(locks.break_lock("a")).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        let text = error.to_string();
        assert!(
            text.contains("lslocks") && text.contains("locks/a"),
            "{text}"
        );
    }
    drop(stuck);
    guard.check().unwrap();
}

#[tokio::test]
async fn a_stuck_record_costs_its_own_lock_and_no_other_of_the_process() {
    let ttl = Duration::from_millis(1_200);
    let dir = tempfile::tempdir().unwrap();
    let (store, others) = two(dir.path());
    for text in ["stuck", "good"] {
        // So that the two below are granted, and so renewed, together.
        cycle(&others, text).await;
    }
    let locks = Locks::new(store);
    let stuck = locks.acquire("stuck").ttl(ttl).await.unwrap();
    let good = locks.acquire("good").ttl(ttl).await.unwrap();
    let kernel_lock = fs::File::open(record_path(dir.path(), "stuck")).unwrap();
    kernel_lock.lock().unwrap();
    // Several TTLs, in which nothing but renewals can keep the other lock.
    assert_eq!(soon(stuck.lost()).await, LostReason::Unconfirmed);
    for _ in 0..4 {
        tokio::time::sleep(ttl).await;
        good.check().unwrap();
        held(&others, &request("good", LONG)).await;
    }
}

#[tokio::test]
async fn a_record_that_is_busy_is_not_idle_and_does_not_stop_a_prune() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    for text in ["a", "b", "c"] {
        cycle(&store, text).await;
    }
    let busy = fs::File::open(record_path(dir.path(), "b")).unwrap();
    busy.lock().unwrap();
    let pruned = soon(store.prune(Duration::ZERO)).await.unwrap();
    assert_eq!((pruned.removed, pruned.kept), (2, 1));
}

/// Needs a disk of its own: a mount namespace, made by whoever may, which is root or, where user
/// namespaces are allowed, anybody. The injected faults of the engine's own tests run everywhere.
#[test]
fn on_a_full_disk_held_locks_go_on_and_new_ones_are_unavailable() {
    let skipped = std::env::var("FENCELOCK_TEST_SKIP").unwrap_or_default();
    if skipped.split(',').any(|name| name == "full-disk") {
        return;
    }
    let can = |flags: &str| {
        let script = "mount -t tmpfs tmpfs /tmp";
        let done = Command::new("unshare")
            .args([flags, "sh", "-c", script])
            .output();
        done.is_ok_and(|done| done.status.success())
    };
    let flags = ["-m", "-rm"].into_iter().find(|flags| can(flags)).expect(
        "a file system for the full-disk test cannot be mounted: run it where unshare -m or unshare -rm may mount, or set FENCELOCK_TEST_SKIP=full-disk",
    );
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("store")).unwrap();
    let mount = "mount -t tmpfs -o size=256k,mode=0700 tmpfs \"$FENCELOCK_TEST_DIR/store\" && exec \"$0\" \"$@\"";
    let under = ["unshare", flags, "sh", "-c", mount];
    let mut child = Process::start_under(&under, dir.path(), "full disk");
    assert_eq!(child.hear(), "done");
    // It lay on a file system of its own.
    assert_eq!(fs::read_dir(dir.path().join("store")).unwrap().count(), 0);
}

fn fill(dir: &Path) {
    let file = fs::File::create(dir.join("filler")).unwrap();
    let mut at = 0;
    while file.write_all_at(&[1; 4_096], at).is_ok() {
        at += 4_096;
    }
}

pub(crate) async fn on_a_full_disk(dir: &Path, store: FileStore) {
    let first = request("a", LONG);
    let grant = granted(&store, &first).await;
    fill(dir);
    assert!(matches!(
        renewal(&store, &lease(&first, &grant), first.ttl).await,
        Renewal::Renewed
    ));
    store
        .release(&lease(&first, &grant), Duration::ZERO)
        .await
        .unwrap();
    // Written in place: an old record needs no space, not even for a new reservation.
    for expected in 2..100 {
        assert_eq!(cycle(&store, "a").await, expected);
    }
    let error = store.acquire(&request("new", LONG)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("disk is full"), "{error}");
    assert_eq!(
        fs::read_dir(dir.join("locks")).unwrap().count(),
        1,
        "a half-made record"
    );
    fs::remove_file(dir.join("filler")).unwrap();
    cycle(&store, "new").await;
}

/// Root may do anything: as root, the child is another user.
#[test]
fn a_record_that_became_unreadable_is_unavailable_and_hides_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let start = |dir: &Path| {
        if !rustix::process::geteuid().is_root() {
            return Process::start(dir, "shut out");
        }
        // Where that user can run it.
        let program = dir.join("tests");
        fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        std::os::unix::fs::chown(dir, Some(65_534), Some(65_534)).unwrap();
        let under = [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
        ];
        Process::start_program(&under, &program, dir, "shut out")
    };
    let mut child = start(dir.path());
    assert_eq!(child.hear(), "done");
}

pub(crate) async fn on_being_shut_out(dir: &Path, store: FileStore) {
    let set_mode = |path: &Path, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let first = request("a", LONG);
    let grant = granted(&store, &first).await;
    let lease = lease(&first, &grant);
    granted(&store, &request("b", LONG)).await;
    let path = record_path(&dir.join("store"), "a");
    for shut in [path.clone(), dir.join("store/locks")] {
        let mode = fs::metadata(&shut).unwrap().permissions().mode();
        set_mode(&shut, 0);
        for error in [
            store.acquire(&request("a", LONG)).await.unwrap_err(),
            store.inspect(&name("a")).await.unwrap_err(),
            store.break_lock(&name("a")).await.unwrap_err(),
            store
                .raise_floor(&name("a"), token(9), true)
                .await
                .unwrap_err(),
            store.release(&lease, Duration::ZERO).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            let text = error.to_string();
            assert!(text.contains("chmod") && text.contains("locks/a"), "{text}");
            assert!(!text.contains("repair"), "{text}");
        }
        let renewed = renewal(&store, &lease, first.ttl).await;
        assert!(matches!(renewed, Renewal::Unknown(_)), "{renewed:?}");
        if shut == path {
            let listed = store.list("", None, 9).await.unwrap();
            let [shut, other] = &*listed else {
                panic!("{listed:?}")
            };
            let damage = shut.damage.as_deref().unwrap();
            assert!(damage.contains("chmod"), "{damage}");
            assert_eq!((&other.damage, other.holders.len()), (&None, 1));
        } else {
            let error = store.list("", None, 9).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        }
        set_mode(&shut, mode & 0o777);
    }
    assert!(matches!(
        renewal(&store, &lease, first.ttl).await,
        Renewal::Renewed
    ));

    // To open a place that is shut is a wrong configuration.
    let shut = dir.join("shut");
    fs::create_dir(&shut).unwrap();
    for mode in [0o500, 0] {
        set_mode(&shut, mode);
        let error = FileStore::open(shut.join("store")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("chmod"), "{error}");
        let error = FileStore::open(&shut).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    let error = FencedFiles::open(shut.join("values")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
}
