//! What is refused, and how it is said.

use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::routing::any;
use axum::{Extension, Router};
use fencelock::http::{FencingLayer, Problem, ShownFence, Tokenless, writes_by_path};
use fencelock::memory::FencedMemory;
use fencelock::{Error, ErrorKind, Fenced, FencingToken};
use serde_json::json;

use crate::lab::*;

/// A handler that says whom it was called for, behind a layer.
async fn server(layer: FencingLayer) -> (Server, Client) {
    let echo = |shown: Option<Extension<ShownFence>>| async move {
        shown.map_or("nobody".to_owned(), |Extension(shown)| {
            format!("{} {}", shown.resource(), shown.fence())
        })
    };
    let server = Server::start(Router::new().fallback(any(echo)).layer(layer)).await;
    let client = Client::of(&server);
    (server, client)
}

fn memory() -> Fenced {
    Fenced::new(FencedMemory::new())
}

/// Both modes over a storage of their own.
fn checking() -> [FencingLayer; 2] {
    [
        FencingLayer::hold(memory(), writes_by_path),
        FencingLayer::pass(writes_by_path).raise_first(memory()),
    ]
}

#[tokio::test]
async fn thirty_three_after_thirty_four_is_refused_with_both_numbers() {
    for layer in checking() {
        let (_server, client) = server(layer).await;
        assert_eq!(client.put("/r", fence(1, 33)).await.status, 200);
        assert_eq!(client.put("/r", fence(2, 34)).await.status, 200);
        for stale in [fence(1, 33), token(33).into(), fence(2, 33)] {
            let answer = client.put("/r", stale).await;
            let error = answer.assert_refused(412, ErrorKind::Fenced);
            assert_eq!(error.token(), Some(token(33)));
            assert_eq!(error.watermark(), Some(token(34)));
            assert_eq!(
                answer.json(),
                json!({
                    "type": "urn:fencelock:fenced",
                    "title": "The fencing token is stale",
                    "status": 412,
                    "detail": "stale fencing token refused token=33 watermark=34",
                    "token": 33,
                    "watermark": 34,
                })
            );
            assert_eq!(answer.headers["fencing-token"], "33");
            assert_eq!(answer.headers["fencing-watermark"], "34");
            assert_eq!(answer.headers["cache-control"], "no-store");
        }
        // Another resource has its own watermark.
        assert_eq!(client.put("/other", fence(1, 33)).await.status, 200);
        assert_eq!(client.put("/r", fence(3, 35)).await.status, 200);
    }
}

#[tokio::test]
async fn another_spelling_of_a_path_is_the_same_resource() {
    for layer in checking() {
        let (_server, client) = server(layer).await;
        assert_eq!(client.put("/r/a", fence(2, 34)).await.status, 200);
        for path in ["/r/%61", "/%72/a?x=1", "/r%2fa"] {
            let answer = client.put(path, fence(1, 33)).await;
            answer.assert_refused(412, ErrorKind::Fenced);
        }
    }
}

#[tokio::test]
async fn an_equal_token_of_another_holder_is_stale() {
    for layer in checking() {
        let (_server, client) = server(layer).await;
        assert_eq!(client.put("/r", fence(1, 34)).await.status, 200);
        assert_eq!(client.put("/r", fence(1, 34)).await.status, 200);
        let error = client.put("/r", fence(2, 34)).await;
        let error = error.assert_refused(412, ErrorKind::Fenced);
        assert_eq!(error.watermark(), Some(token(34)));
        // Only the number: nothing more can be judged.
        assert_eq!(client.put("/r", token(34)).await.status, 200);
    }
}

#[tokio::test]
async fn tokens_of_another_lock_are_a_conflict_that_does_not_name_the_bound_one() {
    for layer in checking() {
        let (_server, client) = server(layer).await;
        let first = of_lock("bound-lock", 1, 34);
        assert_eq!(client.put("/r", first).await.status, 200);
        for number in [33, 34, 99] {
            let answer = client.put("/r", of_lock("another", 1, number)).await;
            answer.assert_refused(409, ErrorKind::DomainMismatch);
            assert!(!answer.text().contains("bound-lock"), "{answer:?}");
            assert!(!answer.headers.contains_key("fencing-watermark"));
        }
    }
}

