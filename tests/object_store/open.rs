//! What opening refuses, how fast, and what it never says.

use std::error::Error as _;
use std::time::Duration;

use fencelock::object_store::ObjectOptions;
use fencelock::{Error, ErrorKind};
use fencelock_testbed::http::Meddler;
use fencelock_testbed::port::Port;
use fencelock_testbed::proxy::Proxy;
use fencelock_testbed::{s3, skip};

use crate::lab::{client, open, token};

const LIMIT: Duration = Duration::from_secs(10);

const WRONG: &str = "wrong-secret-hunter3";

/// The error of opening, which came in time and says no secret.
async fn refusal(options: ObjectOptions, url: &str) -> Error {
    let opened = tokio::time::timeout(LIMIT, options.open_fenced(url)).await;
    let error = opened.unwrap().unwrap_err();
    let said = format!("{error} {error:?} {:?}", error.source());
    for secret in [s3::SECRET, WRONG] {
        assert!(!said.contains(secret), "{said}");
    }
    error
}

fn good() -> ObjectOptions {
    ObjectOptions::default().credentials(s3::KEY, s3::SECRET, None)
}

#[tokio::test]
async fn wrong_credentials_and_a_missing_bucket_say_so() {
    skip!("s3");
    let server = s3::S3::seaweed();
    open(&server.url("x")).await.unwrap();
    for (key, secret) in [(s3::KEY, WRONG), ("unknown", s3::SECRET)] {
        let wrong = ObjectOptions::default().credentials(key, secret, None);
        let error = refusal(wrong, &server.url("x")).await;
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
        assert!(error.to_string().contains("denied access"), "{error}");
    }
    let missing = server.url("x").replace("s3://bucket", "s3://missing");
    let error = refusal(good(), &missing).await;
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
    assert!(
        error.to_string().contains("bucket does not exist"),
        "{error}"
    );
    assert!(error.to_string().contains("store=s3://missing"), "{error}");
}

#[tokio::test]
async fn a_missing_bucket_is_not_an_empty_one() {
    skip!("s3");
    let server = s3::S3::moto();
    let url = server.url("x").replace("s3://bucket", "s3://missing");
    let objects = good().without_probe().open_fenced(&url).await.unwrap();
    for error in [
        objects.get("v").await.unwrap_err(),
        objects.put("v", "1", token(1)).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
        assert!(
            error.to_string().contains("bucket does not exist"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn an_endpoint_that_cannot_be_reached_says_so_within_ten_seconds() {
    let port = Port::free();
    let url = format!("s3://bucket/x?endpoint=http://127.0.0.1:{}", port.number());
    let error = refusal(good(), &url).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("cannot be reached"), "{error}");
    let unknown = "s3://bucket/x?endpoint=https://fencelock.invalid";
    let error = refusal(good(), unknown).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
}

#[tokio::test]
async fn an_endpoint_that_is_silent_says_so_within_ten_seconds() {
    skip!("s3");
    let server = s3::S3::moto();
    let proxy = Proxy::start(server.address());
    proxy.black_hole();
    let error = refusal(good(), &s3::url(proxy.address(), "x")).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
}

#[tokio::test]
async fn plaintext_to_another_host_has_to_be_meant() {
    let url = "s3://bucket/x?endpoint=http://192.0.2.1:9";
    let error = refusal(good(), url).await;
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
    assert!(error.to_string().contains("insecure=true"), "{error}");
    let error = refusal(good(), &format!("{url}&insecure=true")).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
}

#[tokio::test]
async fn what_this_build_does_not_know_says_so() {
    for (url, feature) in [
        ("gs://bucket/x", "object_store-gcp"),
        ("az://container/x", "object_store-azure"),
    ] {
        let error = refusal(ObjectOptions::default(), url).await;
        if error.kind() == ErrorKind::Unsupported {
            assert!(error.to_string().contains(feature), "{error}");
        }
    }
    let error = refusal(good(), "s3://bucket/x?realm=a").await;
    assert!(error.to_string().contains("for locks"), "{error}");
}

#[tokio::test]
async fn nothing_shows_the_secret() {
    skip!("s3");
    let server = s3::S3::moto();
    let options = good();
    let objects = options.clone().open_fenced(&server.url("x")).await.unwrap();
    let shown = format!("{options:?} {objects:?}");
    assert!(!shown.contains(s3::SECRET), "{shown}");
}

#[tokio::test]
async fn a_probe_leaves_nothing_behind_and_can_be_left_out() {
    skip!("s3");
    let server = s3::S3::moto();
    let meddler = Meddler::start(server.address());
    let url = s3::url(meddler.address(), "x");
    open(&url).await.unwrap();
    assert_eq!(meddler.count("http/1.1"), 6);
    let objects = good()
        .open_fenced(&format!("{url}&probe=false"))
        .await
        .unwrap();
    assert_eq!(meddler.count("http/1.1"), 6);
    let left = client(&server)
        .list_with_delimiter(Some(&"x".into()))
        .await
        .unwrap();
    assert!(left.objects.is_empty(), "{left:?}");
    meddler.strip("If-None-Match");
    let findings = fencelock::FencedStore::probe(&objects).await.unwrap();
    assert!(
        findings[0]
            .detail
            .contains("ignores the condition If-None-Match"),
        "{findings:?}"
    );
}
