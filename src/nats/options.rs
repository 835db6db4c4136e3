//! How a store is opened: what to connect to, and what to ask of it.

use std::fmt;

use async_nats::Client;

use super::connect::{Link, Servers, Target};
use super::fence::FencedNats;
use super::lease::NatsStore;
use crate::error::{Error, Result};
use crate::settings::{self, Tls};

/// The bucket where nothing is said.
const BUCKET: &str = "fencelock";

const BUCKET_MAX_BYTES: usize = 64;

/// What JetStream allows.
const REPLICAS_MAX: usize = 5;

/// How to open a [`NatsStore`] or a [`FencedNats`]: what the options of the URL say, for those who
/// bring a client of their own.
#[derive(Clone, Debug)]
pub struct NatsOptions {
    pub(super) bucket: String,
    pub(super) replicas: Option<usize>,
    pub(super) realm: Option<String>,
    pub(super) create: bool,
    pub(super) insecure: bool,
    pub(super) tls: Option<Tls>,
}

/// The servers that a URL names.
#[derive(Clone)]
pub(crate) struct Place {
    /// Host and port, at least one.
    pub(super) hosts: Vec<(String, u16)>,
    pub(super) login: Option<Login>,
}

/// Who we are to the servers. Never shown.
#[derive(Clone)]
pub(super) enum Login {
    /// User and password.
    User(String, String),
    Token(String),
}

impl Default for NatsOptions {
    fn default() -> Self {
        Self {
            bucket: BUCKET.to_owned(),
            replicas: None,
            realm: None,
            create: true,
            insecure: false,
            tls: None,
        }
    }
}

impl NatsOptions {
    /// The bucket, `fencelock` at first. Two buckets never meet.
    ///
    /// # Errors
    /// `Invalid` for an empty one, more than 64 bytes, or other characters than letters, digits,
    /// `-` and `_`.
    pub fn bucket(mut self, bucket: &str) -> Result<Self> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
        if bucket.is_empty() || bucket.len() > BUCKET_MAX_BYTES || !bucket.bytes().all(plain) {
            return Err(
                Error::invalid("not a bucket; expected 1 to 64 letters, digits, - and _")
                    .with("bucket", format_args!("{bucket:?}")),
            );
        }
        bucket.clone_into(&mut self.bucket);
        Ok(self)
    }

    /// How many servers keep a bucket that is made here: 1 at first, 3 for one that survives the
    /// loss of a server. A bucket that is there already has to have as many, where this is said.
    ///
    /// # Errors
    /// `Invalid` for 0 or more than 5.
    pub fn replicas(mut self, replicas: usize) -> Result<Self> {
        if !(1..=REPLICAS_MAX).contains(&replicas) {
            return Err(Error::invalid("not a number of replicas; expected 1 to 5")
                .with("replicas", replicas));
        }
        self.replicas = Some(replicas);
        Ok(self)
    }

    /// The identity of the locks' data (S9), where it is to outlive the bucket. Otherwise it is a
    /// random one that is kept in the bucket's own settings.
    ///
    /// # Errors
    /// `Invalid` where it is empty, longer than 64 bytes, or has other characters than lowercase
    /// letters, digits, `-` and `_`.
    pub fn realm(mut self, realm: &str) -> Result<Self> {
        settings::check_realm(realm)?;
        self.realm = Some(realm.to_owned());
        Ok(self)
    }

    /// Refuses to make the bucket where it is missing: for users who may not, and for those to whom
    /// a missing bucket is a mistake.
    #[must_use]
    pub fn must_exist(mut self) -> Self {
        self.create = false;
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

    /// Opens the locks of a bucket over a client of your own.
    ///
    /// Its connections are its own matter: where it connects again by itself, it sends late what it
    /// had not sent; and where its runtime is starved, leases are lost.
    ///
    /// # Errors
    /// As [`NatsStore::open`].
    pub async fn open_client(self, client: Client) -> Result<NatsStore> {
        NatsStore::start(&self, Link::new(Target::Given(client))).await
    }

    pub(crate) async fn open_place(self, place: Place) -> Result<NatsStore> {
        let target = self.target(place).await?;
        NatsStore::start(&self, Link::new(target)).await
    }

    /// Fenced values over a client of your own.
    ///
    /// # Errors
    /// As [`FencedNats::open`].
    pub async fn open_fenced_client(self, client: Client) -> Result<FencedNats> {
        FencedNats::start(&self, Link::new(Target::Given(client))).await
    }

    pub(crate) async fn open_fenced_place(self, place: Place) -> Result<FencedNats> {
        let target = self.target(place).await?;
        FencedNats::start(&self, Link::new(target)).await
    }

    async fn target(&self, place: Place) -> Result<Target> {
        self.check_plaintext(&place);
        if let Some(tls) = &self.tls {
            // The client reads them at each connection, and does not say which it cannot read.
            let client = tls.client.iter().flat_map(|(cert, key)| [cert, key]);
            for file in tls.authority.iter().chain(client) {
                settings::read_pem(file).await?;
            }
        }
        Ok(Target::Servers(Servers {
            hosts: place.hosts,
            login: place.login,
            tls: self.tls.clone(),
        }))
    }

    /// Passwords and holders' secrets travel in the clear without TLS.
    fn check_plaintext(&self, place: &Place) {
        if self.tls.is_some() || self.insecure {
            return;
        }
        let hosts = place.hosts.iter().map(|(host, _)| host.as_str());
        settings::warn_of_plaintext("nats", hosts, "say tls=true");
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place")
            .field("hosts", &self.hosts)
            .finish_non_exhaustive()
    }
}
