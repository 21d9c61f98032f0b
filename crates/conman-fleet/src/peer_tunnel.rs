//! A client's WebSocket to another node's API.

use std::io;
use std::time::Duration;

use conman_core::Closing;
use conman_peer::{FrameTracker, close_frame};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, copy, sink, split};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::Passage;
use crate::lost_nodes::becomes_lost;

/// Buffer of a tunnel between two nodes, in each direction.
const TUNNEL_BUFFER_BYTES: usize = 16 * 1024;

/// Time for the client to answer a Close frame.
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// Passes bytes on until one side ends, the other node is lost, or this node leaves: then the client gets
/// a Close frame.
pub(crate) async fn carry<C, N>(
    client: C,
    node: N,
    mut lost: watch::Receiver<Option<Closing>>,
    mut passage: Option<Passage>,
) where
    C: AsyncRead + AsyncWrite,
    N: AsyncRead + AsyncWrite,
{
    let (mut from_client, mut to_client) = split(client);
    let (mut from_node, mut to_node) = split(node);
    let up = async {
        let _: io::Result<u64> = copy(&mut from_client, &mut to_node).await;
        let _: io::Result<()> = to_node.shutdown().await;
        // The other direction ends the tunnel.
        std::future::pending::<bool>().await
    };
    let leaves = tokio::select! {
        leaves = down(&mut from_node, &mut to_client, &mut passage) => leaves.unwrap_or(false),
        leaves = up => leaves,
        // Bytes on the way to or from a lost node are lost in any case.
        () = becomes_lost(&mut lost) => false,
    };
    if leaves {
        let frame = close_frame(&Closing::service_restart("the node leaves, connect again"));
        let closing = async {
            to_client.write_all(&frame).await?;
            to_client.shutdown().await?;
            copy(&mut from_client, &mut sink()).await
        };
        // A client that does not answer has the frame all the same.
        let _ = timeout(CLOSE_PATIENCE, closing).await;
    }
}

/// Returns whether it ends between two frames because this node leaves.
async fn down(
    from_node: &mut (impl AsyncRead + Unpin),
    to_client: &mut (impl AsyncWrite + Unpin),
    passage: &mut Option<Passage>,
) -> io::Result<bool> {
    let mut frames = FrameTracker::default();
    let mut buffer = vec![0; TUNNEL_BUFFER_BYTES];
    loop {
        let read = tokio::select! {
            // Cancel safe, both: a read that is not taken has read nothing.
            () = closes(passage), if frames.at_boundary() => return Ok(true),
            read = from_node.read(&mut buffer) => read?,
        };
        if read == 0 {
            to_client.shutdown().await?;
            return Ok(false);
        }
        to_client.write_all(&buffer[..read]).await?;
        to_client.flush().await?;
        frames.advance(&buffer[..read]);
    }
}

/// Pending for what does not count as passing through.
pub(crate) async fn closes(passage: &mut Option<Passage>) {
    match passage {
        Some(passage) => passage.closes().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;
    use tokio::task::yield_now;

    use super::*;

    #[tokio::test]
    async fn a_tunnel_does_not_take_the_end_of_the_daemon_for_the_loss_of_the_node() {
        const EMPTY_TEXT: [u8; 2] = [0x81, 0];
        let (client, mut client_end) = duplex(64);
        let (node, mut node_end) = duplex(64);
        let (sender, lost) = watch::channel(None);
        drop(sender);
        tokio::spawn(carry(client, node, lost, None));
        yield_now().await;
        node_end.write_all(&EMPTY_TEXT).await.expect("room for it");
        let mut arrived = [0; 2];
        client_end
            .read_exact(&mut arrived)
            .await
            .expect("it is open");
        assert_eq!(arrived, EMPTY_TEXT);
    }
}
