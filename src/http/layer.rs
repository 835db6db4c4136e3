//! How a service is fenced: which requests, over which storage, in which mode.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use tower_layer::Layer;

use super::headers::fence_of;
use super::problem::Problem;
use super::section::{Held, Sections};
use super::service::FencingService;
use super::shown::ShownFence;
use crate::clock::unix_micros;
use crate::driver::within;
use crate::error::{Error, ErrorKind, Result};
use crate::fence::{Fence, Fenced};
use crate::name::ResourceName;
use crate::token::check_jump;

/// How long a request may wait for its turn at a resource.
const WAIT: Duration = Duration::from_secs(10);

/// How long the storage of the watermarks may take.
const STORE_LIMIT: Duration = Duration::from_secs(10);

type ResourceOf = dyn Fn(&Parts) -> Result<Option<ResourceName>> + Send + Sync;

/// Fences a service: see [`http`](mod@super) for the two modes.
///
/// Cheap to clone; clones share the resources that are held. Two layers that are built apart do not:
/// build one for each storage of watermarks, and clone it.
///
/// The layer is always ready. The service inside is asked for readiness once a request is let in, so
/// that one that waits for its turn reserves nothing. It runs inside a tokio runtime, as servers of
/// hyper, axum and tonic do.
#[derive(Clone)]
pub struct FencingLayer {
    mode: Mode,
    resource_of: Arc<ResourceOf>,
    tokenless: Tokenless,
    wait: Duration,
    store_limit: Duration,
}

#[derive(Clone, Debug)]
enum Mode {
    Hold { store: Fenced, sections: Sections },
    Pass { first: Option<Fenced> },
}

/// What becomes of a request that shows no token, for a resource that is fenced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tokenless {
    /// It is refused: 428.
    #[default]
    Refuse,
    /// It is let through unchecked, without a [`ShownFence`] and without waiting. For reads, or while
    /// clients are being moved over one by one: meanwhile nothing stops a writer that shows nothing.
    LetThrough,
}

impl FencingLayer {
    /// Hands the fence to the handler, as a [`ShownFence`] in the request's extensions, to be shown to
    /// the storage that the handler writes to. The layer itself refuses only what is malformed or
    /// missing; see [`raise_first`](Self::raise_first).
    ///
    /// `resource_of` names what a request is for, `None` where it is not fenced;
    /// [`writes_by_path`](super::writes_by_path) is one such function. Its error is answered as a
    /// [`Problem`].
    ///
    /// This is the mode that is sound whatever stalls, since the check and the write are one step of
    /// that storage (S2). Nothing can see to it that a handler uses what it is handed.
    pub fn pass(
        resource_of: impl Fn(&Parts) -> Result<Option<ResourceName>> + Send + Sync + 'static,
    ) -> Self {
        Self::new(Mode::Pass { first: None }, resource_of)
    }

    /// Raises the resource's watermark in `store`, and then lets one request at a time into the
    /// handler, until its response's body has ended or was dropped.
    ///
    /// So an older handler's effect is there before a newer one starts, or it never starts. What this
    /// covers is **one process**: the handlers behind this layer and its clones. It is advisory for
    /// all else, above all for a handler of another replica that stalls between the check and its
    /// write, and for what a handler asks of other servers. Use [`pass`](Self::pass) there.
    ///
    /// - A handler that panics, is cancelled, or whose client goes away gives the resource up. Work
    ///   that it spawned goes on: give it a [`ShownFence::keep`].
    /// - Others wait in the order of arrival, 1024 at the most and for [`wait`](Self::wait), and then
    ///   get 503. So a slow reader of a long response keeps others out.
    /// - A resource that nobody is at costs no memory.
    /// - Sequences are not looked at: a duplicate of an earlier request of the same holder runs again
    ///   (S7 is up to a storage that the handler shows the [`ShownFence`] to).
    ///
    /// The raise reads the resource's value, so let the watermarks have names, or a storage, of their
    /// own where values are large. A name that the storage cannot hold is answered with 500.
    pub fn hold(
        store: Fenced,
        resource_of: impl Fn(&Parts) -> Result<Option<ResourceName>> + Send + Sync + 'static,
    ) -> Self {
        let sections = Sections::default();
        Self::new(Mode::Hold { store, sections }, resource_of)
    }

