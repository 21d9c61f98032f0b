//! Metrics of the egress proxies.

use metrics::{Counter, Gauge, counter, describe_counter, describe_gauge, gauge};

const CONNECTIONS: &str = "conman_egress_connections";
const REFUSED: &str = "conman_egress_refused_total";
const BYTES: &str = "conman_egress_bytes_total";

pub(super) fn describe() {
    describe_gauge!(CONNECTIONS, "Sessions' connections to the egress proxy");
    describe_counter!(
        REFUSED,
        "Refused or failed requests of sessions to the egress proxy"
    );
    describe_counter!(BYTES, "Bytes in the egress proxy's tunnels");
}

/// Counts a refusal. There are no labels for sessions: labels must stay few.
pub(super) fn refused(reason: &'static str) {
    counter!(REFUSED, "reason" => reason).increment(1);
}

pub(super) fn bytes(direction: &'static str) -> Counter {
    counter!(BYTES, "direction" => direction)
}

/// One open connection, until dropped.
pub(super) struct Connection(Gauge);

pub(super) fn connection() -> Connection {
    let open = gauge!(CONNECTIONS);
    open.increment(1.0);
    Connection(open)
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}
