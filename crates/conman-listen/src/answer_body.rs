//! The body of an answer, whose request is open until the body has ended.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use conman_listen::OpenRequest;
use hyper::body::{Frame, SizeHint};

pub(super) struct Answer {
    pub(super) body: Body,
    pub(super) _open: Option<OpenRequest>,
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
