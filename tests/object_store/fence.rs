//! What is this storage's own: keys, requests, and contents that repeat.

use fencelock::object_store::client::path::Path;
use fencelock::object_store::client::{ObjectStoreExt as _, PutPayload};
use fencelock::{ErrorKind, Fenced, open as by_url};
use fencelock_testbed::{s3, skip};

use crate::faulty::{Faulty, Op};
use crate::lab::{client, fence, large, open, over, text, token};

#[tokio::test]
async fn steady_writes_of_one_writer_are_one_request_each_and_large_ones_two() {
    let store = Faulty::new();
    let objects = over(store.clone()).await;
    let _ = store.asked();
    objects.put("v", "cold", fence(1, 1, 1)).await.unwrap();
    let cold = store.asked();
    assert_eq!(cold.len(), 2, "it looks first: {cold:?}");
    for seq in 2..5 {
        objects.put("v", "warm", fence(1, 1, seq)).await.unwrap();
        let warm = store.asked();
        assert_eq!(warm, [(Op::Put, "x/v".to_owned())]);
    }
    objects.put("v", large("5"), fence(1, 1, 5)).await.unwrap();
    objects.put("v", large("6"), fence(1, 1, 6)).await.unwrap();
    let _ = store.asked();
    objects.put("v", large("7"), fence(1, 1, 7)).await.unwrap();
    let mut warm: Vec<Op> = store.asked().into_iter().map(|(op, _)| op).collect();
    // The removal goes along with the swap.
    warm.sort_by_key(|op| format!("{op:?}"));
    assert_eq!(warm, [Op::Delete, Op::Put, Op::Put]);
    objects.delete("v", fence(1, 1, 8)).await.unwrap();
    let seen = objects.get("v").await.unwrap();
    assert!(seen.value.is_none());
}

