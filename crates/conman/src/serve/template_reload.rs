//! Reads the templates again at SIGHUP, and reports what else of the file has changed.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use conman_net::Class;
use conman_node::Node;
use conman_proto::RuntimeKind;
use toml::Table;

use super::network;
use crate::config::{self, Config};

/// The configuration that the daemon started with.
pub(super) struct TemplateReload {
    node: Arc<Node>,
    path: Option<PathBuf>,
    runtimes: BTreeSet<RuntimeKind>,
    classes: Vec<Class>,
    has_session_rules: bool,
    open_loopback: bool,
    sections: Table,
}

impl TemplateReload {
    pub(super) fn new(config: &Config, node: &Arc<Node>) -> Self {
        Self {
            node: Arc::clone(node),
            path: config.file.clone(),
            runtimes: config.runtimes(),
            classes: network::classes(config),
            has_session_rules: network::needs_session_rules(config),
            open_loopback: config.open_loopback,
            sections: config.sections.clone(),
        }
    }

    /// Reads the file. A mistake anywhere in it changes nothing. Blocks.
    pub(super) fn read(&self) {
        let config = match config::load(self.path.as_deref()) {
            Ok(config) => config,
            Err(error) => {
                let error = super::chain(&error);
                tracing::error!(
                    error,
                    "cannot read the templates again; keeping the former ones"
                );
                return;
            }
        };
        let changed = changed(&self.sections, &config.sections);
        if self.open_loopback && changed.contains(&"auth") {
            tracing::warn!(
                "`auth` is read at the next start only: until then every user of this machine is \
                 an administrator of conman; restart it"
            );
        }
        let needs = if !config.runtimes().is_subset(&self.runtimes) {
            Some("a template has a runtime that this daemon does not use")
        } else if network::classes(&config) != self.classes {
            Some("a template with `network = \"routed\"`, or its `egress`, has changed")
        } else if changed.contains(&"auth") || changed.contains(&"net") {
            // The templates were checked against the new ones, and the daemon has the old ones.
            Some("`auth` or `net` has changed, too")
        } else if network::needs_session_rules(&config) && !self.has_session_rules {
            Some("a template's network needs rules inside its sessions, which were not checked")
        } else {
            None
        };
        if let Some(why) = needs {
            tracing::error!(why, "the templates need a restart; keeping the former ones");
            return;
        }
        let count = config.policy.templates.len();
        self.node.set_templates(config.policy.templates);
        tracing::info!(count, "read the templates again");
        if !changed.is_empty() {
            let changed = changed.join(", ");
            tracing::warn!(changed, "changed settings are read at the next start only");
        }
    }
}

/// The names of the sections that differ, without `templates`.
fn changed<'a>(before: &'a Table, now: &'a Table) -> Vec<&'a str> {
    let names: BTreeSet<&str> = before
        .keys()
        .chain(now.keys())
        .map(String::as_str)
        .collect();
    let differs = |name: &&str| *name != "templates" && before.get(*name) != now.get(*name);
    names.into_iter().filter(differs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_that_differ_are_named_but_for_the_templates() {
        let table = |text: &str| text.parse::<Table>().expect("TOML");
        let before = table("[a]\nx = 1\n[b]\nx = 1\n[templates.t]\nimage = \"i\"\n");
        let now = table("[a]\nx = 1\n[b]\nx = 2\n[c]\n[templates.t]\nimage = \"j\"\n");
        assert_eq!(changed(&before, &now), ["b", "c"]);
        assert!(changed(&now, &now).is_empty());
    }
}
