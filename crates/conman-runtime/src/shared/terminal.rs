//! A pseudo-terminal.

use std::io;
use std::os::fd::OwnedFd;

use conman_proto::TerminalSize;
use nix::fcntl::OFlag;
use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};
use rustix::fs::{Mode, OFlags};
use rustix::termios::{Winsize, tcsetwinsize};

/// The near end.
#[derive(Debug)]
pub struct Terminal {
    near: OwnedFd,
}

impl Terminal {
    /// Also returns the far end, for the command.
    pub fn open(size: TerminalSize) -> io::Result<(Self, OwnedFd)> {
        let near = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC)?;
        grantpt(&near)?;
        unlockpt(&near)?;
        let name = ptsname_r(&near)?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let far = rustix::fs::open(name, flags, Mode::empty())?;
        let terminal = Self { near: near.into() };
        terminal.set_size(size);
        Ok((terminal, far))
    }

    /// A copy of the near end's descriptor, to read or write.
    pub fn near(&self) -> io::Result<OwnedFd> {
        self.near.try_clone()
    }

    pub fn set_size(&self, size: TerminalSize) {
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