/// Two clients that do not know of each other's writes: one more look is all that it costs.
#[tokio::test]
async fn what_a_client_remembers_never_decides() {
    let store = Faulty::new();
    let a = over(store.clone()).await;
    let b = over(store.clone()).await;
    a.put("v", "1", fence(5, 1, 1)).await.unwrap();
    // Behind the back of `a`: another lock, a lower bound, a repeat.
    let other = "v1:9:22222222222222222222222222222222:test/r/other".parse::<fencelock::Fence>();
    b.rebind("v", other.unwrap()).await.unwrap();
    let error = a.put("v", "2", fence(10, 1, 1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DomainMismatch, "{error:?}");
    let back = fence(11, 1, 0);
    b.rebind("v", &back).await.unwrap();
    a.put("v", "3", fence(11, 1, 1)).await.unwrap();
    b.put("v", "4", fence(12, 2, 1)).await.unwrap();
    let error = a.put("v", "5", fence(11, 1, 2)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced);
    assert_eq!(error.watermark(), Some(token(12)));
    assert_eq!(text(b.get("v").await.unwrap()).as_deref(), Some("4"));
    // What `a` bound itself and `b` bound back: the refusal that `a` remembers is none.
    let other = "v1:13:22222222222222222222222222222222:test/r/other".parse::<fencelock::Fence>();
    a.rebind("v", other.unwrap()).await.unwrap();
    b.rebind("v", &fence(14, 1, 0)).await.unwrap();
    a.put("v", "6", fence(14, 1, 1)).await.unwrap();
}

/// The stores' ETags are the content's alone: without a nonce, a value that comes back would bring
/// its old version back.
#[tokio::test]
async fn contents_that_repeat_are_different_versions() {
    skip!("s3");
    for server in [s3::S3::moto(), s3::S3::seaweed()] {
        let objects = open(&server.url("x")).await.unwrap();
        let bucket = client(&server);
        let key = Path::from("x/v");
        let mut tags = std::collections::BTreeSet::new();
        for (round, body) in ["a", "b", "a", "b", "a"].into_iter().enumerate() {
            objects.put("v", body, token(4)).await.unwrap();
            tags.insert(bucket.head(&key).await.unwrap().e_tag.unwrap());
            objects.raise("v", token(4)).await.unwrap();
            assert_eq!(tags.len(), round + 1);
        }
        objects.raise("v", token(5)).await.unwrap();
        tags.insert(bucket.head(&key).await.unwrap().e_tag.unwrap());
        assert_eq!(tags.len(), 6, "a raise alone is a version too");
        let error = objects.put("v", "a", token(4)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fenced);
    }
}

#[tokio::test]
async fn names_that_keys_cannot_hold_are_refused() {
    let objects = over(Faulty::new()).await;
    let long = "x".repeat(512);
    objects.put(&long, "fits", token(1)).await.unwrap();
    for name in [
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "a/../b",
        "a\nb",
        "a\0b",
        "a\\b",
        "v.fencelock",
        "v.fencelock/x",
        ".fencelock-probe-1",
    ] {
        let error = objects.put(name, "x", token(1)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{name:?}");
        assert_eq!(
            objects.get(name).await.unwrap_err().kind(),
            ErrorKind::Invalid
        );
    }
    let deep = over_deep().await;
    let error = deep.put(&long, "x", token(1)).await.unwrap_err();
    assert!(error.to_string().contains("too long"), "{error}");
}

async fn over_deep() -> fencelock::object_store::FencedObjects {
    let options = fencelock::object_store::ObjectOptions::default();
    let store = Faulty::new();
    options
        .open_fenced_store(store, &"p".repeat(480))
        .await
        .unwrap()
}

#[tokio::test]
async fn an_object_of_somebody_else_is_never_overwritten() {
    let store = Faulty::new();
    let objects = over(store.clone()).await;
    for bytes in [b"a,b\n1,2\n".to_vec(), Vec::new(), vec![b'x'; 2 << 20]] {
        let key = Path::from("x/v");
        store
            .inner
            .put(&key, PutPayload::from(bytes.clone()))
            .await
            .unwrap();
        for error in [
            objects.put("v", "mine", token(1)).await.unwrap_err(),
            objects.raise("v", token(1)).await.unwrap_err(),
            objects.delete("v", token(1)).await.unwrap_err(),
            objects.get("v").await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
        }
        let there = store.inner.get(&key).await.unwrap().bytes().await.unwrap();
        assert_eq!(there, bytes);
    }
}

#[tokio::test]
async fn a_pointer_that_was_copied_to_another_key_is_refused() {
    let store = Faulty::new();
    let objects = over(store.clone()).await;
    objects.put("v", "1", token(1)).await.unwrap();
    store
        .inner
        .copy(&"x/v".into(), &"x/w".into())
        .await
        .unwrap();
    let error = objects.get("w").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
}

#[tokio::test]
async fn a_destination_names_its_object_in_the_path() {
    for (url, said) in [
        ("s3://bucket", "names no object"),
        ("s3://bucket/", "names no object"),
        ("s3://bucket/a//b", "single slashes"),
        ("s3://bucket/a?key=b", "unknown store option"),
        ("s3://bucket/a?realm=b", "for locks"),
    ] {
        let error = by_url::destination(url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{url}: {error:?}");
        assert!(error.to_string().contains(said), "{url}: {error}");
    }
}

/// The user's own prefix and the bucket's root name the same object.
#[tokio::test]
async fn a_key_is_one_resource_whatever_prefix_was_opened() {
    let store = Faulty::new();
    let below = over(store.clone()).await;
    let options = fencelock::object_store::ObjectOptions::default();
    let root = options.open_fenced_store(store, "").await.unwrap();
    below.put("v", "1", token(4)).await.unwrap();
    let error = Fenced::new(root.clone())
        .put("x/v", "2", token(3))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced);
    assert_eq!(text(root.get("x/v").await.unwrap()).as_deref(), Some("1"));
}
