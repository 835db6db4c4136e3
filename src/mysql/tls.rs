//! How a connection is protected: by TLS that verifies fully, or not at all.

use mysql_async::OptsBuilder;

#[cfg(not(feature = "mysql-tls"))]
use crate::error::Error;
use crate::error::Result;

/// How a connection is protected.
#[derive(Clone)]
pub(super) enum Tls {
    /// Not at all.
    Off,
    /// By TLS that verifies the server's certificate and name.
    #[cfg(feature = "mysql-tls")]
    Verifying(Box<mysql_async::SslOpts>),
}

impl Tls {
    /// TLS that trusts the certificates of the file `roots`, or those of the host.
    ///
    /// # Errors
    /// `Invalid` where there are none.
    #[cfg(feature = "mysql-tls")]
    pub(super) fn verifying(roots: Option<&str>) -> Result<Self> {
        use mysql_async::SslOpts;

        // The client takes the process's provider, and there has to be one. A program that chose its
        // own has done so before.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let certificates = match roots {
            Some(path) => from_file(path)?,
            None => rustls_native_certs::load_native_certs().certs,
        };
        // Some of the host's that cannot be read are no reason to refuse the others.
        let mut trusted = rustls::RootCertStore::empty();
        let usable: Vec<_> = certificates
            .into_iter()
            .filter(|certificate| trusted.add(certificate.clone()).is_ok())
            .map(|certificate| certificate.to_vec().into())
            .collect();
        if usable.is_empty() {
            return Err(crate::error::Error::invalid(
                "no trusted certificates are known, so no server can be verified; name a file with ssl-ca",
            ));
        }
        Ok(Self::Verifying(Box::new(
            SslOpts::default()
                .with_root_certs(usable)
                .with_disable_built_in_roots(true),
        )))
    }

    #[cfg(not(feature = "mysql-tls"))]
    pub(super) fn verifying(_: Option<&str>) -> Result<Self> {
        Err(Error::unsupported(
            "this server needs TLS and this build has none; enable the feature `mysql-tls`, or accept a connection in the clear with insecure=true&ssl-mode=disabled",
        ))
    }

    pub(super) fn is_on(&self) -> bool {
        !matches!(self, Self::Off)
    }

    pub(super) fn apply(self, options: OptsBuilder) -> OptsBuilder {
        match self {
            Self::Off => options,
            #[cfg(feature = "mysql-tls")]
            Self::Verifying(tls) => options.ssl_opts(*tls),
        }
    }
}

#[cfg(feature = "mysql-tls")]
fn from_file(path: &str) -> Result<Vec<rustls::pki_types::CertificateDer<'static>>> {
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject as _;

    CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error: rustls::pki_types::pem::Error| {
            crate::error::Error::invalid(
                "the file of trusted certificates cannot be read; expected PEM",
            )
            .with("ssl-ca", format_args!("{path:?}"))
            .with_source(error)
        })
}
