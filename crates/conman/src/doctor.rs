//! `conman doctor`: shows which limits of this host apply, without the daemon.
use std::io;
use std::path::Path;
use std::process::ExitCode;

use conman_cli::{DoctorArgs, DoctorRuntime};
use conman_core::naming::instance_cgroup;
use conman_core::{CgroupDriver, Template};
use conman_doctor::{
    Applied, Diagnosis, Fix, Footprint, Host, Kernel, Roots, Site, Superblocks, examine,
    layers_text, missing_layers,
};
use conman_linux::Features;
use conman_net::egress::IDLE_DESCRIPTORS;
use conman_net::{LINK_DESCRIPTORS, MAX_NEIGHBOURS, ROUTED_NEIGHBOURS};
use conman_proto::{Network, RuntimeKind};
use conman_runtime::{OciOptions, RootStore, SNAPSHOTS_FILE};
use serde::Serialize;

use crate::config::{self, Config};
use crate::serve::network;
use crate::serve::runtimes::NATIVE;
use crate::state_dir;

/// Docker's default directory for containers.
pub(crate) const DOCKER_ROOT: &str = "/var/lib/docker";

/// Exits with 0 when the host is fit for the target.
pub(crate) fn run(arguments: &DoctorArgs, json: bool) -> ExitCode {
    let config = match config::load(arguments.config.as_deref()) {
        Ok(config) => config,
        Err(error) => return crate::fail(&format!("{:#}", anyhow::Error::new(error))),
    };
    let host = Host::this();
    let look = || diagnose(&host, arguments, &config);
    let diagnosis = look();
    let applied = arguments.fix.then(|| Fix::plan(&diagnosis).apply(&host));
    // Limits that were raised do not apply any more.
    let diagnosis = if applied.is_some() { look() } else { diagnosis };
    let features = match kind(arguments, &config) {
        RuntimeKind::Docker => None,
        RuntimeKind::Native | RuntimeKind::Gvisor | RuntimeKind::Oci(_) | RuntimeKind::Process => {
            Features::probe().ok()
        }
    };
    let kernel = features.as_ref().map(Kernel::from);
    let superblocks = features.as_ref().and_then(|_| Superblocks::measure());
    let roots = features.as_ref().map(|_| roots(&config));
    let layers = features.map(|features| missing_layers(&features, &config.state_dir));
    let network = match missing_for_network(&config) {
        Ok(missing) => missing,
        Err(error) => return crate::fail(&format!("cannot check the network: {error}")),
    };
    let runtimes = match OciRuntime::tried(arguments, &config) {
        Ok(runtimes) => runtimes,
        Err(error) => return crate::fail(&format!("cannot try the OCI runtimes: {error}")),
    };
    let fit = diagnosis.is_fit()
        && runtimes.iter().all(|one| one.missing.is_none())
        && roots.as_ref().is_none_or(|roots| roots.missing.is_none())
        && kernel.as_ref().is_none_or(|one| one.missing.is_empty())
        && network.as_ref().is_none_or(Vec::is_empty);
    if json {
        let value = serde_json::json!({
            "fit": fit, "diagnosis": diagnosis, "kernel": kernel, "fixed": applied,
            "missing_layers": layers, "superblocks": superblocks, "roots": roots,
            "missing_network": network,
            "oci_runtimes": runtimes,
            "open_api": config.open_loopback,
        });
        crate::tell(&value.to_string());
    } else {
        crate::tell(diagnosis.to_text().trim_end());
        if let Some(kernel) = &kernel {
            crate::tell(&kernel.to_text());
        }
        if let Some(superblocks) = &superblocks {
            crate::tell(&superblocks.to_text());
        }
        if let Some(roots) = &roots {
            crate::tell(&roots.to_text());
        }
        if let Some(layers) = &layers {
            crate::tell(&layers_text(layers));
        }
        if let Some(missing) = &network {
            crate::tell(&network_text(missing));
        }
        for runtime in &runtimes {
            crate::tell(&runtime.to_text());
        }
        if config.open_loopback {
            crate::tell(
                "The API is open: with `auth.loopback = \"open\"` every user of this machine is an \
                 administrator of conman. Remove that line unless nobody else has an account here.",
            );
        }
        if let Some(applied) = &applied {
            crate::tell(&applied_text(applied));
        }
    }
    let failed = applied.is_some_and(|applied| !applied.failed.is_empty());
    if fit && !failed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn kind(arguments: &DoctorArgs, config: &Config) -> RuntimeKind {
    match arguments.runtime {
        Some(DoctorRuntime::Native) => RuntimeKind::Native,
        Some(DoctorRuntime::Docker) => RuntimeKind::Docker,
        Some(DoctorRuntime::Gvisor) => RuntimeKind::Gvisor,
        // A bridge network means Docker.
        None if arguments.bridge => RuntimeKind::Docker,
        None => config.runtime,
    }
}

fn diagnose(host: &Host, arguments: &DoctorArgs, config: &Config) -> Diagnosis {
    let kind = kind(arguments, config);
    let footprint = footprint(kind, arguments.bridge, config);
    let folders = folders(kind, &config.state_dir.to_string_lossy());
    let folders: Vec<&str> = folders.iter().map(String::as_str).collect();
    // There is none before the first start of the daemon.
    let cgroup = state_dir::known_instance(&config.state_dir)
        .map(|instance| instance_cgroup(&instance, CgroupDriver::Cgroupfs));
    let site = Site {
        folders: &folders,
        cgroup: cgroup.as_deref(),
        alive: None,
        proxy_buffer_bytes: config.net.egress.buffer_bytes,
    };
    examine(host, &footprint, arguments.target, &site)
}

/// Where native sessions write.
fn roots(config: &Config) -> Roots {
    let directory = config.state_dir.join(NATIVE);
    match config.images.roots {
        RootStore::Overlay => Roots::overlays(&directory),
        RootStore::Btrfs(_) => Roots::snapshots(&directory.join(SNAPSHOTS_FILE)),
    }
}

/// Resources that a session of a runtime needs on this machine.
pub(crate) fn footprint(kind: RuntimeKind, bridge: bool, config: &Config) -> Footprint {
    let footprint = match kind {
        // Bare processes are for tests, and similar to a native session.
        RuntimeKind::Native | RuntimeKind::Process => {
            Footprint::native(config.id_range.ranges().into())
        }
        RuntimeKind::Gvisor => Footprint::gvisor(config.id_range.ranges().into()),
        RuntimeKind::Oci(_) => Footprint::oci(config.id_range.ranges().into()),
        RuntimeKind::Docker => Footprint::docker(bridge, Host::this().has_unified_cgroups()),
    };
    let traits = |template: &Template| {
        let network = template.request.network.as_ref();
        network.map(Network::traits).unwrap_or_default()
    };
    // If one template has it, all sessions may be of that template.
    let templates = config.policy.templates.values();
    let descriptors = templates.map(|template| {
        let egress = template.request.egress.as_ref();
        match egress.is_some_and(|patterns| !patterns.is_empty()) {
            _ if traits(template).routed => match template.request.talk {
                Some(_) => LINK_DESCRIPTORS + IDLE_DESCRIPTORS,
                None => LINK_DESCRIPTORS,
            },
            true => IDLE_DESCRIPTORS,
            false => 0,
        }
    });
    let descriptors = descriptors.max().unwrap_or(0);
    let templates = config.policy.templates.values();
    let neighbours = templates.map(|template| {
        let traits = traits(template);
        match (traits.routed, traits.on_interface) {
            (true, _) => ROUTED_NEIGHBOURS,
            (false, true) => MAX_NEIGHBOURS,
            (false, false) => 0,
        }
    });
    footprint
        .with_descriptors(descriptors)
        .with_neighbours(neighbours.max().unwrap_or(0))
}

/// Where the files of a runtime's sessions lie.
pub(crate) fn folders(kind: RuntimeKind, state_dir: &str) -> Vec<String> {
    let mut folders = vec![state_dir.to_owned()];
    if kind == RuntimeKind::Docker && Path::new(DOCKER_ROOT).exists() {
        folders.insert(0, DOCKER_ROOT.to_owned());
    }
    folders
}

/// `None` if the configuration needs nothing for networks.
fn missing_for_network(config: &Config) -> io::Result<Option<Vec<String>>> {
    let instance = state_dir::known_instance(&config.state_dir);
    // Before the first start of the daemon it has no links whose routes are to be left out.
    let instance = instance
        .as_ref()
        .map_or("00000000", |instance| instance.as_str());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    Ok(runtime.block_on(network::missing(config, instance)))
}

/// What an OCI runtime does on this machine.
#[derive(Debug, Serialize)]
struct OciRuntime {
    name: String,
    version: Option<String>,
    /// How long a program in it took, from its start to its end; only gVisor is tried so.
    program_ms: Option<u64>,
    /// Why sessions with it cannot start, and what to do.
    missing: Option<String>,
}

impl OciRuntime {
    /// Tries those that the configuration has sessions with, or that the arguments name.
    fn tried(arguments: &DoctorArgs, config: &Config) -> io::Result<Vec<Self>> {
        let mut kinds = config.runtimes();
        kinds.insert(kind(arguments, config));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let used = config.oci.iter().filter(|(kind, _)| kinds.contains(kind));
        Ok(used
            .map(|(kind, options)| runtime.block_on(Self::of(kind.to_string(), options)))
            .collect())
    }

    async fn of(name: String, options: &OciOptions) -> Self {
        let version = options.version().await;
        let ran = match &version {
            Ok(_) if options.is_gvisor => options.probe().await.map(Some),
            Ok(_) | Err(_) => Ok(None),
        };
        let missing = version.as_ref().err().or(ran.as_ref().err());
        Self {
            name,
            missing: missing.map(ToString::to_string),
            version: version.ok(),
            program_ms: ran
                .ok()
                .flatten()
                .and_then(|took| u64::try_from(took.as_millis()).ok()),
        }
    }

    fn to_text(&self) -> String {
        let name = &self.name;
        match (&self.missing, &self.version, self.program_ms) {
            (Some(missing), ..) => {
                format!("Sessions with `runtime = \"{name}\"` cannot start: {missing}.")
            }
            (None, Some(version), Some(ms)) => format!(
                "gVisor works: runsc {version} ran a program in {ms} ms. Its cgroups are conman's."
            ),
            (None, version, _) => format!(
                "The runtime `{name}` is {}. Its cgroups are conman's.",
                version.as_deref().unwrap_or_default()
            ),
        }
    }
}

fn network_text(missing: &[String]) -> String {
    match missing {
        [] => "The network of sessions has everything: nf_tables with fib, nat and reject, veth, forwarding, \
               a free pool."
            .to_owned(),
        missing => format!("The network of sessions lacks:\n  {}", missing.join("\n  ")),
    }
}

fn applied_text(applied: &Applied) -> String {
    let set = applied.set.iter().map(|setting| format!("set {setting}"));
    let file = applied
        .file
        .iter()
        .map(|file| format!("written for the next boot: {}", file.display()));
    let failed = applied
        .failed
        .iter()
        .map(|error| format!("failed: {error}"));
    let lines: Vec<String> = set.chain(file).chain(failed).collect();
    if lines.is_empty() {
        return "no kernel setting needs to be changed".to_owned();
    }
    lines.join("\n")
}
