//! A WebSocket client that costs as little as possible, so that it measures only the path.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Bound on the handshake and on every echo.
const PATIENCE: Duration = Duration::from_secs(20);
/// Longest head of a request or response.
const MAX_HEAD_BYTES: usize = 16 * 1024;

/// The address of a WebSocket or of another HTTP service.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    pub(crate) path: String,
    /// A proxy that is asked to CONNECT to the address.
    pub(crate) through: Option<SocketAddr>,
}

/// Result of one run.
#[derive(Debug, Clone)]
pub(crate) struct Measured {
    /// Every message's time to its echo, in microseconds.
    pub(crate) latencies_us: Vec<f64>,
    pub(crate) messages_per_s: f64,
}

/// Opens `connections` WebSockets and echoes messages of `bytes` on each, one at a time, for
/// `duration`.
pub(crate) async fn echo(
    target: &Target,
    connections: usize,
    bytes: usize,
    duration: Duration,
) -> Result<Measured> {
    let mut clients = Vec::with_capacity(connections);
    for _ in 0..connections {
        let mut client = Client::open(target, bytes).await?;
        client.echo_once().await.context("the first echo")?;
        clients.push(client);
    }
    let begun = Instant::now();
    let end = begun + duration;
    let tasks: Vec<_> = clients
        .into_iter()
        .map(|mut client| {
            tokio::spawn(async move {
                let mut latencies = Vec::with_capacity(1 << 16);
                let mut before = Instant::now();
                while before < end {
                    client.echo_once().await?;
                    let after = Instant::now();
                    latencies.push((after - before).as_secs_f64() * 1e6);
                    before = after;
                }
                anyhow::Ok(latencies)
            })
        })
        .collect();
    let mut latencies_us = Vec::new();
    for task in tasks {
        latencies_us.extend(task.await.context("a client panicked")??);
    }
    let messages_per_s = latencies_us.len() as f64 / begun.elapsed().as_secs_f64();
    Ok(Measured {
        latencies_us,
        messages_per_s,
    })
}

/// One WebSocket.
pub(crate) struct Client {
    stream: TcpStream,
    sent: Vec<u8>,
    /// The expected echo: the same payload after a header without a mask.
    expected: Vec<u8>,
    received: Vec<u8>,
}

impl Client {
    pub(crate) async fn open(target: &Target, bytes: usize) -> Result<Self> {
        let opening = async {
            let mut stream = connect(target).await?;
            handshake(&mut stream, target).await?;
            anyhow::Ok(stream)
        };
        let stream = tokio::time::timeout(PATIENCE, opening)
            .await
            .context("no WebSocket in time")?
            .with_context(|| format!("opening a WebSocket to {}{}", target.address, target.path))?;
        let expected = frame(bytes, false)?;
        Ok(Self {
            stream,
            sent: frame(bytes, true)?,
            received: vec![0; expected.len()],
            expected,
        })
    }

    pub(crate) async fn echo_once(&mut self) -> Result<()> {
        let exchange = async {
            // Large messages fill both directions' buffers, so write and read at once.
            let (mut reader, mut writer) = self.stream.split();
            let write = async { writer.write_all(&self.sent).await };
            let read = async { reader.read_exact(&mut self.received).await };
            let (written, read) = tokio::join!(write, read);
            written.context("sending")?;
            read.context("receiving")?;
            anyhow::Ok(())
        };
        // A timer for every message would cost more than the message. The caller's bound on the whole
        // run covers a stuck path.
        exchange.await?;
        ensure!(
            self.received == self.expected,
            "the echo differs from what was sent"
        );
        Ok(())
    }
}

/// A final binary frame of `bytes` bytes (RFC 6455, section 5.2). The mask is zero, which leaves
/// the payload as it is.
fn frame(bytes: usize, masked: bool) -> Result<Vec<u8>> {
    let mask_bit = if masked { 0x80 } else { 0 };
    let mut frame = vec![0x82];
    match bytes {
        0..=125 => frame.push(mask_bit | u8::try_from(bytes).context("a small length")?),
        126..=65_535 => {
            frame.push(mask_bit | 126);
            frame.extend(
                u16::try_from(bytes)
                    .context("a middle length")?
                    .to_be_bytes(),
            );
        }
        _ => {
            frame.push(mask_bit | 127);
            frame.extend(
                u64::try_from(bytes)
                    .context("a great length")?
                    .to_be_bytes(),
            );
        }
    }
    if masked {
        frame.extend([0; 4]);
    }
    frame.resize(frame.len() + bytes, b'x');
    Ok(frame)
}

/// Connects to the target's address, through its proxy if it has one.
pub(crate) async fn connect(target: &Target) -> Result<TcpStream> {
    let mut stream = TcpStream::connect(target.through.unwrap_or(target.address))
        .await
        .context("connecting")?;
    stream
        .set_nodelay(true)
        .context("switching off Nagle's algorithm")?;
    if target.through.is_some() {
        let address = target.address;
        let request = format!("CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n\r\n");
        stream
            .write_all(request.as_bytes())
            .await
            .context("sending CONNECT")?;
        let head = read_head(&mut stream).await?;
        let head = String::from_utf8_lossy(&head);
        ensure!(
            head.starts_with("HTTP/1.1 200") || head.starts_with("HTTP/1.0 200"),
            "the proxy answered: {}",
            head.lines().next().unwrap_or_default()
        );
    }
    Ok(stream)
}

/// Reads the head of a request or response, byte by byte, so that nothing after it is taken.
pub(crate) async fn read_head(stream: &mut TcpStream) -> Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.context("reading a head")?);
        ensure!(head.len() <= MAX_HEAD_BYTES, "a head has no end");
    }
    Ok(head)
}

async fn handshake(stream: &mut TcpStream, target: &Target) -> Result<()> {
    let request = format!(
        "GET {} HTTP/1.1\r\nHost: {}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        target.path, target.address
    );
    stream
        .write_all(request.as_bytes())
        .await
        .context("sending the request")?;
    let head = read_head(stream).await?;
    if head.starts_with(b"HTTP/1.1 101 ") {
        return Ok(());
    }
    let mut problem = vec![0; MAX_HEAD_BYTES];
    let length = stream.read(&mut problem).await.unwrap_or(0);
    bail!(
        "answered: {} {}",
        String::from_utf8_lossy(&head).lines().next().unwrap_or(""),
        String::from_utf8_lossy(&problem[..length])
    )
}
