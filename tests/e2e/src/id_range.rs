//! User ids for the conmans of tests, of which many run on one machine.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::time::Duration;

use conman_shim::{IDS_FILE, IdPool, RANGE_SIZE, ids_taken};

/// Below the default range, which the machine's own conman may use.
const FIRST: u32 = 0x4000_0000;
const SESSIONS: u32 = 256;
const RANGES: u32 = 63;

/// More than a killed shim takes to end.
const ENDING: Duration = Duration::from_secs(30);

/// A value for `node.id_range` that no other test on this machine uses while this lives.
#[derive(Debug)]
pub struct IdRange {
    pool: IdPool,
    /// As for ports: atomic across processes, and released at the end of the process.
    _claim: UnixListener,
}

impl IdRange {
    /// Claims a range for 256 sessions.
    ///
    /// # Panics
    /// When none is free.
    #[must_use]
    pub fn claim() -> Self {
        let middle = std::process::id() % RANGES;
        (middle..RANGES)
            .chain(0..middle)
            .find_map(Self::try_claim)
            .expect("one of 63 ranges of user ids is free")
    }

    fn try_claim(number: u32) -> Option<Self> {
        let name = SocketAddr::from_abstract_name(format!("conman-e2e-ids-{number}"));
        let claim = UnixListener::bind_addr(&name.expect("the name is short")).ok()?;
        let first = FIRST + number * SESSIONS * RANGE_SIZE;
        let last = first + SESSIONS * RANGE_SIZE - 1;
        let pool: IdPool = format!("{first}-{last}").parse().expect("whole ranges");
        // A cluster that was made by hand outlives its maker's claim.
        let is_used = nix::unistd::geteuid().is_root()
            && ids_taken(Path::new(IDS_FILE), pool, Duration::ZERO)
                .is_ok_and(|taken| taken.is_some());
        (!is_used).then_some(Self {
            pool,
            _claim: claim,
        })
    }

    /// Waits for the end of a killed shim that has them, which cleans up first.
    pub fn wait_until_unused(&self) {
        let _ = ids_taken(Path::new(IDS_FILE), self.pool, ENDING);
    }

    /// The value in TOML.
    #[must_use]
    pub fn value(&self) -> String {
        format!("\"{}\"", self.pool)
    }
}
