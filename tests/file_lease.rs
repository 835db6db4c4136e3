//! The file lock engine: its own traps, with real files and real processes.

#![cfg(all(feature = "file", target_os = "linux"))]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests and their helpers fail by panicking, and children talk on their standard output"
)]

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

// Granting, and what a grant survives.

#[tokio::test]
async fn tokens_count_up_over_releases_and_stores() {
    let dir = tempfile::tempdir().unwrap();
    let a = FileStore::open(dir.path()).unwrap();
    let b = FileStore::open(dir.path()).unwrap();
    for expected in 1..=200 {
        let store = if expected % 2 == 0 { &a } else { &b };
        assert_eq!(cycle(store, "a").await, expected);
    }
}

#[tokio::test]
async fn a_held_lock_says_who_holds_it_and_for_how_long() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let mut first = request("a", LONG);
    first.info.label = Some("nightly \"export\"\n".to_owned());
    granted(&a, &first).await;
    for store in [&a, &b] {
        let by = held(store, &request("a", LONG)).await;
        assert_eq!(by.holder.unwrap().label, first.info.label);
        let left = by.free_in.unwrap();
        assert!(left <= LONG && left > LONG / 2, "{left:?}");
    }
}

#[tokio::test]
async fn the_same_request_finds_its_own_grant() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Clock::adjustable();
    let a = FileStore::options()
        .clock(clock.clone())
        .open(dir.path())
        .unwrap();
    let first = request("a", LONG);
    let grant = granted(&a, &first).await;
    clock.advance(LONG * 3 / 4);
    assert_eq!(granted(&a, &first).await, grant);
    clock.advance(LONG * 3 / 4);
    held(&a, &request("a", LONG)).await;
    assert_eq!(
        a.inspect(&name("a")).await.unwrap().unwrap().holders.len(),
        1
    );
}

#[tokio::test]
async fn a_lapsed_grant_is_never_revived() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Clock::adjustable();
    let a = FileStore::options()
        .clock(clock.clone())
        .open(dir.path())
        .unwrap();
    let first = request("a", LONG);
    let grant = granted(&a, &first).await;
    let first_lease = lease(&first, &grant);
    clock.advance(LONG / 2);
    assert!(matches!(
        renewal(&a, &first_lease, first.ttl).await,
        Renewal::Renewed
    ));
    clock.advance(LONG);
    assert!(matches!(
        renewal(&a, &first_lease, first.ttl).await,
        Renewal::Lost
    ));
    assert_eq!(
        a.release(&first_lease, Duration::ZERO).await.unwrap(),
        Release::NotHeld
    );
    assert_eq!(granted(&a, &first).await.token.get(), grant.token.get() + 1);
    assert!(matches!(
        renewal(&a, &first_lease, first.ttl).await,
        Renewal::Lost
    ));
}

#[tokio::test]
async fn renew_and_release_want_the_holder_and_the_token() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let first = request("a", LONG);
    let grant = granted(&a, &first).await;
    let good = lease(&first, &grant);
    let other_holder = LeaseRef {
        holder: HolderId::random(),
        ..good.clone()
    };
    let other_token = LeaseRef {
        token: Some(token(99)),
        ..good.clone()
    };
    for bad in [&other_holder, &other_token] {
        assert!(matches!(renewal(&b, bad, first.ttl).await, Renewal::Lost));
        assert_eq!(
            b.release(bad, Duration::ZERO).await.unwrap(),
            Release::NotHeld
        );
    }
    assert!(matches!(
        renewal(&b, &good, first.ttl).await,
        Renewal::Renewed
    ));
    let by_holder = LeaseRef {
        token: None,
        ..good
    };
    assert_eq!(
        b.release(&by_holder, Duration::ZERO).await.unwrap(),
        Release::Released
    );
    assert_eq!(
        b.release(&by_holder, Duration::ZERO).await.unwrap(),
        Release::NotHeld
    );
}

#[tokio::test]
async fn a_linger_keeps_the_lock_without_its_process_and_then_ends() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Clock::adjustable();
    let open = || {
        FileStore::options()
            .clock(clock.clone())
            .open(dir.path())
            .unwrap()
    };
    let (a, b) = (open(), open());
    let first = request("a", LONG);
    let grant = granted(&a, &first).await;
    let first_lease = lease(&first, &grant);
    assert_eq!(
        a.release(&first_lease, LONG * 2).await.unwrap(),
        Release::Released
    );
    assert!(matches!(
        renewal(&a, &first_lease, first.ttl).await,
        Renewal::Lost
    ));
    assert_eq!(
        a.release(&first_lease, Duration::ZERO).await.unwrap(),
        Release::NotHeld
    );
    drop(a);
    clock.advance(LONG * 3 / 2);
    held(&b, &request("a", LONG)).await;
    held(&b, &first).await;
    clock.advance(LONG / 2);
    assert!(granted(&b, &request("a", LONG)).await.token > grant.token);
}