#[tokio::test]
async fn a_token_far_ahead_is_a_bad_request_and_bricks_nothing() {
    for layer in checking() {
        let (_server, client) = server(layer).await;
        for forged in [token(1 << 62), FencingToken::MAX] {
            let answer = client.put("/r", forged).await;
            let error = answer.assert_refused(400, ErrorKind::Invalid);
            assert!(
                error.to_string().contains("implausibly far ahead"),
                "{error}"
            );
        }
        assert_eq!(client.put("/r", token(1)).await.status, 200);
    }
}

#[tokio::test]
async fn a_request_without_a_token_is_refused_unless_it_is_let_through() {
    for layer in checking() {
        let (_server, client) = server(layer.clone()).await;
        for method in [Method::PUT, Method::POST, Method::DELETE, Method::PATCH] {
            let answer = client.send(method, "/r", HeaderMap::new()).await;
            answer.assert_refused(428, ErrorKind::Invalid);
            assert_eq!(answer.json()["type"], "urn:fencelock:token_required");
        }
        for method in [Method::GET, Method::OPTIONS] {
            let answer = client.send(method, "/r", shown(token(7))).await;
            assert_eq!(answer.text(), "nobody", "it is not fenced");
        }

        let (_server, client) = server(layer.tokenless(Tokenless::LetThrough)).await;
        let answer = client.send(Method::PUT, "/r", HeaderMap::new()).await;
        assert_eq!(answer.text(), "nobody");
        // Whoever shows one is judged all the same.
        assert_eq!(client.put("/r", fence(2, 34)).await.status, 200);
        let stale = client.put("/r", fence(1, 33)).await;
        stale.assert_refused(412, ErrorKind::Fenced);
        let malformed = headers(&[("fencing-token", "x")]);
        let answer = client.send(Method::PUT, "/r", malformed).await;
        answer.assert_refused(400, ErrorKind::Invalid);
    }
}

