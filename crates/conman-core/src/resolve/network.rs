//! How a session is reached: its network, its ports, when it is ready.

use conman_proto::{Network, PortRange, RuntimeKind, SessionRequest};

use super::limits::within;
use super::mistakes::Mistakes;
use crate::runtime_traits::runtime_traits;
use crate::spec_policy::SpecPolicy;

/// Maximum length of `ready_path` in bytes.
pub const MAX_READY_PATH_BYTES: usize = 2_048;
/// Maximum readiness timeout, in seconds.
pub const MAX_READY_TIMEOUT_S: u32 = 600;
/// Maximum number of entries of `ports`; each may be a range.
const MAX_PORTS: usize = 64;

pub(super) const NODES_PORT: &str =
    "is a port of the node in the network `host`: only the template can set it";

pub(super) fn port(
    base: &SessionRequest,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> Option<u16> {
    let port = request.port.or(base.port).flatten();
    if port == Some(0) {
        mistakes.add("port", "must be 1 to 65535, or null for no port");
    }
    port
}

/// A template's ports are dropped with its port, like its `ready_path`.
pub(super) fn ports(
    base: &SessionRequest,
    request: &SessionRequest,
    port: Option<u16>,
    mistakes: &mut Mistakes,
) -> Vec<PortRange> {
    let inherited = base
        .ports
        .as_ref()
        .filter(|_| port.is_some() || request.port.is_none());
    let ports = request.ports.as_ref().or(inherited);
    let ports = ports.cloned().unwrap_or_default();
    check_ports(&ports, mistakes);
    ports
}

pub(super) fn check_ports(ports: &[PortRange], mistakes: &mut Mistakes) {
    if ports.len() > MAX_PORTS {
        let given = ports.len();
        let message = format!("has {given} entries; {MAX_PORTS} are allowed");
        mistakes.add("ports", message);
    }
}

/// A template's path is dropped with its port if the request sets no port; a path in the request
/// itself is then a contradiction.
pub(super) fn ready_path(
    base: &SessionRequest,
    request: &SessionRequest,
    port: Option<u16>,
    whole: bool,
    mistakes: &mut Mistakes,
) -> Option<String> {
    let own = request.ready_path.as_ref().or_else(|| {
        base.ready_path
            .as_ref()
            .filter(|_| port.is_some() || request.port.is_none())
    })?;
    if whole && port.is_none() {
        mistakes.add(
            "ready_path",
            "needs a port: without one a session is ready once it runs",
        );
    }
    let visible = own
        .bytes()
        .all(|byte| byte.is_ascii_graphic() && byte != b'#');
    if !own.starts_with('/') || !visible || own.len() > MAX_READY_PATH_BYTES {
        mistakes.add(
            "ready_path",
            format!(
                "must begin with `/` and be at most {MAX_READY_PATH_BYTES} visible ASCII \
                 characters without `#`; percent-encode others"
            ),
        );
    }
    Some(own.clone())
}

pub(super) fn ready_timeout_s(
    policy: &SpecPolicy,
    base: &SessionRequest,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> u32 {
    within(
        "ready_timeout_s",
        request.ready_timeout_s.or(base.ready_timeout_s),
        policy.default_ready_timeout_s,
        (1, MAX_READY_TIMEOUT_S),
        mistakes,
    )
}

/// A request can always give up its template's network for `loopback`.
pub(super) fn network(
    base: &SessionRequest,
    request: &SessionRequest,
    runtime: RuntimeKind,
    mistakes: &mut Mistakes,
) -> Network {
    let given = request.network.as_ref().or(base.network.as_ref());
    let network = given.cloned().unwrap_or_default();
    let traits = network.traits();
    if !runtime_traits(runtime).has_network(traits) {
        mistakes.add(
            "network",
            format!("the {runtime} runtime has no `{network}`"),
        );
    } else if traits.leads_out && base.network.as_ref() != Some(&network) {
        let message = format!("only a template can give the network `{network}`");
        mistakes.add("network", message);
    }
    if traits.shares_host {
        // conman connects its clients to these ports, and any program of the node may listen there.
        let changed = [
            (
                "port",
                request.port.is_some_and(|port| Some(port) != base.port),
            ),
            (
                "ports",
                request.ports.is_some() && request.ports != base.ports,
            ),
        ];
        for (field, _) in changed.iter().filter(|(_, changed)| *changed) {
            mistakes.add(*field, NODES_PORT);
        }
    }
    network
}
