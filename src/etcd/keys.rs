//! Where things are in etcd.

use crate::name::{LockName, ResourceName};

/// The keys of one store: all begin with its prefix.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    prefix: String,
}

impl Keys {
    pub(super) fn new(prefix: &str) -> Self {
        Self {
            prefix: prefix.to_owned(),
        }
    }

    /// The identity of the data.
    pub(super) fn realm(&self) -> String {
        format!("{}realm", self.prefix)
    }

    /// The record of a name.
    pub(super) fn record(&self, name: &LockName) -> String {
        format!("{}lock/{}", self.prefix, name.encoded())
    }

    /// What all records begin with.
    pub(super) fn records(&self) -> String {
        format!("{}lock/", self.prefix)
    }

    /// What the keys of all holders of a name begin with. An encoded name holds no slash, so that
    /// no name's holders are among another's.
    pub(super) fn holders(&self, name: &LockName) -> String {
        format!("{}live/{}/", self.prefix, name.encoded())
    }

    /// The watermark of a resource, whose value is at its own name.
    pub(super) fn fence(&self, resource: &ResourceName) -> String {
        format!("{}fence/{}", self.prefix, resource.encoded())
    }

    /// True where a key is among this store's own.
    pub(super) fn owns(&self, key: &str) -> bool {
        key.starts_with(&self.prefix)
    }
}
