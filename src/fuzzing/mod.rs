//! Every parser of bytes that are stored, sent or given, each as a function of bytes that also checks
//! what must hold for all of them: for the project's own fuzzing (`fuzz/`, and `tests/fuzz/` on
//! stable). Not for users, and free to change.
//!
//! What is asked of a parser:
//! - It panics on nothing.
//! - What it reads, it writes again so that reading gives the same; and text that has one spelling is
//!   spelled so.
//! - Damage to what is stored is `Corrupt`, never the caller's mistake, and never a smaller token than
//!   was told.
//! - Different names are never the same key.
//! - No secret is in an error.

mod names;
mod text;
mod urls;

/// One parser, or a few that belong together.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// What it is called, in `fuzz/fuzz_targets/` and `fuzz/corpus/` too.
    pub name: &'static str,
    /// Gives it bytes; panics where something does not hold.
    pub run: fn(&[u8]),
}

/// All of them that this build has.
pub const TARGETS: &[Target] = &[
    target("duration", text::duration),
    target("fence", text::fence),
    target("names", names::names),
    target("token", text::token),
    target("urls", urls::urls),
    #[cfg(feature = "file")]
    target("file_identity", crate::file::fuzz_identity),
    #[cfg(feature = "file")]
    target("file_record", crate::file::fuzz_record),
    #[cfg(feature = "file")]
    target("file_sidecar", crate::file::fuzz_sidecar),
    #[cfg(feature = "file")]
    target("file_slots", crate::file::fuzz_slots),
    #[cfg(any(feature = "mysql", feature = "postgres", feature = "sqlite"))]
    target("database_info", crate::info::fuzz),
    #[cfg(feature = "etcd")]
    target("etcd_realm", crate::etcd::fuzz_realm),
    #[cfg(feature = "etcd")]
    target("etcd_record", crate::etcd::fuzz_record),
    #[cfg(feature = "etcd")]
    target("etcd_watermark", crate::etcd::fuzz_watermark),
    #[cfg(feature = "http")]
    target("http_headers", crate::http::fuzz_headers),
    #[cfg(feature = "http")]
    target("http_problem", crate::http::fuzz_problem),
    #[cfg(feature = "mysql")]
    target("mysql_rows", crate::mysql::fuzz_rows),
    #[cfg(feature = "nats")]
    target("nats_answer", crate::nats::fuzz_answer),
    #[cfg(feature = "nats")]
    target("nats_record", crate::nats::fuzz_record),
    #[cfg(feature = "nats")]
    target("nats_stream", crate::nats::fuzz_stream),
    #[cfg(feature = "nats")]
    target("nats_watermark", crate::nats::fuzz_watermark),
    #[cfg(feature = "object_store")]
    target("object_lock", crate::object_store::fuzz_lock),
    #[cfg(feature = "object_store")]
    target("object_pointer", crate::object_store::fuzz_pointer),
    #[cfg(feature = "object_store")]
    target("object_url", crate::object_store::fuzz_url),
    #[cfg(feature = "postgres")]
    target("postgres_rows", crate::postgres::fuzz_rows),
    #[cfg(feature = "redis")]
    target("redis_record", crate::redis::fuzz_record),
    #[cfg(feature = "redis")]
    target("redis_watermark", crate::redis::fuzz_watermark),
    #[cfg(feature = "sqlite")]
    target("sqlite_rows", crate::sqlite::fuzz_rows),
];

const fn target(name: &'static str, run: fn(&[u8])) -> Target {
    Target { name, run }
}

/// Gives `bytes` to the target of this name.
///
/// # Panics
/// Where something does not hold, or there is no such target.
pub fn run(name: &str, bytes: &[u8]) {
    let found = TARGETS.iter().find(|target| target.name == name);
    assert!(found.is_some(), "no target of this name: {name}");
    if let Some(target) = found {
        (target.run)(bytes);
    }
}

/// What is stored and cannot be read is damage: an operator is told to mend it, and not the caller
/// that it made a mistake.
#[cfg_attr(
    not(feature = "_shared"),
    allow(dead_code, reason = "not every engine needs it")
)]
pub(crate) fn assert_corrupt<T>(read: &crate::Result<T>) {
    if let Err(error) = read {
        assert_eq!(error.kind(), crate::ErrorKind::Corrupt, "{error}");
    }
}

/// The input cut at its first line's end.
#[cfg_attr(
    not(feature = "_shared"),
    allow(dead_code, reason = "not every engine needs it")
)]
pub(crate) fn split_line(bytes: &[u8]) -> (&[u8], &[u8]) {
    let mut parts = bytes.splitn(2, |byte| *byte == b'\n');
    (
        parts.next().unwrap_or_default(),
        parts.next().unwrap_or_default(),
    )
}
