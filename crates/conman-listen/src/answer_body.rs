//! The body of an answer, whose request is open until the body has ended.

use std::pin::Pin;
use std::task::{Context, Poll};

use http_body::{Body, Frame, SizeHint};

use crate::OpenRequest;

/// A body that keeps its request open.
#[derive(Debug)]
pub struct AnswerBody<B> {
    body: B,
    _open: Option<OpenRequest>,
}

impl<B> AnswerBody<B> {
    /// `open`: `None` if the end of the client's input is to end the request.
    pub fn new(body: B, open: Option<OpenRequest>) -> Self {
        Self { body, _open: open }
    }
}

impl<B: Body + Unpin> Body for AnswerBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
