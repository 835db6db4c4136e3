//! Fenced storage for scripts: `put`, `get`, `raise`, `delete`, `rebind`, each in a file of its own.

mod delete;
mod get;
mod put;
mod raise;
mod rebind;
mod shown;

use fencelock::fence::{Snapshot, Written};
use fencelock::lease::Finding;
use fencelock::open::without_secrets;
use fencelock::{Fence, Fenced, Fencing, ResourceName};
use serde_json::json;

pub(crate) use self::delete::delete;
pub(crate) use self::get::get;
pub(crate) use self::put::{Source, put};
pub(crate) use self::raise::raise;
pub(crate) use self::rebind::rebind;
pub(crate) use self::shown::Shown;
use crate::failure::{Failure, Result};
use crate::output;

/// The demo's values are one line.
const DEMO_VALUE_MAX_BYTES: u64 = 4096;

/// A fenced resource: a storage, and a name in it.
#[derive(Debug)]
pub(crate) struct Destination {
    storage: Fenced,
    resource: ResourceName,
    /// As the user gave it, without what may be secret: for messages.
    shown: String,
    in_files: bool,
}

impl Destination {
    /// Opens a path, `file:///path`, or a store URL with `?key=NAME`.
    pub(crate) async fn open(dest: &str) -> Result<Self> {
        let mut shown = without_secrets(dest);
        let in_files =
            !dest.contains("://") || dest.starts_with("file:") || dest.starts_with("sqlite:");
        let (storage, resource) = fencelock::open::destination(dest).await.map_err(|error| {
            Failure::opening(&error, in_files).within(&format!("destination {shown}"))
        })?;
        // A path and an object's URL end with the resource; a store's URL has it among its options.
        if !shown.ends_with(resource.as_str()) {
            shown = format!("{shown} key={resource}");
        }
        Ok(Self {
            storage,
            resource,
            shown,
            in_files,
        })
    }

    /// Moves the watermark up, so that no older holder can write there any more.
    pub(crate) async fn raise(&self, fence: impl Fencing) -> Result<Snapshot> {
        let raised = self.storage.raise(&self.resource, fence).await;
        raised.map_err(|error| self.failed(error))
    }

    /// Replaces the value, for the demo, which looks at the error itself.
    pub(crate) async fn put(&self, value: String, fence: &Fence) -> fencelock::Result<Written> {
        self.storage.put(&self.resource, value, fence).await
    }

    /// The whole value; empty where there is none. For the demo.
    pub(crate) async fn bytes(&self) -> Result<Vec<u8>> {
        let snapshot = self.storage.get(&self.resource).await;
        let snapshot = snapshot.map_err(|error| self.failed(error))?;
        let bytes = snapshot
            .value
            .map(|value| value.into_bytes(DEMO_VALUE_MAX_BYTES));
        Ok(bytes.transpose()?.unwrap_or_default().to_vec())
    }

    /// What an operator should know of it.
    pub(crate) async fn probe(&self) -> Result<Vec<Finding>> {
        self.storage
            .probe()
            .await
            .map_err(|error| self.failed(error))
    }

    fn failed(&self, error: fencelock::Error) -> Failure {
        Failure::working(&error, self.in_files).within(&self.shown)
    }

    /// Prints the answer to a write.
    fn report(&self, shown: &Shown, written: &Written, json: bool) -> Result<()> {
        if json {
            output::object(&json!({
                "resource": self.resource.as_str(),
                "token": output::token(shown.token()),
                "watermark": output::token(written.watermark.token),
                "applied": written.applied,
            }))?;
        }
        Ok(())
    }
}
