//! A streamed answer of another node, which ends with an error when that node is lost.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::BoxError;
use bytes::Bytes;
use conman_core::Closing;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::sync::watch;

/// A frozen node closes no connection, and the next bytes of its log may be an hour away.
pub(super) struct UntilGone {
    body: Incoming,
    gone: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl UntilGone {
    pub(super) fn new(body: Incoming, mut gone: watch::Receiver<Option<Closing>>) -> Self {
        let gone = Box::pin(async move {
            let _ = gone.wait_for(Option::is_some).await;
        });
        Self { body, gone }
    }
}

impl Body for UntilGone {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        ready!(self.gone.as_mut().poll(context));
        Poll::Ready(Some(Err("the session's node is gone".into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
