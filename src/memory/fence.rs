//! Fenced values under one mutex: the check and the write are one locked section (S2).

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use bytes::Bytes;

use super::locked;
use crate::body::Body;
use crate::clock::unix_micros;
use crate::driver::off_thread;
use crate::error::Result;
use crate::fence::{Fence, FencedStore, Snapshot, Written};
use crate::lease::{Finding, Severity};
use crate::name::ResourceName;
use crate::token::{Admission, FencingToken, Intent, Watermark, judge};

/// The largest value that a [`FencedMemory`] takes: 1 GiB.
pub const VALUE_MAX_BYTES: u64 = 1 << 30;

/// Fenced values in the memory of this process, for a server that guards its own state.
///
/// Clones share the data. A body from a file is read whole, on a thread where it may block, and
/// refused above [`VALUE_MAX_BYTES`].
#[derive(Clone, Debug, Default)]
pub struct FencedMemory {
    resources: Arc<Mutex<HashMap<ResourceName, Resource>>>,
}

#[derive(Debug)]
struct Resource {
    watermark: Watermark,
    value: Option<Value>,
}

#[derive(Clone, Debug)]
struct Value {
    bytes: Bytes,
    writer: FencingToken,
}

impl FencedMemory {
    /// An empty storage.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Judges and applies in one locked section; `change` gets the resource that was admitted.
    fn admit<T>(
        &self,
        name: &ResourceName,
        fence: &Fence,
        intent: Intent,
        change: impl FnOnce(&mut Resource, bool) -> T,
    ) -> Result<T> {
        let mut resources = locked(&self.resources);
        let current = resources.get(name).map(|resource| &resource.watermark);
        let (watermark, applied) = match judge(current, fence, intent, unix_micros())? {
            Admission::Apply(watermark) => (watermark, true),
            Admission::Repeat(watermark) => (watermark, false),
        };
        let resource = resources.entry(name.clone()).or_insert_with(|| Resource {
            watermark: watermark.clone(),
            value: None,
        });
        resource.watermark = watermark;
        Ok(change(resource, applied))
    }

    fn write(&self, name: &ResourceName, value: Option<Value>, fence: &Fence) -> Result<Written> {
        self.admit(name, fence, Intent::Write, |resource, applied| {
            if applied {
                resource.value = value;
                Written::applied(resource.watermark.clone())
            } else {
                Written::repeated(resource.watermark.clone())
            }
        })
    }
}

impl Resource {
    fn snapshot(&self) -> Snapshot {
        Snapshot::new(
            self.value.as_ref().map(|value| value.bytes.clone().into()),
            Some(self.watermark.clone()),
            self.value.as_ref().map(|value| value.writer),
        )
    }
}

#[async_trait]
impl FencedStore for FencedMemory {
    async fn put(&self, resource: &ResourceName, body: Body, fence: &Fence) -> Result<Written> {
        // Before the section: reading a body may take long, and may fail.
        let bytes = if body.in_memory() {
            body.into_bytes(VALUE_MAX_BYTES)?
        } else {
            off_thread(move || body.into_bytes(VALUE_MAX_BYTES)).await??
        };
        let writer = fence.token();
        self.write(resource, Some(Value { bytes, writer }), fence)
    }

    async fn get(&self, resource: &ResourceName) -> Result<Snapshot> {
        Ok(match locked(&self.resources).get(resource) {
            Some(resource) => resource.snapshot(),
            None => Snapshot::new(None, None, None),
        })
    }

    async fn raise(&self, resource: &ResourceName, fence: &Fence) -> Result<Snapshot> {
        self.admit(resource, fence, Intent::Raise, |resource, _| {
            resource.snapshot()
        })
    }

    async fn delete(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        self.write(resource, None, fence)
    }

    async fn rebind(&self, resource: &ResourceName, fence: &Fence) -> Result<Written> {
        self.admit(resource, fence, Intent::Rebind, |resource, _| {
            Written::applied(resource.watermark.clone())
        })
    }

    async fn probe(&self) -> Result<Vec<Finding>> {
        Ok(vec![Finding::new(
            Severity::Warning,
            "durability",
            "values and watermarks live in this process only and end with it",
        )])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn a_value_above_the_limit_is_refused_and_nothing_raised() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(VALUE_MAX_BYTES + 1).unwrap();
        let (store, resource) = (FencedMemory::new(), "r".parse().unwrap());
        let fence = Fence::from(FencingToken::MIN);
        let put = store.put(&resource, Body::from_file(file).unwrap(), &fence);
        assert_eq!(
            pollster::block_on(put).unwrap_err().kind(),
            ErrorKind::Invalid
        );
        let seen = pollster::block_on(store.get(&resource)).unwrap();
        assert!(seen.watermark.is_none());
    }
}
