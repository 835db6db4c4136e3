//! How a store is opened: what to connect to, and what to ask of it.

use std::fmt;

use etcd_client::Client;
use tonic::transport::Endpoint;

use super::connect::{CONNECT_LIMIT, Link, Member, Servers, Target};
use super::fence::FencedEtcd;
use super::lease::EtcdStore;
use crate::error::{Error, Result};
use crate::settings::{self, Tls};

/// How to open an [`EtcdStore`] or a [`FencedEtcd`]: what the options of the URL say, for those who bring a client of
/// their own.
#[derive(Clone, Debug)]
pub struct EtcdOptions {
    pub(super) prefix: String,
    pub(super) realm: Option<String>,
    pub(super) accept_restored: bool,
    pub(super) insecure: bool,
    pub(super) tls: Option<Tls>,
}

/// The servers that a URL names.
#[derive(Clone)]
pub(crate) struct Place {
    /// Host and port, at least one.
    pub(super) hosts: Vec<(String, u16)>,
    /// User and password.
    pub(super) login: Option<(String, String)>,
}

impl Default for EtcdOptions {
    fn default() -> Self {
        Self {
            prefix: "fencelock/".to_owned(),
            realm: None,
            accept_restored: false,
            insecure: false,
            tls: None,
        }
    }
}

impl EtcdOptions {
    /// What all keys begin with, `fencelock/` at first. Two prefixes in one cluster never meet
    /// where neither begins with the other.
    ///
    /// # Errors
    /// `Invalid` for an empty one, more than 64 bytes, or other characters than letters, digits
    /// and `:._-/`.
    pub fn prefix(mut self, prefix: &str) -> Result<Self> {
        if prefix.is_empty() {
            return Err(Error::invalid(
                "not a key prefix where it is empty; expected 1 to 64 letters, digits, and : . _ - /",
            ));
        }
        settings::check_prefix(prefix)?;
        prefix.clone_into(&mut self.prefix);
        Ok(self)
    }

    /// The identity of the locks' data (S9), where it is to outlive the cluster. Otherwise it is
    /// the cluster's id and a random one that is kept in a key.
    ///
    /// # Errors
    /// `Invalid` where it is empty, longer than 64 bytes, or has other characters than lowercase
    /// letters, digits, `-` and `_`.
    pub fn realm(mut self, realm: &str) -> Result<Self> {
        settings::check_realm(realm)?;
        self.realm = Some(realm.to_owned());
        Ok(self)
    }

    /// Opens a cluster that was restored from a snapshot, and remembers that it was accepted.
    /// Tokens that were told after the snapshot was taken are told again, unless the restore
    /// bumped the revision or the names' floors are raised.
    #[must_use]
    pub fn accept_restored(mut self) -> Self {
        self.accept_restored = true;
        self
    }

    /// Says that connections without TLS to other hosts are meant.
    #[must_use]
    pub fn insecure(mut self) -> Self {
        self.insecure = true;
        self
    }

    /// Connects with TLS, with these files.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Opens the locks of a cluster over a client of your own.
    ///
    /// Its connections are its own matter: where it connects again by itself, a cluster that was
    /// restored meanwhile is found only by its revision; and where its runtime is starved, leases
    /// are lost.
    ///
    /// # Errors
    /// As [`EtcdStore::open`].
    pub async fn open_client(self, client: Client) -> Result<EtcdStore> {
        EtcdStore::start(&self, Link::new(Target::Given(Box::new(client)), &self)).await
    }

    pub(crate) async fn open_place(self, place: Place) -> Result<EtcdStore> {
        let target = self.target(place).await?;
        EtcdStore::start(&self, Link::new(target, &self)).await
    }

    /// Fenced values over a client of your own.
    ///
    /// # Errors
    /// As [`FencedEtcd::open`].
    pub async fn open_fenced_client(self, client: Client) -> Result<FencedEtcd> {
        FencedEtcd::start(&self, Link::new(Target::Given(Box::new(client)), &self)).await
    }

    pub(crate) async fn open_fenced_place(self, place: Place) -> Result<FencedEtcd> {
        let target = self.target(place).await?;
        FencedEtcd::start(&self, Link::new(target, &self)).await
    }

    async fn target(&self, place: Place) -> Result<Target> {
        self.check_plaintext(&place);
        let mut members = Vec::with_capacity(place.hosts.len());
        for (host, port) in place.hosts {
            let scheme = if self.tls.is_some() { "https" } else { "http" };
            let shown = if host.contains(':') {
                format!("[{host}]")
            } else {
                host.clone()
            };
            let endpoint = Endpoint::from_shared(format!("{scheme}://{shown}:{port}"))
                .map_err(|e| {
                    Error::invalid("not a host; expected host or host:port")
                        .with("host", format_args!("{host:?}"))
                        .with_source(e)
                })?
                .connect_timeout(CONNECT_LIMIT)
                .http2_keep_alive_interval(std::time::Duration::from_secs(10))
                .keep_alive_timeout(std::time::Duration::from_secs(5))
                .keep_alive_while_idle(true);
            let endpoint = self.with_tls(endpoint).await?;
            members.push(Member {
                host,
                port,
                endpoint,
            });
        }
        Ok(Target::Servers(Servers {
            members,
            login: place.login,
        }))
    }

    #[cfg(not(feature = "etcd-tls"))]
    async fn with_tls(&self, endpoint: Endpoint) -> Result<Endpoint> {
        match self.tls {
            None => Ok(endpoint),
            Some(_) => Err(Error::unsupported(
                "this build has no TLS for etcd; enable the feature `etcd-tls`",
            )),
        }
    }

    #[cfg(feature = "etcd-tls")]
    async fn with_tls(&self, endpoint: Endpoint) -> Result<Endpoint> {
        use tonic::transport::{Certificate, ClientTlsConfig, Identity};
        let Some(tls) = &self.tls else {
            return Ok(endpoint);
        };
        let mut config = ClientTlsConfig::new();
        config = match &tls.authority {
            Some(path) => {
                config.ca_certificate(Certificate::from_pem(settings::read_pem(path).await?))
            }
            None => config.with_native_roots(),
        };
        if let Some((certificate, key)) = &tls.client {
            let (certificate, key) = (
                settings::read_pem(certificate).await?,
                settings::read_pem(key).await?,
            );
            config = config.identity(Identity::from_pem(certificate, key));
        }
        endpoint
            .tls_config(config)
            .map_err(|e| Error::invalid("not the settings of a TLS connection").with_source(e))
    }

    /// Passwords and holders' secrets travel in the clear without TLS.
    fn check_plaintext(&self, place: &Place) {
        if self.tls.is_some() || self.insecure {
            return;
        }
        let hosts = place.hosts.iter().map(|(host, _)| host.as_str());
        settings::warn_of_plaintext("etcd", hosts, "say tls=true");
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place")
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}
