//! `fencelock bench`: its rows, what it refuses, and that it leaves nothing.

use crate::{Yard, ended};

#[test]
fn each_row_is_measured_and_nothing_is_left() {
    let yard = Yard::new();
    let mut command = yard
        .bench
        .command(["bench", "--duration", "100ms", "--json"]);
    let told = ended(command.env("TMPDIR", yard.tmp()))
        .expect_code(0)
        .json();
    let rows = told["rows"].as_array().unwrap();
    let names: Vec<&str> = rows
        .iter()
        .map(|row| row["name"].as_str().unwrap())
        .collect();
    let expected = [
        "pairs",
        "pairs-many",
        "hand-over",
        "put",
        "raise",
        "get",
        "plain-file",
    ];
    assert_eq!(names, expected);
    for row in rows {
        assert!(row["count"].as_u64().unwrap() > 0, "{row}");
        assert!(row["p50_us"].as_u64() <= row["p99_us"].as_u64(), "{row}");
    }
    assert!(!yard.bench.path("locks").exists());
    yard.expect_empty();
}

#[cfg(feature = "redis")]
#[test]
fn a_server_is_measured_and_no_key_is_left() {
    fencelock_testbed::skip!("redis");
    let yard = Yard::new();
    let redis = fencelock_testbed::redis::Redis::start();
    let url = redis.url();
    let mut command = yard
        .bench
        .command(["bench", "--store", &url, "--duration", "50ms"]);
    let told = ended(command.env("TMPDIR", yard.tmp())).expect_code(0);
    assert!(told.out.contains("a fenced write of 1 KiB"), "{}", told.out);
    assert!(told.out.contains("Compare rows of one run"), "{}", told.out);
    assert_eq!(redis.cli(&["KEYS", "*"]), "");
    yard.expect_empty();
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let yard = Yard::new();
    for (args, code, said) in [
        (["--duration", "2m"], 64, "expected at most 1m"),
        (["--tasks", "0"], 64, "0"),
        (["--store", "memory:"], 78, "one process's own"),
        (["--dest", "missing/deep"], 78, "missing/deep"),
    ] {
        let mut command = yard.bench.command(["bench"]);
        let refused = ended(command.args(args).env("TMPDIR", yard.tmp())).expect_code(code);
        assert!(refused.err.contains(said), "{args:?}: {}", refused.err);
    }
    yard.expect_empty();
}
