//! Asking the fence.

use conman_linux::Freezer;
use conman_shim::{CallError, ClientError, FenceState, Reply, Request};

use super::{Client, boottime_ns, until};

pub(crate) const MS: u64 = 1_000_000;

pub(crate) fn freezer() -> Freezer {
    Freezer::detect().expect("detected")
}

pub(crate) fn state(client: &mut Client) -> FenceState {
    match client.ask(Request::Fence).expect("asked") {
        Reply::Fence { state } => state,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn is_fenced(client: &mut Client) -> bool {
    until(|| matches!(state(client), FenceState::Fenced { .. }))
}

pub(crate) fn fenced<T: std::fmt::Debug>(outcome: Result<T, ClientError>) -> bool {
    let error = outcome.expect_err("it is closed");
    matches!(error, ClientError::Refused(CallError::Fenced))
}

pub(crate) fn arm(client: &mut Client, after_ms: u64) -> u64 {
    let until_boottime_ns = boottime_ns() + after_ms * MS;
    client
        .ask(Request::ExtendDeadline { until_boottime_ns })
        .expect("armed");
    until_boottime_ns
}

pub(crate) fn unfence(names: Option<&[&str]>) -> Request {
    Request::Unfence {
        until_boottime_ns: Some(boottime_ns() + 60_000 * MS),
        names: names.map(|names| names.iter().map(|name| (*name).to_owned()).collect()),
    }
}
