//! NATS URLs: `nats://[user:password@]host[:port],host[:port],…[?options]`, and `tls://` with TLS.

use super::options::{Login, NatsOptions, Place};
use crate::address::{decoded, host_and_port};
use crate::error::{Error, Result};
use crate::open::StoreUrl;
use crate::settings::Tls;

const KNOWN: &[&str] = &[
    "bucket", "replicas", "realm", "create", "insecure", "tls", "ca", "cert", "cert_key",
];

const PORT: u16 = 4222;

/// The options and the servers of a URL, which is used up.
pub(crate) fn options(mut url: StoreUrl) -> Result<(NatsOptions, Place)> {
    let place = place(&url)?;
    let mut options = NatsOptions::default();
    if let Some(bucket) = url.take("bucket") {
        options = options.bucket(&bucket)?;
    }
    if let Some(text) = url.take("replicas") {
        let replicas = text.parse().map_err(|_| {
            Error::invalid("not a number of replicas; expected 1 to 5")
                .with("replicas", format_args!("{text:?}"))
        })?;
        options = options.replicas(replicas)?;
    }
    if let Some(realm) = url.take("realm") {
        options = options.realm(&realm)?;
    }
    match url.take("create").as_deref() {
        None | Some("true") => {}
        Some("false") => options = options.must_exist(),
        Some(other) => {
            return Err(Error::invalid("not a flag; expected true or false")
                .with("create", format_args!("{other:?}")));
        }
    }
    if url.take_flag("insecure")? {
        options = options.insecure();
    }
    let wanted = url.take_flag("tls")? || matches!(url.scheme(), "tls" | "nats+tls");
    let tls = Tls::take(&mut url)?;
    // A certificate that is named means TLS.
    if wanted || tls.is_named() {
        options = options.tls(tls);
    }
    url.finish("nats:", KNOWN)?;
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
            "a NATS URL has no path; expected nats://host,host?bucket=NAME for another bucket",
        ));
    }
    let hosts = hosts
        .split(',')
        .map(|host| host_and_port(host, PORT))
        .collect::<Result<Vec<_>>>()?;
    Ok(Place { hosts, login })
}

/// `user:password`, or a token alone.
fn login_of(text: &str) -> Result<Login> {
    let malformed =
        || Error::invalid("not a login; expected nats://user:password@host, or nats://token@host");
    match text.split_once(':') {
        Some(("", _)) => Err(malformed()),
        Some((user, password)) => Ok(Login::User(decoded(user)?, decoded(password)?)),
        None if text.is_empty() => Err(malformed()),
        None => Ok(Login::Token(decoded(text)?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<(NatsOptions, Place)> {
        options(StoreUrl::parse(url)?)
    }

    #[test]
    fn urls_are_taken_apart() {
        let (options, place) = parse("nats://user:p%40ss@a,b:7000,[::1]:2/?bucket=x").unwrap();
        let expected = [("a", 4222), ("b", 7000), ("::1", 2)];
        assert_eq!(
            place.hosts,
            expected.map(|(host, port)| (host.to_owned(), port))
        );
        let Some(Login::User(user, password)) = place.login else {
            panic!("no user");
        };
        assert_eq!((user.as_str(), password.as_str()), ("user", "p@ss"));
        assert_eq!(options.bucket, "x");
        assert!(options.tls.is_none());
        assert!(matches!(
            parse("nats://t0k@a").unwrap().1.login,
            Some(Login::Token(token)) if token == "t0k"
        ));
        for url in [
            "tls://a",
            "nats+tls://a",
            "nats://a?tls=true",
            "nats://a?ca=/x",
        ] {
            assert!(parse(url).unwrap().0.tls.is_some(), "{url}");
        }
    }

    #[test]
    fn wrong_urls_are_refused() {
        for (url, said) in [
            ("nats://", "not a host"),
            ("nats://a,,b", "not a host"),
            ("nats://host:0", "not a host"),
            ("nats://host:port", "not a host"),
            ("nats://[::1]x", "not a host"),
            ("nats://host/x", "no path"),
            ("nats://:x@host", "not a login"),
            ("nats://@host", "not a login"),
            ("nats://host?colour=red", "colour"),
            ("nats://host?bucket=a.b", "not a bucket"),
            ("nats://host?bucket=", "not a bucket"),
            ("nats://host?replicas=0", "1 to 5"),
            ("nats://host?replicas=six", "1 to 5"),
            ("nats://host?realm=A", "not a realm"),
            ("nats://host?create=no", "expected true or false"),
            ("nats://host?cert=/x", "needs its key"),
            ("nats://host?insecure=yes", "expected true or false"),
        ] {
            let message = parse(url).unwrap_err().to_string();
            assert!(message.contains(said), "{url}: {message}");
        }
    }

    #[test]
    fn a_password_is_not_shown() {
        for url in [
            "nats://user:canary@host:port",
            "nats://user:canary@host?colour=red",
            "nats://canary@host?colour=red",
            "nats://:can@canary@",
            "nats://user:canary@host/x",
        ] {
            let error = parse(url).unwrap_err();
            assert!(!format!("{error:?} {error}").contains("canary"), "{url}");
        }
        for url in ["nats://user:canary@host", "nats://canary@host"] {
            let (_, place) = parse(url).unwrap();
            assert!(!format!("{place:?}").contains("canary"));
        }
    }
}
