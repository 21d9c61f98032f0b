//! What the runtimes can do, for every decision about specs.

use conman_proto::{NetworkTraits, RuntimeKind};

/// What a runtime can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuntimeTraits {
    /// Its containers have an image.
    pub needs_image: bool,
    /// Its images are in the node's image store.
    pub uses_image_store: bool,
    pub has_terminals: bool,
    /// Its logs have one stream unless the spec wants two.
    pub merges_log: bool,
    pub pauses: bool,
    pub limits_disk: bool,
    pub limits_terminals: bool,
    /// Its programs may not install system call filters unless the template allows it.
    pub refuses_filters: bool,
    /// Templates choose what its sessions see of their limits, whether they may gain privileges, and whether
    /// their disk is durable.
    pub has_native_choices: bool,
    /// Its programs run below an init.
    pub has_init: bool,
    /// Unless the spec says otherwise.
    pub init_is_optional: bool,
    pub has_egress_proxy: bool,
    /// The host sees a session's processes, so they can be listed.
    pub lists_processes: bool,
    /// The first process of a container and of a command is the session's program, not an OCI runtime that runs it: it
    /// can be warned by a signal at a preemption, and a kept command can have a time limit.
    pub runs_programs_itself: bool,
    /// Its containers get links from conman.
    makes_links: bool,
    /// Its containers can share the node's network.
    shares_host: bool,
    /// Its daemon has a bridge.
    has_bridge: bool,
}

impl RuntimeTraits {
    /// Whether its containers can have a network.
    #[must_use]
    pub fn has_network(&self, network: NetworkTraits) -> bool {
        match (network.leads_out, network.by_docker, network.shares_host) {
            (false, ..) => true,
            (true, true, _) => self.has_bridge,
            (true, false, true) => self.shares_host,
            (true, false, false) => self.makes_links,
        }
    }
}

/// What a runtime can do: the one place that tells the runtimes apart for specs.
#[must_use]
pub fn runtime_traits(runtime: RuntimeKind) -> RuntimeTraits {
    match runtime {
        RuntimeKind::Native => RuntimeTraits {
            needs_image: true,
            uses_image_store: true,
            has_terminals: true,
            merges_log: true,
            pauses: true,
            limits_disk: true,
            limits_terminals: true,
            refuses_filters: true,
            has_native_choices: true,
            has_init: true,
            init_is_optional: true,
            has_egress_proxy: true,
            lists_processes: true,
            runs_programs_itself: true,
            makes_links: true,
            shares_host: true,
            has_bridge: false,
        },
        RuntimeKind::Gvisor => RuntimeTraits {
            needs_image: true,
            uses_image_store: true,
            has_terminals: true,
            merges_log: true,
            pauses: true,
            limits_disk: true,
            limits_terminals: false,
            refuses_filters: false,
            has_native_choices: false,
            has_init: false,
            init_is_optional: false,
            has_egress_proxy: true,
            lists_processes: false,
            runs_programs_itself: false,
            makes_links: true,
            shares_host: true,
            has_bridge: false,
        },
        RuntimeKind::Oci(_) => RuntimeTraits {
            limits_terminals: true,
            lists_processes: true,
            ..runtime_traits(RuntimeKind::Gvisor)
        },
        RuntimeKind::Docker => RuntimeTraits {
            needs_image: true,
            uses_image_store: false,
            has_terminals: true,
            merges_log: false,
            pauses: false,
            limits_disk: false,
            limits_terminals: false,
            refuses_filters: false,
            has_native_choices: false,
            has_init: true,
            init_is_optional: false,
            has_egress_proxy: true,
            lists_processes: true,
            runs_programs_itself: true,
            makes_links: true,
            shares_host: false,
            has_bridge: true,
        },
        RuntimeKind::Process => RuntimeTraits {
            needs_image: false,
            uses_image_store: true,
            has_terminals: false,
            merges_log: false,
            pauses: false,
            limits_disk: false,
            limits_terminals: false,
            refuses_filters: false,
            has_native_choices: false,
            has_init: false,
            init_is_optional: false,
            has_egress_proxy: false,
            lists_processes: true,
            runs_programs_itself: true,
            makes_links: false,
            shares_host: false,
            has_bridge: false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page for operators.
    const PAGE: &str = include_str!("../../../deploy/configure.md");

    type Row = (&'static str, fn(RuntimeTraits) -> bool);

    /// What operators can notice.
    fn table() -> String {
        let kinds = [
            RuntimeKind::Native,
            RuntimeKind::Gvisor,
            "crun".parse().expect("a name"),
            RuntimeKind::Docker,
        ];
        let rows: [Row; 12] = [
            ("images are in the node's store", |one| {
                one.needs_image && one.uses_image_store
            }),
            ("`tty`, attaching", |one| one.has_terminals),
            ("`conman pause`, `idle_action = \"pause\"`", |one| {
                one.pauses
            }),
            ("limits of disk space", |one| one.limits_disk),
            ("`ptys`", |one| one.limits_terminals),
            (
                "`sys`, `durable`, `no_new_privs`, `ipc`, `own_filters`, `pool`",
                |one| one.has_native_choices && one.refuses_filters,
            ),
            (
                "programs below an init (native: unless `init = false`)",
                |one| one.has_init,
            ),
            ("`routed`, `macvlan` and `ipoib` networks, links", |one| {
                one.makes_links
            }),
            ("the network `host`", |one| one.shares_host),
            ("Docker's bridge", |one| one.has_bridge),
            ("`conman processes`", |one| one.lists_processes),
            ("`preempt_signal`, time limits of kept commands", |one| {
                one.runs_programs_itself
            }),
        ];
        let mut table =
            "| | native | gvisor | another OCI runtime | docker |\n|---|---|---|---|---|\n"
                .to_owned();
        for (what, has) in rows {
            let cells = kinds.map(|kind| {
                if has(runtime_traits(kind)) {
                    "yes"
                } else {
                    "no"
                }
            });
            table += &format!("| {what} | {} |\n", cells.join(" | "));
        }
        table
    }

    #[test]
    fn the_page_for_operators_says_what_each_runtime_can_do() {
        let table = table();
        assert!(
            PAGE.contains(&table),
            "deploy/configure.md must have:\n{table}"
        );
    }
}
