//! Opening stores and destinations by URL.
//!
//! | URL | Store | Options |
//! |---|---|---|
//! | `memory:` | locks of this process | `ttl` |
//! | `file:///dir`, `file:dir` | locks of this host, in a directory, absolute or relative to the working directory | `ttl` (a duration, or `none`), `allow_network_fs`, `mend` (a token; see [`FileOptions::mend`](crate::file::FileOptions::mend)) |
//! | `redis://[user:password@]host[:port][/db]`, `rediss://` with TLS | locks of many hosts, in Redis or Valkey | `ttl`, `prefix`, `realm`, `tokens` (`clock` or `counter`), `wait_replicas`, `wait_aof`, `allow_eviction`, `insecure`, `ca`, `cert`, `cert_key` |
//! | `redis-sentinel://host,host/master[/db]`, `rediss-sentinel://` | the same at a master that Sentinels know | also `sentinel_user`, `sentinel_password` |
//! | `redis-cluster://host,host`, `rediss-cluster://` | the same in a cluster | |
//! | `postgres://user@host:port/db` | locks in a PostgreSQL database | `ttl`, `schema`, `create`, `listen`, `insecure`, `sslmode`, `sslrootcert`, `host`, `application_name`, `target_session_attrs` |
//! | `mysql://user:password@host:port/db`, `mariadb://` | locks in a MySQL or MariaDB database | `ttl`, `prefix`, `create`, `allow_galera`, `insecure`, `ssl-mode`, `ssl-ca`, `socket` |
//! | `etcd://[user:password@]host[:port],…` | locks of many hosts, in etcd: `docs/backends/etcd.md` | `ttl`, `prefix`, `realm`, `restored` (`accept`), `insecure`, `tls`, `ca`, `cert`, `cert_key` |
//! | `sqlite:///path/file.db`, `sqlite:file.db` | locks of this host, in a SQLite database | `ttl`, `create`, `busy_timeout`, `allow_network_fs` |
//! | `nats://[user:password@]host[:port],…`, `tls://` with TLS | locks of many hosts, in a NATS JetStream bucket: `docs/backends/nats.md` | `ttl`, `bucket`, `replicas`, `realm`, `create`, `insecure`, `tls`, `ca`, `cert`, `cert_key` |
//! | `s3://bucket/prefix`, `gs://`, `az://` | locks of many hosts, in an object store: `docs/backends/object_store.md` | `ttl`, `endpoint`, `region`, `realm`, `expiry` (`clock` or `observation`), `clock_margin`, `durability`, `insecure`, `allow_http`, `ca`, `virtual_hosted`, `probe` |
//!
//! An object is a destination of its own: `s3://bucket/key`, `gs://bucket/key`, `az://container/key`, with the
//! options `endpoint`, `region`, `virtual_hosted`, `ca`, `insecure` (also `allow_http`) and `probe`:
//! `docs/storages/object_store.md`.
//!
//! In a path, `%20` stands for a space, and so on for every byte; `?`, `#` and `%` themselves have to
//! be written so. `file://dir` is refused: what follows two slashes is a host, and can only be
//! `localhost`.
//!
//! An option that the store does not know is refused. `ttl` is the TTL of acquires that name none,
//! as `500ms`, `30s`, `5m` or `2h`.

use std::sync::Arc;
use std::time::Duration;

use percent_encoding::percent_decode_str;

use crate::driver::Driver;
#[cfg(any(feature = "file", feature = "sqlite"))]
use crate::driver::off_thread;
use crate::error::{Error, Result};
use crate::fence::Fenced;
use crate::lease::{LeaseStore, Ttl};
use crate::locks::{Locks, LocksBuilder};
use crate::name::ResourceName;

