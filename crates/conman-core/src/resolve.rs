//! Resolves a request, its template and the node's policy to a session's spec.

use std::collections::BTreeSet;

use conman_proto::{FieldError, IdleAction, ResolvedSpec, RuntimeKind, SessionId, SessionRequest};

use crate::bind::Bind;
use crate::image_reference;
use crate::nearest::nearest;
use crate::runtime_traits::runtime_traits;
use crate::spec_policy::{SpecPolicy, Template};

mod egress;
mod limits;
mod mistakes;
mod native_choices;
mod network;
mod patch;
mod program;
mod signals;
mod talk;

pub use network::{MAX_READY_PATH_BYTES, MAX_READY_TIMEOUT_S};
pub use patch::patched;
pub(crate) use program::is_label_key;
pub use program::{
    MAX_ARGUMENT_BYTES, MAX_ARGUMENTS, MAX_ENV_BYTES, MAX_ENV_ENTRIES, MAX_LABEL_KEY_BYTES,
    MAX_LABEL_VALUE_BYTES, MAX_LABELS,
};
pub(crate) use talk::is_group;

use limits::{bandwidth, cpus, disk, memory, pids, ptys};
use mistakes::{Mistakes, quote};
use native_choices::NativeChoices;
use network::{network, port, ports, ready_path, ready_timeout_s};

/// Maximum number of binds.
pub const MAX_BINDS: usize = 32;
/// Maximum `preempt_grace_ms` and `stop_grace_ms`.
pub const MAX_GRACE_MS: u32 = 60_000;
/// Value of the image if the runtime needs none.
const NO_IMAGE: &str = "none";

/// Maximum number of templates that a message lists.
const MAX_NAMED: usize = 20;

/// Fills in a request from its template and the node's defaults.
///
/// All mistakes are found at once; each names the field and the allowed values.
pub fn resolve(
    policy: &SpecPolicy,
    id: &SessionId,
    request: &SessionRequest,
) -> Result<ResolvedSpec, Vec<FieldError>> {
    let mut mistakes = Mistakes::default();
    let template = find_template(policy, request, &mut mistakes);
    let lacks_template = request.template.is_some() && template.is_none();
    let spec = fill_in(
        policy,
        id,
        template,
        request,
        !lacks_template,
        &mut mistakes,
    );
    mistakes.into_result(spec)
}

/// Whether a session that runs as `running` matches the request `asked`. The template, the
/// cause of the start and a later `expires_at` do not matter, only the resulting values.
#[must_use]
pub fn matches(running: &ResolvedSpec, asked: &ResolvedSpec) -> bool {
    let asked = ResolvedSpec {
        template: running.template.clone(),
        restarted: running.restarted.clone(),
        expires_at: running.expires_at,
        ..asked.clone()
    };
    *running == asked
}

/// The mistakes of a template alone. It need not name an image: requests may.
pub(crate) fn resolve_template(
    policy: &SpecPolicy,
    name: &str,
    template: &Template,
) -> Vec<FieldError> {
    let mut mistakes = Mistakes::default();
    if template.request.template.is_some() {
        mistakes.add("template", "a template cannot start from another one");
    }
    let id: SessionId = "a".parse().expect("one letter is a session id");
    let empty = SessionRequest::default();
    fill_in(policy, &id, Some(template), &empty, false, &mut mistakes);
    let mut found = mistakes.into_result(()).err().unwrap_or_default();
    for mistake in &mut found {
        mistake.field = format!("templates.{name}.{}", mistake.field);
    }
    found
}

fn find_template<'a>(
    policy: &'a SpecPolicy,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> Option<&'a Template> {
    let name = request.template.as_ref()?;
    let found = policy.templates.get(name);
    if found.is_none() {
        mistakes.add("template", unknown_template(policy, name));
    }
    found
}

fn unknown_template(policy: &SpecPolicy, name: &str) -> String {
    let known: Vec<&str> = policy.templates.keys().map(String::as_str).collect();
    no_template(name, &known, "This node's")
}

