//! `conman doctor`: which limits of this host bind; no daemon is asked.
use std::path::Path;
use std::process::ExitCode;

use conman_cli::DoctorArgs;
use conman_doctor::{Applied, Diagnosis, Fix, Footprint, Host, examine};

use crate::config;

/// Where Docker keeps its containers unless told otherwise.
const DOCKER_ROOT: &str = "/var/lib/docker";

/// Exits with 0 when the host is fit for the target.
pub(crate) fn run(arguments: &DoctorArgs, json: bool) -> ExitCode {
    let config = match config::load(arguments.config.as_deref()) {
        Ok(config) => config,
        Err(error) => return crate::fail(&format!("{:#}", anyhow::Error::new(error))),
    };
    let host = Host::this();
    let state_dir = config.state_dir.to_string_lossy().into_owned();
    let look = || diagnose(&host, arguments, &state_dir);
    let diagnosis = look();
    let applied = arguments.fix.then(|| Fix::plan(&diagnosis).apply(&host));
    // What was raised does not bind any more.
    let diagnosis = if applied.is_some() { look() } else { diagnosis };
    if json {
        let value = serde_json::json!({
            "fit": diagnosis.is_fit(), "diagnosis": diagnosis, "fixed": applied,
        });
        crate::tell(&value.to_string());
    } else {
        crate::tell(diagnosis.to_text().trim_end());
        if let Some(applied) = &applied {
            crate::tell(&told(applied));
        }
    }
    let failed = applied.is_some_and(|applied| !applied.failed.is_empty());
    if diagnosis.is_fit() && !failed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn diagnose(host: &Host, arguments: &DoctorArgs, state_dir: &str) -> Diagnosis {
    let footprint = Footprint::docker(arguments.bridge, host.has_unified_cgroups());
    let mut folders = vec![state_dir];
    if Path::new(DOCKER_ROOT).exists() {
        folders.insert(0, DOCKER_ROOT);
    }
    examine(host, &footprint, arguments.target, &folders)
}

fn told(applied: &Applied) -> String {
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
        return "no kernel setting needs to be raised".to_owned();
    }
    lines.join("\n")
}
