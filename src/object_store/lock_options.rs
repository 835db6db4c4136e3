//! What locks need to be told, besides how to reach the store.

use std::sync::Arc;
use std::time::Duration;

use ::object_store::ObjectStore;
use ::object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};

use super::lease::BucketStore;
use super::options::{Kind, ObjectOptions, Place};
use super::time::GRAIN;
use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::lease::Durability;

/// At first: the second that the store's times are rounded to, and two for the differences between
/// its servers.
const MARGIN: Duration = Duration::from_secs(3);

const MARGIN_MAX: Duration = Duration::from_secs(300);

/// The settings of locks.
#[derive(Clone, Debug)]
pub(super) struct LockSettings {
    /// Leases are judged by observation.
    pub(super) observe: bool,
    pub(super) margin: Duration,
    pub(super) clock: Clock,
    durability: Option<Durability>,
}

impl Default for LockSettings {
    fn default() -> Self {
        Self {
            observe: false,
            margin: MARGIN,
            clock: Clock::system(),
            durability: None,
        }
    }
}

impl LockSettings {
    /// What was said, or what is known of the store.
    pub(super) fn durability(&self, provider: Provider) -> Durability {
        self.durability.unwrap_or(match provider {
            Provider::Cloud => Durability::D3Failover,
            Provider::Unknown => Durability::D1ProcessCrash,
            Provider::Memory => Durability::D0Memory,
        })
    }
}

/// Who keeps the objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Provider {
    /// Amazon, Google or Microsoft, which answer once several places have it.
    Cloud,
    /// A server that speaks S3, or a store of the caller's own.
    Unknown,
    /// The client's own store in memory.
    Memory,
}

impl ObjectOptions {
    /// Judges leases by observation instead of by the store's clock: a grant has lapsed once *this*
    /// client has seen it unrenewed for its whole TTL. For stores whose servers' clocks may differ by
    /// more than the [margin](Self::clock_margin) or are set by hand. All clients of the locks have
    /// to do the same. A single try then finds a crashed holder's lock held, unless this client has
    /// watched it before; a wait ends a whole TTL after it began. For locks only.
    #[must_use]
    pub fn observe(mut self) -> Self {
        self.locks.observe = true;
        self
    }

    /// How much longer than its TTL a grant keeps others out: a second, to which the store's times
    /// are rounded, and as much as the clocks of two of its servers may differ; 3 s at first. All
    /// clients of the locks have to agree on it. For locks only.
    ///
    /// # Errors
    /// `Invalid` below 1 s or above 5 minutes.
    pub fn clock_margin(mut self, margin: Duration) -> Result<Self> {
        if margin < GRAIN || margin > MARGIN_MAX {
            return Err(
                Error::invalid("clock margin is out of range; expected 1 s to 5 min")
                    .with("clock_margin", format_args!("{margin:?}")),
            );
        }
        self.locks.margin = margin;
        Ok(self)
    }

    /// What the store's writes survive, which it does not tell: D3 is declared of the three cloud
    /// providers, and D1 of any other server, until its operator knows better. For locks only.
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.locks.durability = Some(durability);
        self
    }

    /// This host's clock: [`Clock::adjustable`] in tests. For locks only.
    #[must_use]
    pub fn clock(mut self, clock: Clock) -> Self {
        self.locks.clock = clock;
        self
    }

    /// Opens locks below `prefix` in a store of your own. Its retries, time limits and connections
    /// are its own matter: where it needs a runtime of yours, leases are lost when that is starved.
    ///
    /// # Errors
    /// As [`BucketStore::open`].
    pub async fn open_locks(
        self,
        store: Arc<dyn ObjectStore>,
        prefix: &str,
    ) -> Result<BucketStore> {
        let provider = match store.to_string().as_str() {
            "InMemory" => Provider::Memory,
            _ => Provider::Unknown,
        };
        let link = self.link_to(store, prefix).await?;
        BucketStore::start(&self, link, provider).await
    }

    /// True where no other server is named than Amazon's.
    fn is_amazon(&self) -> bool {
        let environment = AmazonS3Builder::from_env();
        let said = |key| environment.get_config_value(&key);
        let endpoint = self
            .endpoint
            .clone()
            .or_else(|| said(AmazonS3ConfigKey::S3Endpoint))
            .or_else(|| said(AmazonS3ConfigKey::Endpoint));
        endpoint.is_none_or(|endpoint| {
            let rest = endpoint.split_once("://").map_or("", |(_, rest)| rest);
            let host = rest.split(['/', ':']).next().unwrap_or_default();
            [".amazonaws.com", ".amazonaws.com.cn"]
                .iter()
                .any(|end| host.ends_with(end))
        })
    }

    pub(crate) async fn open_locks_at(self, place: Place) -> Result<BucketStore> {
        let provider = match place.kind {
            Kind::S3 if !self.is_amazon() => Provider::Unknown,
            _ => Provider::Cloud,
        };
        let link = self.link(&place).await?;
        let store = BucketStore::start(&self, link, provider).await?;
        // The connections of locks are made where the first one is asked for: a store that was
        // opened in the user's runtime must not have its renewals wait for that.
        let fresh = self.clone().without_probe().link(&place).await?;
        Ok(store.over(fresh))
    }
}
