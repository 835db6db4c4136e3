//! URLs of object stores: `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`.
//!
//! Credentials are not in them: they come from the environment, as the providers' own clients read
//! it.

use super::options::{Kind, ObjectOptions, Place};
use crate::address::{decoded, host_and_port};
use crate::error::{Error, Result};
use crate::lease::Durability;
use crate::open::{StoreUrl, parse_duration};
use crate::settings;

const KNOWN: &[&str] = &[
    "endpoint",
    "region",
    "realm",
    "ca",
    "insecure",
    "allow_http",
    "virtual_hosted",
    "probe",
    "expiry",
    "clock_margin",
    "durability",
    "layout",
];

/// The options and the place of a URL, which is used up.
pub(crate) fn options(url: StoreUrl) -> Result<(ObjectOptions, Place)> {
    onto(ObjectOptions::default(), url)
}

/// The same, over options that were given otherwise.
pub(super) fn onto(
    mut options: ObjectOptions,
    mut url: StoreUrl,
) -> Result<(ObjectOptions, Place)> {
    let place = place(&url)?;
    if let Some(endpoint) = url.take("endpoint") {
        options = options.endpoint(&endpoint)?;
    }
    if let Some(region) = url.take("region") {
        options = options.region(&region)?;
    }
    if let Some(realm) = url.take("realm") {
        options = options.realm(&realm)?;
    }
    if let Some(ca) = url.take("ca") {
        options = options.ca(ca);
    }
    // The word of all engines, and the one that the client's own users know.
    if url.take_flag("insecure")? | url.take_flag("allow_http")? {
        options = options.insecure();
    }
    if url.take_flag("virtual_hosted")? {
        options = options.virtual_hosted();
    }
    match url.take("probe").as_deref() {
        None | Some("true") => {}
        Some("false") => options = options.without_probe(),
        Some(other) => {
            return Err(Error::invalid("not a flag; expected true or false")
                .with("probe", format_args!("{other:?}")));
        }
    }
    match url.take("expiry").as_deref() {
        None | Some("clock") => {}
        Some("observation") => options = options.observe(),
        Some(other) => {
            return Err(
                Error::invalid("not a way to judge leases; expected clock or observation")
                    .with("expiry", format_args!("{other:?}")),
            );
        }
    }
    if let Some(margin) = url.take("clock_margin") {
        let margin = parse_duration(&margin).ok_or_else(|| {
            Error::invalid("not a duration; expected a number with ms, s or m")
                .with("clock_margin", format_args!("{margin:?}"))
        })?;
        options = options.clock_margin(margin)?;
    }
    match url.take("durability").as_deref() {
        None => {}
        Some("d1") => options = options.durability(Durability::D1ProcessCrash),
        Some("d2") => options = options.durability(Durability::D2PowerLoss),
        Some("d3") => options = options.durability(Durability::D3Failover),
        Some(other) => {
            return Err(Error::invalid("not a durability; expected d1, d2 or d3")
                .with("durability", format_args!("{other:?}")));
        }
    }
    match url.take("layout").as_deref() {
        None | Some("strict") => {}
        Some("plain") => {
            return Err(Error::unsupported(
                "objects that hold only their bytes cannot be fenced: a store may take two writes of the same bytes for one version, so that a raise would stop nobody; leave layout out, and read with fencelock get",
            ));
        }
        Some(other) => {
            return Err(Error::invalid("not a layout; expected strict")
                .with("layout", format_args!("{other:?}")));
        }
    }
    url.finish("s3:", KNOWN)?;
    Ok((options, place))
}

fn place(url: &StoreUrl) -> Result<Place> {
    let kind = match url.scheme() {
        "gs" => Kind::Google,
        "az" => Kind::Azure,
        _ => Kind::S3,
    };
    let rest = url.rest();
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.contains('@') {
        return Err(Error::invalid(
            "the URL of an object store holds no user or password; credentials come from the environment",
        ));
    }
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    if bucket.is_empty() || bucket.len() > 255 || !bucket.bytes().all(plain) {
        // What follows a colon may be a password that lacks its host.
        let bucket = bucket.split(':').next().unwrap_or_default();
        return Err(Error::invalid(format!(
            "the URL names no bucket; expected {}://bucket/prefix",
            url.scheme()
        ))
        .with("bucket", format_args!("{bucket:?}")));
    }
    let prefix = decoded(prefix)?;
    let prefix = prefix.strip_suffix('/').unwrap_or(&prefix);
    let odd = |part: &str| {
        part.is_empty()
            || part == "."
            || part == ".."
            // SeaweedFS takes a backslash for a slash.
            || part.contains(|c: char| c.is_ascii_control() || c == '\\')
    };
    if !prefix.is_empty() && prefix.split('/').any(odd) {
        return Err(Error::invalid(
            "not a prefix of objects; expected parts between single slashes, none of them empty, . or .., and no backslash or control character",
        )
        .with("prefix", format_args!("{prefix:?}")));
    }
    Ok(Place {
        kind,
        bucket: bucket.to_owned(),
        prefix: prefix.to_owned(),
    })
}