#[tokio::test]
async fn a_lock_without_a_ttl_ends_with_its_process_only() {
    let dir = tempfile::tempdir().unwrap();
    let clock = Clock::adjustable();
    let open = || {
        FileStore::options()
            .clock(clock.clone())
            .open(dir.path())
            .unwrap()
    };
    let (a, b) = (open(), open());
    let mut first = AcquireRequest::new(name("a"), Ttl::NONE);
    let grant = granted(&a, &first).await;
    clock.advance(Ttl::MAX * 2);
    assert!(matches!(
        renewal(&a, &lease(&first, &grant), Ttl::NONE).await,
        Renewal::StillHeld
    ));
    assert_eq!(held(&b, &request("a", LONG)).await.free_in, None);
    let shown = b.inspect(&name("a")).await.unwrap().unwrap();
    assert_eq!(
        (shown.holders[0].ttl, shown.holders[0].expires_in),
        (Ttl::NONE, None)
    );
    drop(a);
    granted(&b, &request("a", LONG)).await;
    first.detached = true;
    assert_eq!(
        b.acquire(&first).await.unwrap_err().kind(),
        ErrorKind::Invalid
    );
}

#[tokio::test]
async fn a_detached_grant_outlives_its_store_and_another_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let mut detached = request("detached", LONG);
    detached.detached = true;
    let grant = granted(&a, &detached).await;
    granted(&a, &request("tied", LONG)).await;
    held(&b, &request("tied", LONG)).await;
    drop(a);
    granted(&b, &request("tied", LONG)).await;
    held(&b, &request("detached", LONG)).await;
    assert!(matches!(
        renewal(&b, &lease(&detached, &grant), detached.ttl).await,
        Renewal::Renewed
    ));
}

#[tokio::test]
async fn a_grant_whose_liveness_file_was_removed_is_replaced_and_the_next_gets_a_new_file() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let first = request("a", LONG);
    let grant = granted(&a, &first).await;
    for file in fs::read_dir(dir.path().join("live")).unwrap() {
        fs::remove_file(file.unwrap().path()).unwrap();
    }
    let second = granted(&b, &request("a", LONG)).await;
    assert!(second.token > grant.token);
    assert!(matches!(
        renewal(&a, &lease(&first, &grant), first.ttl).await,
        Renewal::Lost
    ));
    granted(&a, &request("other", LONG)).await;
    held(&b, &request("other", LONG)).await;
}

#[tokio::test]
async fn as_many_hold_a_semaphore_as_it_has_permits() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let permits = |n| {
        let mut request = request("s", LONG);
        request.permits = n;
        request
    };
    let mut leases = Vec::new();
    for n in 1..=3 {
        let request = permits(3);
        let grant = granted(if n == 2 { &b } else { &a }, &request).await;
        assert_eq!(grant.token.get(), n);
        leases.push(lease(&request, &grant));
    }
    held(&b, &permits(3)).await;
    let error = b.acquire(&permits(2)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().ends_with("asked=2 capacity=3"), "{error}");
    a.release(&leases[1], Duration::ZERO).await.unwrap();
    assert_eq!(granted(&b, &permits(3)).await.token.get(), 4);
    b.break_lock(&name("s")).await.unwrap();
    assert_eq!(granted(&b, &permits(2)).await.token.get(), 5);
    for bad in [0, 1_001] {
        assert_eq!(
            a.acquire(&permits(bad)).await.unwrap_err().kind(),
            ErrorKind::Invalid
        );
    }
}

#[tokio::test]
async fn more_holders_than_a_slot_holds_are_kept_and_let_go() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let clumsy = || {
        let mut request = request("s", LONG);
        request.permits = 60;
        request.info.label = Some("\u{1}".repeat(256));
        request
    };
    let mut leases = Vec::new();
    for n in 0..60 {
        let request = clumsy();
        let grant = granted(if n % 2 == 0 { &a } else { &b }, &request).await;
        leases.push(lease(&request, &grant));
    }
    held(&b, &clumsy()).await;
    let state = b.inspect(&name("s")).await.unwrap().unwrap();
    let tokens: HashSet<_> = state.holders.iter().map(|h| h.token).collect();
    assert_eq!(tokens.len(), 60);
    for lease in &leases[..58] {
        b.release(lease, Duration::ZERO).await.unwrap();
    }
    assert_eq!(
        a.inspect(&name("s")).await.unwrap().unwrap().holders.len(),
        2
    );
    assert_eq!(granted(&b, &clumsy()).await.token.get(), 61);
}

#[tokio::test]
async fn infos_beyond_the_limit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let mut long = request("a", LONG);
    long.info.label = Some("x".repeat(257));
    assert_eq!(
        store.acquire(&long).await.unwrap_err().kind(),
        ErrorKind::Invalid
    );
}

