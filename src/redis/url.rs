//! Redis URLs.
//!
//! `redis://[user:password@]host[:port][/database]`, `rediss://` with TLS;
//! `redis-sentinel://[user:password@]host[:port],…/master[/database]`;
//! `redis-cluster://[user:password@]host[:port],…`; the last two also as `rediss-…`.

use super::options::{Kind, Login, Place, RedisOptions};
use crate::address::{decoded, host_and_port};
use crate::error::{Error, Result};
use crate::open::StoreUrl;
use crate::settings::Tls;

const KNOWN: &[&str] = &[
    "prefix",
    "realm",
    "tokens",
    "wait_replicas",
    "wait_aof",
    "allow_eviction",
    "insecure",
    "ca",
    "cert",
    "cert_key",
    "sentinel_user",
    "sentinel_password",
];

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// The options and the servers of a URL, which is used up.
pub(crate) fn options(mut url: StoreUrl) -> Result<(RedisOptions, Place)> {
    let mut place = place(&url)?;
    let mut options = RedisOptions::default();
    if let Some(prefix) = url.take("prefix") {
        options = options.prefix(&prefix)?;
    }
    if let Some(realm) = url.take("realm") {
        options = options.realm(&realm)?;
    }
    match url.take("tokens").as_deref() {
        None | Some("clock") => {}
        Some("counter") => options = options.count_tokens(),
        Some(other) => {
            return Err(
                Error::invalid("not a source of tokens; expected clock or counter")
                    .with("tokens", format_args!("{other:?}")),
            );
        }
    }
    if let Some(replicas) = url.take("wait_replicas") {
        let replicas = replicas.parse().ok().filter(|n| (1..=100).contains(n));
        options = options.wait_replicas(replicas.ok_or_else(|| {
            Error::invalid("not a number of replicas; expected wait_replicas=1 to 100")
        })?);
    }
    match url.take("wait_aof").as_deref() {
        None | Some("0" | "false") => {}
        Some("1" | "true") => options = options.wait_aof(),
        Some(other) => {
            return Err(
                Error::invalid("not a flag; expected wait_aof=0 or wait_aof=1")
                    .with("wait_aof", format_args!("{other:?}")),
            );
        }
    }
    if url.take_flag("allow_eviction")? {
        options = options.allow_eviction();
    }
    if url.take_flag("insecure")? {
        options = options.insecure();
    }
    options.tls = Tls::take(&mut url)?;
    place.sentinel_user = Login {
        user: url.take("sentinel_user"),
        password: url.take("sentinel_password"),
    };
    url.finish("redis:", KNOWN)?;
    Ok((options, place))
}

fn place(url: &StoreUrl) -> Result<Place> {
    let (kind, tls) = match url.scheme() {
        "redis" => (Kind::Single, false),
        "rediss" => (Kind::Single, true),
        "redis-sentinel" => (Kind::Sentinel, false),
        "rediss-sentinel" => (Kind::Sentinel, true),
        "redis-cluster" => (Kind::Cluster, false),
        "rediss-cluster" => (Kind::Cluster, true),
        _ => return Err(Error::invalid("not a redis URL")),
    };
    // The last @: one in a password has to be written %40, but a mistake there must not make a
    // password a host that messages show.
    let (login, rest) = match url.rest().rsplit_once('@') {
        Some((login, rest)) => (login_of(login)?, rest),
        None => (Login::default(), url.rest()),
    };
    let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
    let default_port = if kind == Kind::Sentinel {
        SENTINEL_PORT
    } else {
        PORT
    };
    let hosts = hosts
        .split(',')
        .map(|host| host_and_port(host, default_port))
        .collect::<Result<Vec<_>>>()?;
    if kind == Kind::Single && hosts.len() > 1 {
        return Err(Error::invalid(
            "redis:// names one host; expected redis-sentinel:// or redis-cluster:// for several",
        ));
    }
    let (master, database) = match kind {
        Kind::Sentinel => path.split_once('/').unwrap_or((path, "")),
        Kind::Single | Kind::Cluster => ("", path),
    };
    if kind == Kind::Sentinel && master.is_empty() {
        return Err(Error::invalid(
            "the URL names no master; expected redis-sentinel://host,host/master",
        ));
    }
    let database = database_of(database)?;
    if kind == Kind::Cluster && database != 0 {
        return Err(Error::invalid("a cluster has database 0 only"));
    }
    Ok(Place {
        kind,
        tls,
        hosts,
        master: decoded(master)?,
        user: login,
        sentinel_user: Login::default(),
        database,
    })
}