/// The schemes of stores that this build can open, for messages.
const SCHEMES: &[&str] = &[
    #[cfg(feature = "memory")]
    "memory:",
    #[cfg(feature = "file")]
    "file:///dir",
    #[cfg(feature = "redis")]
    "redis://host",
    #[cfg(feature = "redis")]
    "redis-sentinel://host,host/master",
    #[cfg(feature = "redis")]
    "redis-cluster://host,host",
    #[cfg(feature = "postgres")]
    "postgres://user@host:port/database",
    #[cfg(feature = "mysql")]
    "mysql://user@host:port/database",
    #[cfg(feature = "etcd")]
    "etcd://host,host",
    #[cfg(feature = "sqlite")]
    "sqlite:///path/file.db",
    #[cfg(feature = "nats")]
    "nats://host,host",
    #[cfg(feature = "object_store")]
    "s3://bucket/prefix",
    #[cfg(feature = "object_store-gcp")]
    "gs://bucket/prefix",
    #[cfg(feature = "object_store-azure")]
    "az://container/prefix",
];

/// Schemes of engines that a build may lack, and the features that bring them. The command line's
/// own features are named after the scheme.
const ENGINES: [(&str, &str); 10] = [
    ("redis", "redis"),
    ("rediss", "redis"),
    ("postgres", "postgres"),
    ("mysql", "mysql"),
    ("mariadb", "mysql"),
    ("sqlite", "sqlite"),
    ("etcd", "etcd"),
    ("nats", "nats"),
    ("tls", "nats"),
    ("s3", "object_store"),
];

/// Opens locks: see [`Locks::open`].
pub(crate) async fn locks(url: &str) -> Result<Locks> {
    let mut url = StoreUrl::parse(url)?;
    let ttl = url.take("ttl").map(|text| parse_ttl(&text)).transpose()?;
    // Connections live where the renewals run, so that a starved executor of the user's does not
    // lose locks.
    let driver = Arc::new(Driver::default());
    let store = driver.run(Box::pin(lease_store(url))).await??;
    let builder = LocksBuilder::new(store).driver(driver);
    Ok(match ttl {
        Some(ttl) => builder.ttl(ttl).build(),
        None => builder.build(),
    })
}

async fn lease_store(url: StoreUrl) -> Result<Arc<dyn LeaseStore>> {
    match url.scheme.as_str() {
        #[cfg(feature = "memory")]
        "memory" => {
            url.finish("memory:", &["ttl"])?;
            Ok(Arc::new(crate::memory::MemoryStore::new()))
        }
        #[cfg(feature = "redis")]
        "redis" | "rediss" | "redis-sentinel" | "rediss-sentinel" | "redis-cluster"
        | "rediss-cluster" => {
            let (options, place) = crate::redis::url_options(url)?;
            Ok(Arc::new(options.open_place(place).await?))
        }
        #[cfg(feature = "file")]
        "file" => {
            let mut url = url;
            let network = url.take_flag("allow_network_fs")?;
            let mend = url.take("mend").map(|least| least.parse()).transpose()?;
            url.finish("file:", &["ttl", "allow_network_fs", "mend"])?;
            let path = url.path()?;
            let mut options = crate::file::FileStore::options().allow_network_fs(network);
            if let Some(least) = mend {
                options = options.mend(least);
            }
            Ok(Arc::new(off_thread(move || options.open(path)).await??))
        }
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => {
            let options =
                crate::postgres::PostgresOptions::from_parts(url.rest(), url.options.clone())?;
            let store = crate::postgres::PostgresStore::open_here(options, None).await?;
            Ok(Arc::new(store))
        }
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => {
            let options = crate::mysql::MysqlOptions::from_parts(url.rest(), url.options.clone())?;
            let store = crate::mysql::MysqlStore::open_here(options, None).await?;
            Ok(Arc::new(store))
        }
        #[cfg(feature = "etcd")]
        "etcd" => {
            let (options, place) = crate::etcd::url_options(url)?;
            Ok(Arc::new(options.open_place(place).await?))
        }
        #[cfg(feature = "sqlite")]
        "sqlite" => {
            let (options, path) = sqlite_options(url, &SQLITE_LOCKS_KNOW)?;
            Ok(Arc::new(options.open(path).await?))
        }
        #[cfg(feature = "nats")]
        "nats" | "nats+tls" | "tls" => {
            let (options, place) = crate::nats::url_options(url)?;
            Ok(Arc::new(options.open_place(place).await?))
        }
        #[cfg(feature = "object_store")]
        "s3" | "gs" | "az" => {
            let (options, place) = crate::object_store::url_options(url)?;
            Ok(Arc::new(options.open_locks_at(place).await?))
        }
        _ => Err(url.unknown_scheme()),
    }
}

