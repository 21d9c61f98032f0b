//! Binds the listening sockets.

use std::fs;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};
use conman_auth::HostRules;
use rustix::fs::{Mode, fchmod};
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};
use tokio::net::{TcpListener, UnixListener};

use crate::config::Config;

/// Backlog of the admin socket.
const BACKLOG: i32 = 128;

/// Backlog for other nodes: a whole fleet may reconnect at once.
const PEERS_BACKLOG: i32 = 1_024;

/// All listening sockets: bound, so that a port in use is reported at once, and not served yet.
pub(super) struct Listeners {
    pub(super) api: TcpListener,
    pub(super) sessions: std::net::TcpListener,
    pub(super) sessions_address: SocketAddr,
    /// For other nodes.
    pub(super) peers: Option<PeersSocket>,
    pub(super) admin: AdminSocket,
}

fn in_use(what: &str, field: &str, address: SocketAddr) -> String {
    format!("cannot listen on {address} for {what}; change `listen.{field}`, or stop what uses it")
}

/// The socket for other nodes: bound, and refusing connections until it is served. A node that is
/// refused waits for this one; a connection in the backlog would look like a node that does not
/// answer.
pub(super) struct PeersSocket {
    socket: OwnedFd,
    address: SocketAddr,
}

impl PeersSocket {
    fn bind(address: SocketAddr) -> std::io::Result<Self> {
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        // As the standard library does: connections of an earlier daemon must not block the bind.
        set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &address)?;
        Ok(Self { socket, address })
    }

    pub(super) fn listen(self) -> Result<std::net::TcpListener> {
        // Another program may have bound the address as well and be listening.
        listen(&self.socket, PEERS_BACKLOG)
            .with_context(|| in_use("other nodes", "peers", self.address))?;
        Ok(self.socket.into())
    }
}

/// The admin socket.
pub(super) struct AdminSocket {
    pub(super) listener: UnixListener,
    pub(super) path: SocketPath,
}

/// Path of a Unix socket.
pub(super) struct SocketPath(PathBuf);

impl Listeners {
    pub(super) async fn bind(config: &Config) -> Result<Self> {
        let listen = &config.listen;
        let api = TcpListener::bind(listen.api)
            .await
            .with_context(|| in_use("the API", "api", listen.api))?;
        let sessions = std::net::TcpListener::bind(listen.sessions)
            .with_context(|| in_use("sessions", "sessions", listen.sessions))?;
        let peers = listen.peers.map(|address| {
            PeersSocket::bind(address).with_context(|| in_use("other nodes", "peers", address))
        });
        let sessions_address = sessions
            .local_addr()
            .context("cannot read the sessions listener's address")?;
        Ok(Self {
            api,
            sessions,
            sessions_address,
            peers: peers.transpose()?,
            admin: bind_admin(&listen.admin)?,
        })
    }

    /// Copies of the API's listeners, to be served by another task meanwhile.
    pub(super) fn share(self) -> Result<(Self, TcpListener, UnixListener)> {
        let share = || -> std::io::Result<_> {
            let api = self.api.into_std()?;
            let admin = self.admin.listener.into_std()?;
            let others = (
                TcpListener::from_std(api.try_clone()?)?,
                UnixListener::from_std(admin.try_clone()?)?,
            );
            let own = Self {
                api: TcpListener::from_std(api)?,
                peers: self.peers,
                sessions: self.sessions,
                sessions_address: self.sessions_address,
                admin: AdminSocket {
                    listener: UnixListener::from_std(admin)?,
                    path: self.admin.path,
                },
            };
            Ok((own, others.0, others.1))
        };
        let (own, api, admin) = share().context("cannot share the API's listeners")?;
        Ok((own, api, admin))
    }

    /// The allowed `Host` names at a listener of this address.
    pub(super) fn host_rules(&self, config: &Config, address: SocketAddr) -> Result<HostRules> {
        let domain = (address == self.sessions_address).then_some(config.listen.domain.as_str());
        let rules = HostRules::new(address, &config.listen.hosts, domain);
        // The configuration reports each wrong name with its line.
        rules.map_err(|_| anyhow!("`listen.hosts` holds a name that is not valid"))
    }
}

impl SocketPath {
    /// Removes the path. For a client, a missing path means the same as a refused connection.
    pub(super) fn remove(&self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::warn!(%error, "cannot remove the admin socket {}", self.0.display());
        }
    }
}

fn bind_admin(path: &Path) -> Result<AdminSocket> {
    let directory = path.parent().context("`listen.admin` has no directory")?;
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    remove_stale(path)?;
    let listener = private_listener(path)
        .with_context(|| format!("cannot make the admin socket {}", path.display()))?;
    Ok(AdminSocket {
        listener,
        path: SocketPath(path.to_path_buf()),
    })
}

/// A listening socket that only its owner may connect to. Linux gives the path the mode that the
/// socket has when it is bound, so there is no moment between bind and chmod.
fn private_listener(path: &Path) -> std::io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    fchmod(&socket, Mode::from_raw_mode(0o600))?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG)?;
    UnixListener::from_std(socket.into())
}

/// Removes the socket of a daemon that has gone. The state directory's lock excludes a second
/// daemon of this installation; a daemon of another installation still answers.
fn remove_stale(path: &Path) -> Result<()> {
    let metadata = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot look at {}", path.display()));
        }
    };
    if !metadata.file_type().is_socket() {
        bail!(
            "{} is there and is no socket; change `listen.admin`, or move it",
            path.display()
        );
    }
    match UnixStream::connect(path) {
        Ok(_) => bail!(
            "another conman answers on {}; stop it, or give this one its own `listen.admin`",
            path.display()
        ),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path)
                .with_context(|| format!("cannot remove the stale socket {}", path.display()))
        }
        // A daemon whose backlog is full has no stale socket.
        Err(error) => Err(error).with_context(|| {
            format!(
                "cannot tell whether another conman answers on {}",
                path.display()
            )
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpStream};

    use super::*;

    #[test]
    fn the_port_for_other_nodes_is_taken_at_once_and_refuses_until_it_is_served() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let socket = PeersSocket::bind(any).expect("bound");
        let bound = rustix::net::getsockname(&socket.socket).expect("bound");
        let address = SocketAddr::try_from(bound).expect("an address of IP");
        let refused = TcpStream::connect(address).expect_err("it is not served");
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        let listener = socket.listen().expect("it listens");
        TcpStream::connect(address).expect("it is served");
        let second = PeersSocket::bind(address).map(|_| ());
        let error = second.expect_err("it is in use");
        assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
        drop(listener);
    }
}
