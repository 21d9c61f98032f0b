//! Terminals for programs under test.

use std::io;
use std::os::fd::OwnedFd;

use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};

/// Opens a terminal of this size: the end of a person, and that of a program. What other threads start meanwhile does
/// not inherit them, which would keep the terminal open.
pub fn open_terminal(rows: u16, columns: u16) -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let person = openpt(flags)?;
    grantpt(&person)?;
    unlockpt(&person)?;
    let program = ioctl_tiocgptpeer(&person, flags)?;
    let size = Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(&program, size)?;
    Ok((person, program))
}
