//! What is removed, when, and that it is never what somebody is pointed to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fencelock::ErrorKind;
use fencelock::object_store::FencedObjects;
use fencelock::object_store::client::ObjectStore;
use fencelock::object_store::client::path::Path;
use fencelock::object_store::client::{ObjectStoreExt as _, PutPayload};
use futures_util::StreamExt as _;

use crate::faulty::{Act, Faulty, Op};
use crate::lab::{fence, large, over, text, token};

const POINTER: &str = "x/v";
const DATA: &str = "x/v.fencelock/";

/// The data objects of `v`, by the tokens that wrote them.
async fn data(store: &dyn ObjectStore) -> Vec<u64> {
    let folder = Path::from("x/v.fencelock");
    let all = store.list(Some(&folder));
    let mut tokens: Vec<u64> = all
        .map(|meta| {
            let location = meta.unwrap().location;
            let name = location.filename().unwrap().to_owned();
            name.split_once('-').unwrap().0.parse::<u64>().unwrap()
        })
        .collect()
        .await;
    tokens.sort_unstable();
    tokens
}

async fn is(objects: &FencedObjects, expected: &str) {
    assert_eq!(
        text(objects.get("v").await.unwrap()).as_deref(),
        Some(expected)
    );
}

#[tokio::test]
async fn steady_writes_keep_the_value_and_the_one_before_it() {
    let store = Faulty::new();
    let objects = over(store.clone()).await;
    for seq in 1..=20 {
        objects
            .put("v", large(&seq.to_string()), &fence(4, 1, seq))
            .await
            .unwrap();
        is(&objects, &seq.to_string()).await;
        assert!(data(&store.inner).await.len() <= 2);
    }
    // A small value needs none, and takes the others along, one by one.
    objects.put("v", "small", &fence(4, 1, 21)).await.unwrap();
    assert_eq!(data(&store.inner).await.len(), 1);
    objects.put("v", "small", &fence(4, 1, 22)).await.unwrap();
    assert!(data(&store.inner).await.is_empty());
}

#[tokio::test]
async fn a_deleted_value_leaves_only_the_watermark() {
    let store = Faulty::new();
    let objects = over(store.clone()).await;
    for seq in 1..=2 {
        objects
            .put("v", large("x"), &fence(4, 1, seq))
            .await
            .unwrap();
    }
    objects.delete("v", &fence(4, 1, 3)).await.unwrap();
    assert!(data(&store.inner).await.is_empty());
    let late = objects.put("v", large("late"), token(3)).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Fenced);
    assert!(
        data(&store.inner).await.is_empty(),
        "a refused write leaves nothing"
    );
    assert!(objects.get("v").await.unwrap().value.is_none());
}

#[tokio::test]
async fn a_write_that_is_refused_takes_its_data_along() {
    let store = Faulty::new();
    let a = over(store.clone()).await;
    let b = over(store.clone()).await;
    a.put("v", large("0"), token(1)).await.unwrap();
    let stop = store.stop(Op::Put, POINTER);
    let (written, ()) = tokio::join!(a.put("v", large("a"), token(5)), async {
        stop.reached.notified().await;
        b.put("v", "b", token(6)).await.unwrap();
        stop.go.notify_one();
    });
    assert_eq!(written.unwrap_err().kind(), ErrorKind::Fenced);
    assert!(!data(&store.inner).await.contains(&5));
    is(&b, "b").await;
}

/// A process that ends between its two writes.
#[tokio::test]
async fn what_a_crash_between_data_and_pointer_left_is_removed_by_later_holders() {
    let store = Faulty::new();
    let objects = over(store.clone()).await;
    objects.put("v", large("1"), token(1)).await.unwrap();
    let stop = store.stop(Op::Put, POINTER);
    {
        let crashed = over(store.clone()).await;
        tokio::select! {
            _ = crashed.put("v", large("2"), token(2)) => panic!("it waits"),
            () = stop.reached.notified() => {}
        }
    }
    assert_eq!(data(&store.inner).await, [1, 2]);
    is(&objects, "1").await;
    // Not yet: a holder of token 2 might still come.
    objects.put("v", large("3"), token(3)).await.unwrap();
    assert_eq!(data(&store.inner).await, [1, 2, 3]);
    objects.put("v", large("4"), token(4)).await.unwrap();
    assert_eq!(data(&store.inner).await, [3, 4]);
    is(&objects, "4").await;
}