/// Opens a fenced resource by its destination: a path, `file:///path`, `s3://bucket/key` (and `gs://`,
/// `az://`), or a store URL with `?key=NAME`.
///
/// # Errors
/// `Invalid` for an unknown scheme or option, or a path without a file name; `Unsupported` where the
/// storage cannot keep its promises there.
pub async fn destination(dest: &str) -> Result<(Fenced, ResourceName)> {
    if !has_scheme(dest) {
        return file_destination(dest.into(), false).await;
    }
    let mut url = StoreUrl::parse(dest)?;
    match url.scheme.as_str() {
        "file" => {
            let network = url.take_flag("allow_network_fs")?;
            url.finish("file:", &["allow_network_fs"])?;
            file_destination(url.path()?, network).await
        }
        #[cfg(feature = "redis")]
        "redis" | "rediss" | "redis-sentinel" | "rediss-sentinel" | "redis-cluster"
        | "rediss-cluster" => {
            let key = url.take_key()?;
            on_driver(key, crate::redis::FencedRedis::open_url(url)).await
        }
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => {
            let key = url.take_key()?;
            let options =
                crate::postgres::PostgresOptions::from_parts(url.rest(), url.options.clone())?;
            on_driver(
                key,
                crate::postgres::FencedPostgres::open_here(options, None),
            )
            .await
        }
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => {
            let key = url.take_key()?;
            let options = crate::mysql::MysqlOptions::from_parts(url.rest(), url.options.clone())?;
            on_driver(key, crate::mysql::FencedMysql::open_here(options, None)).await
        }
        #[cfg(feature = "etcd")]
        "etcd" => {
            let key = url.take_key()?;
            let (options, place) = crate::etcd::url_options(url)?;
            on_driver(key, async move { options.open_fenced_place(place).await }).await
        }
        #[cfg(feature = "sqlite")]
        "sqlite" => {
            let key = url.take_key()?;
            let (options, path) = sqlite_options(url, &SQLITE_VALUES_KNOW)?;
            on_driver(key, async move { options.open_fenced(path).await }).await
        }
        #[cfg(feature = "nats")]
        "nats" | "nats+tls" | "tls" => {
            let key = url.take_key()?;
            let (options, place) = crate::nats::url_options(url)?;
            on_driver(key, async move { options.open_fenced_place(place).await }).await
        }
        #[cfg(feature = "object_store")]
        "s3" | "gs" | "az" => {
            let (options, place, key) = crate::object_store::destination(url)?;
            let opening = crate::object_store::FencedObjects::open_place(options, place);
            on_driver(key, opening).await
        }
        "memory" => Err(Error::invalid(
            "memory: is gone when this process ends; give a path or a store URL with ?key=NAME",
        )
        .with("destination", format_args!("{dest:?}"))),
        _ => Err(url.unknown_scheme()),
    }
}

/// What a trial's own names begin with, before 16 hexadecimal digits.
pub const TRIAL_PREFIX: &str = "fencelock-torture-";

