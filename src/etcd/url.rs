//! etcd URLs: `etcd://[user:password@]host[:port],host[:port],…[?options]`.

use super::options::{EtcdOptions, Place};
use crate::address::{decoded, host_and_port};
use crate::error::{Error, Result};
use crate::open::StoreUrl;
use crate::settings::Tls;

const KNOWN: &[&str] = &[
    "prefix", "realm", "restored", "insecure", "tls", "ca", "cert", "cert_key",
];

const PORT: u16 = 2379;

/// The options and the servers of a URL, which is used up.
pub(crate) fn options(mut url: StoreUrl) -> Result<(EtcdOptions, Place)> {
    let place = place(&url)?;
    let mut options = EtcdOptions::default();
    if let Some(prefix) = url.take("prefix") {
        options = options.prefix(&prefix)?;
    }
    if let Some(realm) = url.take("realm") {
        options = options.realm(&realm)?;
    }
    match url.take("restored").as_deref() {
        None => {}
        Some("accept") => options = options.accept_restored(),
        Some(other) => {
            return Err(Error::invalid("expected restored=accept")
                .with("restored", format_args!("{other:?}")));
        }
    }
    if url.take_flag("insecure")? {
        options = options.insecure();
    }
    let wanted = url.take_flag("tls")?;
    let tls = Tls::take(&mut url)?;
    // A certificate that is named means TLS.
    if wanted || tls.is_named() {
        options = options.tls(tls);
    }
    url.finish("etcd:", KNOWN)?;
    Ok((options, place))
}

fn place(url: &StoreUrl) -> Result<Place> {
    // The last @: one in a password has to be written %40, but a mistake there must not make a
    // password a host that messages show.
    let (login, hosts) = match url.rest().rsplit_once('@') {
        Some((login, hosts)) => (Some(login_of(login)?), hosts),
        None => (None, url.rest()),
    };
    let hosts = hosts.strip_suffix('/').unwrap_or(hosts);
    if hosts.contains('/') {
        return Err(Error::invalid(
            "an etcd URL has no path; expected etcd://host,host?prefix=path/ for another prefix",
        ));
    }
    let hosts = hosts
        .split(',')
        .map(|host| host_and_port(host, PORT))
        .collect::<Result<Vec<_>>>()?;
    Ok(Place { hosts, login })
}

fn login_of(text: &str) -> Result<(String, String)> {
    let (user, password) = text
        .split_once(':')
        .filter(|(user, _)| !user.is_empty())
        .ok_or_else(|| Error::invalid("not a login; expected etcd://user:password@host"))?;
    Ok((decoded(user)?, decoded(password)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<(EtcdOptions, Place)> {
        options(StoreUrl::parse(url)?)
    }

    #[test]
    fn urls_are_taken_apart() {
        let (options, place) = parse("etcd://user:p%40ss@a,b:7000,[::1]:2/?prefix=x/").unwrap();
        let expected = [("a", 2379), ("b", 7000), ("::1", 2)];
        assert_eq!(
            place.hosts,
            expected.map(|(host, port)| (host.to_owned(), port))
        );
        assert_eq!(place.login, Some(("user".to_owned(), "p@ss".to_owned())));
        assert_eq!(options.prefix, "x/");
        assert!(options.tls.is_none());
        let (options, _) = parse("etcd://a?ca=/ca.pem").unwrap();
        assert!(options.tls.is_some(), "a certificate means TLS");
    }

    #[test]
    fn wrong_urls_are_refused() {
        for (url, said) in [
            ("etcd://", "not a host"),
            ("etcd://a,,b", "not a host"),
            ("etcd://host:0", "not a host"),
            ("etcd://host:port", "not a host"),
            ("etcd://[::1]x", "not a host"),
            ("etcd://host/x", "no path"),
            ("etcd://user@host", "not a login"),
            ("etcd://host?colour=red", "colour"),
            ("etcd://host?prefix={x}", "not a key prefix"),
            ("etcd://host?prefix=", "not a key prefix"),
            ("etcd://host?realm=A", "not a realm"),
            ("etcd://host?restored=yes", "restored=accept"),
            ("etcd://host?cert=/x", "needs its key"),
            ("etcd://host?insecure=yes", "expected true or false"),
        ] {
            let message = parse(url).unwrap_err().to_string();
            assert!(message.contains(said), "{url}: {message}");
        }
    }

    #[test]
    fn a_password_is_not_shown() {
        for url in [
            "etcd://user:canary@host:port",
            "etcd://user:canary@host?colour=red",
            "etcd://:can@canary@",
            "etcd://user:canary@host/x",
        ] {
            let error = parse(url).unwrap_err();
            assert!(!format!("{error:?} {error}").contains("canary"), "{url}");
        }
        let (_, place) = parse("etcd://user:canary@host").unwrap();
        assert!(!format!("{place:?}").contains("canary"));
    }
}
