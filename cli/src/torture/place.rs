//! Places of a run's own, within a store and within storages: nothing outside of them is touched, and
//! they are taken away as a whole.
//!
//! | Engine | A run's own place |
//! |---|---|
//! | files | a directory below the given one |
//! | Redis, etcd | a key prefix |
//! | PostgreSQL | a schema |
//! | MySQL | a prefix of tables and procedures |
//! | SQLite | a database file beside the given one |
//! | NATS | a bucket |
//! | object stores | a prefix of the path |

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use fencelock::lease::HolderId;
use fencelock::open::{TRIAL_PREFIX, without_secrets};
use serde::{Deserialize, Serialize};

use super::plan::Storage;
use crate::exit_codes;
use crate::failure::{Failure, Result};
use crate::store::StoreUrl;

/// What tells a run's names from all others.
#[derive(Clone, Debug)]
pub(crate) struct Mark(String);

impl Mark {
    pub(crate) fn random() -> Self {
        let drawn: String = HolderId::random().reveal().chars().take(16).collect();
        Self(format!("{TRIAL_PREFIX}{drawn}"))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

/// How a place is taken away.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Trace {
    /// This directory with all that is in it.
    Directory(PathBuf),
    /// This directory, if it is empty: we made it.
    EmptyDirectory(PathBuf),
    /// What an engine keeps for this URL.
    Engine(String),
}

/// A place in a lock store or a storage.
#[derive(Clone)]
pub(crate) struct Place {
    /// The store's URL, with the run's own place in it.
    pub(crate) url: String,
    /// The same as a storage.
    pub(crate) storage: Storage,
    pub(crate) traces: Vec<Trace>,
    /// As the user gave it, without what may be secret.
    pub(crate) shown: String,
}

impl Place {
    /// The run's own place within `given`, a store's URL or a path. Directories are made.
    pub(crate) fn within(given: &str, mark: &Mark, role: &str) -> Result<Self> {
        let given = absolute(given)?;
        let shown = without_secrets(&given);
        let mark = mark.as_str();
        let (base, options) = split(&given);
        if options.iter().any(|(key, _)| *key == "key") {
            return Err(Failure::usage(format!(
                "{shown}: torture gives its values names of its own; leave ?key= away"
            )));
        }
        let scheme = base.split(':').next().unwrap_or_default();
        let in_names = |url: String, dest: String, trace| Self {
            url,
            storage: Storage {
                dest,
                names: format!("{mark}/values/"),
            },
            traces: vec![trace],
            shown: shown.clone(),
        };
        let keyed = |base: &str, options: &[(&str, &str)]| {
            let mut options = options.to_vec();
            let key = format!("{mark}/values/none");
            options.push(("key", key.as_str()));
            join(base, &options)
        };
        // The same place for locks and values, and a TTL only for locks.
        let in_one = |base: &str, options: &[(&str, &str)]| {
            let url = join(base, options);
            let dest = keyed(base, &without(options, &["ttl"]));
            in_names(url.clone(), dest, Trace::Engine(url))
        };
        Ok(match scheme {
            "file" => return Self::directory(&base, &options, mark, role, shown),
            "redis" | "rediss" | "redis-sentinel" | "rediss-sentinel" | "redis-cluster"
            | "rediss-cluster" => {
                let prefix = format!("{}{mark}:", value_of(&options, "prefix").unwrap_or(""));
                let url = join(&base, &with(&options, "prefix", &prefix));
                let dest = keyed(
                    &base,
                    &without(&options, &["prefix", "realm", "tokens", "ttl"]),
                );
                in_names(url.clone(), dest, Trace::Engine(url))
            }
            "etcd" => {
                let prefix = format!("{mark}/locks/");
                in_one(&base, &with(&options, "prefix", &prefix))
            }
            "postgres" | "postgresql" => {
                let schema = mark.replace('-', "_");
                in_one(&base, &with(&options, "schema", &schema))
            }
            "mysql" | "mariadb" => {
                let prefix = mark.replace('-', "_");
                let options = with(&without(&options, &["create"]), "prefix", &prefix);
                in_one(&base, &options)
            }
            "nats" | "nats+tls" | "tls" => {
                let options = with(&without(&options, &["create"]), "bucket", mark);
                in_one(&base, &options)
            }
            "sqlite" => {
                let dir = base.rsplit_once(['/', ':']).map_or("", |(dir, _)| dir);
                let end = base.get(dir.len()..=dir.len()).unwrap_or("/");
                let base = format!("{dir}{end}{mark}.db");
                in_one(&base, &without(&options, &["create"]))
            }
            "s3" | "gs" | "az" => {
                let base = format!("{}/{mark}", base.trim_end_matches('/'));
                let dest = join(
                    &format!("{base}/values/none"),
                    &without(&options, &["ttl", "expiry", "clock_margin"]),
                );
                let url = join(&base, &options);
                let mut place = in_names(url.clone(), dest, Trace::Engine(url));
                place.storage.names = String::new();
                place
            }
            _ => {
                return Err(Failure::new(
                    exit_codes::CONFIG,
                    format!("{shown}: torture knows no such store"),
                ));
            }
        })
    }

