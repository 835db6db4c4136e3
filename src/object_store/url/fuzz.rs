//! What fuzzing asks of the URLs of object stores and of their objects.

use std::net::IpAddr;

use ::object_store::path::Path;
use reqwest::Url;

use super::{check_endpoint, is_loopback, options};
use crate::error::{ErrorKind, Result};
use crate::object_store::fence::destination;
use crate::object_store::options::{ObjectOptions, Place};
use crate::open::StoreUrl;

/// The input is what follows `s3://`, `gs://` or `az://`.
pub(crate) fn url(bytes: &[u8]) {
    let Ok(rest) = std::str::from_utf8(bytes) else {
        return;
    };
    for scheme in ["s3", "gs", "az"] {
        let url = || StoreUrl::parse(&format!("{scheme}://{rest}"));
        if let Some((options, place)) = read(url().and_then(options)) {
            sound(&options, &place);
        }
        if let Some((options, place, name)) = read(url().and_then(destination)) {
            sound(&options, &place);
            assert!(!name.as_str().contains('/'), "{name:?}");
            can_be_a_key(&place, name.as_str());
        }
    }
}

fn read<T>(parsed: Result<T>) -> Option<T> {
    if let Err(error) = &parsed {
        let wrong = matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Unsupported);
        assert!(wrong, "{error}");
    }
    parsed.ok()
}

fn sound(options: &ObjectOptions, place: &Place) {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    assert!(!place.bucket.is_empty() && place.bucket.chars().all(plain));
    can_be_a_key(place, "lock/payment-export");
    let margin = options.locks.margin.as_millis();
    assert!((1_000..=300_000).contains(&margin), "{margin}");
    if let Some(endpoint) = &options.endpoint {
        is_reached_as_it_was_checked(endpoint);
    }
}

/// What an opened store could never address is refused with its URL.
fn can_be_a_key(place: &Place, below: &str) {
    let key = match place.prefix.as_str() {
        "" => below.to_owned(),
        prefix => format!("{prefix}/{below}"),
    };
    let path = Path::parse(&key);
    let is_exact = path.is_ok_and(|path| path.as_ref() == key);
    assert!(is_exact && !key.contains('\\'), "{key:?}");
}

/// The client reads the endpoint by rules of its own: it must not send without TLS to another host
/// than the one that was found to be this one.
fn is_reached_as_it_was_checked(endpoint: &str) {
    let plaintext = check_endpoint(endpoint);
    assert!(plaintext.is_ok(), "the options took it: {endpoint:?}");
    let Ok(url) = Url::parse(endpoint) else {
        return;
    };
    assert_eq!(plaintext.ok(), Some(url.scheme() == "http"), "{endpoint:?}");
    if is_loopback(endpoint) {
        let host = url.host_str().unwrap_or_default();
        let address = host.trim_start_matches('[').trim_end_matches(']');
        let is_here = address.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        assert!(host == "localhost" || is_here, "{endpoint:?} is {host:?}");
    }
}