/// Removes what a trial, such as `fencelock torture`, has left at a store: locks, values and
/// watermarks together, so that the tokens of its names start over.
///
/// `url` is the store's, as the trial opened it: with a key prefix that begins with `mark`, or a
/// schema, a prefix of tables, a bucket, a database file or a last part of a path that is named after
/// it; anything else is refused. `mark` is [`TRIAL_PREFIX`] and 16 hexadecimal digits, and nothing
/// without it in its name is touched. Cancel safe: erasing twice is erasing once.
///
/// # Errors
/// `Invalid` for a mark that is no trial's; `Unsupported` where the engine has no namespace that
/// can be taken away as a whole; and what opening the store and asking it returns.
pub async fn erase_trial(url: &str, mark: &str) -> Result<()> {
    let drawn = mark.strip_prefix(TRIAL_PREFIX).is_some_and(|drawn| {
        drawn.len() == 16
            && drawn
                .bytes()
                .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
    });
    if !drawn {
        return Err(Error::invalid(format!(
            "not the mark of a trial; expected {TRIAL_PREFIX} and 16 hexadecimal digits"
        ))
        .with("mark", format_args!("{mark:?}")));
    }
    let mut url = StoreUrl::parse(url)?;
    // It is for those who acquire.
    let _ = url.take("ttl");
    let mark = mark.to_owned();
    Driver::default()
        .run(Box::pin(async move { erase(url, &mark).await }))
        .await?
}

async fn erase(url: StoreUrl, mark: &str) -> Result<()> {
    match url.scheme.as_str() {
        #[cfg(feature = "redis")]
        "redis" | "rediss" | "redis-sentinel" | "rediss-sentinel" | "redis-cluster"
        | "rediss-cluster" => {
            let (options, place) = crate::redis::url_options(url)?;
            options.open_place(place).await?.erase(mark).await
        }
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => {
            let options =
                crate::postgres::PostgresOptions::from_parts(url.rest(), url.options.clone())?;
            let store = crate::postgres::PostgresStore::open_here(options, None).await?;
            store.erase(mark).await
        }
        #[cfg(feature = "etcd")]
        "etcd" => {
            let (options, place) = crate::etcd::url_options(url)?;
            options.open_place(place).await?.erase(mark).await
        }
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => {
            let options = crate::mysql::MysqlOptions::from_parts(url.rest(), url.options.clone())?;
            let store = crate::mysql::MysqlStore::open_here(options, None).await?;
            store.erase(mark).await
        }
        #[cfg(feature = "nats")]
        "nats" | "nats+tls" | "tls" => {
            let (options, place) = crate::nats::url_options(url)?;
            options.open_place(place).await?.erase(mark).await
        }
        #[cfg(feature = "sqlite")]
        "sqlite" => {
            let (_, path) = sqlite_options(url, &SQLITE_LOCKS_KNOW)?;
            let mark = mark.to_owned();
            off_thread(move || crate::sqlite::SqliteOptions::erase(&path, &mark)).await?
        }
        #[cfg(feature = "object_store")]
        "s3" | "gs" | "az" => {
            let (options, place) = crate::object_store::url_options(url)?;
            options.erase(place, mark).await
        }
        _ => {
            let _ = mark;
            Err(
                Error::unsupported("what a trial left there cannot be removed as a whole")
                    .with("scheme", &url.scheme),
            )
        }
    }
}

/// A resource of a storage that is opened, and then used, on a driver: its connections live there.
#[cfg(feature = "_shared")]
async fn on_driver<S: crate::FencedStore + 'static>(
    key: ResourceName,
    opening: impl Future<Output = Result<S>> + Send + 'static,
) -> Result<(Fenced, ResourceName)> {
    let driver = Arc::new(Driver::default());
    let store = driver.run(Box::pin(opening)).await??;
    Ok((Fenced::on_driver(Arc::new(store), driver), key))
}

/// The options of a SQLite URL, of locks and of a destination, for messages.
#[cfg(feature = "sqlite")]
pub(crate) const SQLITE_LOCKS_KNOW: [&str; 4] =
    ["ttl", "create", "busy_timeout", "allow_network_fs"];