/// True where the endpoint has no TLS.
pub(super) fn check_endpoint(endpoint: &str) -> Result<bool> {
    let malformed = || Error::invalid("not an endpoint; expected http:// or https:// and a host");
    let (plaintext, rest) = match endpoint.split_once("://") {
        Some(("http", rest)) => (true, rest),
        Some(("https", rest)) => (false, rest),
        // What it is instead may be a secret in the wrong place.
        _ => return Err(malformed()),
    };
    if rest.contains(['@', '?', '#']) {
        return Err(Error::invalid(
            "the endpoint holds a user, a query or a fragment; expected only a host",
        ));
    }
    let host = rest.split('/').next().unwrap_or_default();
    host_and_port(host, 443).map_err(|error| malformed().with_source(error))?;
    Ok(plaintext)
}

/// True where the endpoint is on this host.
pub(super) fn is_loopback(endpoint: &str) -> bool {
    let rest = endpoint.split_once("://").map_or("", |(_, rest)| rest);
    let host = rest.split('/').next().unwrap_or_default();
    host_and_port(host, 443).is_ok_and(|(host, _)| settings::is_loopback(&host))
}

#[cfg(feature = "fuzzing")]
pub(super) mod fuzz;

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(url: &str) -> String {
        let parsed = StoreUrl::parse(url).and_then(options);
        parsed.unwrap_err().to_string()
    }

    #[test]
    fn a_wrong_url_says_what_is_wrong() {
        for (url, said) in [
            ("s3:", "expected s3://bucket/prefix"),
            ("s3://", "expected s3://bucket/prefix"),
            ("s3:///x", "bucket=\"\""),
            ("s3://b?c/x", "unknown store option; s3: knows endpoint"),
            ("s3://b/x//y", "prefix=\"x//y\""),
            ("s3://b/../x", "prefix=\"../x\""),
            ("s3://b/x%0a", "or control character"),
            ("s3://b/x%5cy", "no backslash"),
            ("s3://b?insecure=maybe", "expected true or false"),
            ("s3://b?probe=no", "expected true or false"),
            ("s3://b?layout=plain", "cannot be fenced"),
            ("s3://b?layout=x", "not a layout"),
            ("s3://b?region=a_b", "not a region"),
            ("s3://b?region=", "not a region"),
            ("s3://b?region=a&region=b", "given twice"),
            ("s3://b?endpoint=ftp://x", "not an endpoint"),
            ("s3://b?endpoint=http://", "not an endpoint"),
            ("s3://b?realm=A", "not a realm"),
            ("s3://b?expiry=never", "expected clock or observation"),
            ("s3://b?clock_margin=3", "not a duration"),
            ("s3://b?clock_margin=500ms", "expected 1 s to 5 min"),
            ("s3://b?clock_margin=6m", "expected 1 s to 5 min"),
            ("s3://b?durability=d4", "expected d1, d2 or d3"),
        ] {
            let message = refusal(url);
            assert!(message.contains(said), "{url}: {message}");
        }
    }

    #[test]
    fn secrets_in_a_wrong_url_are_not_shown() {
        for url in [
            "s3://key:hunter2@bucket/x",
            "s3://b?endpoint=http://key:hunter2@host",
            "s3://b?endpoint=hunter2",
        ] {
            let message = refusal(url);
            assert!(!message.contains("hunter2"), "{message}");
        }
    }

    #[test]
    fn a_url_is_a_bucket_and_a_prefix() {
        for (url, bucket, prefix) in [
            ("s3://b", "b", ""),
            ("s3://b/", "b", ""),
            ("s3://b/x/y", "b", "x/y"),
            ("gs://b.c-d/x/", "b.c-d", "x"),
            ("az://b/a%20%3f", "b", "a ?"),
        ] {
            let (_, place) = options(StoreUrl::parse(url).unwrap()).unwrap();
            assert_eq!(
                (place.bucket.as_str(), place.prefix.as_str()),
                (bucket, prefix)
            );
        }
    }

    #[test]
    fn only_this_host_is_loopback() {
        for endpoint in ["http://localhost:1", "http://127.0.0.1/x", "http://[::1]:9"] {
            assert!(is_loopback(endpoint), "{endpoint}");
        }
        for endpoint in [
            "http://localhost.example",
            "http://10.0.0.1",
            "http://127.0.0.1.example",
        ] {
            assert!(!is_loopback(endpoint), "{endpoint}");
        }
    }
}
