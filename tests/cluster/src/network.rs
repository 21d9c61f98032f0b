//! The namespaces, the bridge and the links.

use std::fmt::Write as _;
use std::process::Command;

use anyhow::Result;

use crate::command::{run, run_with_input};
use crate::layout::{Layout, SWITCH_ADDRESS};

/// The host that holds the bridge.
pub(crate) const SWITCH: &str = "switch";

/// What nodes with links need: their hosts forward packets.
const FORWARD: &str = "echo 1 > /proc/sys/net/ipv4/ip_forward
    ! [ -d /proc/sys/net/ipv6 ] || echo 1 > /proc/sys/net/ipv6/conf/all/forwarding";

/// Takes a host's link away, or gives it back: no packet leaves or reaches it, and nobody is notified.
pub(crate) fn set_link(layout: &Layout, host: &str, up: bool) -> Result<()> {
    let state = if up { "up" } else { "down" };
    let switch = layout.namespace(SWITCH);
    batch(&switch, &format!("link set {host} {state}\n"))
}

/// Makes every host and joins them.
pub(crate) fn make(layout: &Layout) -> Result<()> {
    let switch = layout.namespace(SWITCH);
    add(&switch)?;
    let mut script = format!(
        "link set lo up\nlink add bridge type bridge\naddress add {SWITCH_ADDRESS}/24 dev bridge\n\
         link set bridge up\n"
    );
    for host in layout.hosts() {
        let (name, namespace) = (&host.name, layout.namespace(&host.name));
        add(&namespace)?;
        let _ = writeln!(
            script,
            "link add {name} type veth peer name eth0 netns {namespace}\n\
             link set {name} master bridge up"
        );
    }
    batch(&switch, &script)?;
    for host in layout.hosts() {
        let script = format!(
            "link set lo up\naddress add {}/24 dev eth0\nlink set eth0 up\n",
            host.address
        );
        batch(&layout.namespace(&host.name), &script)?;
        let mut forward = Command::new("nsenter");
        forward.arg(format!(
            "--net={}",
            layout.namespace_path(&host.name).display()
        ));
        forward.args(["sh", "-ec", FORWARD]);
        run(&mut forward)?;
    }
    Ok(())
}

/// Names of the cluster's namespaces that exist.
pub(crate) fn existing(layout: &Layout) -> Vec<String> {
    let prefix = layout.namespace("");
    let Ok(entries) = std::fs::read_dir(crate::layout::NAMESPACES) else {
        return Vec::new();
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    names
        .filter_map(|name| name.into_string().ok())
        .filter(|name| name.starts_with(&prefix))
        .collect()
}

/// Removes a namespace's name; it goes, with its links, when its last process has.
pub(crate) fn remove(namespace: &str) -> Result<()> {
    run(Command::new("ip").args(["netns", "delete", namespace])).map(drop)
}

fn add(namespace: &str) -> Result<()> {
    run(Command::new("ip").args(["netns", "add", namespace])).map(drop)
}

fn batch(namespace: &str, script: &str) -> Result<()> {
    let mut command = Command::new("ip");
    command.args(["-netns", namespace, "-batch", "-"]);
    run_with_input(&mut command, script).map(drop)
}