/// The first [`MAX_NAMED`] names.
fn listed(names: &[&str]) -> String {
    let listed = names[..names.len().min(MAX_NAMED)].join(", ");
    match names.len() > MAX_NAMED {
        true => format!("{listed}, …"),
        false => listed,
    }
}

/// The message for an unknown template, with the known ones; `whose` says where those are.
#[must_use]
pub fn no_template(name: &str, known: &[&str], whose: &str) -> String {
    let shown = quote(name);
    if known.is_empty() {
        return format!("there is no template `{shown}`; none is configured");
    }
    let hint = match nearest(name, known.iter().copied()) {
        Some(near) => format!("; did you mean `{near}`?"),
        None => ".".to_owned(),
    };
    let listed = listed(known);
    format!("there is no template `{shown}`{hint} {whose} templates are: {listed}")
}

/// `whole` is true if all parts are present: a template alone, or a request whose template is
/// unknown, may lack values that the other part would supply.
fn fill_in(
    policy: &SpecPolicy,
    id: &SessionId,
    template: Option<&Template>,
    request: &SessionRequest,
    whole: bool,
    mistakes: &mut Mistakes,
) -> ResolvedSpec {
    let empty = SessionRequest::default();
    let base = template.map_or(&empty, |template| &template.request);
    let runtime = template
        .and_then(|t| t.runtime)
        .unwrap_or(policy.default_runtime);

    let (command, args) = program::command(base, request, mistakes);
    let env = program::env(base, request, mistakes);
    let labels = program::labels(base, request, mistakes);
    let node_labels = program::node_labels(base, request, mistakes);

    let port = port(base, request, mistakes);
    let ports = ports(base, request, port, mistakes);
    let ready_path = ready_path(base, request, port, whole, mistakes);
    let network = network(base, request, runtime, mistakes);
    let (preempt_signal, preempt_grace_ms) =
        signals::preemption((base, request), runtime, whole, mistakes);
    let (stop_signal, stop_grace_ms) = signals::stop(base, request, whole, mistakes);
    let tty = tty(base, request, runtime, mistakes);
    let (ptys, ptys_when_asked) = ptys(base, request, (runtime, tty), mistakes);
    let choices = NativeChoices::of(template, runtime, mistakes);
    let (disk_bytes, disk_inodes) = disk(policy, base, request, runtime, mistakes);

    let idle_timeout_s = request.idle_timeout_s.or(base.idle_timeout_s);
    let max_lifetime_s = request.max_lifetime_s.or(base.max_lifetime_s);
    let on_node_loss = request.on_node_loss.or(base.on_node_loss);

    ResolvedSpec {
        template: request.template.clone(),
        runtime,
        image: image(policy, base, request, runtime, whole, mistakes),
        command,
        args,
        env,
        port,
        ports,
        strip_prefix: request.strip_prefix.or(base.strip_prefix).unwrap_or(true),
        ready_path,
        ready_timeout_s: ready_timeout_s(policy, base, request, mistakes),
        egress: egress::egress(base, request, (runtime, &network, port), mistakes),
        talk: talk::talk(base, request, (&network, port), mistakes),
        bandwidth: bandwidth(base, request, &network, mistakes),
        network,
        memory_bytes: memory(policy, base, request, mistakes),
        disk_bytes,
        disk_inodes,
        cpus: cpus(policy, base, request, mistakes),
        pids: pids(policy, base, request, mistakes),
        ptys,
        ptys_when_asked,
        labels,
        binds: binds(policy, id, base, request, mistakes),
        idle_timeout_s: idle_timeout_s.unwrap_or(policy.default_idle_timeout_s),
        idle_action: idle_action(base, request, runtime, mistakes),
        max_lifetime_s: max_lifetime_s.unwrap_or(policy.default_max_lifetime_s),
        expires_at: None,
        preempt_signal,
        preempt_grace_ms,
        stop_signal,
        stop_grace_ms,
        init: init(base, request, runtime, mistakes),
        tty,
        log_streams: log_streams(base, request, runtime, tty),
        own_filters: choices.own_filters,
        sys: choices.sys,
        durable: choices.durable,
        new_privs: choices.new_privs,
        without_ipc: choices.without_ipc,
        pool: choices.pool,
        on_node_loss: on_node_loss.unwrap_or_default(),
        restarted: None,
        node_labels,
    }
}

