//! The services that clients measure: the program of a session, and of every other place.

use std::io::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};

use crate::echo::echo;
use crate::load::{Target, read_head};
use crate::rivals::wait_listening;

/// The first of the services' ports in every place of their own.
pub(super) const PORT: u16 = 27_800;
/// Ports of the services of one place: HTTP, iperf3, Redis.
pub(super) const PORTS: u16 = 3;
/// Path of bulk transfers.
pub(super) const BULK: &str = "bulk";
/// Bytes that are sent or received at a time.
pub(super) const CHUNK_BYTES: usize = 128 * 1024;

/// The line that says that all services listen.
pub(super) const READY: &str = "ready";

/// Addresses of the services of one place.
#[derive(Debug, Clone)]
pub(super) struct Services {
    /// Echoes WebSocket messages. Below [`BULK`], GET reads without end, and POST writes.
    pub(super) http: Target,
    /// iperf3 and Redis; `None` on a path that only carries HTTP.
    pub(super) tools: Option<Tools>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Tools {
    pub(super) iperf3: SocketAddr,
    pub(super) redis: SocketAddr,
}

impl Services {
    /// The services whose first port is `port`.
    pub(super) fn at(address: impl Into<IpAddr>, port: u16) -> Self {
        let address = address.into();
        Self {
            http: Target {
                address: SocketAddr::new(address, port),
                path: "/".to_owned(),
                through: None,
            },
            tools: Some(Tools {
                iperf3: SocketAddr::new(address, port + 1),
                redis: SocketAddr::new(address, port + 2),
            }),
        }
    }

    /// The services of session `id`, through conman's proxy.
    pub(super) fn of_session(proxy: SocketAddr, id: &str) -> Self {
        Self {
            http: Target {
                address: proxy,
                path: format!("/s/{id}/"),
                through: None,
            },
            tools: None,
        }
    }

    /// The same services, through a proxy that is asked to CONNECT.
    pub(super) fn through(mut self, proxy: SocketAddr) -> Self {
        self.http.through = Some(proxy);
        self.tools = None;
        self
    }
}

/// The programs of the distribution that are needed, and their packages.
pub(super) fn programs() -> Result<[PathBuf; 2]> {
    Ok([
        program("iperf3", "iperf3")?,
        program("redis-server", "redis-server")?,
    ])
}

/// The path of a program of the distribution.
pub(super) fn program(name: &str, package: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
        .with_context(|| format!("there is no {name}; install the package {package}"))
}

/// Serves echo and bulk, iperf3 and Redis on three ports of an address.
///
/// # Errors
/// When one of them cannot listen, or iperf3 or Redis ends.
pub(crate) async fn serve_services(listen: SocketAddr) -> Result<()> {
    let services = Services::at(listen.ip(), listen.port());
    let tools = services.tools.context("these have all services")?;
    let address = listen.ip().to_string();
    let mut iperf3 = tool("iperf3", |command| {
        let port = tools.iperf3.port().to_string();
        command.args(["--server", "--bind", &address, "--port", &port]);
    })?;
    let mut redis = tool("redis-server", |command| {
        let port = tools.redis.port().to_string();
        command
            .args([
                "--bind",
                &address,
                "--port",
                &port,
                "--protected-mode",
                "no",
            ])
            .args(["--save", "", "--appendonly", "no"]);
    })?;
    for port in [tools.iperf3.port(), tools.redis.port()] {
        wait_listening(SocketAddr::new(listen.ip(), port)).await?;
    }
    // Last, because a session is ready as soon as this port is open.
    let http = TcpListener::bind(listen)
        .await
        .with_context(|| format!("listening on {listen}"))?;
    // The caller may have stopped waiting.
    let _ = writeln!(std::io::stdout(), "{READY}");
    tokio::select! {
        // None of them is meant to end, and the process ends when one does.
        ended = serve_http(http) => ended,
        status = iperf3.wait() => bail!("iperf3 ended: {status:?}"),
        status = redis.wait() => bail!("redis-server ended: {status:?}"),
    }
}

fn tool(name: &'static str, configure: impl FnOnce(&mut Command)) -> Result<Child> {
    let mut command = Command::new(name);
    configure(&mut command);
    command
        .current_dir("/tmp")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("starting {name}; install the package {name}"))
}

async fn serve_http(listener: TcpListener) -> Result<()> {
    loop {
        let (stream, _) = listener.accept().await.context("accepting a connection")?;
        // An error affects only this connection: the client notices and reports it.
        tokio::spawn(async move {
            let mut begin = [0; 9];
            stream.peek(&mut begin).await?;
            match begin.starts_with(b"POST ") || begin == *b"GET /bulk" {
                true => bulk(stream).await?,
                false => echo(stream).await,
            }
            anyhow::Ok(())
        });
    }
}

/// Answers GET with bytes until the client has enough, and reads POST until the client stops.
async fn bulk(mut stream: TcpStream) -> Result<()> {
    let head = read_head(&mut stream).await?;
    let mut chunk = vec![b'x'; CHUNK_BYTES];
    if head.starts_with(b"GET ") {
        stream
            .write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            .await?;
        loop {
            stream.write_all(&chunk).await?;
        }
    }
    while stream.read(&mut chunk).await? > 0 {}
    Ok(())
}