#[cfg(feature = "sqlite")]
const SQLITE_VALUES_KNOW: [&str; 4] = ["key", "create", "busy_timeout", "allow_network_fs"];

#[cfg(feature = "sqlite")]
pub(crate) fn sqlite_options(
    mut url: StoreUrl,
    known: &[&str],
) -> Result<(crate::sqlite::SqliteOptions, std::path::PathBuf)> {
    let mut options = crate::sqlite::SqliteStore::options()
        .create(url.take_flag_or("create", true)?)
        .allow_network_fs(url.take_flag("allow_network_fs")?);
    if let Some(limit) = url.take("busy_timeout") {
        options = options.busy_timeout(duration_option("busy_timeout", &limit)?)?;
    }
    url.finish("sqlite:", known)?;
    Ok((options, url.path()?))
}

#[cfg(feature = "file")]
async fn file_destination(
    path: std::path::PathBuf,
    allow_network_fs: bool,
) -> Result<(Fenced, ResourceName)> {
    let (parent, name) = file_parts(&path)?;
    let options = crate::file::FencedFiles::options().allow_network_fs(allow_network_fs);
    let files = off_thread(move || options.open(parent)).await??;
    Ok((Fenced::new(files), name))
}

/// The directory of a fenced file, and its name there.
#[cfg(feature = "file")]
pub(crate) fn file_parts(path: &std::path::Path) -> Result<(std::path::PathBuf, ResourceName)> {
    let shown = path.display().to_string();
    let no_name = || {
        Error::invalid("destination has no file name; expected the path of a file")
            .with("destination", format_args!("{shown:?}"))
    };
    if shown.ends_with('/') {
        return Err(no_name());
    }
    let name = path.file_name().ok_or_else(no_name)?;
    let name = name.to_str().ok_or_else(|| {
        Error::invalid("destination's file name is not UTF-8").with("destination", &shown)
    })?;
    let name = ResourceName::new(name)?;
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => ".".into(),
    };
    Ok((parent, name))
}

#[cfg(not(feature = "file"))]
async fn file_destination(_: std::path::PathBuf, _: bool) -> Result<(Fenced, ResourceName)> {
    Err(Error::unsupported(
        "this build has no files; enable the feature `file`",
    ))
}

/// A store URL, taken apart: what is left over in `options` is unknown.
pub(crate) struct StoreUrl {
    scheme: String,
    /// What stands between the scheme and the query.
    rest: String,
    options: Vec<(String, String)>,
}

impl StoreUrl {
    pub(crate) fn parse(url: &str) -> Result<Self> {
        let (scheme, rest) = url
            .split_once(':')
            .filter(|(s, _)| is_scheme(s))
            .ok_or_else(|| {
                Error::invalid(format!(
                    "not a store URL; expected one of {}",
                    SCHEMES.join(", ")
                ))
                .with("url", format_args!("{:?}", without_secrets(url)))
            })?;
        if matches!(scheme, "file" | "sqlite") {
            refuse_malformed(scheme, rest)?;
        }
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let key = query.split(['=', '&']).next().unwrap_or_default();
        if key.contains('@') {
            return Err(Error::invalid(
                "URL has a user after its question mark; write %3F for a ? in a user's name or password",
            )
            .with("scheme", scheme));
        }
        Ok(Self {
            scheme: scheme.to_owned(),
            rest: rest.to_owned(),
            options: form_urlencoded::parse(query.as_bytes())
                .into_owned()
                .collect(),
        })
    }

