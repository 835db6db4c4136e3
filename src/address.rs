//! Hosts and ports in the URLs of engines.

use percent_encoding::percent_decode_str;

use crate::error::{Error, Result};

/// Takes `host`, `host:port` or `[ipv6]:port` apart, decoded.
///
/// # Errors
/// `Invalid` where it is none of these, as where a mistake in a password made a part of it a host.
pub(crate) fn host_and_port(text: &str, default_port: u16) -> Result<(String, u16)> {
    // What stands where a port was expected may be a password that lacks its host.
    let shown = match text.split_once(':') {
        Some((host, port))
            if !text.starts_with('[') && !port.bytes().all(|b| b.is_ascii_digit()) =>
        {
            format!("{host:?} and more")
        }
        _ => format!("{text:?}"),
    };
    let malformed =
        || Error::invalid("not a host; expected host or host:port").with("host", &shown);
    // An IPv6 address stands in brackets.
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, port)) => (host, Some(port.strip_prefix(':').ok_or_else(malformed)?)),
        None => match text.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (text, None),
        },
    };
    let port = match port {
        None => default_port,
        Some(port) => port.parse().ok().filter(|p| *p > 0).ok_or_else(malformed)?,
    };
    let host = decoded(host)?;
    let odd = |c: char| c.is_whitespace() || c.is_control() || "[]/?#%".contains(c);
    if host.is_empty() || host.contains(odd) {
        return Err(malformed());
    }
    Ok((host, port))
}

/// A part of a URL without its percent escapes.
///
/// # Errors
/// `Invalid` where it is not UTF-8.
pub(crate) fn decoded(text: &str) -> Result<String> {
    let decoded = percent_decode_str(text).decode_utf8();
    Ok(decoded
        .map_err(|_| Error::invalid("a part of the URL is not UTF-8"))?
        .into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_taken_apart_or_refused() {
        for (text, host, port) in [
            ("db", "db", 7),
            ("db:8", "db", 8),
            ("[::1]", "::1", 7),
            ("[::1]:8", "::1", 8),
        ] {
            assert_eq!(host_and_port(text, 7).unwrap(), (host.to_owned(), port));
        }
        for bad in [
            "", ":8", "db:", "db:0", "db:x", "db:65536", "[::1]x", "a b", "a/b", "%ff",
        ] {
            assert!(host_and_port(bad, 7).is_err(), "{bad:?}");
        }
    }
}
