//! Packets that are lost on their way: nftables rules in the receiver's namespace, so that the
//! sender notices nothing.

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
    /// One such answer, and with it their connection, which would send it again.
    Reply { from: Host, to: Host, port: u16 },
}

impl Cut {
    /// Which packets whom do not reach.
    fn drops(&self) -> Vec<(String, &Host)> {
        let all = |from: &Host| format!("ip saddr {}", from.address);
        match self {
            Self::OneWay { from, to } => vec![(all(from) + " drop", to)],
            Self::Between(one, other) => {
                vec![(all(one) + " drop", other), (all(other) + " drop", one)]
            }
            Self::Replies { from, to, port } => {
                vec![(format!("{} tcp sport {port} drop", all(from)), to)]
            }
            // The flag is that of packets with data. What rejects one ends its connection.
            Self::Reply { from, to, port } => {
                let one = "tcp flags & psh == psh limit rate 1/day burst 1 packets";
                let lost = format!("{} tcp sport {port} {one} reject with tcp reset", all(from));
                vec![(lost, to)]
            }
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
            Self::Reply { from, to, port } => {
                format!("one_from_{}_{port}_to_{}", from.name, to.name)
            }
        }
    }

    pub(crate) fn make(&self, layout: &Layout) -> Result<()> {
        let chain = self.chain();
        for (lost, to) in self.drops() {
            nft(layout, to, &script(&chain, &lost))?;
        }
        Ok(())
    }

    /// Takes this one back; whatever else is cut stays so.
    pub(crate) fn mend(&self, layout: &Layout) -> Result<()> {
        let chain = self.chain();
        for (_, to) in self.drops() {
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

fn script(chain: &str, lost: &str) -> String {
    format!(
        "add table {TABLE}\n\
         add chain {TABLE} {chain} {{ type filter hook input priority -300; }}\n\
         add rule {TABLE} {chain} {lost}\n"
    )
}

fn nft(layout: &Layout, host: &Host, script: &str) -> Result<()> {
    let mut command = inside(&layout.namespace_path(&host.name), "nft");
    run_with_input(command.args(["-f", "-"]), script).map(drop)
}