#[tokio::test]
async fn a_raise_lets_the_next_write_remove_what_the_last_holder_left() {
    let store = Faulty::new();
    let objects = over(store.clone()).await;
    let orphan = Path::from(format!("{DATA}{:020}-{}", 2, "ab".repeat(16)));
    store
        .inner
        .put(&orphan, PutPayload::from_static(b"left"))
        .await
        .unwrap();
    objects.put("v", large("2"), token(2)).await.unwrap();
    objects.raise("v", token(3)).await.unwrap();
    objects.put("v", large("3"), token(3)).await.unwrap();
    assert_eq!(
        data(&store.inner).await,
        [2, 3],
        "the value before, and the value"
    );
    is(&objects, "3").await;
}

#[tokio::test]
async fn foreign_objects_beside_the_data_stay() {
    let store = Faulty::new();
    let objects = over(store.clone()).await;
    let names = [
        "note.txt",
        "00000000000000000001-ab",
        "1-abababababababababababababababab",
    ];
    for name in names {
        let path = Path::from(format!("{DATA}{name}"));
        store
            .inner
            .put(&path, PutPayload::from_static(b"mine"))
            .await
            .unwrap();
    }
    for number in 5..9 {
        objects.put("v", large("x"), token(number)).await.unwrap();
    }
    for name in names {
        store
            .inner
            .head(&Path::from(format!("{DATA}{name}")))
            .await
            .unwrap();
    }
}

/// The writer is paused between its data and its pointer, while newer holders write and clean up.
#[tokio::test]
async fn a_paused_writer_is_refused_and_harms_nobody() {
    let store = Faulty::new();
    let slow = over(store.clone()).await;
    let other = over(store.clone()).await;
    slow.put("v", large("1"), token(1)).await.unwrap();
    let stop = store.stop(Op::Put, POINTER);
    let (written, ()) = tokio::join!(slow.put("v", large("slow"), token(2)), async {
        stop.reached.notified().await;
        for number in 3..6 {
            other
                .put("v", large(&number.to_string()), token(number))
                .await
                .unwrap();
        }
        assert!(
            !data(&store.inner).await.contains(&2),
            "it was removed meanwhile"
        );
        stop.go.notify_one();
    });
    assert_eq!(written.unwrap_err().kind(), ErrorKind::Fenced);
    is(&other, "5").await;
}

/// The one that is paused has the highest token: what others clean up is not its.
#[tokio::test]
async fn a_paused_writer_with_the_highest_token_still_gets_through() {
    let store = Faulty::new();
    let slow = over(store.clone()).await;
    let other = over(store.clone()).await;
    slow.put("v", large("1"), token(1)).await.unwrap();
    let stop = store.stop(Op::Put, POINTER);
    let (written, ()) = tokio::join!(slow.put("v", large("slow"), token(9)), async {
        stop.reached.notified().await;
        for number in 3..9 {
            other
                .put("v", large(&number.to_string()), token(number))
                .await
                .unwrap();
        }
        other.put("v", large("equal"), token(9)).await.unwrap();
        stop.go.notify_one();
    });
    assert!(written.unwrap().applied);
    is(&other, "slow").await;
}

#[tokio::test]
async fn a_reader_on_its_way_to_a_value_finds_it_or_a_newer_one() {
    let store = Faulty::new();
    let writer = over(store.clone()).await;
    let reader = over(store.clone()).await;
    for seen in ["2", "4"] {
        let writes = if seen == "2" { 1 } else { 3 };
        writer.put("v", large("1"), token(1)).await.unwrap();
        let stop = store.stop(Op::Get, DATA);
        let (found, ()) = tokio::join!(reader.get("v"), async {
            stop.reached.notified().await;
            for number in 2..2 + writes {
                writer
                    .put("v", large(&number.to_string()), token(1))
                    .await
                    .unwrap();
            }
            stop.go.notify_one();
        });
        // One write later the object is still there.
        let expected = if writes == 1 { "1" } else { seen };
        assert_eq!(text(found.unwrap()).as_deref(), Some(expected));
    }
}