    fn new(
        mode: Mode,
        resource_of: impl Fn(&Parts) -> Result<Option<ResourceName>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            mode,
            resource_of: Arc::new(resource_of),
            tokenless: Tokenless::default(),
            wait: WAIT,
            store_limit: STORE_LIMIT,
        }
    }

    /// In [`pass`](Self::pass) mode, raises the watermark in `store` before the handler: whoever is
    /// stale already is refused early, before the handler does what no storage guards. One more
    /// request to `store`, which may be the one that the handler writes to. In
    /// [`hold`](Self::hold) mode, changes the storage of the watermarks.
    #[must_use]
    pub fn raise_first(mut self, with: Fenced) -> Self {
        match &mut self.mode {
            Mode::Hold { store, .. } => *store = with,
            Mode::Pass { first } => *first = Some(with),
        }
        self
    }

    /// What becomes of requests without a token; they are refused by default.
    #[must_use]
    pub fn tokenless(mut self, policy: Tokenless) -> Self {
        self.tokenless = policy;
        self
    }

    /// In [`hold`](Self::hold) mode, how long a request may wait for its turn; 10 s by default.
    #[must_use]
    pub fn wait(mut self, limit: Duration) -> Self {
        self.wait = limit;
        self
    }

    /// How long the storage of the watermarks may take until the answer is 503; 10 s by default.
    #[must_use]
    pub fn store_limit(mut self, limit: Duration) -> Self {
        self.store_limit = limit;
        self
    }

    /// Lets a request in, with what it showed and the resource that it holds.
    pub(super) async fn admit(&self, parts: &Parts) -> Result<Admitted, Problem> {
        let problem = |error: Error| {
            let problem = Problem::of(&error);
            if problem.status().is_server_error() {
                tracing::warn!(?error, "a request cannot be fenced");
            } else {
                tracing::debug!(%error, "a fenced request is refused");
            }
            problem
        };
        let Some(resource) = (self.resource_of)(parts).map_err(problem)? else {
            return Ok(Admitted::default());
        };
        let Some(fence) = fence_of(&parts.headers).map_err(problem)? else {
            return match self.tokenless {
                Tokenless::LetThrough => Ok(Admitted::default()),
                Tokenless::Refuse => Err(Problem::token_required()),
            };
        };
        let held = match &self.mode {
            // First the turn and then the raise: what was judged before a wait is old after it.
            Mode::Hold { store, sections } => {
                let held = sections
                    .enter(&resource, self.wait)
                    .await
                    .map_err(problem)?;
                self.raise(store, &resource, &fence)
                    .await
                    .map_err(problem)?;
                Some(Arc::new(held))
            }
            Mode::Pass { first: Some(store) } => {
                self.raise(store, &resource, &fence)
                    .await
                    .map_err(problem)?;
                None
            }
            Mode::Pass { first: None } => None,
        };
        let shown = ShownFence::new(resource, fence, held.as_ref());
        Ok(Admitted {
            shown: Some(shown),
            held,
        })
    }

    /// Raises, and says of a failure what it means for the request, which is not handled then.
    async fn raise(&self, store: &Fenced, resource: &ResourceName, fence: &Fence) -> Result<()> {
        let raise = within(self.store_limit, store.raise(resource, fence)).await;
        let error = match raise {
            Some(Ok(_)) => return Ok(()),
            Some(Err(error)) => error,
            None => Error::unavailable("the storage of the watermarks did not answer in time")
                .with("limit_ms", self.store_limit.as_millis()),
        };
        Err(match error.kind() {
            // The watermark may have been raised, which a repeat does again.
            ErrorKind::Indeterminate => error.into_kind(ErrorKind::Unavailable),
            // A token out of bounds is the client's mistake, all else is one of the server's.
            ErrorKind::Invalid => match self.out_of_bounds(store, resource, fence).await {
                Some(error) => error,
                None => error.into_kind(ErrorKind::Unsupported),
            },
            _ => error,
        })
    }

    async fn out_of_bounds(
        &self,
        store: &Fenced,
        resource: &ResourceName,
        fence: &Fence,
    ) -> Option<Error> {
        let seen = within(self.store_limit, store.get(resource)).await?.ok()?;
        let last = seen.watermark.map(|watermark| watermark.token);
        check_jump(last, fence.token(), unix_micros()).err()
    }
}

/// A request that was let in.
#[derive(Debug, Default)]
pub(super) struct Admitted {
    /// `None` where it is not fenced.
    pub(super) shown: Option<ShownFence>,
    pub(super) held: Option<Arc<Held>>,
}

impl<S> Layer<S> for FencingLayer {
    type Service = FencingService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        FencingService::new(inner, self.clone())
    }
}

impl fmt::Debug for FencingLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FencingLayer")
            .field("mode", &self.mode)
            .field("tokenless", &self.tokenless)
            .field("wait", &self.wait)
            .field("store_limit", &self.store_limit)
            .finish_non_exhaustive()
    }
}