#[tokio::test]
async fn a_watermark_that_was_met_is_exceeded_and_a_forged_one_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let mut healing = request("a", LONG);
    healing.above = Some(token(10_000));
    assert_eq!(granted(&store, &healing).await.token.get(), 10_001);
    let mut forged = request("b", LONG);
    forged.above = Some(token(1 << 62));
    assert_eq!(
        store.acquire(&forged).await.unwrap_err().kind(),
        ErrorKind::Invalid
    );
}

#[tokio::test]
async fn the_last_token_is_told_once_and_then_none() {
    let dir = tempfile::tempdir().unwrap();
    drop(FileStore::open(dir.path()).unwrap());
    fs::write(dir.path().join("store"), "damaged").unwrap();
    let near = token(FencingToken::MAX.get() - 1);
    let store = FileStore::options().mend(near).open(dir.path()).unwrap();
    let first = request("a", LONG);
    let grant = granted(&store, &first).await;
    assert_eq!(grant.token, FencingToken::MAX);
    store
        .release(&lease(&first, &grant), Duration::ZERO)
        .await
        .unwrap();
    for text in ["a", "another"] {
        let error = store.acquire(&request(text, LONG)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
    }
}

// Names and lists.

fn odd_names() -> Vec<String> {
    let mut names: Vec<String> = [
        "a",
        "A",
        "a/b",
        "a:0",
        "a:fence",
        "{a}",
        "../a",
        "..",
        ".",
        "/",
        "a ",
        " a",
        "a\n",
        "a\0b",
        "é",
        "e\u{301}",
        "=61",
        "a=",
        "store",
        "locks",
        "日本語",
        "%2e",
        "a==b",
    ]
    .map(str::to_owned)
    .to_vec();
    names.push("x".repeat(512));
    names
}

#[tokio::test]
async fn odd_names_are_24_records() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let mut names = odd_names();
    assert_eq!(names.len(), 24);
    for name in &names {
        granted(&a, &request(name, LONG)).await;
    }
    for name in &names {
        held(&b, &request(name, LONG)).await;
    }
    assert_eq!(fs::read_dir(dir.path().join("locks")).unwrap().count(), 24);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    names.sort();
    let all = b.list("", None, 100).await.unwrap();
    assert_eq!(
        all.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(),
        names
    );
    let some = b.list("a", Some(&name("a/b")), 2).await.unwrap();
    assert_eq!(
        some.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(),
        ["a:0", "a:fence"]
    );
    assert!(b.list("", None, 0).await.unwrap().is_empty());
    assert_eq!(b.list("xx", None, 9).await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_record_is_shown_without_secrets() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    assert_eq!(store.inspect(&name("a")).await.unwrap(), None);
    let first = request("a", LONG);
    granted(&store, &first).await;
    let state: LockState = store.inspect(&name("a")).await.unwrap().unwrap();
    assert_eq!(
        (state.capacity, state.last_token),
        (Some(1), Some(token(1)))
    );
    assert!(!format!("{state:?}").contains(&first.holder.reveal()));
}

#[tokio::test]
async fn a_broken_lock_has_a_larger_token_for_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    assert_eq!(b.break_lock(&name("a")).await.unwrap(), None);
    let first = request("a", LONG);
    let grant = granted(&a, &first).await;
    let before = b.break_lock(&name("a")).await.unwrap().unwrap();
    assert_eq!(before.holders[0].token, grant.token);
    assert!(matches!(
        renewal(&a, &lease(&first, &grant), first.ttl).await,
        Renewal::Lost
    ));
    assert!(granted(&b, &request("a", LONG)).await.token > grant.token);
}

#[tokio::test]
async fn a_raised_floor_lasts_and_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let first = request("a", LONG);
    let grant = granted(&store, &first).await;
    assert_eq!(
        store
            .raise_floor(&name("a"), token(500), false)
            .await
            .unwrap(),
        token(500)
    );
    assert_eq!(
        store
            .raise_floor(&name("a"), token(400), false)
            .await
            .unwrap(),
        token(500)
    );
    assert!(matches!(
        renewal(&store, &lease(&first, &grant), first.ttl).await,
        Renewal::Renewed
    ));
    let absurd = store
        .raise_floor(&name("a"), token(1 << 62), false)
        .await
        .unwrap_err();
    assert_eq!(absurd.kind(), ErrorKind::Invalid);
    drop(store);
    let store = FileStore::open(dir.path()).unwrap();
    assert_eq!(cycle(&store, "a").await, 501);
}

// Damage.

/// All that could grant or tell a token refuses, and names the lock, the file and what mends it.
async fn assert_corrupt(store: &FileStore, text: &str, how: &str) {
    let file = name(text).encoded();
    for error in [
        store.acquire(&request(text, LONG)).await.unwrap_err(),
        store.inspect(&name(text)).await.unwrap_err(),
        store.break_lock(&name(text)).await.unwrap_err(),
        store
            .raise_floor(&name(text), token(1), false)
            .await
            .unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{how}: {error}");
        assert!(
            error.to_string().contains(&format!("locks/{file}")),
            "{how}: {error}"
        );
        assert!(
            error
                .to_string()
                .contains(&format!("`fencelock repair '{text}' --min-token N`")),
            "{how}: {error}"
        );
    }
}

