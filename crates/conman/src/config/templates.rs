//! Reads `[templates.NAME]` of the configuration.

use conman_core::Template;
use conman_proto::{Bandwidth, Network, Rate, SessionRequest};

use super::reader::Section;
use super::runtimes;

/// Any value passes here. The policy decides whether it is allowed, with the same message as for
/// a request over the API.
const ANY: std::ops::RangeInclusive<u64> = 0..=u64::MAX >> 1;

/// Reads one `[templates.<name>]`.
pub(super) fn template(section: Section<'_, '_>) -> Template {
    let request = SessionRequest {
        template: None,
        image: section.string("image"),
        command: section.strings("command"),
        args: section.strings("args"),
        env: section.string_map("env"),
        port: section.integer("port", 1..=65_535).map(Some),
        ports: section.get("ports", "a list such as [8080, \"3000-3010\"]"),
        strip_prefix: section.boolean("strip_prefix"),
        ready_path: section.string("ready_path"),
        ready_timeout_s: section.integer("ready_timeout_s", ANY),
        network: section.get("network", Network::ALLOWED),
        egress: section.strings("egress"),
        talk: section.strings("talk"),
        bandwidth: bandwidth(&section),
        memory_bytes: section.integer("memory_bytes", ANY),
        disk_bytes: section.integer("disk_bytes", ANY),
        disk_inodes: section.integer("disk_inodes", ANY),
        cpus: section.number("cpus"),
        pids: section.integer("pids", ANY),
        ptys: section.integer("ptys", ANY),
        labels: section.string_map("labels"),
        binds: section.strings("binds"),
        idle_timeout_s: section.integer("idle_timeout_s", ANY),
        idle_action: section.get("idle_action", "\"stop\" or \"pause\""),
        max_lifetime_s: section.integer("max_lifetime_s", ANY),
        preempt_signal: section.string("preempt_signal"),
        preempt_grace_ms: section.integer("preempt_grace_ms", ANY),
        stop_signal: section.string("stop_signal"),
        stop_grace_ms: section.integer("stop_grace_ms", ANY),
        init: section.boolean("init"),
        tty: section.boolean("tty"),
        log_streams: section.boolean("log_streams"),
        on_node_loss: section.get("on_node_loss", "\"wait\" or \"restart\""),
        node_labels: section.string_map("node_labels"),
    };
    let template = Template {
        request,
        runtime: section.parsed("runtime", runtimes::kind),
        start_on_connect: section.boolean("start_on_connect").unwrap_or(false),
        resume_on_connect: section.boolean("resume_on_connect").unwrap_or(false),
        own_filters: section.boolean("own_filters").unwrap_or(false),
        sys: section.boolean("sys"),
        durable: section.boolean("durable"),
        no_new_privs: section.boolean("no_new_privs"),
        ipc: section.boolean("ipc"),
        pool: section.integer("pool", ANY),
    };
    section.finish();
    template
}

fn bandwidth(template: &Section<'_, '_>) -> Option<Bandwidth> {
    let section = template.section("bandwidth");
    let bandwidth = Bandwidth {
        inward: section.get("in", Rate::ALLOWED),
        outward: section.get("out", Rate::ALLOWED),
    };
    section.finish();
    (!bandwidth.is_unlimited()).then_some(bandwidth)
}
