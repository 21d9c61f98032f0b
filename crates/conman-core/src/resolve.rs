use std::collections::{BTreeMap, BTreeSet};

use conman_proto::{FieldError, Network, ResolvedSpec, RuntimeKind, SessionId, SessionRequest};

use crate::bind::Bind;
use crate::nearest::nearest;
use crate::spec_policy::{MIN_CPUS, MIN_MEMORY_BYTES, SpecPolicy, Template};
use crate::{image_reference, preempt_signal};

/// Most entries of `env`.
pub const MAX_ENV_ENTRIES: usize = 256;
/// Most bytes of `env`, as the kernel counts them: `NAME=value` and a NUL each.
pub const MAX_ENV_BYTES: usize = 64 << 10;
/// Most items of `command` and `args` together.
pub const MAX_ARGUMENTS: usize = 256;
/// Most bytes of `command` and `args` together, with a NUL each.
pub const MAX_ARGUMENT_BYTES: usize = 64 << 10;
/// Most labels.
pub const MAX_LABELS: usize = 64;
/// Longest label key in bytes.
pub const MAX_LABEL_KEY_BYTES: usize = 63;
/// Longest label value in bytes.
pub const MAX_LABEL_VALUE_BYTES: usize = 253;
/// Most binds.
pub const MAX_BINDS: usize = 32;
/// Longest `ready_path` in bytes.
pub const MAX_READY_PATH_BYTES: usize = 2_048;
/// Longest bound on readiness, in seconds.
pub const MAX_READY_TIMEOUT_S: u32 = 600;
/// Longest `preempt_grace_ms`.
pub const MAX_PREEMPT_GRACE_MS: u32 = 60_000;

/// Environment variables that conman itself sets begin so.
const RESERVED_ENV_PREFIX: &str = "CONMAN_";

/// What stands for the image where the runtime needs none.
const NO_IMAGE: &str = "none";

/// Mistakes that are told in full; a last entry counts the others.
const MAX_MISTAKES: usize = 50;

/// Templates that a message names.
const MAX_NAMED: usize = 20;

/// Fills in a request from its template and the node's defaults.
///
/// Every mistake is found at once; each names the field and the allowed values.
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

/// Whether a session that runs as `running` is what `asked` asks for. Which template it came from
/// does not matter, only what came of it.
#[must_use]
pub fn matches(running: &ResolvedSpec, asked: &ResolvedSpec) -> bool {
    let asked = ResolvedSpec {
        template: running.template.clone(),
        ..asked.clone()
    };
    *running == asked
}

/// The mistakes of a template by itself. It need not name an image: requests may.
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

#[derive(Debug, Default)]
struct Mistakes {
    found: Vec<FieldError>,
    more: usize,
}

impl Mistakes {
    fn add(&mut self, field: impl Into<String>, message: impl Into<String>) {
        if self.found.len() < MAX_MISTAKES {
            self.found.push(FieldError {
                field: field.into(),
                message: message.into(),
            });
        } else {
            self.more += 1;
        }
    }

    fn into_result<T>(mut self, value: T) -> Result<T, Vec<FieldError>> {
        if self.more > 0 {
            let message = format!("{} more mistakes are not listed", self.more);
            self.found.push(FieldError {
                field: String::new(),
                message,
            });
        }
        if self.found.is_empty() {
            Ok(value)
        } else {
            Err(self.found)
        }
    }
}

/// A caller's text, cut and escaped for a message.
fn quote(text: &str) -> String {
    const MAX_CHARS: usize = 64;
    let mut shown: String = text
        .chars()
        .take(MAX_CHARS)
        .flat_map(char::escape_debug)
        .collect();
    if text.chars().nth(MAX_CHARS).is_some() {
        shown.push('…');
    }
    shown
}

fn has_control(text: &str) -> bool {
    text.chars().any(char::is_control)
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
    let known = || policy.templates.keys().map(String::as_str);
    let shown = quote(name);
    if policy.templates.is_empty() {
        return format!("there is no template `{shown}`: this node has no templates");
    }
    let hint = match nearest(name, known()) {
        Some(near) => format!("; did you mean `{near}`?"),
        None => ".".to_owned(),
    };
    let listed = known().take(MAX_NAMED).collect::<Vec<_>>().join(", ");
    let more = if policy.templates.len() > MAX_NAMED {
        ", …"
    } else {
        ""
    };
    format!("there is no template `{shown}`{hint} This node's templates are: {listed}{more}")
}

