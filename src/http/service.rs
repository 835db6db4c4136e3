//! A service behind the fence.

use std::future::poll_fn;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::body::ResponseBody;
use super::future::ResponseFuture;
use super::layer::FencingLayer;

/// A service whose requests a [`FencingLayer`] lets in.
#[derive(Clone, Debug)]
pub struct FencingService<S> {
    inner: S,
    layer: FencingLayer,
}

impl<S> FencingService<S> {
    /// `inner` behind `layer`.
    pub fn new(inner: S, layer: FencingLayer) -> Self {
        Self { inner, layer }
    }
}

impl<S, Q, B> Service<Request<Q>> for FencingService<S>
where
    S: Service<Request<Q>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    Q: Send + 'static,
    B: Body<Data = Bytes>,
{
    type Response = Response<ResponseBody<B>>;
    type Error = S::Error;
    type Future = ResponseFuture<B, S::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let (layer, mut inner) = (self.layer.clone(), self.inner.clone());
        ResponseFuture::new(async move {
            let (mut parts, body) = request.into_parts();
            let admitted = match layer.admit(&parts).await {
                Ok(admitted) => admitted,
                Err(problem) => return Ok(problem.response_to(&parts.headers)),
            };
            if let Some(shown) = admitted.shown {
                parts.extensions.insert(shown);
            }
            // Before the handler's future, so that it is dropped after it.
            let held = admitted.held;
            poll_fn(|context| inner.poll_ready(context)).await?;
            let response = inner.call(Request::from_parts(parts, body)).await?;
            Ok(response.map(|body| ResponseBody::of_handler(body, held)))
        })
    }
}