fn login_of(text: &str) -> Result<Login> {
    let (user, password) = text.split_once(':').unwrap_or((text, ""));
    let known = |part: String| (!part.is_empty()).then_some(part);
    Ok(Login {
        user: known(decoded(user)?),
        password: known(decoded(password)?),
    })
}

fn database_of(text: &str) -> Result<i64> {
    if text.is_empty() {
        return Ok(0);
    }
    let number = text.parse().ok().filter(|n| (0..=16_383).contains(n));
    number.ok_or_else(|| {
        Error::invalid("not a database; expected a number from 0")
            .with("database", format_args!("{text:?}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Place> {
        Ok(options(StoreUrl::parse(url)?)?.1)
    }

    #[test]
    fn urls_are_taken_apart() {
        let place = parse("redis://user:p%40ss@db.example:7000/3").unwrap();
        assert_eq!(place.hosts, [("db.example".to_owned(), 7000)]);
        assert_eq!(place.user.user.as_deref(), Some("user"));
        assert_eq!(place.user.password.as_deref(), Some("p@ss"));
        assert_eq!(place.database, 3);
        let place = parse("rediss-sentinel://:pw@a,b:1,[::1]:2/main/1").unwrap();
        let ports: Vec<u16> = place.hosts.iter().map(|(_, port)| *port).collect();
        assert_eq!((place.kind, place.tls), (Kind::Sentinel, true));
        assert_eq!(ports, [26379, 1, 2]);
        assert_eq!((place.master.as_str(), place.database), ("main", 1));
    }

    #[test]
    fn wrong_urls_are_refused() {
        for (url, said) in [
            ("redis://", "not a host"),
            ("redis://host:0", "not a host"),
            ("redis://host:port", "not a host"),
            ("redis://[::1]x", "not a host"),
            ("redis://a,b", "one host"),
            ("redis://host/x", "not a database"),
            ("redis://host/-1", "not a database"),
            ("redis-sentinel://a,b", "no master"),
            ("redis-cluster://a/1", "database 0"),
            ("redis://host?colour=red", "colour"),
            ("redis://host?tokens=uuid", "clock or counter"),
            ("redis://host?wait_replicas=0", "number of replicas"),
            ("redis://host?prefix={x}", "not a key prefix"),
            ("redis://host?realm=A", "not a realm"),
            ("redis://host?realm=", "not a realm"),
            ("rediss://host?cert=/x", "needs its key"),
            ("redis://host?insecure=yes", "expected true or false"),
        ] {
            let message = parse(url).unwrap_err().to_string();
            assert!(message.contains(said), "{url}: {message}");
        }
    }

    #[test]
    fn a_password_is_not_shown() {
        for url in [
            "redis://user:canary@host:port",
            "redis://user:canary@host?colour=red",
            "redis://:can@canary@",
            "redis-sentinel://user:canary@host",
            "redis-sentinel://host/m?sentinel_password=canary&x=1",
        ] {
            let error = parse(url).unwrap_err();
            assert!(!format!("{error:?} {error}").contains("canary"), "{url}");
        }
        let place = parse("redis://user:canary@host").unwrap();
        assert!(!format!("{place:?}").contains("canary"));
    }
}