#[tokio::test]
async fn every_malformed_header_is_a_bad_request_that_says_what_was_expected() {
    const HOLDER: &str = "00000000000000000000000000000001";
    let lock = |token: &str| format!("v1:{token}:{HOLDER}:a/b/c:7");
    let good = lock("34");
    let long = "1".repeat(300);
    let mut cases: Vec<(Vec<(&'static str, String)>, &str)> = Vec::new();
    for bad in [
        "0",
        "-1",
        "+1",
        "1.0",
        "01",
        "1e3",
        "0x22",
        "",
        "34, 34",
        "34,35",
        "3 4",
        "x",
        "34;q=1",
        "\"34\"",
        "٣٤",
        "9223372036854775808",
        "9999999999999999999",
    ] {
        cases.push((vec![("fencing-token", bad.into())], ""));
    }
    cases.push((vec![("fencing-token", long.clone())], "too long"));
    cases.push((
        vec![("fencing-token", "18446744073709551616".into())],
        "too long",
    ));
    let twice = vec![
        ("fencing-token", "34".into()),
        ("fencing-token", "34".into()),
    ];
    cases.push((twice, "more than once"));
    cases.push((vec![("fencing-lock", good.clone())], "fencing-token beside"));
    for bad in [
        "",
        "34",
        "payment-export",
        "v2:34:-:-",
        "v1:34",
        "v1:34:-:-:7",
        "v1:034:-:-",
        "v1:0:-:-",
        "v1:34:xyz:-",
        "v1:34:-:a/b",
        "v1:34:-:A/B/C",
        "v1:34:-:a/b/c d",
    ] {
        let pair = vec![("fencing-token", "34".into()), ("fencing-lock", bad.into())];
        cases.push((pair, ""));
    }
    for bad in ["0", "-1", "x", "", "1:2", "9223372036854775808"] {
        let lock = format!("v1:34:{HOLDER}:a/b/c:{bad}");
        let pair = vec![("fencing-token", "34".into()), ("fencing-lock", lock)];
        cases.push((pair, "not a fence"));
    }
    let pair = |token: &str, lock: String| {
        vec![("fencing-token", token.to_owned()), ("fencing-lock", lock)]
    };
    cases.push((pair("35", good.clone()), "different tokens"));
    cases.push((pair("33", good.clone()), "different tokens"));
    cases.push((pair("34", format!("v1:34:-:a/b/{long}{long}")), "too long"));
    let mut twice = pair("34", good.clone());
    twice.push(("fencing-lock", good.clone()));
    cases.push((twice, "more than once"));
    assert!(cases.len() > 40);

    for layer in checking()
        .into_iter()
        .chain([FencingLayer::pass(writes_by_path)])
    {
        let (_server, client) = server(layer).await;
        for (pairs, says) in &cases {
            let mut sent = HeaderMap::new();
            for (name, value) in pairs {
                let value = http::HeaderValue::from_bytes(value.as_bytes()).unwrap();
                sent.append(*name, value);
            }
            let answer = client.send(Method::PUT, "/r", sent).await;
            let error = answer.assert_refused(400, ErrorKind::Invalid);
            assert!(error.to_string().contains(says), "{pairs:?}: {error}");
            assert!(answer.body.len() < 600, "{answer:?}");
        }
        // Nothing of it counted.
        assert_eq!(client.put("/r", token(1)).await.status, 200);
        let blanks = headers(&[("fencing-token", " 34\t"), ("Fencing-LOCK", &good)]);
        let answer = client.send(Method::PUT, "/r", blanks).await;
        assert_eq!(
            answer.text(),
            format!("/r {good}"),
            "what HTTP strips is no part"
        );
    }
}

#[tokio::test]
async fn a_path_that_is_no_name_is_a_bad_request() {
    let (_server, client) = server(FencingLayer::pass(writes_by_path)).await;
    for path in ["/%ff", &format!("/{}", "x".repeat(600))] {
        let answer = client.put(path, token(1)).await;
        answer.assert_refused(400, ErrorKind::Invalid);
    }
}

#[tokio::test]
async fn a_storage_that_fails_lets_nobody_in_and_keeps_its_words() {
    let kinds = [
        (Some(ErrorKind::Unavailable), 503, ErrorKind::Unavailable),
        // The request was not handled, and to raise again does no harm.
        (Some(ErrorKind::Indeterminate), 503, ErrorKind::Unavailable),
        (None, 503, ErrorKind::Unavailable),
        (Some(ErrorKind::Corrupt), 500, ErrorKind::Corrupt),
        (Some(ErrorKind::Unsupported), 500, ErrorKind::Unsupported),
        // A mistake in the server's settings is none of the client's.
        (Some(ErrorKind::Invalid), 500, ErrorKind::Unsupported),
    ];
    for (failing, status, kind) in kinds {
        let store = || Fenced::new(Failing(failing));
        for layer in [
            FencingLayer::hold(store(), writes_by_path),
            FencingLayer::pass(writes_by_path).raise_first(store()),
        ] {
            let limit = Duration::from_millis(50);
            let (_server, client) = server(layer.store_limit(limit)).await;
            for _ in 0..2 {
                let answer = client.put("/r", token(34)).await;
                answer.assert_refused(status, kind);
                let retry = answer.headers.get("retry-after").map(|v| v == "1");
                assert_eq!(retry, (status == 503).then_some(true));
                assert!(!answer.text().contains("SECRET"), "{answer:?}");
            }
            let read = client.send(Method::GET, "/r", HeaderMap::new()).await;
            assert_eq!(read.status, 200, "reads are not fenced");
        }
    }
}

/// As where the database's user lacks a privilege: the client can do nothing about it.
#[test]
fn a_mistake_in_the_servers_settings_is_not_told_to_clients() {
    let error = Error::invalid("GRANT SECRET").with_source("of the driver");
    let answer = Problem::of(&error).response::<bytes::Bytes>();
    assert_eq!(answer.status(), 500);
    let text = String::from_utf8(answer.body().to_vec()).unwrap();
    assert!(!text.contains("SECRET"), "{text}");
}

#[tokio::test]
async fn a_number_beyond_a_double_is_a_string() {
    let high = (1 << 53) + 1;
    let numbers = |token_: u64| {
        let error = Error::fenced(token(token_), token(high), "stale");
        Problem::of(&error).response::<bytes::Bytes>()
    };
    let answer = numbers(34);
    let text = std::str::from_utf8(answer.body()).unwrap();
    assert!(
        text.contains(r#""token":34,"watermark":"9007199254740993""#),
        "{text}"
    );
    let error = fencelock::http::refusal(answer.status(), answer.headers(), answer.body());
    assert_eq!(error.unwrap().watermark(), Some(token(high)));
}

#[tokio::test]
async fn a_head_request_is_refused_with_the_numbers_in_its_headers() {
    let all = |_: &http::request::Parts| Ok(Some("r".parse()?));
    let (_server, client) = server(FencingLayer::hold(memory(), all)).await;
    client.put("/", token(34)).await;
    let answer = client.send(Method::HEAD, "/", shown(token(33))).await;
    assert!(answer.body.is_empty());
    let error = answer.assert_refused(412, ErrorKind::Fenced);
    assert_eq!(error.watermark(), Some(token(34)));
}

#[tokio::test]
async fn grpc_is_refused_by_trailers_only() {
    let all = |_: &http::request::Parts| Ok(Some("r".parse()?));
    let (_server, client) = server(FencingLayer::hold(memory(), all)).await;
    let call = async |pairs: &[(&'static str, &str)]| {
        let mut sent = headers(pairs);
        sent.insert("content-type", "application/grpc+proto".parse().unwrap());
        client
            .send(Method::POST, "/bank.Accounts/Deposit", sent)
            .await
    };
    assert_eq!(call(&[("fencing-token", "34")]).await.text(), "r v1:34:-:-");
    let holder = "v1:34:00000000000000000000000000000001:a/b/c";
    assert_eq!(
        call(&[("fencing-token", "34"), ("fencing-lock", holder)])
            .await
            .status,
        200
    );
    let other = "v1:35:00000000000000000000000000000001:a/b/other";
    for (pairs, code, says) in [
        (
            &[("fencing-token", "33")][..],
            tonic::Code::FailedPrecondition,
            "token=33 watermark=34",
        ),
        (&[], tonic::Code::FailedPrecondition, "required"),
        (
            &[("fencing-token", "0")],
            tonic::Code::InvalidArgument,
            "expected a whole number",
        ),
        (
            &[("fencing-token", "35"), ("fencing-lock", other)],
            tonic::Code::FailedPrecondition,
            "another lock",
        ),
    ] {
        let answer = call(pairs).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.headers["content-type"], "application/grpc");
        assert!(answer.body.is_empty());
        let status = tonic::Status::from_header_map(&answer.headers).unwrap();
        assert_eq!(status.code(), code, "{status:?}");
        assert!(status.message().contains(says), "{status:?}");
        let refusal = fencelock::http::refusal(StatusCode::OK, status.metadata().as_ref(), b"");
        let numbers = refusal.map(|e| (e.token().unwrap().get(), e.watermark().unwrap().get()));
        assert_eq!(numbers, says.contains("33").then_some((33, 34)));
    }
    let failing = FencingLayer::hold(Fenced::new(Failing(Some(ErrorKind::Unavailable))), all);
    let (_server, client) = server(failing).await;
    let sent = headers(&[("fencing-token", "1"), ("content-type", "application/grpc")]);
    let answer = client.send(Method::POST, "/", sent).await;
    let status = tonic::Status::from_header_map(&answer.headers).unwrap();
    assert_eq!(status.code(), tonic::Code::Unavailable);
}

/// In pass mode the layer checks nothing by itself: the handler's storage does.
#[tokio::test]
async fn a_handler_answers_for_its_storage_in_the_same_form() {
    let store = memory();
    let save = |State(store): State<Fenced>,
                Extension(shown): Extension<ShownFence>,
                body: String| async move {
        match store.put(shown.resource(), body, &shown).await {
            Ok(written) => Ok(written.applied.to_string()),
            Err(error) => Err(Problem::of(&error).response::<axum::body::Body>()),
        }
    };
    let app = Router::new()
        .route("/r", any(save))
        .layer(FencingLayer::pass(writes_by_path))
        .with_state(store.clone());
    let server = Server::start(app).await;
    let client = Client::of(&server);
    let first = shown(fence(1, 33).with_seq(1));
    let second = shown(fence(1, 33).with_seq(2));
    let put = async |headers: &HeaderMap, body: &'static str| {
        client
            .try_send(Method::PUT, "/r", headers.clone(), body)
            .await
            .unwrap()
    };
    assert_eq!(put(&first, "first").await.text(), "true");
    assert_eq!(put(&second, "second").await.text(), "true");
    // The same request again is acknowledged, an earlier one is refused (S7).
    assert_eq!(put(&second, "second").await.text(), "false");
    put(&first, "first")
        .await
        .assert_refused(412, ErrorKind::Fenced);
    let seen = store.get("/r").await.unwrap();
    assert_eq!(seen.value.unwrap().into_bytes(10).unwrap(), "second");
    client.put("/r", fence(2, 34)).await;
    put(&second, "late")
        .await
        .assert_refused(412, ErrorKind::Fenced);
}
