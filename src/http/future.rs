//! The answer to come.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::Response;

use super::body::ResponseBody;

/// The answer of a [`FencingService`](super::FencingService).
///
/// Boxed: raising a watermark is a boxed future already, and dwarfs the allocation. Dropping it
/// drops the handler's future first and then gives up the resource, or the place in its line.
#[must_use = "futures do nothing unless polled"]
pub struct ResponseFuture<B, E> {
    work: Work<B, E>,
}

type Work<B, E> = Pin<Box<dyn Future<Output = Result<Response<ResponseBody<B>>, E>> + Send>>;

impl<B, E> ResponseFuture<B, E> {
    pub(super) fn new(
        work: impl Future<Output = Result<Response<ResponseBody<B>>, E>> + Send + 'static,
    ) -> Self {
        Self {
            work: Box::pin(work),
        }
    }
}

impl<B, E> Future for ResponseFuture<B, E> {
    type Output = Result<Response<ResponseBody<B>>, E>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.work.as_mut().poll(context)
    }
}

impl<B, E> fmt::Debug for ResponseFuture<B, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