#[tokio::test]
async fn a_record_cut_short_at_any_length_is_corrupt_until_mended() {
    for length in [0, 1, 20, 4_095, 4_096, 8_191, 8_192, 12_287, 12_288, 16_383] {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let last = granted(&store, &request("a", LONG)).await.token;
        let file = fs::OpenOptions::new()
            .write(true)
            .open(record_path(dir.path(), "a"))
            .unwrap();
        file.set_len(length).unwrap();
        assert_corrupt(&store, "a", &format!("cut to {length}")).await;
        let counts_as = store.raise_floor(&name("a"), token(1), true).await.unwrap();
        assert!(counts_as >= last);
        assert!(granted(&store, &request("a", LONG)).await.token > counts_as);
    }
}

#[tokio::test]
async fn a_record_that_was_emptied_or_overwritten_is_corrupt() {
    let (reservation, state, all) = ((0, 8_192), (8_192, 16_384), (0, 16_384));
    for (from, to) in [reservation, state, all] {
        for filler in [0, 0xff, b'x'] {
            let dir = tempfile::tempdir().unwrap();
            let store = FileStore::open(dir.path()).unwrap();
            granted(&store, &request("a", LONG)).await;
            let file = fs::OpenOptions::new()
                .write(true)
                .open(record_path(dir.path(), "a"))
                .unwrap();
            file.write_all_at(&vec![filler; to - from], u64::try_from(from).unwrap())
                .unwrap();
            assert_corrupt(&store, "a", &format!("{from}..{to} filled with {filler}")).await;
        }
    }
}

#[tokio::test]
async fn a_flipped_byte_anywhere_neither_frees_the_lock_nor_repeats_a_token() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let path = record_path(dir.path(), "a");
    cycle(&a, "a").await;
    let last = granted(&a, &request("a", LONG)).await.token;
    let sound = fs::read(&path).unwrap();
    let written: Vec<usize> = (0..sound.len()).filter(|at| sound[*at] != 0).collect();
    for at in written {
        let mut flipped = sound.clone();
        flipped[at] ^= 0x5a;
        // In place: a new file would be another record.
        fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .write_all_at(&flipped, 0)
            .unwrap();
        match b.acquire(&request("a", LONG)).await {
            Ok(Attempt::Held(_)) => {}
            Ok(Attempt::Granted(_)) => panic!("byte {at} freed the lock"),
            Err(e) => assert_eq!(e.kind(), ErrorKind::Corrupt, "byte {at}: {e}"),
        }
    }
    fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .write_all_at(&sound, 0)
        .unwrap();
    b.break_lock(&name("a")).await.unwrap();
    assert_eq!(cycle(&b, "a").await, last.get() + 1);
}

#[tokio::test]
async fn a_record_of_another_name_is_corrupt() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    cycle(&store, "a").await;
    fs::copy(record_path(dir.path(), "a"), record_path(dir.path(), "b")).unwrap();
    fs::set_permissions(
        record_path(dir.path(), "b"),
        fs::Permissions::from_mode(0o600),
    )
    .unwrap();
    assert_corrupt(&store, "b", "copied").await;
}

#[tokio::test]
async fn a_deleted_record_starts_above_every_token_it_told() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let mut last = 0;
    for _ in 0..5 {
        for _ in 0..40 {
            let next = cycle(&store, "a").await;
            assert!(next > last);
            last = next;
        }
        fs::remove_file(record_path(dir.path(), "a")).unwrap();
    }
}

#[tokio::test]
async fn what_is_planted_in_a_records_place_is_refused_and_leads_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let path = record_path(dir.path(), "a");
    let victim = dir.path().join("victim");
    fs::write(&victim, "precious").unwrap();

    std::os::unix::fs::symlink(&victim, &path).unwrap();
    assert_corrupt(&store, "a", "symlink").await;
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    store.raise_floor(&name("a"), token(7), true).await.unwrap();
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
    assert!(cycle(&store, "a").await > 7);
    fs::remove_file(&path).unwrap();

    std::os::unix::fs::symlink(dir.path().join("nowhere"), &path).unwrap();
    assert_corrupt(&store, "a", "dangling symlink").await;
    assert!(!dir.path().join("nowhere").exists());
    fs::remove_file(&path).unwrap();

    assert!(
        Command::new("mkfifo")
            .arg(&path)
            .status()
            .unwrap()
            .success()
    );
    assert_corrupt(&store, "a", "pipe").await;
    store.raise_floor(&name("a"), token(7), true).await.unwrap();
    assert!(cycle(&store, "a").await > 7);
    fs::remove_file(&path).unwrap();

    fs::create_dir(&path).unwrap();
    assert_corrupt(&store, "a", "directory").await;
    store
        .raise_floor(&name("a"), token(7), true)
        .await
        .unwrap_err();
    fs::remove_dir(&path).unwrap();

    fs::hard_link(&victim, &path).unwrap();
    assert_corrupt(&store, "a", "hard link").await;
    assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
}

