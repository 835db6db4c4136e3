//! What the layer hands to the handler.

use std::sync::{Arc, Weak};

use super::section::Held;
use crate::error::Result;
use crate::fence::{Fence, Fencing};
use crate::name::ResourceName;
use crate::token::FencingToken;

/// The fence that a request showed, and the resource that it showed it for. The layer puts it into
/// the request's extensions; in axum a handler takes it as `Extension<ShownFence>`.
///
/// It is accepted wherever a fence is: `store.put(shown.resource(), body, &shown)`,
/// `admit(&transaction, shown.resource(), &shown)`. In [`pass`](super::FencingLayer::pass) mode
/// nothing has been checked until that was done.
#[derive(Clone, Debug)]
pub struct ShownFence {
    resource: ResourceName,
    fence: Fence,
    held: Weak<Held>,
}

impl ShownFence {
    pub(super) fn new(resource: ResourceName, fence: Fence, held: Option<&Arc<Held>>) -> Self {
        Self {
            resource,
            fence,
            held: held.map(Arc::downgrade).unwrap_or_default(),
        }
    }

    /// The resource.
    #[must_use]
    pub fn resource(&self) -> &ResourceName {
        &self.resource
    }

    /// The fence.
    #[must_use]
    pub fn fence(&self) -> &Fence {
        &self.fence
    }

    /// In [`hold`](super::FencingLayer::hold) mode, keeps the resource held until the answer is
    /// dropped too: for work that goes on after the handler has returned or was cancelled, a spawned
    /// task or a blocking call. `None` in the other mode, and once the resource is no longer held.
    #[must_use = "the resource is kept as long as this value lives"]
    pub fn keep(&self) -> Option<Kept> {
        self.held.upgrade().map(|held| Kept { _held: held })
    }
}

impl Fencing for ShownFence {
    fn to_fence(&self) -> Result<Fence> {
        Ok(self.fence.clone())
    }
    fn refused(&self, _: FencingToken) {}
}

impl Fencing for &ShownFence {
    fn to_fence(&self) -> Result<Fence> {
        Ok(self.fence.clone())
    }
    fn refused(&self, _: FencingToken) {}
}

/// Keeps a resource held; see [`ShownFence::keep`].
#[derive(Debug)]
pub struct Kept {
    _held: Arc<Held>,
}
