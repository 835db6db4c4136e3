//! What a user of the default features has to build.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on has to fail, its helpers included"
)]

use std::process::Command;

/// Crates that only an engine's own feature may bring.
const DRIVERS: [&str; 14] = [
    "async-nats",
    "deadpool-postgres",
    "etcd-client",
    "fred",
    "hyper",
    "libsqlite3-sys",
    "mysql_async",
    "object_store",
    "redis",
    "reqwest",
    "rusqlite",
    "rustls",
    "sqlx",
    "tokio-postgres",
];

fn tree(arguments: &[&str]) -> Vec<String> {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--package", "fencelock", "--edges", "normal"])
        .args([
            "--prefix",
            "none",
            "--format",
            "{p}",
            "--offline",
            "--locked",
        ])
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let name = |line: &str| line.split(' ').next().unwrap_or_default().to_owned();
    text.lines().map(name).collect()
}

#[test]
fn default_features_bring_no_database_driver() {
    let crates = tree(&[]);
    assert!(crates.contains(&"tokio".to_owned()), "{crates:?}");
    for driver in DRIVERS {
        assert!(!crates.contains(&driver.to_owned()), "{driver}");
    }
}

/// Two crates cannot both link SQLite, so one of them in the lock file would shut out the other.
#[test]
fn the_sqlx_feature_brings_no_sqlite() {
    let lock = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.lock");
    let lock = std::fs::read_to_string(lock).unwrap();
    assert!(lock.contains("name = \"sqlx-postgres\""));
    assert!(!lock.contains("name = \"sqlx-sqlite\""));
}