fn init(
    base: &SessionRequest,
    request: &SessionRequest,
    runtime: RuntimeKind,
    mistakes: &mut Mistakes,
) -> bool {
    let traits = runtime_traits(runtime);
    let chosen = request.init.or(base.init).unwrap_or(traits.has_init);
    if chosen != traits.has_init && !traits.init_is_optional {
        let often = if traits.has_init { "always" } else { "never" };
        let message = format!("sessions of the {runtime} runtime {often} have one; leave it out");
        mistakes.add("init", message);
    }
    chosen
}

fn either<T: Clone>(request: &Option<T>, base: &Option<T>) -> Option<T> {
    request.as_ref().or(base.as_ref()).cloned()
}

fn image(
    policy: &SpecPolicy,
    base: &SessionRequest,
    request: &SessionRequest,
    runtime: RuntimeKind,
    needed: bool,
    mistakes: &mut Mistakes,
) -> String {
    let Some(image) = either(&request.image, &base.image) else {
        if needed && runtime_traits(runtime).needs_image {
            let known: Vec<&str> = policy.templates.keys().map(String::as_str).collect();
            let templates = match known.is_empty() {
                true => String::new(),
                false => format!(
                    ", or a template; this node's templates are: {}",
                    listed(&known)
                ),
            };
            mistakes.add("image", format!("is missing: name an image{templates}"));
        }
        return NO_IMAGE.to_owned();
    };
    if let Some(fault) = image_reference::fault(&image) {
        let shown = quote(&image);
        mistakes.add(
            "image",
            format!("`{shown}` is not an image reference: {fault}"),
        );
    }
    image
}

fn tty(
    base: &SessionRequest,
    request: &SessionRequest,
    runtime: RuntimeKind,
    mistakes: &mut Mistakes,
) -> bool {
    let tty = request.tty.or(base.tty).unwrap_or(false);
    if tty && !runtime_traits(runtime).has_terminals {
        mistakes.add("tty", format!("the {runtime} runtime has no terminals"));
    }
    tty
}

/// A terminal has one output, and the other runtimes tell them apart.
fn log_streams(
    base: &SessionRequest,
    request: &SessionRequest,
    runtime: RuntimeKind,
    tty: bool,
) -> bool {
    let asked = request.log_streams.or(base.log_streams).unwrap_or(false);
    asked && runtime_traits(runtime).merges_log && !tty
}

fn idle_action(
    base: &SessionRequest,
    request: &SessionRequest,
    runtime: RuntimeKind,
    mistakes: &mut Mistakes,
) -> IdleAction {
    let action = request.idle_action.or(base.idle_action).unwrap_or_default();
    if action == IdleAction::Pause && !runtime_traits(runtime).pauses {
        mistakes.add(
            "idle_action",
            format!("the {runtime} runtime does not pause sessions; use `stop`"),
        );
    }
    action
}

fn binds(
    policy: &SpecPolicy,
    id: &SessionId,
    base: &SessionRequest,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> Vec<String> {
    let asked = request.binds.as_ref().or(base.binds.as_ref());
    let asked = asked.map(Vec::as_slice).unwrap_or_default();
    if asked.len() > MAX_BINDS {
        mistakes.add(
            "binds",
            format!("has {} entries; {MAX_BINDS} are allowed", asked.len()),
        );
        return Vec::new();
    }
    let mut targets = BTreeSet::new();
    let mut resolved = Vec::new();
    for (index, text) in asked.iter().enumerate() {
        match Bind::resolve(text, id, &policy.bind_roots) {
            Ok(bind) => {
                resolved.push(bind.to_string());
                if !targets.insert(bind.target) {
                    mistakes.add(
                        format!("binds[{index}]"),
                        "an earlier bind has the same target",
                    );
                }
            }
            Err(error) => {
                mistakes.add(
                    format!("binds[{index}]"),
                    format!("`{}`: {error}", quote(text)),
                );
            }
        }
    }
    resolved
}

#[cfg(test)]
mod tests;
