//! A client that sends and shows bytes as they are.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::yield_now;
use tokio::time::timeout;

/// Bound on each wait for bytes, or for room for them.
const PATIENCE: Duration = Duration::from_secs(60);

/// Most bytes that one wait may bring: no test's answer is longer.
const MAX_BYTES: usize = 16 << 20;

/// A client that sends and shows bytes as they are, whatever HTTP thinks of them.
#[derive(Debug)]
pub struct RawClient {
    stream: TcpStream,
    /// Read, and not yet given to anybody.
    ahead: Vec<u8>,
}

impl RawClient {
    /// # Panics
    /// When nobody listens.
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address)
            .await
            .expect("the listener takes connections");
        stream.set_nodelay(true).expect("TCP has the option");
        Self {
            stream,
            ahead: Vec::new(),
        }
    }

    /// Sends all of it.
    ///
    /// # Panics
    /// When the connection does not take it.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        assert!(self.try_send(bytes).await, "the connection takes bytes");
    }

    /// Sends all of it; `false` when the connection is broken.
    ///
    /// # Panics
    /// When the connection is open and takes nothing for long.
    pub async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        let sent = timeout(PATIENCE, self.stream.write_all(bytes.as_ref())).await;
        sent.expect("there is room in time").is_ok()
    }

    /// Closes the sending side.
    pub async fn finish(&mut self) {
        // A connection that is broken is closed, too.
        let _ = self.stream.shutdown().await;
    }

    /// Everything up to and including `mark`.
    ///
    /// # Panics
    /// When the connection ends before, or the mark does not come.
    pub async fn read_until(&mut self, mark: &str) -> String {
        let mark = mark.as_bytes();
        let mut searched = 0;
        loop {
            let found = self.ahead[searched..]
                .windows(mark.len())
                .position(|window| window == mark);
            if let Some(at) = found {
                let rest = self.ahead.split_off(searched + at + mark.len());
                let taken = std::mem::replace(&mut self.ahead, rest);
                return text(&taken);
            }
            searched = self.ahead.len().saturating_sub(mark.len());
            assert!(self.read_more().await, "ended with {}", text(&self.ahead));
        }
    }

    /// The next `count` bytes, or fewer where the connection ends.
    ///
    /// # Panics
    /// When neither comes in time.
    pub async fn read(&mut self, count: usize) -> Vec<u8> {
        // What has arrived is taken without a wait: whatever shares the task has its turn here.
        yield_now().await;
        while self.ahead.len() < count && self.read_more().await {}
        let rest = self.ahead.split_off(count.min(self.ahead.len()));
        std::mem::replace(&mut self.ahead, rest)
    }

    /// Everything until the connection's end, also a violent one.
    ///
    /// # Panics
    /// When it does not end.
    pub async fn read_to_end(&mut self) -> String {
        while self.read_more().await {}
        text(&std::mem::take(&mut self.ahead))
    }

    /// `false` at the end.
    async fn read_more(&mut self) -> bool {
        assert!(self.ahead.len() <= MAX_BYTES, "no end of bytes");
        self.ahead.reserve(64 << 10);
        let read = timeout(PATIENCE, self.stream.read_buf(&mut self.ahead));
        let read = read.await.expect("bytes or an end come in time");
        read.is_ok_and(|count| count > 0)
    }

    /// The socket, for who reads and writes at the same time; bytes read ahead are lost.
    pub fn into_stream(self) -> TcpStream {
        self.stream
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Sends one connection's bytes and gives everything that comes back until its end.
pub async fn raw_exchange(address: SocketAddr, bytes: impl AsRef<[u8]>) -> String {
    let mut client = RawClient::connect(address).await;
    // Whoever refuses early may close before it has read everything.
    client.try_send(bytes).await;
    client.read_to_end().await
}
