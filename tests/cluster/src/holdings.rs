//! What a node has of the kernel's, to be compared before and after.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use conman_linux::Cgroups;

use crate::command::{inside, run};
use crate::layout::Layout;
use crate::{leftovers, process};

/// Cgroups, network namespaces, links, addresses, mounts and descriptors, each kind with its number.
///
/// Sockets come and go with whoever asks; a pidfd or a namespace's descriptor is a session's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holdings(BTreeMap<String, usize>);

impl Holdings {
    pub(crate) fn of(layout: &Layout, node: &str) -> Result<Self> {
        let mut found = BTreeMap::new();
        let mut count = |what: String| *found.entry(what).or_insert(0) += 1;
        if let Some(instance) = leftovers::instance(layout, node) {
            let cgroups = Cgroups::detect().context("no cgroups")?;
            for name in cgroups.children(&leftovers::cgroup(&instance)) {
                count(format!("cgroup {name}"));
            }
        }
        let namespace = layout.namespace_path(node);
        let links = run(inside(&namespace, "ip").args(["-brief", "address"]))?;
        for line in links.lines() {
            let words = line.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
            count(format!("link {words}"));
        }
        for one in process::residents(&namespace) {
            let role = one.words.get(1).cloned().unwrap_or_default();
            let own = Path::new("/proc").join(one.pid.to_string());
            // Those that end meanwhile have nothing any more.
            let mounts = fs::read_to_string(own.join("mountinfo")).unwrap_or_default();
            for line in mounts.lines() {
                let point = line.split_ascii_whitespace().nth(4).unwrap_or_default();
                // Hosts of this cluster and of others that come up meanwhile, and other tests' containers.
                let others = ["/run/netns/", "/run/docker/", "/var/lib/docker/"];
                // Docker of another cluster mounts below that cluster's directory, next to this one's.
                let is_other_clusters = layout.directory.parent().is_some_and(|clusters| {
                    let point = Path::new(point);
                    point.starts_with(clusters)
                        && point != clusters
                        && !point.starts_with(&layout.directory)
                });
                if !is_other_clusters && !others.iter().any(|other| point.starts_with(other)) {
                    count(format!("{role}: mount {point}"));
                }
            }
            for descriptor in fs::read_dir(own.join("fd")).into_iter().flatten().flatten() {
                if let Some(kind) = fs::read_link(descriptor.path())
                    .ok()
                    .and_then(|to| kind(&to))
                {
                    count(format!("{role}: {kind}"));
                }
            }
        }
        Ok(Self(found))
    }

    /// What there is more of than there was.
    #[must_use]
    pub fn beyond(&self, before: &Self) -> Vec<String> {
        let grown = self.0.iter().filter_map(|(what, now)| {
            let was = before.0.get(what).copied().unwrap_or(0);
            (*now > was).then(|| format!("{what}: {now}, was {was}"))
        });
        grown.collect()
    }
}

/// What a descriptor is of, without its number.
fn kind(to: &Path) -> Option<String> {
    let to = to.to_string_lossy();
    match to.split_once(":[") {
        Some(("socket", _)) => None,
        Some(("anon_inode", _)) | None => Some(to.into_owned()),
        Some((kind, _)) => Some(kind.to_owned()),
    }
}
