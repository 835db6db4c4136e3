//! How a store is opened: what to connect to, and what to ask of it.

use std::fmt;
use std::sync::OnceLock;

use redis::aio::ConnectionLike;
use redis::{Client, ConnectionAddr, RedisConnectionInfo};

use super::connect::{ClusterTarget, Dial, Link, Realm, Target, client, hearing};
use super::fence::FencedRedis;
use super::lease::RedisStore;
use super::script::Acknowledge;
use super::sentinel::Sentinels;
use crate::error::{Error, Result};
use crate::fence::hex;
use crate::random;
use crate::settings::{self, Tls};
use crate::token::FencingToken;

/// The largest token: what a double holds exactly (L9).
pub(super) const TOKEN_MAX: u64 = (1 << 53) - 1;

/// How to open a [`RedisStore`] or a [`FencedRedis`]: what the options of the URL say, for those
/// who bring a connection of their own.
#[derive(Clone, Debug)]
pub struct RedisOptions {
    pub(super) prefix: String,
    pub(super) realm: Option<String>,
    pub(super) counter: bool,
    pub(super) acknowledge: Acknowledge,
    pub(super) allow_eviction: bool,
    pub(super) insecure: bool,
    pub(super) tls: Tls,
}

/// The servers that a URL names.
#[derive(Clone)]
pub(crate) struct Place {
    pub(super) kind: Kind,
    pub(super) tls: bool,
    /// Host and port, at least one.
    pub(super) hosts: Vec<(String, u16)>,
    /// The name that Sentinels know the master by.
    pub(super) master: String,
    pub(super) user: Login,
    /// To the Sentinels themselves.
    pub(super) sentinel_user: Login,
    pub(super) database: i64,
}

/// What stands before `://`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Single,
    Sentinel,
    Cluster,
}

/// A user and a password. Never shown.
#[derive(Clone, Default)]
pub(super) struct Login {
    pub(super) user: Option<String>,
    pub(super) password: Option<String>,
}

impl Default for RedisOptions {
    fn default() -> Self {
        Self {
            prefix: "fencelock:".to_owned(),
            realm: None,
            counter: false,
            acknowledge: Acknowledge::default(),
            allow_eviction: false,
            insecure: false,
            tls: Tls::default(),
        }
    }
}

impl RedisOptions {
    /// What the keys of all locks begin with, `fencelock:` at first. Two prefixes on one server
    /// never meet.
    ///
    /// # Errors
    /// `Invalid` for more than 64 bytes, or other characters than letters, digits and `:._-/`.
    pub fn prefix(mut self, prefix: &str) -> Result<Self> {
        settings::check_prefix(prefix)?;
        prefix.clone_into(&mut self.prefix);
        Ok(self)
    }

    /// The identity of the locks' data (S9), where it is to outlive the data: resources stay bound
    /// to the locks through a flush or a move to another server. Otherwise a random one is kept in
    /// the server.
    ///
    /// # Errors
    /// `Invalid` where it is empty, longer than 64 bytes, or has other characters than lowercase
    /// letters, digits, `-` and `_`.
    pub fn realm(mut self, realm: &str) -> Result<Self> {
        settings::check_realm(realm)?;
        self.realm = Some(realm.to_owned());
        Ok(self)
    }

    /// Counts tokens from 1 in steps of one, instead of following the server's clock. A failover or
    /// a flush that loses the counter then repeats numbers.
    #[must_use]
    pub fn count_tokens(mut self) -> Self {
        self.counter = true;
        self
    }

    /// A grant counts only once this many replicas have it (WAIT). Fewer than asked within a second:
    /// it is given back, and the acquire is `Unavailable`. Not in a cluster.
    #[must_use]
    pub fn wait_replicas(mut self, replicas: u32) -> Self {
        self.acknowledge.replicas = replicas;
        self
    }

    /// A grant counts only once the server has it on its disk (WAITAOF, Redis 7.2 or later with
    /// `appendonly yes`). Not in a cluster.
    #[must_use]
    pub fn wait_aof(mut self) -> Self {
        self.acknowledge.aof = true;
        self
    }

    /// Opens a server whose policy may evict the records of held locks. An evicted lock is granted
    /// again while its holder believes in it; only fenced storage is safe then.
    #[must_use]
    pub fn allow_eviction(mut self) -> Self {
        self.allow_eviction = true;
        self
    }

