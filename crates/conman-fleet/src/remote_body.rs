//! The answers of other nodes.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use conman_core::{Closing, error_chain};
use conman_peer::PeerBody;
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt as _, Limited};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::Passage;
use crate::lost_nodes::becomes_lost;
use crate::passage::closes;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Time for a small body, once the head has arrived: the node's liveness is not checked then.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// The body of another node's answer; ends with an error when that node is lost. A frozen node closes
/// no connection, and the next bytes of its log may be an hour away. An endless one also ends so when this
/// node leaves.
pub struct RemoteBody {
    body: PeerBody,
    /// Returns why the body ends early.
    ends: Pin<Box<dyn Future<Output = &'static str> + Send>>,
}

impl RemoteBody {
    pub(crate) fn new(
        body: PeerBody,
        mut lost: watch::Receiver<Option<Closing>>,
        mut passage: Option<Passage>,
        is_endless: bool,
    ) -> Self {
        let ends = Box::pin(async move {
            tokio::select! {
                () = becomes_lost(&mut lost) => "the session's node is lost",
                () = closes(&mut passage), if is_endless => "this node leaves, connect again",
            }
        });
        Self { body, ends }
    }
}

impl std::fmt::Debug for RemoteBody {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("RemoteBody").finish_non_exhaustive()
    }
}

impl Body for RemoteBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let why = ready!(self.ends.as_mut().poll(context));
        Poll::Ready(Some(Err(why.into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Reads a body of at most `max_bytes` as JSON.
///
/// # Errors
/// It is longer, takes too long, breaks off, or is not such JSON; as text.
pub async fn read_json<T, B>(body: B, max_bytes: usize) -> Result<T, String>
where
    T: DeserializeOwned,
    B: Body,
    B::Error: Into<BoxError>,
{
    let reading = timeout(BODY_TIMEOUT, Limited::new(body, max_bytes).collect()).await;
    let body = reading.map_err(|_| "its answer took too long".to_owned())?;
    let body = body.map_err(|error| error_chain(&*error))?.to_bytes();
    serde_json::from_slice(&body).map_err(|error| error_chain(&error))
}
