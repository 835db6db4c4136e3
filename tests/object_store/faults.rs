//! Lost answers, busy answers, late and doubled requests.

use std::sync::Arc;
use std::time::Duration;

use fencelock::object_store::FencedObjects;
use fencelock::{Error, ErrorKind};
use fencelock_testbed::http::{Fault, Meddler};
use fencelock_testbed::{s3, skip};

use crate::faulty::{Act, Faulty, Op, Stop};
use crate::lab::{fence, large, open, over, text, token};

/// The key of the resource `v`, as requests name it.
const POINTER: &str = "x/v";

async fn value(objects: &FencedObjects) -> (Option<String>, u64) {
    let seen = objects.get("v").await.unwrap();
    let watermark = seen.watermark.as_ref().unwrap().token.get();
    (text(seen), watermark)
}

fn refused(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error:?}");
}

#[tokio::test]
async fn a_lost_answer_is_found_again_on_the_wire() {
    skip!("s3");
    let server = s3::S3::moto();
    let meddler = Meddler::start(server.address());
    let objects = open(&s3::url(meddler.address(), "x")).await.unwrap();
    let other = open(&server.url("x")).await.unwrap();
    let mut seq = 0;
    for fault in [
        Fault::AnswerAfter(503),
        Fault::AnswerAfter(500),
        Fault::Hang,
        Fault::Answer(503),
        Fault::Answer(409),
        Fault::Answer(412),
        Fault::Twice,
    ] {
        for times in [1, 2] {
            for body in [b"small".to_vec(), large("large")] {
                seq += 1;
                meddler.ambush("PUT /bucket/x/v HTTP", fault, times);
                let written = objects.put("v", body, &fence(7, 1, seq)).await;
                let written = written.unwrap_or_else(|e| panic!("{fault:?} {times}: {e:?}"));
                assert!(written.applied, "{fault:?} {times}");
                assert_eq!(written.watermark.seq, seq);
                let seen = other.get("v").await.unwrap();
                assert_eq!(seen.watermark.unwrap().seq, seq, "{fault:?} {times}");
            }
        }
    }
    // A create, whose doubled answer is the refusal of itself.
    for (at, fault) in [Fault::Twice, Fault::AnswerAfter(503)]
        .into_iter()
        .enumerate()
    {
        meddler.ambush(&format!("PUT /bucket/x/new-{at} HTTP"), fault, 1);
        let new = objects.put(format!("new-{at}"), "1", token(1)).await;
        assert!(new.unwrap().applied, "{fault:?}");
    }
}

#[tokio::test]
async fn a_request_that_arrives_late_changes_nothing_any_more() {
    skip!("s3");
    let server = s3::S3::moto();
    let meddler = Meddler::start(server.address());
    let objects = open(&s3::url(meddler.address(), "x")).await.unwrap();
    objects.put("v", "1", &fence(1, 1, 1)).await.unwrap();
    let late = Duration::from_millis(3_500);
    meddler.ambush("PUT /bucket/x/v HTTP", Fault::Late(late), 1);
    let written = objects.put("v", "2", &fence(1, 1, 2)).await.unwrap();
    assert!(written.applied, "the request that was sent again");
    objects.put("v", "3", &fence(1, 1, 3)).await.unwrap();
    tokio::time::sleep(late).await;
    assert_eq!(value(&objects).await, (Some("3".to_owned()), 1));
}

/// The answer to `a`'s write is lost, and `b` writes before `a` looks.
#[tokio::test]
async fn a_write_that_was_superseded_after_its_answer_was_lost_is_known_to_have_been_applied() {
    let store = Faulty::new();
    let a = over(store.clone()).await;
    let b = over(store.clone()).await;
    a.put("v", "0", token(1)).await.unwrap();
    let stop = Arc::new(Stop::default());
    store.next(Op::Put, POINTER, Act::StopThenLose(Arc::clone(&stop)));
    let (written, ()) = tokio::join!(a.put("v", "a", token(5)), async {
        stop.reached.notified().await;
        b.put("v", "b", token(6)).await.unwrap();
        stop.go.notify_one();
    });
    let written = written.unwrap();
    assert!(written.applied);
    assert_eq!(written.watermark.token, token(5));
    assert_eq!(value(&b).await, (Some("b".to_owned()), 6));
}

#[tokio::test]
async fn a_write_that_never_arrived_is_refused_for_certain_once_somebody_newer_wrote() {
    let store = Faulty::new();
    let a = over(store.clone()).await;
    let b = over(store.clone()).await;
    a.put("v", large("0"), token(1)).await.unwrap();
    store.next(Op::Put, POINTER, Act::LoseRequest);
    // Before it looks again.
    let look = store.stop(Op::Get, POINTER);
    let (written, ()) = tokio::join!(a.put("v", large("a"), token(5)), async {
        look.reached.notified().await;
        b.put("v", "b", token(6)).await.unwrap();
        look.go.notify_one();
    });
    refused(&written.unwrap_err());
    assert_eq!(value(&b).await, (Some("b".to_owned()), 6));
}

