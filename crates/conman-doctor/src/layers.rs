//! Optional layers of isolation between a hostile session and its host. [`Kernel`](crate::Kernel) reports
//! those that only need a later kernel.

use std::path::Path;

use conman_linux::{Capabilities, Features, ProjectQuotas, has_capability};
use serde::Serialize;

const SUID_DUMPABLE: &str = "/proc/sys/fs/suid_dumpable";

/// The layers that this host lacks for native sessions, in the order of what they protect. `state_dir` need
/// not exist yet.
#[must_use]
pub fn missing_layers(features: &Features, state_dir: &Path) -> Vec<MissingLayer> {
    let dumpable = std::fs::read_to_string(SUID_DUMPABLE).unwrap_or_default();
    let existing = state_dir.ancestors().find(|path| path.exists());
    let all = [
        (dumpable.trim() != "1", ENTERING),
        (features.unified_cgroups, UNIFIED_CGROUPS),
        (
            existing.is_some_and(|path| ProjectQuotas::of(path).is_some()),
            PROJECT_QUOTAS,
        ),
        (has_capability(Capabilities::SYS_RESOURCE), OOM_SCORE),
    ];
    let missing = all.into_iter().filter(|(present, _)| !present);
    missing.map(|(_, layer)| layer).collect()
}

/// For people: missing layers, and what follows.
#[must_use]
pub fn layers_text(missing: &[MissingLayer]) -> String {
    if missing.is_empty() {
        return "No layer of the sessions' isolation is missing.".to_owned();
    }
    let lines = missing.iter().map(|layer| {
        let MissingLayer {
            name,
            consequence,
            remedy,
        } = layer;
        format!("\n  {name}: {consequence}. To get it: {remedy}.")
    });
    format!(
        "Layers of the sessions' isolation that are missing:{}",
        lines.collect::<String>()
    )
}

/// A layer that this host lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MissingLayer {
    pub name: &'static str,
    /// The consequence of its absence.
    pub consequence: &'static str,
    pub remedy: &'static str,
}

const ENTERING: MissingLayer = MissingLayer {
    name: "fs.suid_dumpable other than 1",
    consequence: "native sessions are refused, because a session could trace a command that enters it",
    remedy: "sysctl -w fs.suid_dumpable=0",
};

const UNIFIED_CGROUPS: MissingLayer = MissingLayer {
    name: "cgroup v2",
    consequence: "processes are frozen and killed one by one, and are not created in their cgroup",
    remedy: "boot with systemd.unified_cgroup_hierarchy=1, or mount the v2 hierarchy",
};

const PROJECT_QUOTAS: MissingLayer = MissingLayer {
    name: "project quotas",
    consequence: "a session that exceeds disk_bytes is ended within seconds, can fill the disk until then, \
                  and can hide files from the measurement: not for programs of people that you do not trust",
    remedy: "put node.state_dir on ext4 made with -O quota,project and mounted with prjquota, or on XFS \
             mounted with pquota (Linux 5.14 or later)",
};

const OOM_SCORE: MissingLayer = MissingLayer {
    name: "CAP_SYS_RESOURCE",
    consequence: "a session can lower its oom_score_adj, and the OOM killer may choose the daemon first",
    remedy: "run conman with CAP_SYS_RESOURCE, as its systemd units do",
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_missing_layer_is_named_with_its_consequence_and_remedy() {
        assert!(layers_text(&[]).contains("No layer"));
        let text = layers_text(&[PROJECT_QUOTAS]);
        assert!(text.contains("can fill the disk"), "{text}");
        assert!(text.contains("prjquota"), "{text}");
        assert!(!text.contains(UNIFIED_CGROUPS.name), "{text}");
    }
}