    #[cfg(any(
        feature = "redis",
        feature = "nats",
        feature = "object_store",
        feature = "fuzzing"
    ))]
    pub(crate) fn scheme(&self) -> &str {
        &self.scheme
    }

    /// What stands between the scheme and the query, without the two slashes.
    #[cfg(feature = "_shared")]
    #[cfg_attr(
        not(any(feature = "redis", feature = "postgres", feature = "etcd")),
        allow(dead_code, reason = "the URL of a path has no host to take apart")
    )]
    pub(crate) fn rest(&self) -> &str {
        self.rest.strip_prefix("//").unwrap_or(&self.rest)
    }

    /// What stands between the scheme and the query, and the options.
    #[cfg(all(feature = "fuzzing", any(feature = "postgres", feature = "mysql")))]
    pub(crate) fn into_parts(self) -> (String, Vec<(String, String)>) {
        (self.rest().to_owned(), self.options)
    }

    pub(crate) fn take(&mut self, key: &str) -> Option<String> {
        let at = self.options.iter().position(|(k, _)| k == key)?;
        Some(self.options.remove(at).1)
    }

    /// The resource that a destination names.
    #[cfg(any(
        feature = "redis",
        feature = "postgres",
        feature = "mysql",
        feature = "etcd",
        feature = "sqlite",
        feature = "nats"
    ))]
    fn take_key(&mut self) -> Result<ResourceName> {
        let key = self.take("key").ok_or_else(|| {
            Error::invalid("destination names no resource; add ?key=NAME to the store's URL")
                .with("scheme", &self.scheme)
        })?;
        ResourceName::new(&key)
    }

    pub(crate) fn take_flag(&mut self, key: &str) -> Result<bool> {
        self.take_flag_or(key, false)
    }

    fn take_flag_or(&mut self, key: &str, unsaid: bool) -> Result<bool> {
        match self.take(key).as_deref() {
            None => Ok(unsaid),
            Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(other) => Err(Error::invalid("not a flag; expected true or false")
                .with(key, format_args!("{other:?}"))),
        }
    }

    /// Refuses whatever option was not taken, which includes one that is given twice.
    pub(crate) fn finish(&self, scheme: &str, known: &[&str]) -> Result<()> {
        match self.options.first() {
            None => Ok(()),
            Some((key, _)) if known.contains(&key.as_str()) => {
                Err(Error::invalid("store option is given twice").with("option", key))
            }
            Some((key, _)) => Err(Error::invalid(format!(
                "unknown store option; {scheme} knows {}",
                known.join(", ")
            ))
            .with("option", format_args!("{key:?}"))),
        }
    }

    /// The rest as a path of this host.
    pub(crate) fn path(&self) -> Result<std::path::PathBuf> {
        use std::os::unix::ffi::OsStringExt as _;
        let path = match self.rest.strip_prefix("//") {
            None => self.rest.as_str(),
            Some(rest) => match rest.split_at(rest.find('/').unwrap_or(rest.len())) {
                ("" | "localhost", path) => path,
                (host, path) => {
                    let scheme = &self.scheme;
                    return Err(Error::invalid(format!(
                        "{scheme} URL names a host; write {scheme}:///{host}{path}, or {scheme}:{host}{path} for a relative path"
                    ))
                    .with("host", format_args!("{host:?}")));
                }
            },
        };
        let bytes: Vec<u8> = percent_decode_str(path).collect();
        if bytes.is_empty() || bytes.contains(&0) {
            let scheme = &self.scheme;
            return Err(Error::invalid(format!(
                "{scheme} URL has no path; expected {scheme}:///path"
            )));
        }
        Ok(std::ffi::OsString::from_vec(bytes).into())
    }

    pub(crate) fn unknown_scheme(&self) -> Error {
        let scheme = self.scheme.as_str();
        if let Some((_, feature)) = ENGINES.iter().find(|(known, _)| *known == scheme) {
            return Error::unsupported("this build has no such stores; build it with the feature")
                .with("feature", feature)
                .with("scheme", scheme);
        }
        Error::invalid(format!(
            "unknown store scheme; this build knows {}",
            SCHEMES.join(", ")
        ))
        .with("scheme", format_args!("{:?}", self.scheme))
    }
}

