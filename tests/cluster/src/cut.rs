//! Packets that are lost on their way: nftables rules in the receiver's namespace, so that the
//! sender notices nothing.

use std::net::Ipv4Addr;

use anyhow::Result;

use crate::command::{inside, run_with_input};
use crate::layout::{Host, Layout};

const TABLE: &str = "inet conman_cluster";

/// What is lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cut {
    /// Everything from one host to another.
    OneWay { from: Host, to: Host },
    /// Everything between two hosts.
    Between(Host, Host),
    /// What a host answers to another from one port. Requests arrive and are carried out.
    Replies { from: Host, to: Host, port: u16 },
}

impl Cut {
    /// Whose packets whom do not reach.
    fn drops(&self) -> Vec<(Ipv4Addr, &Host, Option<u16>)> {
        match self {
            Self::OneWay { from, to } => vec![(from.address, to, None)],
            Self::Between(one, other) => {
                vec![(one.address, other, None), (other.address, one, None)]
            }
            Self::Replies { from, to, port } => vec![(from.address, to, Some(*port))],
        }
    }

    /// What its rules are kept in, so that each of several that overlap can end by itself.
    fn chain(&self) -> String {
        match self {
            Self::OneWay { from, to } => format!("from_{}_to_{}", from.name, to.name),
            Self::Between(one, other) => format!("between_{}_and_{}", one.name, other.name),
            Self::Replies { from, to, port } => {
                format!("from_{}_{port}_to_{}", from.name, to.name)
            }
        }
    }

    pub(crate) fn make(&self, layout: &Layout) -> Result<()> {
        let chain = self.chain();
        for (from, to, port) in self.drops() {
            nft(layout, to, &script(&chain, from, port))?;
        }
        Ok(())
    }

    /// Takes this one back; whatever else is cut stays so.
    pub(crate) fn mend(&self, layout: &Layout) -> Result<()> {
        let chain = self.chain();
        for (_, to, _) in self.drops() {
            nft(
                layout,
                to,
                &format!("flush chain {TABLE} {chain}\ndelete chain {TABLE} {chain}\n"),
            )?;
        }
        Ok(())
    }
}

/// Lets everything through again.
pub(crate) fn heal(layout: &Layout) -> Result<()> {
    for host in layout.hosts() {
        // It need not exist, and an addition of what exists changes nothing.
        nft(
            layout,
            &host,
            &format!("add table {TABLE}; delete table {TABLE}"),
        )?;
    }
    Ok(())
}

fn script(chain: &str, from: Ipv4Addr, port: Option<u16>) -> String {
    let port = port.map_or_else(String::new, |port| format!("tcp sport {port} "));
    format!(
        "add table {TABLE}\n\
         add chain {TABLE} {chain} {{ type filter hook input priority -300; }}\n\
         add rule {TABLE} {chain} ip saddr {from} {port}counter drop\n"
    )
}

fn nft(layout: &Layout, host: &Host, script: &str) -> Result<()> {
    let mut command = inside(&layout.namespace_path(&host.name), "nft");
    run_with_input(command.args(["-f", "-"]), script).map(drop)
}
