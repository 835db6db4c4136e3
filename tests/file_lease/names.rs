//! Names, lists, and what operators do to a lock.

use super::*;

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
