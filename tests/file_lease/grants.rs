//! Granting, and what a grant survives.

use super::*;

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
