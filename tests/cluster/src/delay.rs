//! A path to an address that takes time, as a slow registry or a long line has it.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

const CHUNK_BYTES: usize = 64 * 1_024;
/// Chunks on their way: more than a registry's clients send within a second.
const MAX_CHUNKS: usize = 1_024;

/// Listens on loopback in a host's namespace and connects from there. Nothing is left of it when it is
/// dropped.
#[derive(Debug)]
pub struct Delay {
    address: SocketAddr,
    round_trip_ms: Arc<AtomicU64>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Delay {
    /// Forwards what connects to [`Self::address`] in this namespace, without a delay at first.
    ///
    /// # Errors
    /// When the namespace cannot be entered.
    pub fn open(namespace: &Path, to: SocketAddr) -> Result<Self> {
        let file = File::open(namespace)
            .with_context(|| format!("cannot open {}", namespace.display()))?;
        let round_trip_ms = Arc::<AtomicU64>::default();
        let delay = Arc::clone(&round_trip_ms);
        let (stop, stopped) = oneshot::channel();
        let (opened, answer) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("delay".to_owned())
            .spawn(move || {
                let network = Some(LinkNameSpaceType::Network);
                let listener = move_into_link_name_space(file.as_fd(), network)
                    .map_err(std::io::Error::from)
                    .and_then(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)))
                    .and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
                let address = listener.as_ref().map(TcpListener::local_addr);
                let _ = opened.send(match address {
                    Ok(address) => address,
                    Err(error) => Err(std::io::Error::other(error.to_string())),
                });
                if let Ok(listener) = listener {
                    run(listener, to, delay, stopped);
                }
            })
            .context("cannot make a thread")?;
        let address = answer.recv().context("a thread ended")?;
        Ok(Self {
            address: address.with_context(|| format!("cannot enter {}", namespace.display()))?,
            round_trip_ms,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Half of it each way, for whatever is read from here on.
    pub fn set_round_trip(&self, ms: u64) {
        self.round_trip_ms.store(ms, Ordering::Relaxed);
    }
}

impl Drop for Delay {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(
    listener: TcpListener,
    to: SocketAddr,
    delay: Arc<AtomicU64>,
    stopped: oneshot::Receiver<()>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let Ok(runtime) = runtime else { return };
    runtime.block_on(async {
        let Ok(listener) = tokio::net::TcpListener::from_std(listener) else {
            return;
        };
        let serving = async {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(forward(client, to, Arc::clone(&delay)));
            }
        };
        tokio::select! {
            () = serving => {}
            _ = stopped => {}
        }
    });
}

async fn forward(client: TcpStream, to: SocketAddr, delay: Arc<AtomicU64>) {
    let Ok(server) = TcpStream::connect(to).await else {
        return;
    };
    let _ = client.set_nodelay(true);
    let _ = server.set_nodelay(true);
    let (client_reads, client_writes) = client.into_split();
    let (server_reads, server_writes) = server.into_split();
    tokio::join!(
        one_way(client_reads, server_writes, &delay),
        one_way(server_reads, client_writes, &delay),
    );
}

async fn one_way(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    delay: &AtomicU64,
) {
    let (sender, mut chunks) = mpsc::channel::<(Instant, Vec<u8>)>(MAX_CHUNKS);
    let reading = async move {
        let mut buffer = vec![0; CHUNK_BYTES];
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            let half = Duration::from_millis(delay.load(Ordering::Relaxed) / 2);
            let chunk = (Instant::now() + half, buffer[..count].to_vec());
            if sender.send(chunk).await.is_err() {
                return;
            }
        }
    };
    let writing = async move {
        while let Some((due, chunk)) = chunks.recv().await {
            sleep_until(due).await;
            if to.write_all(&chunk).await.is_err() {
                return;
            }
        }
        let _ = to.shutdown().await;
    };
    tokio::join!(reading, writing);
}
