use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, anyhow, bail};
use conman_auth::HostRules;
use tokio::net::{TcpListener, UnixListener};

use crate::config::Config;

/// Everything that is listened on: bound, so that a port in use is told at once, and not yet
/// served.
pub(super) struct Listeners {
    pub(super) api: TcpListener,
    pub(super) sessions: std::net::TcpListener,
    pub(super) sessions_address: SocketAddr,
    pub(super) admin: AdminSocket,
}

/// The admin socket.
pub(super) struct AdminSocket {
    pub(super) listener: UnixListener,
    pub(super) path: SocketPath,
}

/// A socket's name in the file system.
pub(super) struct SocketPath(PathBuf);

impl Listeners {
    pub(super) async fn bind(config: &Config) -> Result<Self> {
        let listen = &config.listen;
        let in_use = |what: &str, field: &str, address: SocketAddr| {
            format!(
                "cannot listen on {address} for {what}; change `listen.{field}`, or stop what uses it"
            )
        };
        let api = TcpListener::bind(listen.api)
            .await
            .with_context(|| in_use("the API", "api", listen.api))?;
        let sessions = std::net::TcpListener::bind(listen.sessions)
            .with_context(|| in_use("sessions", "sessions", listen.sessions))?;
        let sessions_address = sessions
            .local_addr()
            .context("cannot read the sessions listener's address")?;
        Ok(Self {
            api,
            sessions,
            sessions_address,
            admin: bind_admin(&listen.admin)?,
        })
    }

    /// Whose name may stand in `Host` at a listener of this address.
    pub(super) fn host_rules(&self, config: &Config, address: SocketAddr) -> Result<HostRules> {
        let domain = (address == self.sessions_address).then_some(config.listen.domain.as_str());
        HostRules::new(address, &config.listen.hosts, domain).map_err(|mistakes| {
            let texts: Vec<String> = mistakes
                .into_iter()
                .map(|mistake| mistake.message)
                .collect();
            anyhow!("`listen.hosts`: {}", texts.join("; "))
        })
    }
}

impl SocketPath {
    /// Takes the name away; that nobody answers there says the same to a client.
    pub(super) fn remove(&self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::warn!(%error, "cannot remove the admin socket {}", self.0.display());
        }
    }
}

fn bind_admin(path: &Path) -> Result<AdminSocket> {
    let directory = path.parent().context("`listen.admin` has no directory")?;
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    remove_stale(path)?;
    // Between bind and chmod nobody else may connect: the file is made without any permission.
    let former = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let bound = UnixListener::bind(path);
    rustix::process::umask(former);
    let listener =
        bound.with_context(|| format!("cannot make the admin socket {}", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))
        .with_context(|| format!("cannot protect the admin socket {}", path.display()))?;
    Ok(AdminSocket {
        listener,
        path: SocketPath(path.to_path_buf()),
    })
}

/// Removes the socket of a daemon that is gone. The state directory's lock keeps out a second one
/// of this installation; one of another installation still answers.
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
        Err(_) => fs::remove_file(path)
            .with_context(|| format!("cannot remove the stale socket {}", path.display())),
    }
}
