//! How a connection is protected: by TLS that verifies fully, or not at all.

#[cfg(feature = "postgres-tls")]
use std::sync::Arc;

use crate::error::{Error, Result};

/// How a connection is protected.
#[derive(Clone)]
pub(super) enum Tls {
    /// Not at all.
    Off,
    /// By TLS that verifies the server's certificate and name.
    #[cfg(feature = "postgres-tls")]
    Rustls(tokio_postgres_rustls::MakeRustlsConnect),
}

impl Tls {
    /// TLS that trusts the certificates of the file `roots`, or those of the host.
    ///
    /// # Errors
    /// `Invalid` where there are none.
    #[cfg(feature = "postgres-tls")]
    pub(super) fn verifying(roots: Option<&str>) -> Result<Self> {
        use rustls::pki_types::CertificateDer;
        use rustls::pki_types::pem::PemObject as _;

        let mut trusted = rustls::RootCertStore::empty();
        match roots {
            Some(path) => {
                let unreadable = |error: rustls::pki_types::pem::Error| {
                    Error::invalid("the file of trusted certificates cannot be read; expected PEM")
                        .with("sslrootcert", format_args!("{path:?}"))
                        .with_source(error)
                };
                for certificate in CertificateDer::pem_file_iter(path).map_err(unreadable)? {
                    let certificate = certificate.map_err(unreadable)?;
                    trusted.add(certificate).map_err(|error| {
                        Error::invalid("a trusted certificate cannot be used")
                            .with("sslrootcert", format_args!("{path:?}"))
                            .with_source(error)
                    })?;
                }
            }
            None => {
                // Some that cannot be read are no reason to refuse the others.
                trusted.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        if trusted.is_empty() {
            return Err(Error::invalid(
                "no trusted certificates are known, so no server can be verified; name a file with sslrootcert",
            ));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::unsupported("TLS cannot be set up").with_source(error))?
            .with_root_certificates(trusted)
            .with_no_client_auth();
        Ok(Self::Rustls(tokio_postgres_rustls::MakeRustlsConnect::new(
            config,
        )))
    }

    #[cfg(not(feature = "postgres-tls"))]
    pub(super) fn verifying(_: Option<&str>) -> Result<Self> {
        Err(Error::unsupported(
            "this server needs TLS and this build has none; enable the feature `postgres-tls`, or accept a connection in the clear with insecure=true&sslmode=disable",
        ))
    }
}