/// More writes than a pointer remembers.
#[tokio::test]
async fn a_write_of_unknown_outcome_is_indeterminate_where_no_trace_is_left() {
    let store = Faulty::new();
    let a = over(store.clone()).await;
    let b = over(store.clone()).await;
    for act in [Act::LoseRequest, Act::LoseAnswer] {
        a.put("v", "0", token(1)).await.unwrap();
        store.next(Op::Put, POINTER, act);
        let look = store.stop(Op::Get, POINTER);
        let (written, ()) = tokio::join!(a.put("v", "a", token(1)), async {
            look.reached.notified().await;
            for _ in 0..150 {
                b.put("v", "b", token(1)).await.unwrap();
            }
            look.go.notify_one();
        });
        let error = written.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
        assert_eq!(value(&b).await, (Some("b".to_owned()), 1));
    }
}

/// However many writes came since: a resource is created once.
#[tokio::test]
async fn a_create_whose_answer_was_lost_is_always_resolved() {
    for act in [Act::LoseRequest, Act::LoseAnswer] {
        let store = Faulty::new();
        let a = over(store.clone()).await;
        let b = over(store.clone()).await;
        store.next(Op::Put, POINTER, act.clone());
        let creating = a.put("v", "a", token(5));
        let others = async {
            // The create has been sent, and `a` pauses before it looks.
            while !store.asked().contains(&(Op::Put, POINTER.to_owned())) {
                tokio::task::yield_now().await;
            }
            let look = store.stop(Op::Get, POINTER);
            look.reached.notified().await;
            for number in 6..306 {
                b.put("v", "b", token(number)).await.unwrap();
            }
            look.go.notify_one();
        };
        let (written, ()) = tokio::join!(creating, others);
        match act {
            Act::LoseAnswer => assert!(written.unwrap().applied),
            _ => refused(&written.unwrap_err()),
        }
        assert_eq!(value(&b).await, (Some("b".to_owned()), 305));
    }
}

/// The same, where the rule would refuse it now: that says nothing of what was.
#[tokio::test]
async fn a_refusal_after_a_write_of_unknown_outcome_is_indeterminate_too() {
    let store = Faulty::new();
    let a = over(store.clone()).await;
    let b = over(store.clone()).await;
    a.put("v", "0", token(1)).await.unwrap();
    store.next(Op::Put, POINTER, Act::LoseAnswer);
    let look = store.stop(Op::Get, POINTER);
    let (written, ()) = tokio::join!(a.put("v", "a", token(5)), async {
        look.reached.notified().await;
        for number in 6..156 {
            b.put("v", "b", token(number)).await.unwrap();
        }
        look.go.notify_one();
    });
    let error = written.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    // The guard still hears how far the others are.
    assert_eq!(error.watermark(), Some(token(155)));
}

/// The large value was written, the answer lost, and then the store falls silent.
#[tokio::test]
async fn the_data_of_a_write_of_unknown_outcome_stays() {
    let store = Faulty::new();
    let a = over(store.clone()).await;
    let b = over(store.clone()).await;
    a.put("v", large("0"), token(1)).await.unwrap();
    store.next(Op::Put, POINTER, Act::LoseAnswer);
    for _ in 0..1_000 {
        store.next(Op::Get, POINTER, Act::LoseAnswer);
    }
    let error = a.put("v", large("a"), token(2)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error:?}");
    store.calm();
    assert_eq!(value(&b).await, (Some("a".to_owned()), 2));
}

#[tokio::test]
async fn a_repeat_of_a_write_whose_answer_was_lost_is_acknowledged() {
    let store = Faulty::new();
    let objects = over(store.clone()).await;
    objects.put("v", "0", fence(2, 1, 1)).await.unwrap();
    // The process ends before it looks.
    store.next(Op::Put, POINTER, Act::LoseAnswer);
    let look = store.stop(Op::Get, POINTER);
    let first = objects.put("v", "1", fence(3, 1, 1));
    tokio::select! {
        _ = first => panic!("it waits"),
        () = look.reached.notified() => {}
    }
    let again = over(store.clone()).await;
    let written = again.put("v", "1", &fence(3, 1, 1)).await.unwrap();
    assert!(!written.applied);
}

#[tokio::test]
async fn a_paused_server_is_unavailable_or_unknown_within_ten_seconds() {
    skip!("s3");
    let mut server = s3::S3::moto();
    let objects = open(&server.url("x")).await.unwrap();
    objects.put("v", "1", token(1)).await.unwrap();
    server.server().pause();
    let limit = Duration::from_millis(10_500);
    let get = tokio::time::timeout(limit, objects.get("v")).await;
    assert_eq!(get.unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
    let put = tokio::time::timeout(limit, objects.put("v", "2", token(1))).await;
    assert_eq!(put.unwrap().unwrap_err().kind(), ErrorKind::Indeterminate);
    let raise = tokio::time::timeout(limit, objects.raise("v", token(2))).await;
    assert_eq!(raise.unwrap().unwrap_err().kind(), ErrorKind::Unavailable);
    server.server().resume();
    objects.put("v", "3", token(3)).await.unwrap();
    server.server().kill();
    let error = objects.put("v", "4", token(3)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
}
