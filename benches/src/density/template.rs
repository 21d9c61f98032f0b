//! The configuration of the sessions of a density run.

use conman_proto::RuntimeKind;
use serde_json::json;

use super::IMAGE;
use crate::arguments::{Density, DensityNetwork};
use crate::docker::image_name;
use crate::{image, plain};

pub(super) fn template(options: &Density) -> String {
    let image = match options.runtime {
        RuntimeKind::Native | RuntimeKind::Gvisor | RuntimeKind::Oci(_) | RuntimeKind::Process => {
            IMAGE.to_owned()
        }
        RuntimeKind::Docker => image_name(),
    };
    let ptys = match (options.runtime, options.ptys) {
        (RuntimeKind::Native, Some(ptys)) => format!("ptys = {ptys}\n"),
        // The others do not limit terminals.
        _ => String::new(),
    };
    let cpus = match options.runtime {
        // Bare `runsc` has no cgroups here: a limit would slow the start of the session's kernel alone.
        RuntimeKind::Gvisor => String::new(),
        RuntimeKind::Native | RuntimeKind::Oci(_) | RuntimeKind::Docker | RuntimeKind::Process => {
            format!("cpus = {}\n", plain::CPUS)
        }
    };
    let command = json!(image::COMMAND);
    let (net, own) = match options.network {
        DensityNetwork::Loopback => ("", ""),
        // An address for documentation (RFC 5737): no session connects to it.
        DensityNetwork::Egress => ("", "egress = [\"192.0.2.1/32:80\"]\n"),
        DensityNetwork::Routed => (
            "[net]\npool = [\"198.18.0.0/15\"]\n",
            "network = \"routed\"\n",
        ),
    };
    let store = options.store.name();
    format!(
        "[images]\nstore = \"{store}\"\n{net}[templates.http]\n{own}image = \"{image}\"\ncommand = {command}\nport = 8080\n\
         memory_bytes = {}\npids = {}\n{cpus}{ptys}",
        plain::MEMORY_BYTES,
        plain::PIDS,
    )
}
