//! nginx and HAProxy from distribution packages, configured for the same backend address.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use conman_linux::{Signal, signal_group};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

const START_PATIENCE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);

/// A proxy that ends when this is dropped, including its worker processes.
#[derive(Debug)]
pub(crate) struct Rival {
    child: Child,
}

impl Drop for Rival {
    fn drop(&mut self) {
        if let Some(leader) = self.child.id() {
            // A group that has ended already needs no signal.
            let _ = signal_group(leader.cast_signed(), Signal::SIGKILL);
        }
    }
}

pub(crate) async fn nginx(directory: &Path, port: u16, backend: SocketAddr) -> Result<Rival> {
    let folder = directory.display();
    let config = format!(
        "daemon off; worker_processes auto; pid {folder}/nginx.pid; error_log {folder}/nginx.log;\n\
         events {{ worker_connections 4096; }}\n\
         http {{ access_log off; client_body_temp_path {folder}; proxy_temp_path {folder};\n\
         fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};\n\
         server {{ listen 127.0.0.1:{port} reuseport; location / {{ proxy_pass http://{backend};\n\
         proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade;\n\
         proxy_set_header Connection \"upgrade\"; proxy_read_timeout 1h; }} }} }}\n"
    );
    let path = directory.join("nginx.conf");
    std::fs::write(&path, config).context("writing nginx's configuration")?;
    // As root, nginx would drop to a user that cannot enter the temporary folder.
    let globals = "user root;";
    let mut command = Command::new("nginx");
    command.arg("-c").arg(&path).args(["-g", globals]);
    spawn("nginx", command, port).await
}

pub(crate) async fn haproxy(directory: &Path, port: u16, backend: SocketAddr) -> Result<Rival> {
    let config = format!(
        "global\n  maxconn 4000\n\
         defaults\n  mode http\n  timeout connect 5s\n  timeout client 1h\n  timeout server 1h\n  timeout tunnel 1h\n\
         frontend front\n  bind 127.0.0.1:{port}\n  default_backend back\n\
         backend back\n  server one {backend}\n"
    );
    let path = directory.join("haproxy.cfg");
    std::fs::write(&path, config).context("writing HAProxy's configuration")?;
    let mut command = Command::new("haproxy");
    command.arg("-db").arg("-f").arg(&path);
    spawn("haproxy", command, port).await
}

/// HAProxy in TCP mode. It listens here and on a port of loopback in a named network namespace, and
/// connects from here.
pub(crate) async fn haproxy_tcp(
    directory: &Path,
    (port, namespace, inside): (u16, &str, u16),
    backend: SocketAddr,
) -> Result<Rival> {
    let config = format!(
        "global\n  maxconn 4000\n\
         defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 1h\n  timeout server 1h\n\
         frontend front\n  bind 127.0.0.1:{port}\n  bind 127.0.0.1:{inside} namespace {namespace}\n\
         \x20 default_backend back\n\
         backend back\n  server one {backend}\n"
    );
    let path = directory.join("haproxy-tcp.cfg");
    std::fs::write(&path, config).context("writing HAProxy's configuration")?;
    let mut command = Command::new("haproxy");
    command.arg("-db").arg("-f").arg(&path);
    spawn("haproxy", command, port).await
}

/// Only conman's proxy, in front of the same address.
pub(crate) async fn conman(port: u16, backend: SocketAddr) -> Result<Rival> {
    let mut command = this_program("forward", port)?;
    command.args(["--backend", &backend.to_string()]);
    spawn("conman-bench forward", command, port).await
}

/// The program of a session, outside a session.
pub(crate) async fn echo(port: u16) -> Result<Rival> {
    spawn("conman-bench echo", this_program("echo", port)?, port).await
}

/// A node with the session; listens for clients and for nodes.
pub(crate) async fn owner(
    (port, peers): (u16, u16),
    backend: SocketAddr,
    secret: &Path,
) -> Result<Rival> {
    let mut command = this_program("forward", port)?;
    command.args(["--backend", &backend.to_string()]);
    command.args(["--peers", &format!("127.0.0.1:{peers}"), "--secret-file"]);
    command.arg(secret);
    spawn("a node", command, port).await
}

/// A node for clients, all of whose sessions are on the node that listens there.
pub(crate) async fn entry(port: u16, node: SocketAddr, secret: &Path) -> Result<Rival> {
    let mut command = this_program("forward", port)?;
    command.args(["--node", &node.to_string(), "--secret-file"]);
    command.arg(secret);
    spawn("another node", command, port).await
}

/// One of this program's own servers, on a port of loopback.
fn this_program(server: &str, port: u16) -> Result<Command> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    command.args([server, "--listen", &format!("127.0.0.1:{port}")]);
    Ok(command)
}

/// A program that prints a line as soon as it listens.
pub(crate) async fn announcing(name: &str, mut command: Command) -> Result<Rival> {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {name}"))?;
    let output = child.stdout.take().context("it has no output")?;
    let errors = child.stderr.take().context("it has no output")?;
    let rival = Rival { child };
    let mut line = String::new();
    tokio::time::timeout(START_PATIENCE, BufReader::new(output).read_line(&mut line))
        .await
        .with_context(|| {
            format!(
                "{name} does not listen after {} s",
                START_PATIENCE.as_secs()
            )
        })?
        .with_context(|| format!("reading from {name}"))?;
    if line.is_empty() {
        let mut why = String::new();
        // Without the reason, the failure is still reported.
        let _ = BufReader::new(errors).read_line(&mut why).await;
        bail!("{name} ended at once: {}", why.trim());
    }
    Ok(rival)
}

async fn spawn(name: &'static str, mut command: Command, port: u16) -> Result<Rival> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0);
    let child = command.spawn().with_context(|| {
        format!("starting {name}; is it installed? (`apt-get install nginx-light haproxy`)")
    })?;
    let mut rival = Rival { child };
    let listening = async {
        loop {
            if let Some(status) = rival
                .child
                .try_wait()
                .with_context(|| format!("looking after {name}"))?
            {
                bail!("{name} ended at once ({status}); run it by hand to see why");
            }
            if TcpStream::connect(("127.0.0.1", port)).await.is_ok() {
                return Ok(());
            }
            tokio::time::sleep(POLL).await;
        }
    };
    tokio::time::timeout(START_PATIENCE, listening)
        .await
        .with_context(|| {
            format!(
                "{name} does not listen after {} s",
                START_PATIENCE.as_secs()
            )
        })??;
    Ok(rival)
}

/// Waits until something listens on an address.
pub(crate) async fn wait_listening(address: SocketAddr) -> Result<()> {
    // A connection to no address reaches this process's own namespace.
    let listening = async {
        while TcpStream::connect(address).await.is_err() {
            tokio::time::sleep(POLL).await;
        }
    };
    tokio::time::timeout(START_PATIENCE, listening)
        .await
        .with_context(|| format!("nothing listens on {address}"))
}
