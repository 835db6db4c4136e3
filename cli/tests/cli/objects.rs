//! Destinations in an object store.

use std::process::Command;

use fencelock_testbed::s3::{KEY, S3, SECRET};
use fencelock_testbed::skip;

use crate::bench::{Bench, Ended, ended};

/// The endpoint and the credentials come from the environment, as with the store's own clients.
fn with_s3<'a>(command: &'a mut Command, server: &S3) -> &'a mut Command {
    command
        .env("AWS_ACCESS_KEY_ID", KEY)
        .env("AWS_SECRET_ACCESS_KEY", SECRET)
        .env("AWS_ENDPOINT_URL", format!("http://{}", server.address()))
}

fn fencelock(bench: &Bench, server: &S3, args: &[&str]) -> Ended {
    let ended = ended(with_s3(&mut bench.command(args), server));
    for said in [&ended.out, &ended.err] {
        assert!(!said.contains(SECRET), "{ended:?}");
    }
    ended
}

const DEST: &str = "s3://bucket/payments/today.csv";

#[test]
fn an_export_is_piped_into_an_object() {
    skip!("s3");
    let (server, bench) = (S3::moto(), Bench::new());
    let script = format!("printf 'a,b\\n1,2\\n' | fencelock put {DEST}");
    let mut run = bench.run_sh("payment-export", &["--raise", DEST], &script);
    ended(with_s3(&mut run, &server)).expect_code(0);
    let got = fencelock(&bench, &server, &["get", DEST]).expect_code(0);
    assert_eq!(got.out, "a,b\n1,2\n");
    let told = fencelock(&bench, &server, &["get", DEST, "--json"]).json();
    assert_eq!(told["size"], 8);
    assert_eq!(told["token"], told["watermark"]);
}

#[test]
fn a_long_pipe_goes_through_a_spool() {
    skip!("s3");
    let (server, bench) = (S3::moto(), Bench::new());
    let script = format!("head -c 20000000 /dev/zero | tr '\\0' x | fencelock put {DEST}");
    let mut run = bench.run_sh("payment-export", &[], &script);
    ended(with_s3(&mut run, &server)).expect_code(0);
    let got = fencelock(&bench, &server, &["get", DEST]).expect_code(0);
    assert_eq!(got.out.len(), 20_000_000);
    assert!(got.out.bytes().all(|byte| byte == b'x'));
}

#[test]
fn a_stale_put_is_refused_and_a_deleted_value_is_remembered() {
    skip!("s3");
    let (server, bench) = (S3::moto(), Bench::new());
    let file = bench.path("new.csv");
    std::fs::write(&file, "new").unwrap();
    let file = file.to_str().unwrap();
    let put = |token: &str| fencelock(&bench, &server, &["put", DEST, file, "--token", token]);
    put("34").expect_code(0);
    let refused = put("33").expect_code(77);
    assert!(refused.err.contains("watermark=34"), "{}", refused.err);
    fencelock(&bench, &server, &["delete", DEST, "--token", "35"]).expect_code(0);
    fencelock(&bench, &server, &["get", DEST]).expect_code(66);
    put("34").expect_code(77);
}

#[test]
fn doctor_says_whether_conditions_are_honoured() {
    skip!("s3");
    let (server, bench) = (S3::moto(), Bench::new());
    let well = fencelock(&bench, &server, &["doctor", "--dest", DEST]).expect_code(0);
    assert!(well.out.contains("If-None-Match"), "{well:?}");
}

#[test]
fn a_mistake_in_a_destination_says_what_it_is() {
    skip!("s3");
    let (server, bench) = (S3::moto(), Bench::new());
    for (dest, said) in [
        ("s3://bucket", "names no object"),
        ("s3://missing/x", "bucket does not exist"),
        ("s3://bucket/x?colour=red", "colour"),
        #[cfg(not(feature = "gs"))]
        ("gs://bucket/x", "object_store-gcp"),
    ] {
        let ended = fencelock(&bench, &server, &["get", dest]);
        assert_ne!(ended.code, 0);
        assert!(ended.err.contains(said), "{dest}: {}", ended.err);
    }
}
