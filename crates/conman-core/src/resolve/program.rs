//! Input of the program (arguments and environment), and the labels.

use std::collections::BTreeMap;

use conman_proto::SessionRequest;

use super::either;
use super::mistakes::{Mistakes, has_control, quote};

/// Maximum number of entries in `env`.
pub const MAX_ENV_ENTRIES: usize = 256;
/// Maximum size of `env`, as the kernel counts it: `NAME=value` and a NUL each.
pub const MAX_ENV_BYTES: usize = 64 << 10;
/// Maximum number of items in `command` and `args` together.
pub const MAX_ARGUMENTS: usize = 256;
/// Maximum size of `command` and `args` together, with a NUL each.
pub const MAX_ARGUMENT_BYTES: usize = 64 << 10;
/// Maximum number of labels.
pub const MAX_LABELS: usize = 64;
/// Maximum length of a label key in bytes.
pub const MAX_LABEL_KEY_BYTES: usize = 63;
/// Maximum length of a label value in bytes.
pub const MAX_LABEL_VALUE_BYTES: usize = 253;
/// Prefix of the environment variables that conman sets.
const RESERVED_ENV_PREFIX: &str = "CONMAN_";

/// Returns the command and its arguments.
pub(super) fn command(
    base: &SessionRequest,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> (Vec<String>, Vec<String>) {
    let command = either(&request.command, &base.command).unwrap_or_default();
    let args = either(&request.args, &base.args).unwrap_or_default();
    check_arguments(&command, &args, mistakes);
    (command, args)
}

pub(super) fn env(
    base: &SessionRequest,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> BTreeMap<String, String> {
    let env = merged(base.env.as_ref(), request.env.as_ref());
    check_env(&env, mistakes);
    env
}

pub(super) fn labels(
    base: &SessionRequest,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> BTreeMap<String, String> {
    let labels = merged(base.labels.as_ref(), request.labels.as_ref());
    check_labels("labels", &labels, mistakes);
    labels
}

pub(super) fn node_labels(
    base: &SessionRequest,
    request: &SessionRequest,
    mistakes: &mut Mistakes,
) -> BTreeMap<String, String> {
    let node_labels = merged(base.node_labels.as_ref(), request.node_labels.as_ref());
    check_labels("node_labels", &node_labels, mistakes);
    node_labels
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

pub(super) fn check_labels(name: &str, labels: &BTreeMap<String, String>, mistakes: &mut Mistakes) {
    if labels.len() > MAX_LABELS {
        mistakes.add(
            name,
            format!("has {} entries; {MAX_LABELS} are allowed", labels.len()),
        );
    }
    for (key, value) in labels {
        let field = || format!("{name}.{}", quote(key));
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
