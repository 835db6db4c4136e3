//! Fencing for HTTP and gRPC: a tower layer for servers ([`FencingLayer`]), and what their clients
//! send ([`show`]) and hear ([`check_answer`]).
//!
//! A client that holds a lock sends its fence in two [headers]. The layer judges it for the resource
//! that your function names, and answers whoever is stale with a [`Problem`]: 412, with both numbers.
//!
//! **A check in front of a handler is not a fence.** A handler that was let in with 33 can stall, 34
//! can come and go, and then the effect of 33 lands. So there are two modes, and neither only checks:
//!
//! - [`FencingLayer::pass`] hands the fence to the handler as a [`ShownFence`], and the handler shows it
//!   to a storage that checks it with the write: [`Fenced::put`](crate::Fenced::put), or `admit` in
//!   its own database transaction. Sound across processes, and the one to choose.
//! - [`FencingLayer::hold`] raises the resource's watermark and lets one request at a time into the
//!   handler, until its response has ended. Sound for state *of this process*; anything else that the
//!   handler changes is only advised.
//!
//! The layer fits any service of [`http::Request`]s: axum, hyper, tonic.
//!
//! ```
//! use axum::{Extension, Router, routing::put};
//! use fencelock::Fenced;
//! use fencelock::http::{FencingLayer, Problem, ShownFence, writes_by_path};
//! use fencelock::memory::FencedMemory;
//!
//! let reports = Fenced::new(FencedMemory::new());
//! let save = |Extension(shown): Extension<ShownFence>, body: String| async move {
//!     match reports.put(shown.resource(), body, &shown).await {
//!         Ok(_) => Ok("saved"),
//!         Err(error) => Err(Problem::of(&error).response::<axum::body::Body>()),
//!     }
//! };
//! let app: Router = Router::new()
//!     .route("/reports/{day}", put(save))
//!     .layer(FencingLayer::pass(writes_by_path));
//! ```
//!
//! and its client, with whatever HTTP library:
//!
//! ```
//! use fencelock::{Locks, http::show, memory::MemoryStore};
//!
//! # async fn example() -> fencelock::Result<()> {
//! let guard = Locks::new(MemoryStore::new()).acquire("reports").await?;
//! let mut request = http::Request::put("http://reports.internal/reports/today");
//! if let Some(headers) = request.headers_mut() {
//!     show(headers, &guard)?;
//! }
//! # Ok(()) }
//! # pollster::block_on(example()).unwrap();
//! ```
//!
//! Not here: who may write at all. A token orders honest clients, so put authentication outside
//! this layer.

mod body;
mod client;
mod future;
#[cfg(feature = "fuzzing")]
mod fuzz;
pub mod headers;
mod layer;
mod problem;
mod resource;
mod section;
mod service;
mod shown;

pub use ::http;
pub use body::ResponseBody;
pub use client::{check_answer, refusal, show};
pub use future::ResponseFuture;
#[cfg(feature = "fuzzing")]
pub(crate) use fuzz::{headers as fuzz_headers, problem as fuzz_problem};
pub use layer::{FencingLayer, Tokenless};
pub use problem::Problem;
pub use resource::writes_by_path;
pub use service::FencingService;
pub use shown::{Kept, ShownFence};
