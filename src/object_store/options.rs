//! How a store is opened: what to connect to, and what to ask of it.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use ::object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey, AwsCredential};
use ::object_store::{
    BackoffConfig, Certificate, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig,
    StaticCredentialProvider,
};

use super::connect::{CONNECT_LIMIT, Link};
use super::lock_options::LockSettings;
use super::{probe, url};
use crate::error::{Error, ErrorKind, Result};
use crate::settings;

/// How to open locks or fenced objects in an object store: what the options of the URL say, for
/// those who bring a store of their own.
#[derive(Clone, Debug)]
pub struct ObjectOptions {
    pub(super) endpoint: Option<String>,
    pub(super) region: Option<String>,
    pub(super) realm: Option<String>,
    pub(super) ca: Option<PathBuf>,
    pub(super) insecure: bool,
    pub(super) virtual_hosted: bool,
    pub(super) probe: bool,
    credentials: Option<Credentials>,
    pub(super) locks: LockSettings,
}

/// A key and its secret. Never shown.
#[derive(Clone)]
struct Credentials {
    key_id: String,
    secret: String,
    session_token: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}

/// The objects that a URL names.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(super) kind: Kind,
    pub(super) bucket: String,
    /// What keys begin with, without slashes at its ends.
    pub(super) prefix: String,
}

/// What stands before `://`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    S3,
    Google,
    Azure,
}

impl Kind {
    fn scheme(self) -> &'static str {
        match self {
            Self::S3 => "s3",
            Self::Google => "gs",
            Self::Azure => "az",
        }
    }
}

impl Place {
    /// `s3://bucket`, for messages.
    pub(super) fn shown(&self) -> String {
        format!("{}://{}", self.kind.scheme(), self.bucket)
    }
}

impl Default for ObjectOptions {
    fn default() -> Self {
        Self {
            endpoint: None,
            region: None,
            realm: None,
            ca: None,
            insecure: false,
            virtual_hosted: false,
            probe: true,
            credentials: None,
            locks: LockSettings::default(),
        }
    }
}

impl ObjectOptions {
    /// Where an S3-compatible server listens, as `https://host:port`; otherwise what
    /// `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL` says, and else Amazon.
    ///
    /// # Errors
    /// `Invalid` where it is no http or https URL of a host, or names a user.
    pub fn endpoint(mut self, endpoint: &str) -> Result<Self> {
        url::check_endpoint(endpoint)?;
        self.endpoint = Some(endpoint.to_owned());
        Ok(self)
    }

    /// The region; otherwise `AWS_REGION` or `AWS_DEFAULT_REGION`, and else `us-east-1`.
    ///
    /// # Errors
    /// `Invalid` for other characters than letters, digits and `-`.
    pub fn region(mut self, region: &str) -> Result<Self> {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
        if region.is_empty() || region.len() > 64 || !region.bytes().all(plain) {
            return Err(
                Error::invalid("not a region; expected 1 to 64 letters, digits and -")
                    .with("region", format_args!("{region:?}")),
            );
        }
        self.region = Some(region.to_owned());
        Ok(self)
    }

    /// The identity of the locks' data (S9), where it is to outlive the bucket. For locks only.
    ///
    /// # Errors
    /// `Invalid` where it is empty, longer than 64 bytes, or has other characters than lowercase
    /// letters, digits, `-` and `_`.
    pub fn realm(mut self, realm: &str) -> Result<Self> {
        settings::check_realm(realm)?;
        self.realm = Some(realm.to_owned());
        Ok(self)
    }

    /// The authority that signed the server's certificate, in PEM form, where the system does not
    /// know it.
    #[must_use]
    pub fn ca(mut self, path: impl Into<PathBuf>) -> Self {
        self.ca = Some(path.into());
        self
    }

    /// Credentials for S3; otherwise they come from the environment: `AWS_ACCESS_KEY_ID`,
    /// `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`, or the role of the machine.
    #[must_use]
    pub fn credentials(mut self, key_id: &str, secret: &str, session_token: Option<&str>) -> Self {
        self.credentials = Some(Credentials {
            key_id: key_id.to_owned(),
            secret: secret.to_owned(),
            session_token: session_token.map(str::to_owned),
        });
        self
    }

