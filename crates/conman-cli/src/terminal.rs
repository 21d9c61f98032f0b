//! The user's terminal while a session's program uses it.
//!
//! However a command ends, the terminal gets its settings back: [`RawTerminal`] restores them
//! when it is dropped, and the signals that would end the process without a drop are awaited
//! instead ([`Interrupts`]).

use std::io::{self, IsTerminal as _};
use std::os::fd::{AsFd as _, OwnedFd};

use conman_proto::TerminalSize;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use rustix::termios::tcgetwinsize;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Standard input in raw mode.
#[derive(Debug)]
pub(crate) struct RawTerminal {
    /// A separate descriptor: standard input may be closed before the settings are restored.
    terminal: OwnedFd,
    cooked: Termios,
}

impl RawTerminal {
    /// Every key goes to the program unchanged, including Ctrl-C and Ctrl-Z.
    pub(crate) fn enter() -> io::Result<Self> {
        let terminal = io::stdin().as_fd().try_clone_to_owned()?;
        let cooked = tcgetattr(&terminal)?;
        let entered = Self { terminal, cooked };
        entered.set_raw()?;
        Ok(entered)
    }

    /// Stops this process as Ctrl-Z stops a program in a cooked terminal, and returns to raw mode
    /// when it is continued.
    pub(crate) fn suspend(&self) -> io::Result<()> {
        self.restore();
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGSTOP)?;
        self.set_raw()
    }

    fn set_raw(&self) -> io::Result<()> {
        let mut raw = self.cooked.clone();
        cfmakeraw(&mut raw);
        Ok(tcsetattr(&self.terminal, SetArg::TCSANOW, &raw)?)
    }

    fn restore(&self) {
        // A terminal that hung up has no settings to restore. `Drain` would wait for output that a
        // paused terminal never takes.
        let _ = tcsetattr(&self.terminal, SetArg::TCSANOW, &self.cooked);
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        self.restore();
    }
}

/// The terminal's size; `None` if neither output nor input is a terminal with a size.
pub(crate) fn size() -> Option<TerminalSize> {
    let (stdin, stdout) = (io::stdin(), io::stdout());
    [stdout.as_fd(), stdin.as_fd()]
        .into_iter()
        .find_map(|descriptor| {
            let size = tcgetwinsize(descriptor).ok()?;
            (size.ws_col > 0 && size.ws_row > 0).then_some(TerminalSize {
                columns: size.ws_col,
                rows: size.ws_row,
            })
        })
}

/// Whether standard input is a terminal.
pub(crate) fn stdin_is_terminal() -> bool {
    io::stdin().is_terminal()
}

/// Reports when the terminal is resized.
#[derive(Debug)]
pub(crate) struct Resizes(Signal);

impl Resizes {
    pub(crate) fn listen() -> io::Result<Self> {
        Ok(Self(signal(SignalKind::window_change())?))
    }

    /// The next resize. Cancel safe.
    pub(crate) async fn next(&mut self) {
        // `None` only comes when the runtime shuts down, which drops this future as well.
        if self.0.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}

/// A signal from another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interrupt {
    /// Ends this process; the number of the signal.
    End(u8),
    /// Stops this process until it is continued.
    Suspend,
}

/// The signals that end or stop a process; a terminal in raw mode sends none for keys.
#[derive(Debug)]
pub(crate) struct Interrupts {
    hangup: Signal,
    interrupt: Signal,
    quit: Signal,
    terminate: Signal,
    suspend: Signal,
}

impl Interrupts {
    pub(crate) fn listen() -> io::Result<Self> {
        use nix::sys::signal::Signal::SIGTSTP;

        Ok(Self {
            hangup: signal(SignalKind::hangup())?,
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            terminate: signal(SignalKind::terminate())?,
            suspend: signal(SignalKind::from_raw(SIGTSTP as i32))?,
        })
    }

    /// The next signal. Cancel safe: each is kept until it is received.
    pub(crate) async fn next(&mut self) -> Interrupt {
        const fn number(signal: nix::sys::signal::Signal) -> u8 {
            signal as u8
        }
        use nix::sys::signal::Signal::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

        // Every arm is cancel safe, as above.
        tokio::select! {
            _ = self.hangup.recv() => Interrupt::End(number(SIGHUP)),
            _ = self.interrupt.recv() => Interrupt::End(number(SIGINT)),
            _ = self.quit.recv() => Interrupt::End(number(SIGQUIT)),
            _ = self.terminate.recv() => Interrupt::End(number(SIGTERM)),
            _ = self.suspend.recv() => Interrupt::Suspend,
        }
    }
}
