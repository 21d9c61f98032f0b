//! A node of the old way: what a fleet without conman does, as a small program.
//!
//! Sessions are Docker containers on the bridge, and etcd holds who has which. At a notice the node refuses
//! further clients and asks dockerd to kill its containers. It gives up a session when dockerd has answered for it;
//! the rest is given up when the machine is gone. With a hold, a client of a session that is still owned by a node
//! that leaves waits, until another node may have it.

mod claims;
mod engine;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OnceCell, Semaphore};
use tokio::time::{Instant, sleep, timeout};

pub(crate) use claims::Claims;
use engine::{Container, Engine};

/// Bound on a hold: longer than any node takes to leave.
const HOLD: Duration = Duration::from_secs(60);
const HOLD_POLL: Duration = Duration::from_millis(100);
/// Containers that are started at a time.
const STARTS: usize = 8;
/// Bound on the start of a container's program.
const START_PATIENCE: Duration = Duration::from_secs(60);
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(10);
const MAX_HEAD_BYTES: usize = 16 * 1024;
/// Where the program of a session listens.
const PORT: u16 = 8080;
/// Marks a request that another node has forwarded; it is answered at once.
const HOP: &str = "x-forwarded-by-node";

const READY: &str = "200 OK";
const REFUSED: &str = "503 Service Unavailable";
const SWITCHED: &str = "HTTP/1.1 101";

#[derive(Debug, clap::Args)]
pub(crate) struct OldNode {
    /// The name of this node
    #[arg(long)]
    name: String,
    /// Address to listen on
    #[arg(long)]
    listen: SocketAddr,
    /// The other nodes, each as NAME=ADDRESS
    #[arg(long, value_parser = peer)]
    peer: Vec<(String, SocketAddr)>,
    /// Address of etcd
    #[arg(long)]
    etcd: SocketAddr,
    /// Socket of Docker
    #[arg(long)]
    docker: PathBuf,
    /// Image of the sessions
    #[arg(long)]
    image: String,
    /// What a session binds, as HOST:INSIDE
    #[arg(long)]
    bind: String,
    /// Cgroup of the containers
    #[arg(long)]
    cgroup: String,
    /// Let clients wait instead of refusing them
    #[arg(long)]
    hold: bool,
}

fn peer(text: &str) -> Result<(String, SocketAddr), String> {
    let (name, address) = text.split_once('=').ok_or("it is NAME=ADDRESS")?;
    let address = address.parse().map_err(|error| format!("{error}"))?;
    Ok((name.to_owned(), address))
}

struct Node {
    options: OldNode,
    claims: Claims,
    engine: Engine,
    starts: Semaphore,
    /// The containers of the sessions that are claimed here.
    slots: Mutex<HashMap<String, Arc<OnceCell<Container>>>>,
    leaving: AtomicBool,
}

/// Why a client is not served now.
struct Unserved;

/// Runs the node until it is killed.
///
/// # Errors
/// When it cannot listen.
pub(crate) async fn serve(options: OldNode) -> Result<()> {
    let listener = TcpListener::bind(options.listen)
        .await
        .with_context(|| format!("listening on {}", options.listen))?;
    let node = Arc::new(Node {
        claims: Claims::new(options.etcd),
        engine: Engine::new(&options),
        starts: Semaphore::new(STARTS),
        slots: Mutex::default(),
        leaving: AtomicBool::new(false),
        options,
    });
    loop {
        let (client, _) = listener.accept().await.context("accepting a client")?;
        let node = Arc::clone(&node);
        // A client that disappears is no error of the node.
        tokio::spawn(async move { drop(node.answer(client).await) });
    }
}

