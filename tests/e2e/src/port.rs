//! TCP ports that only one test uses.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};

/// Below the range that the kernel hands out for outgoing connections, so that none of those can
/// take a port between its choice and its use.
const RANGE: std::ops::Range<u16> = 15_000..32_000;

/// A TCP port on loopback that no other test on this machine uses while this lives.
///
/// The claim is a socket name in the abstract namespace: atomic across processes, and gone with
/// the process whatever happens.
#[derive(Debug)]
pub struct Port {
    pub number: u16,
    _claim: UnixListener,
}

impl Port {
    /// # Panics
    /// When none is free.
    #[must_use]
    pub fn claim() -> Self {
        // Tests that start at the same moment look in different places first.
        let offset = u16::try_from(std::process::id() % 16_000).expect("below 16,000");
        let middle = RANGE.start + offset;
        (middle..RANGE.end)
            .chain(RANGE.start..middle)
            .find_map(Self::try_claim)
            .expect("one of 17,000 ports is free")
    }

    fn try_claim(number: u16) -> Option<Self> {
        let name = SocketAddr::from_abstract_name(format!("conman-e2e-port-{number}"))
            .expect("the name is short");
        let claim = UnixListener::bind_addr(&name).ok()?;
        TcpListener::bind(("127.0.0.1", number)).ok()?;
        Some(Self {
            number,
            _claim: claim,
        })
    }
}