/// Refuses what the URL of a path may not hold and a path may: it was not escaped.
fn refuse_malformed(scheme: &str, rest: &str) -> Result<()> {
    if let Some((_, fragment)) = rest.split_once('#') {
        return Err(Error::invalid(format!(
            "{scheme} URL has a fragment; write %23 for a # in a path"
        ))
        .with("fragment", format_args!("{fragment:?}")));
    }
    for after in rest.split('%').skip(1) {
        let escape: String = after.chars().take(2).collect();
        if escape.len() < 2 || !escape.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(Error::invalid(format!(
                "{scheme} URL has a malformed escape; expected two hexadecimal digits after %, and %25 for a % in a path"
            ))
            .with("escape", format_args!("\"%{}\"", escape.escape_debug())));
        }
    }
    Ok(())
}

/// True where `dest` is a URL and not a path: `a:b` is a path; `file:b`, `sqlite:b` and `x://b` are
/// URLs.
pub(crate) fn has_scheme(dest: &str) -> bool {
    dest.split_once(':').is_some_and(|(scheme, rest)| {
        is_scheme(scheme)
            && (rest.starts_with("//") || matches!(scheme, "file" | "memory" | "sqlite"))
    })
}

fn is_scheme(text: &str) -> bool {
    let mut bytes = text.bytes();
    text.len() > 1
        && bytes.next().is_some_and(|b| b.is_ascii_lowercase())
        && bytes.all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"+-.".contains(&b))
}

/// A URL without its user part and its query, where passwords live: for messages.
#[must_use]
pub fn without_secrets(url: &str) -> String {
    let (plain, rest) = url.split_at(url.find(['?', '#']).unwrap_or(url.len()));
    let (scheme, place) = match plain.split_once("://") {
        Some((scheme, place)) => (scheme, place),
        None => return plain.to_owned(),
    };
    match place.rsplit_once('@') {
        Some((_, host)) => format!("{scheme}://{host}"),
        // A password that holds a ? or # unescaped: what is before it is no host.
        None if rest.contains('@') => format!("{scheme}://…"),
        None => plain.to_owned(),
    }
}

pub(crate) fn parse_ttl(text: &str) -> Result<Ttl> {
    if text == "none" {
        return Ok(Ttl::NONE);
    }
    let duration = parse_duration(text).ok_or_else(|| {
        Error::invalid("not a TTL; expected a number with ms, s, m or h, or none")
            .with("ttl", format_args!("{text:?}"))
    })?;
    Ttl::new(duration)
}

#[cfg(feature = "sqlite")]
fn duration_option(key: &str, text: &str) -> Result<Duration> {
    parse_duration(text).ok_or_else(|| {
        Error::invalid("not a duration; expected a number with ms, s, m or h")
            .with(key, format_args!("{text:?}"))
    })
}

