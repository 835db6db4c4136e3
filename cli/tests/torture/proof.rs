//! A thousand read-modify-writes by eight processes that are paused past their leases, on each storage:
//! with raise none is lost, with a plain check some are, and without fencing more.
//!
//! A run ends as soon as it has shown that; one that overtakes nobody goes on until it did, within a
//! bound that is far beyond what a quiet machine needs.

use crate::Yard;

/// How many updates each arm has acknowledged.
const UPDATES: u64 = 1_000;

/// The bound of a run. Most end within seconds.
const BOUND: &str = "300s";

/// How many locks a workload has: more than a server can serve in a fraction of the TTL only make its
/// holders late, and an engine that syncs each request of each hand by itself serves few.
const LOCKS: &str = "16";
#[cfg(any(feature = "sqlite", feature = "etcd"))]
const LOCKS_SYNCED: &str = "4";

#[track_caller]
fn proves(yard: &Yard, locks: &str, args: &[&str]) {
    let updates = UPDATES.to_string();
    let fixed = [
        "--clients",
        "8",
        "--locks",
        locks,
        "--faults",
        "pause",
        "--updates",
        &updates,
        "--duration",
        BOUND,
    ];
    let told = yard.run(0, &[&fixed[..], args].concat());
    let arm = |arm: &str, what: &str| told["arms"][arm][what].as_u64().unwrap();
    assert_eq!(told["violations"], serde_json::json!([]), "{told}");
    assert!(arm("raise", "acknowledged") >= UPDATES, "{told}");
    assert_eq!(arm("raise", "lost"), 0, "{told}");
    assert!(arm("naive", "lost") > 0, "{told}");
    assert!(arm("unfenced", "lost") > arm("naive", "lost"), "{told}");
    yard.expect_empty();
}

#[test]
fn files_lose_nothing_where_the_watermark_is_raised_first() {
    proves(&Yard::new(), LOCKS, &[]);
}

#[cfg(feature = "sqlite")]
#[test]
fn sqlite_loses_nothing_where_the_watermark_is_raised_first() {
    let yard = Yard::new();
    let store = format!("sqlite://{}", yard.bench.path("app.db").display());
    proves(&yard, LOCKS_SYNCED, &["--store", &store]);
}

#[cfg(feature = "redis")]
#[test]
fn redis_loses_nothing_where_the_watermark_is_raised_first() {
    fencelock_testbed::skip!("redis");
    let yard = Yard::new();
    let redis = fencelock_testbed::redis::Redis::start();
    proves(&yard, LOCKS, &["--store", &redis.url()]);
}

#[cfg(feature = "postgres")]
#[test]
fn postgres_loses_nothing_where_the_watermark_is_raised_first() {
    fencelock_testbed::skip!("postgres");
    let yard = Yard::new();
    let postgres = fencelock_testbed::postgres::Postgres::fast();
    proves(&yard, LOCKS, &["--store", &postgres.url()]);
}

#[cfg(feature = "mysql")]
#[test]
fn mysql_loses_nothing_where_the_watermark_is_raised_first() {
    fencelock_testbed::skip!("mysql");
    let yard = Yard::new();
    let mysql = fencelock_testbed::mysql::Mysql::fast();
    proves(&yard, LOCKS, &["--store", &mysql.url()]);
}

#[cfg(feature = "etcd")]
#[test]
fn etcd_loses_nothing_where_the_watermark_is_raised_first() {
    fencelock_testbed::skip!("etcd");
    let yard = Yard::new();
    let etcd = fencelock_testbed::etcd::Etcd::start();
    proves(&yard, LOCKS_SYNCED, &["--store", &etcd.url()]);
}

#[cfg(feature = "nats")]
#[test]
fn nats_loses_nothing_where_the_watermark_is_raised_first() {
    fencelock_testbed::skip!("nats");
    let yard = Yard::new();
    let nats = fencelock_testbed::nats::Nats::start();
    proves(&yard, LOCKS, &["--store", &nats.url()]);
}

/// Under locks of files: those of an object store take seconds to lapse.
#[cfg(feature = "s3")]
#[test]
fn objects_lose_nothing_where_the_watermark_is_raised_first() {
    fencelock_testbed::skip!("s3");
    let yard = Yard::new();
    let s3 = fencelock_testbed::s3::S3::seaweed();
    let (store, dest) = (yard.bench.store(), s3.url("values"));
    proves(&yard, LOCKS, &["--store", &store, "--dest", &dest]);
}