    /// Says that an endpoint without TLS on another host is meant, as `AWS_ALLOW_HTTP=true` does.
    #[must_use]
    pub fn insecure(mut self) -> Self {
        self.insecure = true;
        self
    }

    /// Names the bucket in the host (`bucket.host`) and not in the path.
    #[must_use]
    pub fn virtual_hosted(mut self) -> Self {
        self.virtual_hosted = true;
        self
    }

    /// Opens without asking whether the store honours conditional writes. It saves six requests, and
    /// is sound only where somebody else has asked (`fencelock doctor`).
    #[must_use]
    pub fn without_probe(mut self) -> Self {
        self.probe = false;
        self
    }

    /// Connects to a place, and asks whether conditions are honoured there.
    pub(super) async fn link(&self, place: &Place) -> Result<Link> {
        let store = match place.kind {
            Kind::S3 => self.s3(place).await?,
            Kind::Google => self.google(place).await?,
            Kind::Azure => self.azure(place).await?,
        };
        let linked = self
            .probed(Link::new(store, &place.prefix, &place.shown()))
            .await;
        match linked {
            // The client then asks the machine for a role, and says only that nobody answered.
            Err(error)
                if place.kind == Kind::S3
                    && error.kind() == ErrorKind::Unavailable
                    && self.has_no_keys() =>
            {
                Err(Error::unavailable(
                    "no credentials for the object store: the environment has no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and this machine no role that could be asked for",
                )
                .with_source(error))
            }
            linked => linked,
        }
    }

    /// A link to a store of the caller's own, below `prefix`.
    pub(super) async fn link_to(&self, store: Arc<dyn ObjectStore>, prefix: &str) -> Result<Link> {
        let shown = store.to_string();
        let prefix = prefix.trim_matches('/');
        if !prefix.is_empty() {
            // The same rule as for a key.
            Link::new(Arc::clone(&store), "", &shown).path(prefix)?;
        }
        self.probed(Link::new(store, prefix, &shown)).await
    }

    /// True where neither these options nor the environment say with which credentials to go, so that
    /// only a role of the machine is left.
    fn has_no_keys(&self) -> bool {
        use AmazonS3ConfigKey as Key;
        let environment = AmazonS3Builder::from_env();
        let said = |key: Key| environment.get_config_value(&key).is_some();
        self.credentials.is_none()
            && !said(Key::AccessKeyId)
            && !said(Key::WebIdentityTokenFile)
            && !said(Key::ContainerCredentialsRelativeUri)
            && !said(Key::ContainerCredentialsFullUri)
    }

    async fn probed(&self, link: Link) -> Result<Link> {
        if self.probe {
            probe::conditions(&link).await?;
        }
        Ok(link)
    }

