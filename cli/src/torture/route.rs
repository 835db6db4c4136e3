//! Which servers a proxy can stand in front of, and the URLs that lead through it.

use super::place::{split, value_of};
use super::plan::Storage;

/// The engines whose URLs can lead through a proxy, and their ports.
const PORTS: [(&str, u16); 7] = [
    ("redis", 6379),
    ("postgres", 5432),
    ("postgresql", 5432),
    ("etcd", 2379),
    ("mysql", 3306),
    ("mariadb", 3306),
    ("nats", 4222),
];

/// The servers of a run that a proxy can stand in front of.
#[derive(Clone, Debug, Default)]
pub(crate) struct Route {
    servers: Vec<(String, u16)>,
}

impl Route {
    pub(crate) fn of(store: &str, storages: &[Storage]) -> Self {
        let mut servers = Vec::new();
        let urls = std::iter::once(store).chain(storages.iter().map(|s| s.dest.as_str()));
        for server in urls.filter_map(server) {
            if !servers.contains(&server) {
                servers.push(server);
            }
        }
        Self { servers }
    }

    pub(crate) fn servers(&self) -> &[(String, u16)] {
        &self.servers
    }

    /// The URL through a proxy at `port`, where it is a URL of `server`'s.
    pub(crate) fn through(url: &str, to: &(String, u16), port: u16) -> String {
        if server(url).as_ref() != Some(to) {
            return url.to_owned();
        }
        let Some((scheme, rest)) = url.split_once("://") else {
            return url.to_owned();
        };
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        let (authority, after) = rest.split_at(end);
        let login = match authority.rsplit_once('@') {
            Some((login, _)) => format!("{login}@"),
            None => String::new(),
        };
        format!("{scheme}://{login}127.0.0.1:{port}{after}")
    }
}

/// The one server of a URL, where a proxy on this host is as good to its client: it speaks no TLS, and
/// is on this host or said to be meant so.
fn server(url: &str) -> Option<(String, u16)> {
    let (scheme, rest) = url.split_once("://")?;
    let (_, default) = PORTS.iter().find(|(known, _)| *known == scheme)?;
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let authority = rest.get(..end)?;
    let hosts = authority.rsplit_once('@').map_or(authority, |(_, h)| h);
    let (host, port) = match hosts.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()?),
        _ => (hosts, *default),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let (_, options) = split(url);
    let says = |key, value| value_of(&options, key) == Some(value);
    let speaks_tls = says("tls", "true")
        || value_of(&options, "ca").is_some()
        || value_of(&options, "sslmode").is_some_and(|mode| mode != "disable");
    let is_local = host == "localhost"
        || host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_loopback());
    let is_plain = !host.is_empty() && !host.contains([',', '%']);
    let leads_elsewhere = value_of(&options, "host").is_some();
    (is_plain && !speaks_tls && !leads_elsewhere && (is_local || says("insecure", "true")))
        .then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_leads_through_a_proxy_with_all_else_as_it_was() {
        let to = ("127.0.0.1".to_owned(), 7000);
        for (url, through) in [
            ("redis://127.0.0.1:7000", "redis://127.0.0.1:9"),
            (
                "redis://u:p@127.0.0.1:7000/2?prefix=a",
                "redis://u:p@127.0.0.1:9/2?prefix=a",
            ),
            ("redis://127.0.0.1:7001/2", "redis://127.0.0.1:7001/2"),
            ("file:///a", "file:///a"),
        ] {
            assert_eq!(Route::through(url, &to, 9), through);
        }
        assert_eq!(
            server("etcd://localhost"),
            Some(("localhost".to_owned(), 2379))
        );
        assert_eq!(
            server("postgres://u@[::1]:1/d"),
            Some(("::1".to_owned(), 1))
        );
    }

    #[test]
    fn where_a_proxy_would_change_more_than_the_route_there_is_none() {
        for url in [
            "rediss://127.0.0.1",
            "redis-cluster://127.0.0.1",
            "etcd://127.0.0.1,127.0.0.2",
            "etcd://127.0.0.1?tls=true",
            "postgres://db.example/d",
            "postgres://127.0.0.1/d?sslmode=verify-full",
            "postgres:///d?host=/run/postgresql",
            "memory:",
        ] {
            assert_eq!(server(url), None, "{url}");
        }
        assert!(server("redis://db.example?insecure=true").is_some());
    }
}