/// A whole number with its unit, as `500ms`, `30s`, `5m` or `2h`.
pub(crate) fn parse_duration(text: &str) -> Option<Duration> {
    let unit_at = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    let millis = number.parse::<u64>().ok()?.checked_mul(unit_ms)?;
    Some(Duration::from_millis(millis))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open_error(url: &str) -> String {
        pollster::block_on(locks(url)).unwrap_err().to_string()
    }

    #[test]
    fn a_wrong_url_says_what_is_wrong() {
        for (url, said) in [
            ("", "not a store URL"),
            ("nonsense", "not a store URL"),
            ("nonsense://x", "scheme=\"nonsense\""),
            ("memory:?colour=red", "option=\"colour\""),
            ("memory:?ttl=1s&ttl=2s", "given twice"),
            ("memory:?ttl=0s", "TTL is out of range"),
            ("memory:?ttl=fast", "ttl=\"fast\""),
            ("memory:?ttl=99999999999999999h", "not a TTL"),
            ("file:", "no path"),
            ("file://", "no path"),
            ("file://localhost", "no path"),
            ("file:///tmp/x%00", "no path"),
            (
                "file://var/locks",
                "write file:///var/locks, or file:var/locks for a relative path host=\"var\"",
            ),
            ("file://var?ttl=1s", "write file:///var, or file:var"),
            ("file://LOCALHOST:1/x", "host=\"LOCALHOST:1\""),
            ("file:///tmp/x#y", "fragment=\"y\""),
            ("file:///tmp/x?ttl=1s#", "fragment=\"\""),
            ("file:///tmp/%zz", "escape=\"%zz\""),
            ("file:///tmp/100%", "escape=\"%\""),
            ("file:tmp/%a\u{fc}", "escape=\"%a\u{fc}\""),
            ("file:///tmp/x?ttl=%1", "escape=\"%1\""),
            (
                "file:///tmp/x?allow_network_fs=maybe",
                "expected true or false",
            ),
        ] {
            let message = open_error(url);
            assert!(message.contains(said), "{url}: {message}");
        }
    }

    #[test]
    fn a_file_url_is_an_absolute_or_a_relative_path() {
        for (url, path) in [
            ("file:///var/locks", "/var/locks"),
            ("file:/var/locks", "/var/locks"),
            ("file://localhost/var/locks", "/var/locks"),
            ("file:var/locks", "var/locks"),
            ("file:localhost/locks", "localhost/locks"),
            ("file:///a%20b%23%25?ttl=1s", "/a b#%"),
        ] {
            let parsed = StoreUrl::parse(url).and_then(|url| url.path());
            assert_eq!(parsed.unwrap(), std::path::Path::new(path), "{url}");
        }
    }

    #[test]
    fn secrets_in_a_wrong_url_are_not_shown() {
        let message = open_error("Redis://user:hunter2@host/?password=hunter2");
        assert!(!message.contains("hunter2"), "{message}");
    }

    #[test]
    fn only_what_is_a_trials_own_is_erased() {
        let mark = format!("{TRIAL_PREFIX}0123456789abcdef");
        let refusal = |url: &str, mark: &str| {
            let refused = pollster::block_on(erase_trial(url, mark)).unwrap_err();
            assert_eq!(
                refused.kind(),
                crate::ErrorKind::Invalid,
                "{url}: {refused}"
            );
            refused.to_string()
        };
        for mark in ["", "fencelock-torture-", "mine", &mark.to_uppercase()] {
            let said = refusal("sqlite:///tmp/app.db", mark);
            assert!(said.contains("not the mark of a trial"), "{said}");
        }
        #[cfg(feature = "sqlite")]
        {
            let dir = tempfile::tempdir().unwrap();
            let url = |name: &str| format!("sqlite://{}/{name}", dir.path().display());
            let (mine, own) = (dir.path().join("app.db"), format!("{mark}.db"));
            for name in ["app.db", &own, &format!("{own}-wal")] {
                std::fs::write(dir.path().join(name), "").unwrap();
            }
            let said = refusal(&url("app.db"), &mark);
            assert!(said.contains("not a trial's own"), "{said}");
            pollster::block_on(erase_trial(&url(&own), &mark)).unwrap();
            pollster::block_on(erase_trial(&url(&own), &mark)).unwrap();
            let left = std::fs::read_dir(dir.path()).unwrap().count();
            assert_eq!((left, mine.exists()), (1, true));
        }
        #[cfg(feature = "object_store")]
        for url in [
            "s3://bucket",
            "s3://bucket/mine",
            "s3://bucket/fencelock-torture-0/x",
        ] {
            let said = refusal(url, &mark);
            assert!(said.contains("not a trial's own"), "{said}");
        }
    }

    #[test]
    fn a_path_is_not_a_url() {
        for path in ["today.csv", "./a:b", "a:b", "C:x", "/x/file:y"] {
            assert!(!has_scheme(path), "{path}");
        }
        for url in ["file:x", "file:///x", "s3://b/k", "memory:", "sqlite:x"] {
            assert!(has_scheme(url), "{url}");
        }
    }
}