    /// The run's own directory, where the place is one.
    pub(crate) fn own_directory(&self) -> Option<PathBuf> {
        path_of(&split(&self.url).0)
    }

    fn directory(
        base: &str,
        options: &[(&str, &str)],
        mark: &str,
        role: &str,
        shown: String,
    ) -> Result<Self> {
        let parent = path_of(base).ok_or_else(|| {
            Failure::new(
                exit_codes::CONFIG,
                format!("{shown}: expected a directory of this host, as file:///dir"),
            )
        })?;
        let cannot = |error: io::Error| {
            Failure::new(
                exit_codes::CONFIG,
                format!("{shown}: a directory for the run cannot be made: {error}"),
            )
        };
        let mut traces = Vec::new();
        match fs::create_dir(&parent) {
            Ok(()) => traces.push(Trace::EmptyDirectory(parent.clone())),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(cannot(error)),
        }
        let own = parent.join(mark);
        let made = match fs::create_dir(&own) {
            // Store and storage may share it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made,
        };
        made.and_then(|()| {
            let inner = own.join(role);
            fs::create_dir_all(inner)
        })
        .map_err(cannot)?;
        // First what is inside.
        traces.insert(0, Trace::Directory(own));
        let kept = without(options, &["ttl", "mend"]);
        let base = format!("{}/{mark}/{role}", base.trim_end_matches('/'));
        Ok(Self {
            url: join(&base, options),
            storage: Storage {
                dest: join(&format!("{base}/none"), &kept),
                names: String::new(),
            },
            traces,
            shown,
        })
    }
}

/// Takes a place away.
pub(crate) async fn erase(trace: &Trace, mark: &str) -> Result<()> {
    match trace {
        Trace::Directory(path) => match fs::remove_dir_all(path) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(Failure::system(&path.display().to_string(), error)),
        },
        Trace::EmptyDirectory(path) => {
            // Whoever put something there wants to keep it.
            let _ = fs::remove_dir(path);
            Ok(())
        }
        Trace::Engine(url) => fencelock::open::erase_trial(url, mark)
            .await
            .map_err(|error| Failure::from(error).within(&without_secrets(url))),
    }
}

/// A path becomes a URL, and a relative one absolute.
fn absolute(given: &str) -> Result<String> {
    let is_url = given.split_once(':').is_some_and(|(scheme, rest)| {
        rest.starts_with("//") || matches!(scheme, "file" | "memory" | "sqlite")
    });
    if is_url {
        return Ok(StoreUrl::resolve(Some(given))?.reveal().to_owned());
    }
    let path = std::path::absolute(given).map_err(|e| Failure::system(given, e))?;
    Ok(StoreUrl::of_path(&path).reveal().to_owned())
}

/// What stands before the query, and the query's options as they are.
pub(crate) fn split(url: &str) -> (String, Vec<(&str, &str)>) {
    let (base, query) = url.split_once('?').unwrap_or((url, ""));
    let options = query.split('&').filter(|option| !option.is_empty());
    let options = options.map(|option| option.split_once('=').unwrap_or((option, "")));
    (base.to_owned(), options.collect())
}

pub(crate) fn join(base: &str, options: &[(&str, &str)]) -> String {
    let mut url = base.to_owned();
    for (at, (key, value)) in options.iter().enumerate() {
        url.push(if at == 0 { '?' } else { '&' });
        url.push_str(&format!("{key}={value}"));
    }
    url
}

pub(crate) fn value_of<'a>(options: &[(&'a str, &'a str)], key: &str) -> Option<&'a str> {
    options.iter().find(|(k, _)| *k == key).map(|(_, v)| *v)
}

