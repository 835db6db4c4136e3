//! A run on each engine holds, its control loses, and what was there before is there after it, alone.

use crate::{Yard, duration, expect_held};

#[test]
fn files_hold_and_nothing_is_left() {
    let yard = Yard::new();
    std::fs::create_dir(yard.bench.path("locks")).unwrap();
    yard.bench.fencelock(["acquire", "mine"]).expect_code(0);
    let dest = yard.bench.path("values").display().to_string();
    let told = yard.run(0, &["--duration", duration(), "--dest", &dest]);
    expect_held(&told);
    // The naive check refuses what is older, and loses all the same: a duplicate comes late.
    assert!(
        told["arms"]["naive"]["lost"].as_u64().unwrap() > 0,
        "{told}"
    );
    assert!(!yard.bench.path("values").exists());
    assert!(yard.bench.is_held("mine"));
    let left = std::fs::read_dir(yard.bench.path("locks")).unwrap();
    let torture = left
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().contains("torture"));
    assert_eq!(torture.count(), 0);
    yard.expect_empty();
}

#[cfg(feature = "redis")]
#[test]
fn redis_holds_and_no_key_is_left() {
    fencelock_testbed::skip!("redis");
    let yard = Yard::new();
    let redis = fencelock_testbed::redis::Redis::start();
    assert_eq!(redis.cli(&["SET", "mine", "1"]), "OK");
    let told = yard.run(0, &["--store", &redis.url(), "--duration", duration()]);
    expect_held(&told);
    for fault in ["drop", "delay", "swallow"] {
        assert!(told["faults"][fault].is_u64(), "{told}");
    }
    assert_eq!(redis.cli(&["KEYS", "*"]), "mine");
    yard.expect_empty();
}

#[cfg(feature = "postgres")]
#[test]
fn postgres_holds_and_no_schema_is_left() {
    fencelock_testbed::skip!("postgres");
    let yard = Yard::new();
    let postgres = fencelock_testbed::postgres::Postgres::fast();
    let told = yard.run(0, &["--store", &postgres.url(), "--duration", duration()]);
    expect_held(&told);
    let schemas = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'fencelock%'";
    assert_eq!(postgres.psql(schemas).trim(), "");
    yard.expect_empty();
}

#[cfg(feature = "etcd")]
#[test]
fn etcd_holds_and_no_key_is_left() {
    fencelock_testbed::skip!("etcd");
    let yard = Yard::new();
    let etcd = fencelock_testbed::etcd::Etcd::start();
    let _ = etcd.ctl(&["put", "mine", "1"]);
    // Its leases last whole seconds, so faults take longer to show.
    let long = std::env::var_os("FENCELOCK_LONG").map_or("20s", |_| duration());
    let told = yard.run(0, &["--store", &etcd.url(), "--duration", long]);
    expect_held(&told);
    assert_eq!(told["ttl_ms"], 1_000, "the shortest that this server gives");
    assert_eq!(
        etcd.ctl(&["get", "", "--prefix", "--keys-only"]).trim(),
        "mine"
    );
    yard.expect_empty();
}

/// A server that torture starts is paused and killed as well, and gone at the end.
fn expect_its_own(engine: &str) {
    let yard = Yard::new();
    let told = yard.run(0, &["--own", engine, "--duration", duration()]);
    expect_held(&told);
    let struck = |fault: &str| told["faults"][fault].as_u64().unwrap();
    assert!(struck("server-pause") + struck("server-kill") > 0, "{told}");
    yard.expect_empty();
}

#[cfg(feature = "redis")]
#[test]
fn redis_holds_while_it_is_paused_and_killed() {
    fencelock_testbed::skip!("redis");
    expect_its_own("redis");
}

#[cfg(feature = "postgres")]
#[test]
fn postgres_holds_while_it_is_paused_and_killed() {
    fencelock_testbed::skip!("postgres");
    expect_its_own("postgres");
}

#[cfg(feature = "mysql")]
#[test]
fn mysql_holds_while_it_is_paused_and_killed() {
    fencelock_testbed::skip!("mysql");
    expect_its_own("mysql");
}

#[cfg(feature = "etcd")]
#[test]
fn etcd_holds_while_it_is_paused_and_killed() {
    fencelock_testbed::skip!("etcd");
    expect_its_own("etcd");
}

#[cfg(feature = "nats")]
#[test]
fn nats_holds_while_it_is_paused_and_killed() {
    fencelock_testbed::skip!("nats");
    expect_its_own("nats");
}

/// The lock in one engine, and the values in another and in files.
#[cfg(all(feature = "redis", feature = "postgres"))]
#[test]
fn values_may_be_elsewhere_than_the_lock() {
    fencelock_testbed::skip!("redis");
    fencelock_testbed::skip!("postgres");
    let yard = Yard::new();
    let redis = fencelock_testbed::redis::Redis::start();
    let postgres = fencelock_testbed::postgres::Postgres::fast();
    let (store, dest) = (redis.url(), postgres.url());
    let second = yard.bench.path("files").display().to_string();
    let dests = ["--store", &store, "--dest", &dest, "--dest", &second];
    let told = yard.run(0, &[&dests[..], &["--duration", duration()]].concat());
    expect_held(&told);
    assert_eq!(redis.cli(&["KEYS", "*"]), "");
    assert!(!yard.bench.path("files").exists());
    yard.expect_empty();
}

#[cfg(feature = "sqlite")]
#[test]
fn sqlite_holds_and_no_file_is_left() {
    let yard = Yard::new();
    let store = format!("sqlite://{}", yard.bench.path("app.db").display());
    let dests = ["--store", &store, "--dest", &store];
    expect_held(&yard.run(0, &[&dests[..], &["--duration", duration()]].concat()));
    assert_eq!(crate::remains::databases(&yard), [""; 0]);
    yard.expect_empty();
}

#[cfg(feature = "mysql")]
#[test]
fn mysql_holds_and_no_table_is_left() {
    fencelock_testbed::skip!("mysql");
    let yard = Yard::new();
    let mysql = fencelock_testbed::mysql::Mysql::fast();
    let told = yard.run(0, &["--store", &mysql.url(), "--duration", duration()]);
    expect_held(&told);
    for fault in ["drop", "delay", "swallow"] {
        assert!(told["faults"][fault].is_u64(), "{told}");
    }
    assert_eq!(crate::remains::tables(&mysql), "");
    yard.expect_empty();
}

#[cfg(feature = "nats")]
#[test]
fn nats_holds_and_no_bucket_is_left() {
    fencelock_testbed::skip!("nats");
    let yard = Yard::new();
    let nats = fencelock_testbed::nats::Nats::start();
    expect_held(&yard.run(0, &["--store", &nats.url(), "--duration", duration()]));
    assert_eq!(crate::remains::buckets(&nats), 0);
    yard.expect_empty();
}

/// Locks in an object store take seconds to lapse; values do not, under a lock of another engine.
#[cfg(feature = "s3")]
#[test]
fn objects_hold_under_a_lock_of_files_and_none_is_left() {
    fencelock_testbed::skip!("s3");
    let yard = Yard::new();
    let s3 = fencelock_testbed::s3::S3::seaweed();
    let (store, dest) = (yard.bench.store(), s3.url("values"));
    let dests = ["--store", &store, "--dest", &dest];
    expect_held(&yard.run(0, &[&dests[..], &["--duration", duration()]].concat()));
    assert_eq!(s3.keys("values/"), [""; 0]);
    yard.expect_empty();
}
