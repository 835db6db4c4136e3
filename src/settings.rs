//! What the options of several engines have in common: prefixes, realms, the files of TLS, and the
//! word about connections in the clear.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use crate::driver::off_thread;
use crate::error::{Error, Result};
use crate::open::StoreUrl;

const PREFIX_MAX_BYTES: usize = 64;
const REALM_MAX_BYTES: usize = 64;

/// The files of a TLS connection, in PEM form.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// The authority that signed the server's certificate, where the system does not know it.
    pub authority: Option<PathBuf>,
    /// The client's own certificate and its key, where the server asks for one.
    pub client: Option<(PathBuf, PathBuf)>,
}

impl Tls {
    /// The options `ca`, `cert` and `cert_key` of a URL.
    ///
    /// # Errors
    /// `Invalid` for a certificate without its key, or a key without its certificate.
    pub(crate) fn take(url: &mut StoreUrl) -> Result<Self> {
        let client = match (url.take("cert"), url.take("cert_key")) {
            (Some(certificate), Some(key)) => Some((certificate.into(), key.into())),
            (None, None) => None,
            _ => {
                return Err(Error::invalid(
                    "a client certificate needs its key; give both cert and cert_key",
                ));
            }
        };
        Ok(Self {
            authority: url.take("ca").map(Into::into),
            client,
        })
    }

    /// True where a file is named, which asks for TLS.
    pub(crate) fn is_named(&self) -> bool {
        *self != Self::default()
    }
}

/// Reads a certificate or key.
///
/// # Errors
/// `Invalid` where it cannot be read.
pub(crate) async fn read_pem(path: &Path) -> Result<Vec<u8>> {
    let from = path.to_owned();
    off_thread(move || std::fs::read(from)).await?.map_err(|e| {
        Error::invalid("the file of a certificate or key cannot be read")
            .with("path", path.display())
            .with_source(e)
    })
}

/// Checks what the keys of a store begin with.
///
/// # Errors
/// `Invalid` for more than 64 bytes, or other characters than letters, digits and `:._-/`.
pub(crate) fn check_prefix(prefix: &str) -> Result<()> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b":._-/".contains(&b);
    if prefix.len() > PREFIX_MAX_BYTES || !prefix.bytes().all(plain) {
        return Err(Error::invalid(format!(
            "not a key prefix; expected at most {PREFIX_MAX_BYTES} letters, digits, and : . _ - /"
        ))
        .with("prefix", format_args!("{prefix:?}")));
    }
    Ok(())
}

/// True where a domain can hold this realm: 1 to 64 lowercase letters, digits, `-` and `_`.
pub(crate) fn is_realm(realm: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_".contains(&b);
    (1..=REALM_MAX_BYTES).contains(&realm.len()) && realm.bytes().all(plain)
}

/// Checks a realm that a user gives.
///
/// # Errors
/// `Invalid` where no domain can hold it.
pub(crate) fn check_realm(realm: &str) -> Result<()> {
    if is_realm(realm) {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "not a realm; expected 1 to {REALM_MAX_BYTES} lowercase letters, digits, - and _"
    ))
    .with("realm", format_args!("{realm:?}")))
}

/// A realm that was found where the data is.
///
/// # Errors
/// `Corrupt` where no domain can hold it: the fences of its locks would be refused as malformed.
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub(crate) fn stored_realm(realm: String) -> Result<String> {
    if is_realm(&realm) {
        return Ok(realm);
    }
    Err(Error::corrupt(
        "the realm that is stored with the locks is illegible; write the former one back, or another one and rebind the resources",
    ))
}

/// True where what is sent to this host does not leave the machine.
pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// Says that passwords and holders' secrets travel in the clear to each host that is not this
/// machine. `remedy` is what to say in the URL instead.
pub(crate) fn warn_of_plaintext<'a>(
    engine: &str,
    hosts: impl IntoIterator<Item = &'a str>,
    remedy: &str,
) {
    for host in hosts {
        if !is_loopback(host) {
            tracing::warn!(
                engine,
                host,
                "connecting without TLS; {remedy}, or say insecure=true"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_and_realms_are_plain() {
        for good in ["", "fencelock:", "a/b.c_d-E9"] {
            check_prefix(good).unwrap();
        }
        for bad in ["{x}", "a b", "\u{fc}", &"x".repeat(65)] {
            assert!(check_prefix(bad).is_err(), "{bad:?}");
        }
        check_realm("a-b_9").unwrap();
        for bad in ["", "A", "a/b", &"x".repeat(65)] {
            assert!(check_realm(bad).is_err(), "{bad:?}");
            #[cfg(any(feature = "mysql", feature = "postgres"))]
            assert_eq!(
                stored_realm(bad.to_owned()).unwrap_err().kind(),
                crate::ErrorKind::Corrupt
            );
        }
    }

    #[test]
    fn only_this_machine_is_loopback() {
        for host in ["localhost", "127.0.0.2", "::1"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["db", "10.0.0.1", "localhost.example", "2001:db8::1"] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn a_certificate_and_its_key_belong_together() {
        let take = |url: &str| Tls::take(&mut StoreUrl::parse(url).unwrap());
        assert!(!take("redis://h").unwrap().is_named());
        assert!(take("redis://h?ca=/ca.pem").unwrap().is_named());
        let tls = take("redis://h?cert=/c&cert_key=/k").unwrap();
        assert_eq!(tls.client, Some(("/c".into(), "/k".into())));
        for url in ["redis://h?cert=/c", "redis://h?cert_key=/k"] {
            assert!(
                take(url).unwrap_err().to_string().contains("needs its key"),
                "{url}"
            );
        }
    }
}
