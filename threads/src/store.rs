//! A lease store that renews and releases whatever it is shown, and says so.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use fencelock::lease::{
    AcquireRequest, Attempt, Durability, Expiry, Finding, LeaseRef, LockState, Pruned, Release,
    Renewal, StoreProfile, Ttl, Watch,
};
use fencelock::{FencingToken, LeaseStore, LockName, Result};
use tokio::sync::Notify;

#[derive(Debug)]
pub(crate) struct Agreeable {
    profile: StoreProfile,
    /// A lease of this name was renewed.
    awaited: LockName,
    pub(crate) renewed: Notify,
}

impl Agreeable {
    pub(crate) fn new(awaited: &LockName) -> Arc<Self> {
        let realm = String::new();
        Arc::new(Self {
            profile: StoreProfile::new("agreeable", realm, Durability::D0Memory, Expiry::Engine),
            awaited: awaited.clone(),
            renewed: Notify::new(),
        })
    }
}

#[async_trait]
impl LeaseStore for Agreeable {
    fn profile(&self) -> &StoreProfile {
        &self.profile
    }

    async fn renew(&self, leases: &[(LeaseRef, Ttl)]) -> Vec<Renewal> {
        shuttle::future::yield_now().await;
        if leases.iter().any(|(lease, _)| lease.name == self.awaited) {
            self.renewed.notify_one();
        }
        leases.iter().map(|_| Renewal::Renewed).collect()
    }

    async fn release(&self, _: &LeaseRef, _: Duration) -> Result<Release> {
        shuttle::future::yield_now().await;
        Ok(Release::Released)
    }

    async fn acquire(&self, _: &AcquireRequest) -> Result<Attempt> {
        unreachable!("no model acquires")
    }

    async fn watch(&self, _: &LockName) -> Result<Box<dyn Watch>> {
        unreachable!("no model watches")
    }

    async fn inspect(&self, _: &LockName) -> Result<Option<LockState>> {
        unreachable!("no model looks")
    }

    async fn list(&self, _: &str, _: Option<&LockName>, _: usize) -> Result<Vec<LockState>> {
        unreachable!("no model looks")
    }

    async fn break_lock(&self, _: &LockName) -> Result<Option<LockState>> {
        unreachable!("no model breaks")
    }

    async fn raise_floor(&self, _: &LockName, _: FencingToken, _: bool) -> Result<FencingToken> {
        unreachable!("no model raises")
    }

    async fn prune(&self, _: Duration) -> Result<Pruned> {
        unreachable!("no model prunes")
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        unreachable!("no model asks")
    }
}
