//! The client's half.

use axum::Router;
use axum::routing::put;
use fencelock::http::http::{HeaderMap, StatusCode};
use fencelock::http::{FencingLayer, Problem, check_answer, refusal, show, writes_by_path};
use fencelock::memory::{FencedMemory, MemoryStore};
use fencelock::{Error, ErrorKind, Fence, Fenced, FencingToken, Locks};

use crate::lab::*;

#[tokio::test]
async fn a_guard_shows_both_headers_and_each_request_a_sequence_of_its_own() {
    let locks = Locks::new(MemoryStore::new());
    let guard = locks.acquire("job").await.unwrap();
    let mut headers = headers(&[
        ("fencing-token", "1"),
        ("fencing-token", "2"),
        ("fencing-lock", "stale"),
    ]);
    let mut seqs = Vec::new();
    for _ in 0..2 {
        let fence = show(&mut headers, &guard).unwrap();
        assert_eq!(headers.len(), 2);
        assert_eq!(headers["fencing-token"], *guard.token().to_string());
        let text = headers["fencing-lock"].to_str().unwrap();
        assert_eq!(text.parse::<Fence>().unwrap(), fence);
        assert_eq!(fence.domain(), guard.fence().domain());
        seqs.push(fence.seq().unwrap());
    }
    assert!(seqs[0] < seqs[1], "{seqs:?}");
    show(&mut headers, token(7)).unwrap();
    assert_eq!(headers.len(), 1, "a bare number explains nothing");
}

#[tokio::test]
async fn a_guard_that_lost_its_lock_sends_nothing() {
    let locks = Locks::new(MemoryStore::new());
    let guard = locks.acquire("job").await.unwrap();
    locks.break_lock("job").await.unwrap();
    guard.renew().await.unwrap_err();
    let mut headers = headers(&[("fencing-token", "9")]);
    assert_eq!(
        show(&mut headers, &guard).unwrap_err().kind(),
        ErrorKind::Lost
    );
    assert_eq!(headers["fencing-token"], "9");
}

/// A lock whose engine lost its data counts from 1 again, and the server remembers 1000.
#[tokio::test]
async fn a_refused_holder_makes_the_next_token_larger() {
    let store = Fenced::new(FencedMemory::new());
    store.raise("/r", token(1000)).await.unwrap();
    let app = Router::new()
        .route("/r", put(async || "saved"))
        .layer(FencingLayer::hold(store, writes_by_path));
    let server = Server::start(app).await;
    let client = Client::of(&server);

    let locks = Locks::new(MemoryStore::new());
    let guard = locks.acquire("job").await.unwrap();
    let answer = client.put("/r", &guard).await;
    let error = check_answer(&guard, answer.status, &answer.headers, &answer.body).unwrap_err();
    assert_eq!(
        (error.kind(), error.watermark()),
        (ErrorKind::Fenced, Some(token(1000)))
    );
    guard.release().await.unwrap();
    let guard = locks.acquire("job").await.unwrap();
    assert!(guard.token() > token(1000), "{:?}", guard.token());
    let answer = client.put("/r", &guard).await;
    check_answer(&guard, answer.status, &answer.headers, &answer.body).unwrap();
    assert_eq!(answer.text(), "saved");
}

/// A server that lies, or a proxy that answers for another request, must not spoil a lock.
#[tokio::test]
async fn a_refusal_of_another_token_and_a_forged_watermark_move_nothing() {
    let locks = Locks::new(MemoryStore::new());
    let guard = locks.acquire("job").await.unwrap();
    let answers = [
        Error::fenced(token(77), token(1000), "of somebody else"),
        Error::fenced(guard.token(), FencingToken::MAX, "forged"),
    ];
    for error in answers {
        let answer = Problem::of(&error).response::<bytes::Bytes>();
        let heard = check_answer(&guard, answer.status(), answer.headers(), answer.body());
        assert_eq!(heard.unwrap_err().kind(), ErrorKind::Fenced);
    }
    let before = guard.token().get();
    guard.release().await.unwrap();
    let next = locks.acquire("job").await.unwrap();
    assert_eq!(next.token().get(), before + 1);
}

#[test]
fn only_our_own_refusals_are_taken_for_one() {
    let problem = |body: &str| {
        let headers = headers(&[("content-type", "application/problem+json; charset=utf-8")]);
        refusal(StatusCode::PRECONDITION_FAILED, &headers, body.as_bytes())
    };
    let ours = r#"{"type":"urn:fencelock:fenced","token":33,"watermark":"34","new":[1]}"#;
    assert_eq!(problem(ours).unwrap().watermark(), Some(token(34)));
    for body in [
        "",
        "{}",
        "not json",
        r#"{"type":"about:blank","token":33,"watermark":34}"#,
        r#"{"type":"urn:fencelock:unheard_of","token":33,"watermark":34}"#,
        r#"{"type":"urn:fencelock:fenced","token":33}"#,
        r#"{"type":"urn:fencelock:fenced","token":33,"watermark":0}"#,
        r#"{"type":"urn:fencelock:fenced","token":33,"watermark":-1}"#,
        r#"{"type":"urn:fencelock:fenced","token":33,"watermark":1.5}"#,
        r#"{"type":"urn:fencelock:fenced","token":33,"watermark":"9223372036854775808"}"#,
    ] {
        assert!(problem(body).is_none(), "{body}");
    }
    let text = headers(&[("content-type", "text/plain")]);
    assert!(refusal(StatusCode::PRECONDITION_FAILED, &text, ours.as_bytes()).is_none());
    assert!(refusal(StatusCode::PRECONDITION_FAILED, &HeaderMap::new(), b"").is_none());
    let large = format!("{}{}", ours, " ".repeat(1 << 20));
    assert!(
        problem(&large).is_none(),
        "an answer without end is not read"
    );
}
