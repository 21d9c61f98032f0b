//! Carries a command's bytes between its descriptors and its channels.

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

use crate::OutputStream;
use crate::exec_channels::OUTPUT_CHUNK_BYTES;

/// Ends with the stream, or when nobody reads any more.
pub(crate) async fn carry_output<R: AsyncRead + Unpin>(
    from: Option<R>,
    stream: OutputStream,
    to: &mpsc::Sender<(OutputStream, Bytes)>,
) {
    let Some(mut from) = from else { return };
    let mut buffer = BytesMut::new();
    loop {
        buffer.reserve(OUTPUT_CHUNK_BYTES);
        match (&mut from)
            .take(OUTPUT_CHUNK_BYTES as u64)
            .read_buf(&mut buffer)
            .await
        {
            // A terminal reports its other end's closing as an error.
            Ok(0) | Err(_) => return,
            Ok(_) => {
                if to.send((stream, buffer.split().freeze())).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Ends when the input ends or the command reads no more; dropping `to` is the end of its input.
pub(crate) async fn carry_input<W: AsyncWrite + Unpin>(
    from: &mut mpsc::Receiver<Bytes>,
    to: Option<W>,
) {
    let Some(mut to) = to else {
        from.close();
        return;
    };
    while let Some(bytes) = from.recv().await {
        if to.write_all(&bytes).await.is_err() {
            from.close();
            return;
        }
    }
}