#[tokio::test]
async fn a_store_without_its_identity_tells_no_token_until_it_is_mended() {
    for damage in ["deleted", "emptied", "overwritten", "symlink"] {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        let last = cycle(&store, "a").await;
        let path = dir.path().join("store");
        match damage {
            "deleted" => fs::remove_file(&path).unwrap(),
            "emptied" => fs::write(&path, "").unwrap(),
            "overwritten" => fs::write(&path, vec![b'x'; 8_192]).unwrap(),
            _ => {
                fs::rename(&path, dir.path().join("elsewhere")).unwrap();
                std::os::unix::fs::symlink(dir.path().join("elsewhere"), &path).unwrap();
            }
        }
        let error = FileStore::open(dir.path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{damage}: {error}");
        // The message holds the whole remedy, ready to be run.
        let told = error.to_string();
        let remedy = format!("--store 'file://{}?mend=N'", dir.path().display());
        assert!(told.contains(&remedy), "{damage}: {told}");
        let new_name = store.acquire(&request("new", LONG)).await.unwrap_err();
        assert!(
            matches!(new_name.kind(), ErrorKind::Corrupt | ErrorKind::Unavailable),
            "{damage}: {new_name}"
        );

        let mended = FileStore::options()
            .mend(token(300))
            .open(dir.path())
            .unwrap();
        assert_ne!(mended.profile().realm, store.profile().realm, "{damage}");
        assert!(cycle(&mended, "a").await > last);
        assert!(cycle(&mended, "new").await > 300);
        // The tokens of the new store must not be told under the old realm.
        let error = store.acquire(&request("a", LONG)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{damage}: {error}");
    }
}

#[tokio::test]
async fn the_remedy_of_a_damaged_store_can_be_run_as_it_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let odd = dir.path().join("it's 100% a?b#c");
    drop(FileStore::open(&odd).unwrap());
    fs::write(odd.join("store"), "damaged").unwrap();
    let told = FileStore::open(&odd).unwrap_err().to_string();
    let (_, rest) = told.split_once("--store '").unwrap();
    let (url, _) = rest.split_once('\'').unwrap();
    Locks::open(&url.replace("mend=N", "mend=300"))
        .await
        .unwrap();
    let mended = FileStore::open(&odd).unwrap();
    assert!(cycle(&mended, "a").await > 300);
}

#[tokio::test]
async fn a_damaged_record_of_a_long_name_is_known_by_what_is_left_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let long = "a/".repeat(200);
    for (from, known) in [(0, true), (8_192, true), (0, false)] {
        let (_, counts_as) = (
            granted(&store, &request(&long, LONG)).await,
            store.break_lock(&name(&long)).await.unwrap(),
        );
        assert!(counts_as.is_some());
        let path = record_path(dir.path(), &long);
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&[0xff; 8_192], from).unwrap();
        if !known {
            file.write_all_at(&[0xff; 8_192], 8_192).unwrap();
        }
        let listed = store.list("a/", None, 9).await.unwrap();
        assert_eq!(listed[0].name == name(&long), known, "{listed:?}");
        let told = listed[0].damage.as_deref().unwrap();
        let whole = format!("`fencelock repair '{long}' --min-token N`");
        let part = "`fencelock repair NAME --min-token N`";
        assert!(told.contains(if known { &whole } else { part }), "{told}");
        store
            .raise_floor(&name(&long), token(1), true)
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn mending_leaves_a_sound_store_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let grant = granted(&store, &request("a", LONG)).await;
    let again = FileStore::options()
        .mend(token(300))
        .open(dir.path())
        .unwrap();
    assert_eq!(again.profile().realm, store.profile().realm);
    assert_eq!(
        again.raise_floor(&name("a"), token(1), true).await.unwrap(),
        grant.token
    );
    held(&again, &request("a", LONG)).await;
}

