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
    pub has_egress_proxy: bool,
    /// It makes links, or shares the node's network.
    makes_links: bool,
    /// Its daemon has a bridge.
    has_bridge: bool,
}

impl RuntimeTraits {
    /// Whether its containers can have a network.
    #[must_use]
    pub fn has_network(&self, network: NetworkTraits) -> bool {
        match (network.leads_out, network.by_docker) {
            (false, _) => true,
            (true, true) => self.has_bridge,
            (true, false) => self.makes_links,
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
            has_egress_proxy: true,
            makes_links: true,
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
            has_egress_proxy: true,
            makes_links: true,
            has_bridge: false,
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
            has_egress_proxy: true,
            makes_links: false,
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
            has_egress_proxy: false,
            makes_links: false,
            has_bridge: false,
        },
    }
}