impl Node {
    async fn answer(self: Arc<Self>, mut client: TcpStream) -> Result<()> {
        client.set_nodelay(true)?;
        let head = read_head(&mut client).await?;
        let text = String::from_utf8_lossy(&head).into_owned();
        let path = text.split(' ').nth(1).unwrap_or_default();
        let leaves = self.leaving.load(Ordering::Relaxed);
        if path == "/readyz" {
            return close(&mut client, if leaves { REFUSED } else { READY }).await;
        }
        if path == "/notice" {
            self.leaving.store(true, Ordering::Relaxed);
            tokio::spawn(self.leave());
            return close(&mut client, READY).await;
        }
        let id = path.strip_prefix("/s/").unwrap_or_default();
        let id = id.trim_end_matches('/').to_owned();
        ensure!(!id.is_empty(), "no session is named");
        let hopped = text.to_ascii_lowercase().contains(HOP);
        let deadline = Instant::now() + HOLD;
        loop {
            if let Ok((mut backend, answer)) = self.reach(&id, &head, hopped).await {
                client.write_all(&answer).await?;
                copy_bidirectional(&mut client, &mut backend).await?;
                return Ok(());
            }
            if hopped || !self.options.hold || Instant::now() > deadline {
                return close(&mut client, REFUSED).await;
            }
            sleep(HOLD_POLL).await;
        }
    }

    /// A connection on which the session has answered the handshake, and that answer.
    async fn reach(
        &self,
        id: &str,
        head: &[u8],
        hopped: bool,
    ) -> Result<(TcpStream, Vec<u8>), Unserved> {
        let leaves = self.leaving.load(Ordering::Relaxed);
        if leaves && (hopped || !self.options.hold) {
            return Err(Unserved);
        }
        let own = &self.options.name;
        let owner = self.claims.owner(id).await.map_err(|_| Unserved)?;
        let owner = match owner {
            // Another node may have it.
            None if leaves => self.options.peer.first().map(|(name, _)| name.clone()),
            None => Some(self.claims.claim(id, own).await.map_err(|_| Unserved)?),
            owner => owner,
        };
        let owner = owner.ok_or(Unserved)?;
        if owner == *own {
            if leaves {
                return Err(Unserved);
            }
            let backend = self.container(id).await.map_err(|_| Unserved)?.address;
            return handshake(backend, head).await.map_err(|_| Unserved);
        }
        let peer = self.options.peer.iter().find(|(name, _)| *name == owner);
        let (_, address) = peer.ok_or(Unserved)?;
        if hopped {
            return Err(Unserved);
        }
        let mut forwarded = head[..head.len() - 2].to_vec();
        forwarded.extend_from_slice(format!("{HOP}: {own}\r\n\r\n").as_bytes());
        handshake(*address, &forwarded).await.map_err(|_| Unserved)
    }

    /// The container of a session that is claimed here, started by the first client.
    async fn container(&self, id: &str) -> Result<Container> {
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(slots.entry(id.to_owned()).or_default())
        };
        let start = || async {
            let _place = self.starts.acquire().await.context("starts have ended")?;
            let generation = self.claims.generation(id).await?;
            let container = self.engine.start(id, generation).await?;
            let listens = async {
                while TcpStream::connect(container.address).await.is_err() {
                    sleep(POLL).await;
                }
            };
            timeout(START_PATIENCE, listens)
                .await
                .with_context(|| format!("the program of {id} does not listen"))?;
            Ok(container)
        };
        slot.get_or_try_init(start).await.cloned()
    }

    /// Asks dockerd to kill all, and gives up each session for which it has answered.
    async fn leave(self: Arc<Self>) {
        let slots: Vec<_> = {
            let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            let started = slots.iter();
            let started = started.filter_map(|(id, slot)| Some((id.clone(), slot.get()?.clone())));
            started.collect()
        };
        for (id, container) in slots {
            let node = Arc::clone(&self);
            tokio::spawn(async move {
                node.engine.kill(&container.id).await?;
                node.claims.release(&id).await
            });
        }
    }
}

async fn read_head(stream: &mut TcpStream) -> Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        ensure!(head.len() < MAX_HEAD_BYTES, "the head is too long");
        // Byte by byte, so that nothing behind the head is taken.
        head.push(stream.read_u8().await?);
    }
    Ok(head)
}

async fn close(client: &mut TcpStream, status: &str) -> Result<()> {
    let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    client.write_all(answer.as_bytes()).await?;
    client.shutdown().await?;
    Ok(())
}

async fn handshake(to: SocketAddr, head: &[u8]) -> Result<(TcpStream, Vec<u8>)> {
    let mut backend = timeout(CONNECT_PATIENCE, TcpStream::connect(to)).await??;
    backend.set_nodelay(true)?;
    backend.write_all(head).await?;
    let answer = read_head(&mut backend).await?;
    ensure!(answer.starts_with(SWITCHED.as_bytes()), "refused");
    Ok((backend, answer))
}