#[tokio::test]
async fn a_store_that_was_replaced_has_to_be_opened_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let store = FileStore::open(&path).unwrap();
    cycle(&store, "a").await;
    fs::remove_dir_all(&path).unwrap();
    let other = FileStore::open(&path).unwrap();
    cycle(&other, "a").await;
    let error = store.acquire(&request("a", LONG)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[tokio::test]
async fn one_damaged_or_stuck_record_does_not_hide_the_others_from_a_list() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    let (long, longer) = ("l".repeat(300), "l".repeat(301));
    for text in ["a", "a/b", "b", "c", &long, &longer] {
        granted(&store, &request(text, LONG)).await;
    }
    fs::write(record_path(dir.path(), "a/b"), "").unwrap();
    fs::write(record_path(dir.path(), &long), "").unwrap();
    let stuck = fs::File::open(record_path(dir.path(), "c")).unwrap();
    stuck.lock().unwrap();
    let summary = |states: &[LockState]| -> Vec<(String, bool)> {
        states
            .iter()
            .map(|s| (s.name.as_str().to_owned(), s.damage.is_none()))
            .collect()
    };
    let all = soon(store.list("", None, 100)).await.unwrap();
    let expected = [
        ("a", true),
        ("a/b", false),
        ("b", true),
        ("c", false),
        // Nothing tells this one's name any more.
        (&*name(&long).encoded(), false),
        (&*longer, true),
    ];
    assert_eq!(
        summary(&all),
        expected.map(|(text, sound)| (text.to_owned(), sound))
    );
    assert_eq!(all[0].holders.len(), 1);
    assert_eq!((all[1].last_token, all[1].holders.len()), (None, 0));
    let damage = |n: usize| all[n].damage.as_deref().unwrap();
    assert!(damage(1).contains("locks/a=2fb"), "{}", damage(1));
    assert!(damage(3).contains("lslocks"), "{}", damage(3));

    // A prefix and a limit count it as they count the others.
    let some = store.list("a", Some(&name("a")), 1).await.unwrap();
    assert_eq!(summary(&some), [("a/b".to_owned(), false)]);
    assert_eq!(store.list("ll", None, 9).await.unwrap().len(), 2);
    assert_eq!(store.list(&longer, None, 9).await.unwrap().len(), 2);
    assert!(store.list("lx", None, 9).await.unwrap().is_empty());
    let error = store.inspect(&name("a/b")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");

    // What ails the whole store is an error still.
    fs::remove_file(dir.path().join("store")).unwrap();
    let error = store.list("b", None, 9).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}

// Opening.

#[test]
fn a_path_that_cannot_be_a_store_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let kind = |path: &Path| FileStore::open(path).unwrap_err().kind();
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    assert_eq!(kind(&file), ErrorKind::Invalid);
    assert_eq!(kind(&file.join("below")), ErrorKind::Invalid);

    // Not even the superuser can make a directory there.
    for nowhere in ["/proc/none/store", "/sys/kernel/store"] {
        let error = FileStore::open(nowhere).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(nowhere), "{error}");
        assert!(error.to_string().contains("existing="), "{error}");
    }

    let open_to_all = dir.path().join("all");
    fs::create_dir(&open_to_all).unwrap();
    fs::set_permissions(&open_to_all, fs::Permissions::from_mode(0o1777)).unwrap();
    assert_eq!(kind(&open_to_all), ErrorKind::Invalid);

    let planted = dir.path().join("planted");
    fs::create_dir(&planted).unwrap();
    std::os::unix::fs::symlink(dir.path(), planted.join("locks")).unwrap();
    assert_eq!(kind(&planted), ErrorKind::Invalid);
}

#[tokio::test]
async fn files_are_for_their_owner_only() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("deep/store");
    let store = FileStore::open(&root).unwrap();
    granted(&store, &request("a", LONG)).await;
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for part in [root.clone(), root.join("locks"), root.join("live")] {
        assert_eq!(mode(&part), 0o700, "{part:?}");
    }
    let live = fs::read_dir(root.join("live"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    for file in [root.join("store"), root.join("locks/a"), live] {
        assert_eq!(mode(&file), 0o600, "{file:?}");
    }
}

#[test]
fn all_who_open_a_new_store_at_once_agree_on_its_realm() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("new");
    let realms: HashSet<String> = std::thread::scope(|scope| {
        let open = || FileStore::open(&path).unwrap().profile().realm.clone();
        let threads: Vec<_> = (0..50).map(|_| scope.spawn(open)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert_eq!(realms.len(), 1);
    assert_eq!(
        fs::read_dir(&path).unwrap().count(),
        3,
        "half-made files were left"
    );
}

#[tokio::test]
async fn a_probe_tells_what_it_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path()).unwrap();
    granted(&store, &request("a", LONG)).await;
    let findings = store.probe().await.unwrap();
    assert!(
        findings.iter().all(|f| f.severity < Severity::Bad),
        "{findings:?}"
    );
    let of = |subject: &str| {
        &findings
            .iter()
            .find(|f| f.subject == subject)
            .unwrap()
            .detail
    };
    assert!(of("identity").contains(&store.profile().realm));
    assert_eq!(of("records"), "1 sound, 1 of them held");
    fs::write(record_path(dir.path(), "broken"), "").unwrap();
    fs::set_permissions(
        record_path(dir.path(), "broken"),
        fs::Permissions::from_mode(0o600),
    )
    .unwrap();
    let findings = store.probe().await.unwrap();
    let bad: Vec<_> = findings
        .iter()
        .filter(|f| f.severity == Severity::Bad)
        .collect();
    assert!(
        bad.len() == 1
            && bad[0].detail.contains("locks/broken")
            && bad[0]
                .detail
                .contains("`fencelock repair 'broken' --min-token N`"),
        "{bad:?}"
    );
    assert!(
        findings
            .iter()
            .any(|f| f.detail == "1 sound, 1 of them held")
    );

    // A damaged identity is a finding as well, and hides no other.
    fs::write(dir.path().join("store"), "damaged").unwrap();
    let findings = store.probe().await.unwrap();
    let identity = findings.iter().find(|f| f.subject == "identity").unwrap();
    assert_eq!(identity.severity, Severity::Bad);
    assert!(identity.detail.contains("?mend=N'"), "{identity:?}");
    assert!(findings.len() > 5, "{findings:?}");
}

// Waiting.

async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), what)
        .await
        .expect("nothing happened")
}

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

