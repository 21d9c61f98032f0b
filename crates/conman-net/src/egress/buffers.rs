//! Bounds the kernel memory of the egress connections, which no session's limit counts.
//!
//! ```text
//!                 each connection: a window by the number of the session's connections
//!  [`watch`] ─┬─> its session's account ─┬─> the node's budget ─> too much is held:
//!             └── measures its sockets   └── other sessions       the session that holds most is paused
//! ```
//!
//! A paused session's connections get no more room and no new ones are accepted, until the whole is below three
//! quarters of the budget. Its connections that nobody reads from for [`PATIENCE`] looks are closed then.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use conman_linux::{bound_tcp_buffers, socket_memory};
use tokio::net::TcpStream;
use tokio::time::sleep;

use super::meters;

/// Window of a session's first connections, and of the last ones of many: together they hold some tens of MB.
const LARGEST_WINDOW: usize = 1 << 20;
const SMALLEST_WINDOW: usize = 32 << 10;
/// A session's windows in one direction, shared by its connections.
const SESSION_WINDOWS: usize = 8 << 20;
/// Window of a paused session's connections: the kernel's minimum.
const PAUSED_WINDOW: u32 = 4 << 10;

/// Interval between measurements of a connection that holds memory, and of one that holds none.
const LOOK: Duration = Duration::from_secs(1);
const LOOK_AT_IDLE: Duration = Duration::from_secs(3);
/// After so many looks in a row at which a paused connection holds no less than before, it is closed.
const PATIENCE: u32 = 10;

/// The node's budget.
#[derive(Debug)]
pub(super) struct Budget {
    bytes: u64,
    held: AtomicU64,
    accounts: Mutex<Vec<Weak<Account>>>,
}

/// What one session's connections hold.
#[derive(Debug)]
pub(super) struct Account {
    budget: Arc<Budget>,
    held: AtomicU64,
    paused: AtomicBool,
}

/// The sockets of one connection: the client's, and those to targets.
#[derive(Debug, Default)]
pub(super) struct Sockets(Mutex<Vec<Weak<TcpStream>>>);

impl Budget {
    pub(super) fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            bytes,
            held: AtomicU64::new(0),
            accounts: Mutex::default(),
        })
    }

    pub(super) fn account(self: &Arc<Self>) -> Arc<Account> {
        let account = Arc::new(Account {
            budget: Arc::clone(self),
            held: AtomicU64::new(0),
            paused: AtomicBool::new(false),
        });
        let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        accounts.retain(|account| account.strong_count() > 0);
        accounts.push(Arc::downgrade(&account));
        account
    }

    /// Pauses the account that holds most if too much is held, and ends all pauses if there is room again. No
    /// further account is paused while those that are hold enough.
    fn judge(&self) {
        let held = self.held.load(Ordering::Relaxed);
        let (roomy, full) = (held < self.low(), held > self.bytes);
        if !roomy && !full {
            return;
        }
        let accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
        let accounts: Vec<_> = accounts.iter().filter_map(Weak::upgrade).collect();
        if roomy {
            for account in &accounts {
                account.paused.store(false, Ordering::Relaxed);
            }
            return;
        }
        let (paused, running): (Vec<_>, Vec<_>) =
            accounts.iter().partition(|account| account.is_paused());
        let by_paused: u64 = paused.iter().map(|account| account.held()).sum();
        if held.saturating_sub(by_paused) <= self.low() {
            return;
        }
        if let Some(worst) = running.into_iter().max_by_key(|account| account.held()) {
            worst.paused.store(true, Ordering::Relaxed);
            meters::refused("paused");
        }
    }

    /// Pauses end below this.
    fn low(&self) -> u64 {
        self.bytes / 4 * 3
    }
}

impl Account {
    pub(super) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Waits while the session is paused.
    pub(super) async fn running(&self) {
        while self.is_paused() {
            sleep(LOOK).await;
            // All of its connections may be closed.
            self.budget.judge();
        }
    }

    fn change(&self, before: u64, now: u64) {
        for held in [&self.held, &self.budget.held] {
            held.fetch_add(now, Ordering::Relaxed);
            held.fetch_sub(before, Ordering::Relaxed);
        }
        if now > 0 || before > 0 {
            self.budget.judge();
        }
    }
}

/// A connection's part of its account, until dropped.
struct Part<'a> {
    account: &'a Account,
    held: u64,
}

impl Part<'_> {
    fn set(&mut self, held: u64) {
        self.account.change(self.held, held);
        self.held = held;
    }
}

impl Drop for Part<'_> {
    fn drop(&mut self) {
        self.set(0);
    }
}

impl Sockets {
    /// Adds a socket, and bounds its buffers by the number of the session's connections.
    pub(super) fn add(&self, socket: TcpStream, connections: usize) -> Arc<TcpStream> {
        let window = SESSION_WINDOWS / connections.max(1);
        let window = window.clamp(SMALLEST_WINDOW, LARGEST_WINDOW);
        bound(&socket, u32::try_from(window).unwrap_or(PAUSED_WINDOW));
        let socket = Arc::new(socket);
        let mut sockets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.retain(|socket| socket.strong_count() > 0);
        sockets.push(Arc::downgrade(&socket));
        socket
    }

    fn each(&self) -> Vec<Arc<TcpStream>> {
        let sockets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.iter().filter_map(Weak::upgrade).collect()
    }
}

/// Measures a connection's sockets while it is served. Returns when the connection must be closed.
pub(super) async fn watch(account: &Account, sockets: &Sockets) {
    let mut part = Part { account, held: 0 };
    let mut without_progress = 0;
    loop {
        sleep(if part.held > 0 { LOOK } else { LOOK_AT_IDLE }).await;
        let open = sockets.each();
        let held = open
            .iter()
            .filter_map(|socket| socket_memory(&**socket).ok());
        let (before, held) = (part.held, held.sum());
        part.set(held);
        if !account.is_paused() {
            without_progress = 0;
            continue;
        }
        open.iter().for_each(|socket| bound(socket, PAUSED_WINDOW));
        without_progress = if held > 0 && held >= before {
            without_progress + 1
        } else {
            0
        };
        if without_progress >= PATIENCE {
            meters::refused("too_much_buffered");
            return;
        }
    }
}

/// A socket that is closed already is bounded enough.
fn bound(socket: &TcpStream, bytes: u32) {
    if let Err(error) = bound_tcp_buffers(socket, bytes) {
        tracing::debug!(%error, "cannot bound a connection's buffers");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_session_that_holds_most_is_paused_until_there_is_room() {
        let budget = Budget::new(100);
        let (greedy, modest) = (budget.account(), budget.account());
        let mut most = Part {
            account: &greedy,
            held: 0,
        };
        let mut some = Part {
            account: &modest,
            held: 0,
        };
        some.set(20);
        most.set(70);
        assert!(!greedy.is_paused() && !modest.is_paused());
        most.set(90);
        some.set(21);
        assert!(greedy.is_paused() && !modest.is_paused());
        most.set(60);
        assert!(greedy.is_paused(), "81 of 100 are held");
        drop(most);
        assert!(!greedy.is_paused());
        drop(some);
        assert_eq!(budget.held.load(Ordering::Relaxed), 0);
    }
}