fn fill_in(
    policy: &SpecPolicy,
    id: &SessionId,
    template: Option<&Template>,
    request: &SessionRequest,
    needs_image: bool,
    mistakes: &mut Mistakes,
) -> ResolvedSpec {
    let empty = SessionRequest::default();
    let base = template.map_or(&empty, |template| &template.request);
    let runtime = template
        .and_then(|t| t.runtime)
        .unwrap_or(policy.default_runtime);

    let command = either(&request.command, &base.command).unwrap_or_default();
    let args = either(&request.args, &base.args).unwrap_or_default();
    check_arguments(&command, &args, mistakes);
    let env = merged(base.env.as_ref(), request.env.as_ref());
    check_env(&env, mistakes);
    let labels = merged(base.labels.as_ref(), request.labels.as_ref());
    check_labels(&labels, mistakes);

    let port = request.port.or(base.port).flatten();
    if port == Some(0) {
        mistakes.add("port", "must be 1 to 65535, or null for no port");
    }
    let ready_path = ready_path(base, request, port, mistakes);
    let network = request.network.or(base.network).unwrap_or_default();
    if runtime == RuntimeKind::Process && network == Network::Bridge {
        mistakes.add("network", "the process runtime has only `loopback`");
    }
    let (preempt_signal, preempt_grace_ms) = preemption(base, request, mistakes);

    ResolvedSpec {
        template: request.template.clone(),
        runtime,
        image: image(policy, base, request, runtime, needs_image, mistakes),
        command,
        args,
        env,
        port,
        ready_path,
        ready_timeout_s: within(
            "ready_timeout_s",
            request.ready_timeout_s.or(base.ready_timeout_s),
            policy.default_ready_timeout_s,
            (1, MAX_READY_TIMEOUT_S),
            mistakes,
        ),
        network,
        memory_bytes: memory(policy, base, request, mistakes),
        cpus: cpus(policy, base, request, mistakes),
        pids: within(
            "pids",
            request.pids.or(base.pids),
            policy.default_pids.min(policy.max_pids),
            (1, policy.max_pids),
            mistakes,
        ),
        labels,
        binds: binds(policy, id, base, request, mistakes),
        idle_timeout_s: request
            .idle_timeout_s
            .or(base.idle_timeout_s)
            .unwrap_or(policy.default_idle_timeout_s),
        max_lifetime_s: request
            .max_lifetime_s
            .or(base.max_lifetime_s)
            .unwrap_or(policy.default_max_lifetime_s),
        preempt_signal,
        preempt_grace_ms,
    }
}

fn either<T: Clone>(request: &Option<T>, base: &Option<T>) -> Option<T> {
    request.as_ref().or(base.as_ref()).cloned()
}

fn merged(
    base: Option<&BTreeMap<String, String>>,
    over: Option<&BTreeMap<String, String>>,
) -> BTreeMap<String, String> {
    let mut all = base.cloned().unwrap_or_default();
    all.extend(
        over.into_iter()
            .flatten()
            .map(|(key, value)| (key.clone(), value.clone())),
    );
    all
}

