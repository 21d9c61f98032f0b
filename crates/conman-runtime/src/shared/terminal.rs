//! A pseudo-terminal whose near end is read and written without blocking.

use std::io;
use std::os::fd::OwnedFd;

use conman_proto::TerminalSize;
use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::net::unix::pipe;

/// The near end. Tokio's pipe types serve for it: they wait for readiness, then read or write.
#[derive(Debug)]
pub struct Terminal {
    pub reader: pipe::Receiver,
    pub writer: pipe::Sender,
    pub size: TerminalControl,
}

/// Sets the size.
#[derive(Debug)]
pub struct TerminalControl {
    near: OwnedFd,
}

impl Terminal {
    /// The near end, and the far end for the command.
    pub fn open(size: TerminalSize) -> io::Result<(Self, OwnedFd)> {
        let near = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&near)?;
        unlockpt(&near)?;
        fcntl_setfl(&near, fcntl_getfl(&near)? | OFlags::NONBLOCK)?;
        let name = ptsname(&near, Vec::new())?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let far = rustix::fs::open(name.as_c_str(), flags, Mode::empty())?;
        let terminal = Self {
            reader: pipe::Receiver::from_owned_fd_unchecked(near.try_clone()?)?,
            writer: pipe::Sender::from_owned_fd_unchecked(near.try_clone()?)?,
            size: TerminalControl { near },
        };
        terminal.size.set(size);
        Ok((terminal, far))
    }
}

impl TerminalControl {
    pub fn set(&self, size: TerminalSize) {
        let size = Winsize {
            ws_row: size.rows,
            ws_col: size.columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        if let Err(error) = tcsetwinsize(&self.near, size) {
            tracing::debug!(%error, "cannot resize the terminal");
        }
    }
}