// Clean-up.

#[tokio::test]
async fn a_prune_removes_what_is_idle_and_no_token_comes_again() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    let last = cycle(&a, "idle").await;
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

// Stuck and full.

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

async fn on_a_full_disk(dir: &Path, store: FileStore) {
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

async fn on_being_shut_out(dir: &Path, store: FileStore) {
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
            assert!(listed[0].damage.as_deref().unwrap().contains("chmod"));
            assert_eq!(
                (listed[1].damage.as_ref(), listed[1].holders.len()),
                (None, 1)
            );
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

// Processes. A child is this test binary again, told by its environment what to do.

struct Process(Child);

impl Process {
    fn start(dir: &Path, job: &str) -> Self {
        Self::start_under(&[], dir, job)
    }

    /// Starts the child through another program, `under` and its arguments.
    fn start_under(under: &[&str], dir: &Path, job: &str) -> Self {
        Self::start_program(under, &std::env::current_exe().unwrap(), dir, job)
    }

    fn start_program(under: &[&str], program: &Path, dir: &Path, job: &str) -> Self {
        let mut words = under.iter().map(std::ffi::OsStr::new);
        let mut command = match words.next() {
            Some(first) => Command::new(first),
            None => Command::new(program),
        };
        if !under.is_empty() {
            command.args(words).arg(program);
        }
        let child = command
            .current_dir(dir)
            .args(["--exact", "child_process", "--nocapture"])
            .env("FENCELOCK_TEST_DIR", dir)
            .env("FENCELOCK_TEST_JOB", job)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self(child)
    }

    /// The next line that the child's job wrote.
    fn hear(&mut self) -> String {
        use std::io::BufRead as _;
        // One byte at a time would be slow for much, and this is little.
        let mut lines =
            std::io::BufReader::with_capacity(1, self.0.stdout.as_mut().unwrap()).lines();
        loop {
            let line = lines.next().expect("the child ended").unwrap();
            if let Some((_, said)) = line.split_once("SAID ") {
                return said.to_owned();
            }
        }
    }

    fn tell(&mut self, line: &str) {
        use std::io::Write as _;
        writeln!(self.0.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn say(what: impl std::fmt::Display) {
    println!("\nSAID {what}");
}

/// Not a test of its own: the body of the children.
#[tokio::test]
async fn child_process() {
    let Ok(job) = std::env::var("FENCELOCK_TEST_JOB") else {
        return;
    };
    let dir = PathBuf::from(std::env::var("FENCELOCK_TEST_DIR").unwrap());
    let store = FileStore::open(dir.join("store")).unwrap();
    match job.split_once(' ').unwrap() {
        ("hold", ms) => {
            let request = request("a", Duration::from_millis(ms.parse().unwrap()));
            let grant = granted(&store, &request).await;
            say(grant.token);
            std::io::stdin().read_line(&mut String::new()).unwrap();
            say(format!(
                "{:?}",
                renewal(&store, &lease(&request, &grant), request.ttl).await
            ));
        }
        ("count", rounds) => {
            let mut done = 0;
            while done < rounds.parse().unwrap() {
                let mut watch = store.watch(&name("a")).await.unwrap();
                let request = request("a", LONG);
                let Attempt::Granted(grant) = store.acquire(&request).await.unwrap() else {
                    soon(watch.changed()).await;
                    continue;
                };
                // A read, a pause and a write that only the lock makes one step.
                let path = dir.join("counter");
                let before: u64 = fs::read_to_string(&path).unwrap().parse().unwrap();
                tokio::task::yield_now().await;
                fs::write(&path, (before + 1).to_string()).unwrap();
                let mut log = fs::OpenOptions::new()
                    .append(true)
                    .open(dir.join("log"))
                    .unwrap();
                std::io::Write::write_all(&mut log, format!("{}\n", grant.token).as_bytes())
                    .unwrap();
                store
                    .release(&lease(&request, &grant), Duration::ZERO)
                    .await
                    .unwrap();
                done += 1;
            }
            say(store.profile().realm.clone());
        }
        ("spin", text) => loop {
            let token = cycle(&store, text).await;
            let mut log = fs::OpenOptions::new()
                .append(true)
                .open(dir.join("log"))
                .unwrap();
            std::io::Write::write_all(&mut log, format!("{token}\n").as_bytes()).unwrap();
        },
        ("full", _) => {
            on_a_full_disk(&dir.join("store"), store).await;
            say("done");
        }
        ("shut", _) => {
            on_being_shut_out(&dir, store).await;
            say("done");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_killed_holder_is_replaced_at_once_whatever_its_ttl() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path().join("store")).unwrap();
    let mut child = Process::start(dir.path(), "hold 120000");
    let its: u64 = child.hear().parse().unwrap();
    let mut watch = store.watch(&name("a")).await.unwrap();
    held(&store, &request("a", LONG)).await;
    let clock = Clock::system();
    child.signal(rustix::process::Signal::KILL);
    let killed = clock.now();
    let grant = loop {
        soon(watch.changed()).await;
        if let Attempt::Granted(grant) = store.acquire(&request("a", LONG)).await.unwrap() {
            break grant;
        }
    };
    assert!(grant.token.get() > its);
    let took = clock.now().since(killed);
    assert!(took < Duration::from_secs(10), "{took:?} of a TTL of 120 s");
    // A store that is opened later clears up.
    drop(watch);
    drop(store);
    FileStore::open(dir.path().join("store")).unwrap();
    assert_eq!(
        fs::read_dir(dir.path().join("store/live")).unwrap().count(),
        0
    );
}

#[tokio::test]
async fn a_paused_holder_is_replaced_at_its_expiry_and_then_has_lost() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileStore::open(dir.path().join("store")).unwrap();
    let mut child = Process::start(dir.path(), "hold 3000");
    let its: u64 = child.hear().parse().unwrap();
    child.signal(rustix::process::Signal::STOP);
    let mut watch = store.watch(&name("a")).await.unwrap();
    let left = held(&store, &request("a", LONG)).await.free_in.unwrap();
    let clock = Clock::system();
    let seen = clock.now();
    let grant = loop {
        soon(watch.changed()).await;
        if let Attempt::Granted(grant) = store.acquire(&request("a", LONG)).await.unwrap() {
            break grant;
        }
    };
    assert!(
        clock.now().since(seen) >= left,
        "replaced before its expiry"
    );
    assert!(grant.token.get() > its);
    child.signal(rustix::process::Signal::CONT);
    child.tell("renew");
    assert_eq!(child.hear(), "Lost");
    held(&store, &request("a", LONG)).await;
}

#[test]
fn processes_that_share_a_lock_lose_no_update_and_repeat_no_token() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("counter"), "0").unwrap();
    fs::write(dir.path().join("log"), "").unwrap();
    let mut children: Vec<_> = (0..8)
        .map(|_| Process::start(dir.path(), "count 50"))
        .collect();
    let realms: HashSet<_> = children.iter_mut().map(Process::hear).collect();
    assert_eq!(realms.len(), 1);
    assert_eq!(
        fs::read_to_string(dir.path().join("counter")).unwrap(),
        "400"
    );
    let log = fs::read_to_string(dir.path().join("log")).unwrap();
    let tokens: Vec<u64> = log.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(tokens.len(), 400);
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
}

/// Kills at any point of an operation, in the middle of a reservation too: each round begins a new
/// store, whose reservations are short.
#[tokio::test]
async fn a_process_killed_anywhere_leaves_a_sound_record_and_no_token_to_tell_again() {
    for round in 0..12 {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("log"), "").unwrap();
        let child = Process::start(dir.path(), "spin a");
        let told = || fs::read_to_string(dir.path().join("log")).unwrap();
        while told().lines().count() < round * 8 + 1 {
            std::thread::yield_now();
        }
        child.signal(rustix::process::Signal::KILL);
        // Waits for it: until the kernel has closed its files, it may still hold the lock.
        drop(child);
        let highest = told()
            .lines()
            .map(|line| line.parse().unwrap())
            .max()
            .unwrap();
        let store = FileStore::open(dir.path().join("store")).unwrap();
        assert!(cycle(&store, "a").await > highest, "round {round}");
        let findings = store.probe().await.unwrap();
        assert!(
            findings.iter().all(|f| f.severity < Severity::Bad),
            "{findings:?}"
        );
    }
}

#[tokio::test]
async fn a_child_process_does_not_inherit_the_locks() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = two(dir.path());
    granted(&a, &request("a", LONG)).await;
    let mut sleeper = Process(Command::new("sleep").arg("60").spawn().unwrap());
    drop(a);
    granted(&b, &request("a", LONG)).await;
    assert!(sleeper.0.try_wait().unwrap().is_none());
}
