//! The signals that ask a session's program to end, and the time that it has to obey.

use conman_proto::{RuntimeKind, SessionRequest};

use super::limits::within;
use super::{MAX_GRACE_MS, Mistakes, quote};
use crate::runtime_traits::runtime_traits;
use crate::stop_signals;

/// A grace period without a signal would only delay the kill.
pub(super) fn preemption(
    (base, request): (&SessionRequest, &SessionRequest),
    runtime: RuntimeKind,
    whole: bool,
    mistakes: &mut Mistakes,
) -> (Option<String>, u32) {
    let given = request.preempt_signal.as_ref();
    let given = given.or(base.preempt_signal.as_ref());
    let signal = signal("preempt_signal", given, mistakes);
    if given.is_some() && !runtime_traits(runtime).runs_programs_itself {
        let message = format!("the {runtime} runtime cannot send one in time; leave it out");
        mistakes.add("preempt_signal", message);
    }
    let grace = grace(
        "preempt_grace_ms",
        request.preempt_grace_ms.or(base.preempt_grace_ms),
        mistakes,
    );
    if whole && grace > 0 && given.is_none() {
        mistakes.add(
            "preempt_grace_ms",
            "needs a preempt_signal to give time for",
        );
    }
    (signal, grace)
}

/// A signal without a grace period would not be sent. The reverse is not so: images have a signal.
pub(super) fn stop(
    base: &SessionRequest,
    request: &SessionRequest,
    whole: bool,
    mistakes: &mut Mistakes,
) -> (Option<String>, u32) {
    let given = request.stop_signal.as_ref();
    let given = given.or(base.stop_signal.as_ref());
    let signal = signal("stop_signal", given, mistakes);
    let grace = grace(
        "stop_grace_ms",
        request.stop_grace_ms.or(base.stop_grace_ms),
        mistakes,
    );
    if whole && grace == 0 && given.is_some() {
        mistakes.add("stop_signal", "needs stop_grace_ms, the time to obey it");
    }
    (signal, grace)
}

fn signal(field: &str, given: Option<&String>, mistakes: &mut Mistakes) -> Option<String> {
    let text = given?;
    let canonical = stop_signals::canonical(text);
    Some(canonical.unwrap_or_else(|| {
        let allowed = stop_signals::allowed();
        mistakes.add(field, format!("`{}` is not one of {allowed}", quote(text)));
        String::new()
    }))
}

fn grace(field: &str, given: Option<u32>, mistakes: &mut Mistakes) -> u32 {
    within(field, given, 0, (0, MAX_GRACE_MS), mistakes)
}
