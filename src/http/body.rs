//! The answer's body, which keeps the resource held until it has ended.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::section::Held;

pin_project! {
    /// The body of a handler's answer, or of a [`Problem`](super::Problem).
    ///
    /// In [`hold`](super::FencingLayer::hold) mode the resource stays held until the body has ended
    /// or is dropped, since what a handler streams may still be its effect.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        // Before `held`: a body that is dropped ends before the resource is given up.
        #[pin]
        content: Content<B>,
        held: Option<Arc<Held>>,
    }
}

pin_project! {
    #[derive(Debug)]
    #[project = Projected]
    enum Content<B> {
        Handlers { #[pin] body: B },
        Problems { text: Option<Bytes> },
    }
}

impl<B> ResponseBody<B> {
    pub(super) fn of_handler(body: B, held: Option<Arc<Held>>) -> Self {
        Self {
            content: Content::Handlers { body },
            held,
        }
    }
}

/// A body that is there whole, as a problem's.
impl<B> From<Bytes> for ResponseBody<B> {
    fn from(text: Bytes) -> Self {
        Self {
            content: Content::Problems {
                text: (!text.is_empty()).then_some(text),
            },
            held: None,
        }
    }
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let mut this = self.project();
        let frame = match this.content.as_mut().project() {
            Projected::Handlers { body } => ready!(body.poll_frame(context)),
            Projected::Problems { text } => text.take().map(|text| Ok(Frame::data(text))),
        };
        // Whoever polls may stop at the last frame, and keep the value.
        if !matches!(frame, Some(Ok(_))) || this.content.is_end_stream() {
            *this.held = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.content.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Handlers { body } => body.size_hint(),
            Content::Problems { text } => {
                let bytes = text.as_ref().map_or(0, Bytes::len);
                SizeHint::with_exact(u64::try_from(bytes).unwrap_or(u64::MAX))
            }
        }
    }
}

impl<B: Body> Content<B> {
    fn is_end_stream(&self) -> bool {
        match self {
            Self::Handlers { body } => body.is_end_stream(),
            Self::Problems { text } => text.is_none(),
        }
    }
}
