//! `[runtimes.NAME]`: the OCI runtimes that templates may name.

use std::collections::BTreeMap;

use conman_core::SpecPolicy;
use conman_proto::RuntimeKind;
use conman_runtime::OciOptions;

use super::reader::{Reader, Section};

/// Reads a runtime that a node or a template names. Whether it is configured is checked when all is read.
pub(super) fn kind(text: &str) -> Result<RuntimeKind, String> {
    match text.parse() {
        Ok(RuntimeKind::Process) | Err(_) => Err(
            "must be \"native\", \"gvisor\", \"docker\" or the name of a section in `[runtimes]`"
                .to_owned(),
        ),
        Ok(kind) => Ok(kind),
    }
}

/// Reads `[runtimes]`. gVisor is in it also if the configuration does not name it.
pub(super) fn runtimes(section: &Section<'_, '_>) -> BTreeMap<RuntimeKind, OciOptions> {
    let mut runtimes = BTreeMap::from([(RuntimeKind::Gvisor, OciOptions::gvisor())]);
    for (name, runtime) in section.sections() {
        let kind = match name.parse() {
            Ok(kind @ (RuntimeKind::Gvisor | RuntimeKind::Oci(_))) => kind,
            Ok(other) => {
                section.mistake(
                    &name,
                    format!("is built in: name it otherwise, `{other}` cannot be configured"),
                );
                continue;
            }
            Err(error) => {
                section.mistake(&name, error);
                continue;
            }
        };
        if let Some(options) = oci(&runtime, kind == RuntimeKind::Gvisor) {
            runtimes.insert(kind, options);
        }
    }
    runtimes
}

fn oci(section: &Section<'_, '_>, is_gvisor: bool) -> Option<OciOptions> {
    let is_oci = |text: &str| match text {
        "oci" => Ok(()),
        _ => Err("must be \"oci\"".to_owned()),
    };
    // A mistake in it is reported.
    let kind = section.parsed("kind", is_oci);
    if kind.is_none() && !section.has("kind") {
        section.mistake("kind", "is missing; it must be \"oci\"");
    }
    let default = is_gvisor.then(OciOptions::gvisor);
    let program = section.path("path");
    let program = program.or(default.map(|gvisor| gvisor.program));
    if program.is_none() && !section.has("path") {
        section.mistake(
            "path",
            "is missing: the program of the runtime, such as `/usr/bin/crun`",
        );
    }
    let arguments = section.strings("args").unwrap_or_default();
    section.finish();
    Some(OciOptions {
        is_gvisor,
        program: program?,
        arguments,
    })
}

/// Reports templates, and the node, that name a runtime which is not configured.
pub(super) fn mistakes(
    reader: &Reader<'_>,
    policy: &SpecPolicy,
    configured: &BTreeMap<RuntimeKind, OciOptions>,
) {
    let templates = policy.templates.iter();
    let named = templates.filter_map(|(name, template)| {
        let kind = template.runtime?;
        Some((format!("templates.{name}.runtime"), kind))
    });
    for (field, kind) in named.chain([("node.runtime".to_owned(), policy.default_runtime)]) {
        if matches!(kind, RuntimeKind::Oci(_)) && !configured.contains_key(&kind) {
            let message = format!(
                "names `{kind}`, which is not configured: add `[runtimes.{kind}]`, or use \"native\", \"gvisor\" or \"docker\""
            );
            reader.mistake(&field, message);
        }
    }
}