    async fn s3(&self, place: &Place) -> Result<Arc<dyn ObjectStore>> {
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(&place.bucket)
            .with_retry(no_retries())
            // One DELETE is one request, of one key.
            .with_disable_bulk_delete(true);
        let said = |key| builder.get_config_value(&key);
        let endpoint = self
            .endpoint
            .clone()
            .or_else(|| said(AmazonS3ConfigKey::S3Endpoint))
            .or_else(|| said(AmazonS3ConfigKey::Endpoint));
        let allow = said(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp));
        let insecure = self.insecure || allow.is_some_and(|allow| allow == "true" || allow == "1");
        let client = self.client(endpoint.as_deref(), insecure).await?;
        builder = builder.with_client_options(client);
        if let Some(endpoint) = endpoint {
            // Of the two that the environment can set, this one has precedence.
            builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, endpoint);
        }
        if let Some(region) = &self.region {
            builder = builder.with_region(region);
        }
        if self.virtual_hosted {
            builder = builder.with_virtual_hosted_style_request(true);
        }
        if let Some(credentials) = &self.credentials {
            // Not the environment's token with these.
            let given = AwsCredential {
                key_id: credentials.key_id.clone(),
                secret_key: credentials.secret.clone(),
                token: credentials.session_token.clone(),
            };
            builder = builder.with_credentials(Arc::new(StaticCredentialProvider::new(given)));
        }
        let store = builder.build().map_err(|error| unbuilt(&error))?;
        Ok(Arc::new(store))
    }

    #[cfg(not(feature = "object_store-gcp"))]
    #[expect(clippy::unused_async, reason = "as where the feature is on")]
    async fn google(&self, _: &Place) -> Result<Arc<dyn ObjectStore>> {
        Err(Error::unsupported(
            "this build has no Google Cloud Storage; enable the feature `object_store-gcp`",
        ))
    }

    #[cfg(feature = "object_store-gcp")]
    async fn google(&self, place: &Place) -> Result<Arc<dyn ObjectStore>> {
        self.refuse_of_s3("gs:")?;
        let store = ::object_store::gcp::GoogleCloudStorageBuilder::from_env()
            .with_bucket_name(&place.bucket)
            .with_retry(no_retries())
            .with_client_options(self.client(None, false).await?)
            .build()
            .map_err(|error| unbuilt(&error))?;
        Ok(Arc::new(store))
    }

    #[cfg(not(feature = "object_store-azure"))]
    #[expect(clippy::unused_async, reason = "as where the feature is on")]
    async fn azure(&self, _: &Place) -> Result<Arc<dyn ObjectStore>> {
        Err(Error::unsupported(
            "this build has no Azure Blob Storage; enable the feature `object_store-azure`",
        ))
    }

    #[cfg(feature = "object_store-azure")]
    async fn azure(&self, place: &Place) -> Result<Arc<dyn ObjectStore>> {
        self.refuse_of_s3("az:")?;
        let store = ::object_store::azure::MicrosoftAzureBuilder::from_env()
            .with_container_name(&place.bucket)
            .with_retry(no_retries())
            .with_client_options(self.client(None, false).await?)
            .build()
            .map_err(|error| unbuilt(&error))?;
        Ok(Arc::new(store))
    }

    #[cfg(any(feature = "object_store-gcp", feature = "object_store-azure"))]
    fn refuse_of_s3(&self, scheme: &str) -> Result<()> {
        for (given, option) in [
            (self.endpoint.is_some(), "endpoint"),
            (self.region.is_some(), "region"),
            (self.virtual_hosted, "virtual_hosted"),
            (self.credentials.is_some(), "credentials"),
        ] {
            if given {
                return Err(Error::invalid(format!(
                    "the option is for s3:, and {scheme} has none such"
                ))
                .with("option", option));
            }
        }
        Ok(())
    }

    async fn client(&self, endpoint: Option<&str>, insecure: bool) -> Result<ClientOptions> {
        // Where the program has chosen a provider already, that one is used.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut allow_http = false;
        if let Some(endpoint) = endpoint {
            let plaintext = url::check_endpoint(endpoint)?;
            if plaintext && !insecure && !url::is_loopback(endpoint) {
                return Err(Error::invalid(
                    "the endpoint is of another host and without TLS; use https://, or say insecure=true",
                )
                .with("endpoint", endpoint));
            }
            allow_http = plaintext;
        }
        let mut client = ClientOptions::new()
            .with_allow_http(allow_http)
            .with_connect_timeout(CONNECT_LIMIT)
            // Each request has a limit of its own, by what it carries.
            .with_timeout_disabled();
        if let Some(path) = &self.ca {
            let pem = settings::read_pem(path).await?;
            let certificates = Certificate::from_pem_bundle(&pem).map_err(|e| {
                Error::invalid("the file of a certificate is not in PEM form")
                    .with("path", path.display())
                    .with_source(e)
            })?;
            for certificate in certificates {
                client = client.with_root_certificate(certificate);
            }
        }
        Ok(client)
    }
}

/// Nothing is repeated behind our back: see [`connect`](super::connect).
fn no_retries() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig::default(),
        max_retries: 0,
        retry_timeout: CONNECT_LIMIT,
    }
}

/// Settings that the client did not take. Its words may hold their values.
fn unbuilt(error: &::object_store::Error) -> Error {
    let _ = error;
    Error::invalid(
        "the settings of the object store are not complete or not valid; see the environment variables of its credentials",
    )
}