fn without<'a>(options: &[(&'a str, &'a str)], keys: &[&str]) -> Vec<(&'a str, &'a str)> {
    let kept = options.iter().filter(|(key, _)| !keys.contains(key));
    kept.copied().collect()
}

fn with<'a>(
    options: &[(&'a str, &'a str)],
    key: &'a str,
    value: &'a str,
) -> Vec<(&'a str, &'a str)> {
    let mut options = without(options, &[key]);
    options.push((key, value));
    options
}

/// The directory of a file URL.
fn path_of(base: &str) -> Option<PathBuf> {
    let rest = base.strip_prefix("file:")?;
    let rest = match rest.strip_prefix("//") {
        Some(rest) => rest.strip_prefix("localhost").unwrap_or(rest),
        None => rest,
    };
    let mut bytes = Vec::new();
    let mut left = rest.bytes();
    while let Some(byte) = left.next() {
        bytes.push(match byte {
            b'%' => {
                let digits = [left.next()?, left.next()?];
                u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?
            }
            byte => byte,
        });
    }
    let path = PathBuf::from(OsString::from_vec(bytes));
    (path.is_absolute() && path != Path::new("/")).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark() -> Mark {
        Mark(format!("{TRIAL_PREFIX}0123456789abcdef"))
    }

    fn place(given: &str) -> Place {
        Place::within(given, &mark(), "locks").unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn a_run_has_a_place_of_its_own_in_each_engine() {
        let redis = place("redis://:pw@h:1/0?prefix=app:&tokens=counter");
        assert_eq!(
            redis.url,
            "redis://:pw@h:1/0?tokens=counter&prefix=app:fencelock-torture-0123456789abcdef:"
        );
        assert_eq!(
            redis.storage.dest,
            "redis://:pw@h:1/0?key=fencelock-torture-0123456789abcdef/values/none"
        );
        assert_eq!(redis.shown, "redis://h:1/0");
        let postgres = place("postgres://a@h/db?schema=mine");
        assert_eq!(
            postgres.url,
            "postgres://a@h/db?schema=fencelock_torture_0123456789abcdef"
        );
        let etcd = place("etcd://h");
        assert_eq!(
            etcd.url,
            "etcd://h?prefix=fencelock-torture-0123456789abcdef/locks/"
        );
        assert!(
            etcd.storage.dest.contains("prefix="),
            "{}",
            etcd.storage.dest
        );
        let s3 = place("s3://bucket/a");
        assert_eq!(s3.url, "s3://bucket/a/fencelock-torture-0123456789abcdef");
        assert_eq!(
            s3.storage.dest,
            "s3://bucket/a/fencelock-torture-0123456789abcdef/values/none"
        );
        assert!(matches!(s3.traces.as_slice(), [Trace::Engine(_)]));
        let mysql = place("mysql://a@h/db?create=false&ttl=1s");
        assert_eq!(
            mysql.url,
            "mysql://a@h/db?ttl=1s&prefix=fencelock_torture_0123456789abcdef"
        );
        assert_eq!(
            mysql.storage.dest,
            "mysql://a@h/db?prefix=fencelock_torture_0123456789abcdef&key=fencelock-torture-0123456789abcdef/values/none"
        );
        let nats = place("nats://h?bucket=mine");
        assert_eq!(
            nats.url,
            "nats://h?bucket=fencelock-torture-0123456789abcdef"
        );
        let sqlite = place("sqlite:///var/app.db?busy_timeout=1s");
        assert_eq!(
            sqlite.url,
            "sqlite:///var/fencelock-torture-0123456789abcdef.db?busy_timeout=1s"
        );
        assert!(Place::within("gopher://h", &mark(), "locks").is_err());
        assert!(Place::within("redis://h?key=a", &mark(), "locks").is_err());
    }

    #[tokio::test]
    async fn a_directory_is_made_and_taken_away_and_what_was_there_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (dir.path().join("old"), dir.path().join("new dir"));
        fs::create_dir(&old).unwrap();
        for parent in [&old, &new] {
            let place = place(parent.to_str().unwrap());
            let own = parent.join(mark().as_str()).join("locks");
            assert!(own.is_dir());
            for trace in &place.traces {
                assert!(erase(trace, mark().as_str()).await.is_ok());
            }
            assert!(!own.exists());
        }
        assert!(old.exists() && !new.exists());
        assert!(Place::within("file:///", &mark(), "locks").is_err());
    }
}