#[tokio::test]
async fn a_raise_returns_the_value_of_its_own_step_or_a_newer_one() {
    let store = Faulty::new();
    let writer = over(store.clone()).await;
    let reader = over(store.clone()).await;
    writer.put("v", large("1"), token(1)).await.unwrap();
    let stop = store.stop(Op::Get, DATA);
    let (raised, ()) = tokio::join!(reader.raise("v", token(5)), async {
        stop.reached.notified().await;
        for number in 5..9 {
            writer
                .put("v", large(&number.to_string()), token(number))
                .await
                .unwrap();
        }
        stop.go.notify_one();
    });
    // Its value is gone, and whoever replaced it has a larger token.
    assert_eq!(raised.unwrap_err().kind(), ErrorKind::Fenced);
}

#[tokio::test]
async fn a_data_object_that_is_gone_is_said_to_be_gone() {
    let store = Faulty::new();
    let objects = over(store.clone()).await;
    objects.put("v", large("1"), token(1)).await.unwrap();
    let all: Vec<_> = store
        .inner
        .list(Some(&Path::from("x/v.fencelock")))
        .collect()
        .await;
    for meta in all {
        store.inner.delete(&meta.unwrap().location).await.unwrap();
    }
    let error = objects.get("v").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
    objects.put("v", large("2"), token(1)).await.unwrap();
    is(&objects, "2").await;
}

/// Writers of rising tokens, some of which stop in the middle; readers look all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_reader_ever_misses_a_value_while_many_write_and_remove() {
    let store = Faulty::new();
    let objects = over(store.clone()).await;
    objects.put("v", large("0"), token(1)).await.unwrap();
    let tokens = Arc::new(AtomicU64::new(1));
    let done = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for worker in 0..6_u64 {
        let objects = over(store.clone()).await;
        let (store, tokens) = (store.clone(), Arc::clone(&tokens));
        tasks.push(tokio::spawn(async move {
            for round in 0..40_u64 {
                let number = tokens.fetch_add(1, Ordering::SeqCst) + 1;
                for _ in 0..3 {
                    match (worker + round) % 5 {
                        0 => store.next(Op::Put, POINTER, Act::LoseAnswer),
                        1 => store.next(Op::Put, POINTER, Act::LoseRequest),
                        2 => {
                            let stop = store.stop(Op::Put, POINTER);
                            tokio::spawn(async move {
                                tokio::time::sleep(Duration::from_millis(round)).await;
                                stop.go.notify_one();
                            });
                        }
                        _ => {}
                    }
                    match objects
                        .put("v", large(&number.to_string()), token(number))
                        .await
                    {
                        Ok(_) => {}
                        Err(error) => {
                            assert!(
                                matches!(
                                    error.kind(),
                                    ErrorKind::Fenced | ErrorKind::Indeterminate
                                ),
                                "{error:?}"
                            );
                        }
                    }
                }
            }
        }));
    }
    let mut readers = Vec::new();
    for _ in 0..3 {
        let objects = over(store.clone()).await;
        let done = Arc::clone(&done);
        readers.push(tokio::spawn(async move {
            let (mut last, mut reads) = (0, 0);
            while !done.load(Ordering::SeqCst) {
                let seen = objects.get("v").await.unwrap();
                let writer = seen.writer.unwrap().get();
                let value: u64 = text(seen).unwrap().parse().unwrap();
                assert!(value == writer || value == 0, "{value} {writer}");
                assert!(writer >= last, "never back: {writer} after {last}");
                (last, reads) = (writer, reads + 1);
                tokio::task::yield_now().await;
            }
            reads
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    done.store(true, Ordering::SeqCst);
    for reader in readers {
        assert!(reader.await.unwrap() > 20);
    }
    store.calm();
    let highest = tokens.load(Ordering::SeqCst) + 1;
    for number in [highest, highest + 1] {
        objects
            .put("v", large("last"), token(number))
            .await
            .unwrap();
    }
    assert_eq!(
        data(&store.inner).await,
        [highest, highest + 1],
        "nothing else is left"
    );
}
