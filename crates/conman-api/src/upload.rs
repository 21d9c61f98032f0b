//! Bodies of any size, piece by piece.

use std::io;
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::{Stream, StreamExt as _};

/// Longest pause within an upload.
const PIECE_PATIENCE: Duration = Duration::from_secs(60);

/// How much is still read of an upload that has failed, so that its sender can read the answer
/// before the connection is closed.
const DRAINED_BYTES: usize = 16 << 20;
const DRAIN_PATIENCE: Duration = Duration::from_secs(5);

/// The body in pieces; a pause that is too long ends it with an error.
pub(crate) fn pieces(body: Body) -> impl Stream<Item = io::Result<Bytes>> {
    futures_util::stream::unfold(body.into_data_stream(), |mut body| async {
        let piece = match tokio::time::timeout(PIECE_PATIENCE, body.next()).await {
            Ok(piece) => piece?.map_err(io::Error::other),
            Err(_) => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no data arrived for {PIECE_PATIENCE:?}"),
            )),
        };
        Some((piece, body))
    })
}

/// Reads some of the rest: the answer matters more.
pub(crate) async fn drain(mut pieces: impl Stream<Item = io::Result<Bytes>> + Unpin) {
    let drained = async {
        let mut left = DRAINED_BYTES;
        while let Some(Ok(piece)) = pieces.next().await
            && left > piece.len()
        {
            left -= piece.len();
        }
    };
    let _ = tokio::time::timeout(DRAIN_PATIENCE, drained).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_upload_that_goes_silent_ends_with_an_error() {
        let silent = futures_util::stream::iter([Ok::<_, io::Error>("a piece")]);
        let silent = silent.chain(futures_util::stream::pending());
        let mut pieces = Box::pin(pieces(Body::from_stream(silent)));
        assert_eq!(
            pieces.next().await.expect("a piece").expect("whole"),
            "a piece"
        );
        let error = pieces.next().await.expect("an end").expect_err("silence");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
