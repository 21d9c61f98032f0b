//! Queries that are sent to the node's name servers as they are.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

/// Bound on one server.
const TRY: Duration = Duration::from_secs(3);
/// Servers that are tried.
const MAX_SERVERS: usize = 3;
/// Largest answer by UDP.
const ANSWER_BYTES: usize = 4_096;

/// How a query came, and is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Transport {
    Datagram,
    Stream,
}

/// The answer of the first server that gives one.
pub(super) async fn forward(
    servers: &[SocketAddr],
    query: &[u8],
    by: Transport,
) -> Option<Vec<u8>> {
    for server in servers.iter().take(MAX_SERVERS) {
        let exchange = async {
            match by {
                Transport::Datagram => by_datagram(*server, query).await,
                Transport::Stream => by_stream(*server, query).await,
            }
        };
        if let Ok(Ok(answer)) = timeout(TRY, exchange).await {
            return Some(answer);
        }
    }
    None
}

/// The port is another one for each query, and only the server's datagrams arrive on it.
async fn by_datagram(server: SocketAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(query).await?;
    let mut answer = vec![0; ANSWER_BYTES];
    loop {
        let length = socket.recv(&mut answer).await?;
        if length >= 2 && answer[..2] == query[..2] {
            answer.truncate(length);
            return Ok(answer);
        }
    }
}

async fn by_stream(server: SocketAddr, query: &[u8]) -> io::Result<Vec<u8>> {
    let length = u16::try_from(query.len()).map_err(io::Error::other)?;
    let mut stream = TcpStream::connect(server).await?;
    stream
        .write_all(&[&length.to_be_bytes()[..], query].concat())
        .await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    Ok(answer)
}
