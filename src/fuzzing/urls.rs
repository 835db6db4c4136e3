//! URLs of stores and destinations, with the options of every engine; nothing is opened.

use crate::error::Result;
use crate::open::{self, StoreUrl, without_secrets};

/// What stands for a password.
const SECRET: &str = "canary";

pub(super) fn urls(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let _ = parsed(text);
    let _ = destination_of(text);
    // The same as what follows a user and the beginning of a password.
    let Some((scheme, rest)) = text.split_once("://") else {
        return;
    };
    let plain = scheme
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"+-".contains(&b));
    if !plain || !rest.contains('@') || rest.contains(SECRET) {
        return;
    }
    let with_secret = format!("{scheme}://user:{SECRET}{rest}");
    hides(&without_secrets(&with_secret), &with_secret);
    // A path has no password, and messages show it.
    if let Err(error) = parsed(&with_secret)
        && !matches!(scheme, "file" | "sqlite")
    {
        hides(&format!("{error} {error:?}"), &with_secret);
    }
}

fn hides(shown: &str, url: &str) {
    assert!(!shown.contains(SECRET), "{url:?} is shown as {shown}");
}

/// Takes a destination apart where opening it does so in another way than opening a store.
fn destination_of(text: &str) -> Result<()> {
    #[cfg(feature = "file")]
    if !open::has_scheme(text) {
        let path = std::path::Path::new(text);
        let (parent, name) = open::file_parts(path)?;
        assert_eq!(parent.join(name.as_str()).file_name(), path.file_name());
        return Ok(());
    }
    let parts = StoreUrl::parse(text)?;
    match parts.scheme() {
        #[cfg(feature = "object_store")]
        "s3" | "gs" | "az" => crate::object_store::destination(parts).map(drop),
        _ => Ok(()),
    }
}

/// Takes a URL apart as opening its store does.
fn parsed(url: &str) -> Result<()> {
    let mut parts = StoreUrl::parse(url)?;
    if let Some(ttl) = parts.take("ttl") {
        open::parse_ttl(&ttl)?;
    }
    match parts.scheme() {
        #[cfg(feature = "file")]
        "file" => parts
            .path()
            .map(|path| assert!(!path.as_os_str().is_empty())),
        #[cfg(feature = "redis")]
        "redis" | "rediss" | "redis-sentinel" | "rediss-sentinel" | "redis-cluster"
        | "rediss-cluster" => crate::redis::url_options(parts).map(drop),
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => {
            let (rest, options) = parts.into_parts();
            crate::postgres::PostgresOptions::from_parts(&rest, options).map(drop)
        }
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => {
            let (rest, options) = parts.into_parts();
            crate::mysql::MysqlOptions::from_parts(&rest, options).map(drop)
        }
        #[cfg(feature = "etcd")]
        "etcd" => crate::etcd::url_options(parts).map(drop),
        #[cfg(feature = "sqlite")]
        "sqlite" => open::sqlite_options(parts, &open::SQLITE_LOCKS_KNOW).map(drop),
        #[cfg(feature = "nats")]
        "nats" | "nats+tls" | "tls" => crate::nats::url_options(parts).map(drop),
        #[cfg(feature = "object_store")]
        "s3" | "gs" | "az" => crate::object_store::url_options(parts).map(drop),
        _ => Err(parts.unknown_scheme()),
    }
}