    /// Says that a connection without TLS to another host is meant.
    #[must_use]
    pub fn insecure(mut self) -> Self {
        self.insecure = true;
        self
    }

    /// The files of a TLS connection.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = tls;
        self
    }

    /// Opens the locks of a server of your own settings: what a `redis::Client` names, TLS
    /// included. Connections are this store's own.
    ///
    /// # Errors
    /// As [`RedisStore::open`].
    pub async fn open_client(self, client: Client) -> Result<RedisStore> {
        let info = client.get_connection_info().clone();
        let link = self.link(Target::Single(hearing(info)?));
        RedisStore::start(self, link).await
    }

    /// Opens locks over a connection of your own: a `MultiplexedConnection`, a `ConnectionManager`
    /// or a `ClusterConnection`.
    ///
    /// Its time limits are its own matter, waiters poll instead of being woken, and where its
    /// runtime is starved, leases are lost.
    ///
    /// # Errors
    /// As [`RedisStore::open`]; `Unsupported` with [`wait_replicas`](Self::wait_replicas) or
    /// [`wait_aof`](Self::wait_aof), for the connection may be a cluster's.
    pub async fn open_connection<C>(self, connection: C) -> Result<RedisStore>
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        let link = self.link(Target::Given(Box::new(connection)));
        RedisStore::start(self, link).await
    }

    /// Fenced values on a server of your own settings.
    ///
    /// # Errors
    /// `Unavailable` where it cannot be reached, `Unsupported` where it may evict watermarks.
    pub async fn open_fenced_client(self, client: Client) -> Result<FencedRedis> {
        let info = client.get_connection_info().clone();
        FencedRedis::start(&self, Link::new(Target::Single(hearing(info)?), None)).await
    }

    /// Fenced values over a connection of your own.
    ///
    /// # Errors
    /// As [`open_fenced_client`](Self::open_fenced_client).
    pub async fn open_fenced_connection<C>(self, connection: C) -> Result<FencedRedis>
    where
        C: ConnectionLike + Clone + Send + Sync + 'static,
    {
        FencedRedis::start(&self, Link::new(Target::Given(Box::new(connection)), None)).await
    }

    pub(crate) async fn open_place(self, place: Place) -> Result<RedisStore> {
        let target = self.target(place).await?;
        let link = self.link(target);
        RedisStore::start(self, link).await
    }

    pub(crate) async fn open_fenced_place(self, place: Place) -> Result<FencedRedis> {
        let target = self.target(place).await?;
        FencedRedis::start(&self, Link::new(target, None)).await
    }

    /// The key of the record of an encoded name. All keys of a lock share the slot of what stands
    /// between the braces; neither a prefix nor an encoded name can hold one.
    pub(super) fn record_key(&self, encoded: &str) -> String {
        format!("{{{}{encoded}}}:lock", self.prefix)
    }

    fn link(&self, target: Target) -> Link {
        let realm = Realm {
            key: format!("{{{}}}:realm", self.prefix),
            known: OnceLock::new(),
            ends_with_data: self.counter && self.realm.is_none(),
        };
        Link::new(target, self.realm.is_none().then_some(realm))
    }

    async fn target(&self, place: Place) -> Result<Target> {
        self.check_plaintext(&place);
        let dial = self.dialer(place.tls).await?;
        let settings = place.user.settings(place.database);
        match place.kind {
            Kind::Single => {
                let (host, port) = place.hosts.into_iter().next().unwrap_or_default();
                Ok(Target::Single(dial(host, port, &settings)?))
            }
            Kind::Sentinel => {
                let to_sentinel = place.sentinel_user.settings(0);
                let sentinels = place
                    .hosts
                    .into_iter()
                    .map(|(host, port)| dial(host, port, &to_sentinel))
                    .collect::<Result<Vec<_>>>()?;
                Ok(Target::Sentinel(Sentinels {
                    sentinels,
                    master: place.master,
                    settings,
                    dial,
                }))
            }
            Kind::Cluster => {
                if self.acknowledge.is_needed() {
                    return Err(Error::unsupported(
                        "wait_replicas and wait_aof are not offered in a cluster",
                    ));
                }
                let nodes = place
                    .hosts
                    .into_iter()
                    .map(|(host, port)| {
                        let client = dial(host, port, &settings)?;
                        Ok(client.get_connection_info().clone())
                    })
                    .collect::<Result<Vec<_>>>()?;
                self.cluster(nodes, place.tls).await
            }
        }
    }

    async fn cluster(&self, nodes: Vec<redis::ConnectionInfo>, tls: bool) -> Result<Target> {
        #[cfg(feature = "redis-tls")]
        let certificates = if tls {
            Some(self.certificates().await?)
        } else {
            None
        };
        let _ = tls;
        let build = move |greeter: super::connect::Greeter| {
            let builder = redis::cluster::ClusterClientBuilder::new(nodes.clone())
                .use_protocol(redis::ProtocolVersion::RESP3)
                // One retry finds a slot's new master; more would only outlast the time limit.
                .retries(2)
                .max_retry_wait(200)
                .connection_timeout(super::connect::REQUEST_LIMIT)
                .response_timeout(super::connect::REQUEST_LIMIT)
                .push_sender(move |push| greeter(push));
            #[cfg(feature = "redis-tls")]
            let builder = match &certificates {
                Some(certificates) => builder.certs(certificates.clone()),
                None => builder,
            };
            builder
                .build()
                .map_err(|e| Error::invalid("not the settings of a redis cluster").with_source(e))
        };
        Ok(Target::Cluster(ClusterTarget {
            build: Box::new(build),
        }))
    }

    /// Makes clients of addresses.
    async fn dialer(&self, tls: bool) -> Result<Dial> {
        if !tls {
            return Ok(Box::new(|host, port, settings| {
                client(ConnectionAddr::Tcp(host, port), settings.clone())
            }));
        }
        self.tls_dialer().await
    }

    #[cfg(not(feature = "redis-tls"))]
    async fn tls_dialer(&self) -> Result<Dial> {
        Err(Error::unsupported(
            "this build has no TLS for redis; enable the feature `redis-tls`",
        ))
    }

    #[cfg(feature = "redis-tls")]
    async fn tls_dialer(&self) -> Result<Dial> {
        use redis::IntoConnectionInfo as _;
        let certificates = self.certificates().await?;
        Ok(Box::new(move |host, port, settings| {
            let address = ConnectionAddr::TcpTls {
                host,
                port,
                insecure: false,
                tls_params: None,
            };
            let invalid = |e| Error::invalid("not the settings of a TLS connection").with_source(e);
            let settings = settings.clone().set_protocol(redis::ProtocolVersion::RESP3);
            let info = address.into_connection_info().map_err(invalid)?;
            Client::build_with_tls(info.set_redis_settings(settings), certificates.clone())
                .map_err(invalid)
        }))
    }

    #[cfg(feature = "redis-tls")]
    async fn certificates(&self) -> Result<redis::TlsCertificates> {
        // Where the program has chosen a provider already, that one is used.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let root_cert = match &self.tls.authority {
            Some(path) => Some(settings::read_pem(path).await?),
            None => None,
        };
        let client_tls = match &self.tls.client {
            Some((certificate, key)) => Some(redis::ClientTlsConfig {
                client_cert: settings::read_pem(certificate).await?,
                client_key: settings::read_pem(key).await?,
            }),
            None => None,
        };
        Ok(redis::TlsCertificates {
            client_tls,
            root_cert,
        })
    }

    /// Passwords and holders' secrets travel in the clear without TLS.
    fn check_plaintext(&self, place: &Place) {
        if place.tls || self.insecure {
            return;
        }
        let hosts = place.hosts.iter().map(|(host, _)| host.as_str());
        settings::warn_of_plaintext("redis", hosts, "use rediss://");
    }
}

impl Login {
    fn settings(&self, database: i64) -> RedisConnectionInfo {
        let mut settings = RedisConnectionInfo::default()
            .set_db(database)
            // Not every user may set it, and nobody needs it.
            .set_skip_set_lib_name();
        if let Some(user) = &self.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = &self.password {
            settings = settings.set_password(password);
        }
        settings
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place")
            .field("kind", &self.kind)
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}

/// A realm that was read from the server.
pub(super) fn check_stored_realm(realm: &str) -> Result<()> {
    if settings::is_realm(realm) {
        return Ok(());
    }
    Err(Error::corrupt(
        "the realm that is stored on the server is illegible; delete its key, and rebind the resources",
    ))
}

/// A realm for a server that has none.
pub(super) fn new_realm() -> String {
    hex(&random::id())
}

/// The ceiling as a token.
pub(super) fn token_max() -> FencingToken {
    FencingToken::new(TOKEN_MAX).unwrap_or(FencingToken::MIN)
}