fn within(
    field: &str,
    given: Option<u32>,
    default: u32,
    (least, most): (u32, u32),
    mistakes: &mut Mistakes,
) -> u32 {
    let value = given.unwrap_or(default);
    if !(least..=most).contains(&value) {
        mistakes.add(field, format!("is {value}; must be {least} to {most}"));
    }
    value
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
        if needed && runtime != RuntimeKind::Process {
            let templates = if policy.templates.is_empty() {
                ""
            } else {
                ", or a template that does"
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

fn check_arguments(command: &[String], args: &[String], mistakes: &mut Mistakes) {
    let items = command.len() + args.len();
    if items > MAX_ARGUMENTS {
        mistakes.add(
            "command",
            format!("has {items} items together with args; {MAX_ARGUMENTS} are allowed"),
        );
    }
    let bytes: usize = command.iter().chain(args).map(|item| item.len() + 1).sum();
    if bytes > MAX_ARGUMENT_BYTES {
        mistakes.add(
            "command",
            format!("has {bytes} bytes together with args; {MAX_ARGUMENT_BYTES} are allowed"),
        );
    }
    if command.first().is_some_and(String::is_empty) {
        mistakes.add("command[0]", "is empty; it must name a program");
    }
    for (field, list) in [("command", command), ("args", args)] {
        for (index, _) in list
            .iter()
            .enumerate()
            .filter(|(_, item)| item.contains('\0'))
        {
            mistakes.add(format!("{field}[{index}]"), "holds a NUL character");
        }
    }
}

fn check_env(env: &BTreeMap<String, String>, mistakes: &mut Mistakes) {
    if env.len() > MAX_ENV_ENTRIES {
        mistakes.add(
            "env",
            format!("has {} entries; {MAX_ENV_ENTRIES} are allowed", env.len()),
        );
    }
    let bytes: usize = env
        .iter()
        .map(|(name, value)| name.len() + value.len() + 2)
        .sum();
    if bytes > MAX_ENV_BYTES {
        mistakes.add(
            "env",
            format!("has {bytes} bytes; {MAX_ENV_BYTES} are allowed"),
        );
    }
    for (name, value) in env {
        let field = || format!("env.{}", quote(name));
        if name.is_empty() || name.contains('=') || has_control(name) {
            mistakes.add(
                field(),
                "a name must not be empty or hold `=` or control characters",
            );
        } else if name.starts_with(RESERVED_ENV_PREFIX) {
            mistakes.add(
                field(),
                format!("names that begin with {RESERVED_ENV_PREFIX} are set by conman itself"),
            );
        }
        if value.contains('\0') {
            mistakes.add(field(), "the value holds a NUL character");
        }
    }
}

fn check_labels(labels: &BTreeMap<String, String>, mistakes: &mut Mistakes) {
    if labels.len() > MAX_LABELS {
        mistakes.add(
            "labels",
            format!("has {} entries; {MAX_LABELS} are allowed", labels.len()),
        );
    }
    for (key, value) in labels {
        let field = || format!("labels.{}", quote(key));
        if !is_label_key(key) {
            mistakes.add(
                field(),
                format!(
                    "a key must be 1 to {MAX_LABEL_KEY_BYTES} characters of a-z, 0-9, `.`, `_`, \
                     `/` and `-`"
                ),
            );
        }
        if value.len() > MAX_LABEL_VALUE_BYTES || has_control(value) {
            mistakes.add(
                field(),
                format!(
                    "a value must be at most {MAX_LABEL_VALUE_BYTES} bytes without control \
                     characters"
                ),
            );
        }
    }
}

/// Whether a text can be a label's key.
pub(crate) fn is_label_key(key: &str) -> bool {
    (1..=MAX_LABEL_KEY_BYTES).contains(&key.len())
        && key.bytes().all(|byte| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._/-".contains(&byte)
        })
}

/// A template's path falls with its port when the request wants no port; the request's own
/// contradicts it.
fn ready_path(
    base: &SessionRequest,
    request: &SessionRequest,
    port: Option<u16>,
    mistakes: &mut Mistakes,
) -> Option<String> {
    let own = request.ready_path.as_ref().or_else(|| {
        base.ready_path
            .as_ref()
            .filter(|_| port.is_some() || request.port.is_none())
    })?;
    if port.is_none() {
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

fn memory(
    policy: &SpecPolicy,
    base: &SessionRequest,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> Option<u64> {
    // Docker holds sizes as signed 64-bit numbers.
    let most = policy.max_memory_bytes.unwrap_or(i64::MAX as u64);
    let memory = request
        .memory_bytes
        .or(base.memory_bytes)
        .or(policy.default_memory_bytes)
        .or(policy.max_memory_bytes)?;
    if !(MIN_MEMORY_BYTES..=most).contains(&memory) {
        mistakes.add(
            "memory_bytes",
            format!("is {memory}; must be {MIN_MEMORY_BYTES} (6 MiB) to {most}"),
        );
    }
    Some(memory)
}

fn cpus(
    policy: &SpecPolicy,
    base: &SessionRequest,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> Option<f64> {
    let most = policy
        .max_cpus
        .unwrap_or(crate::spec_policy::HIGHEST_MAX_CPUS);
    let cpus = request
        .cpus
        .or(base.cpus)
        .or(policy.default_cpus)
        .or(policy.max_cpus)?;
    // Not a number is in no range.
    if !(MIN_CPUS..=most).contains(&cpus) {
        mistakes.add("cpus", format!("is {cpus}; must be {MIN_CPUS} to {most}"));
    }
    Some(cpus)
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

/// A grace period without a signal would be a mere delay of the kill.
fn preemption(
    base: &SessionRequest,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> (Option<String>, u32) {
    let given = request
        .preempt_signal
        .as_ref()
        .or(base.preempt_signal.as_ref());
    let signal = given.map(|text| {
        preempt_signal::canonical(text)
            .map(str::to_owned)
            .unwrap_or_else(|| {
                let allowed = preempt_signal::allowed();
                mistakes.add(
                    "preempt_signal",
                    format!("`{}` is not one of {allowed}", quote(text)),
                );
                String::new()
            })
    });
    let grace = within(
        "preempt_grace_ms",
        request.preempt_grace_ms.or(base.preempt_grace_ms),
        0,
        (0, MAX_PREEMPT_GRACE_MS),
        mistakes,
    );
    if grace > 0 && given.is_none() {
        mistakes.add(
            "preempt_grace_ms",
            "needs a preempt_signal to give time for",
        );
    }
    (signal, grace)
}

#[cfg(test)]
mod tests;
