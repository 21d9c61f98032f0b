//! Bytes between a session's connection and its target.

use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional_with_sizes};

use super::meters;
use super::shared_stream::SharedStream;

/// Buffer of each direction.
const BUFFER_BYTES: usize = 32 << 10;

/// Copies until both sides have ended, or one has failed.
pub(super) async fn run(mut client: impl AsyncRead + AsyncWrite + Unpin, mut target: SharedStream) {
    let copied =
        copy_bidirectional_with_sizes(&mut client, &mut target, BUFFER_BYTES, BUFFER_BYTES).await;
    if let Ok((up, down)) = copied {
        meters::bytes("to_target").increment(up);
        meters::bytes("to_session").increment(down);
    }
}
