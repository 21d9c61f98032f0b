//! Applies the instance's rules, and restores them when somebody flushes or changes them.
//!
//! One task ([`RulesKeeper::keep`]). The kernel notifies it of changes of nftables; it compares the
//! table with what it has applied. A slow comparison at an interval covers lost notifications.

use std::io;
use std::os::unix::net::UnixDatagram as StdDatagram;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use netlink_packet_core::{NetlinkBuffer, NlasIterator};
use rustix::net::{RecvFlags, netlink, recv};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::UnixDatagram;
use tokio::process::Command;
use tokio::sync::watch;

use crate::netlink::open_netlink;
use crate::rule_set::{FabricElements, RuleSet};

/// The kernel's group of notifications about nftables (`NFNLGRP_NFTABLES`, 7).
const NFTABLES_GROUP: u32 = 1 << 6;

/// Pause after a notification, so that a program that makes many changes is followed by one comparison.
const SETTLE: Duration = Duration::from_millis(50);

/// Interval of comparisons without a notification.
const COMPARE_INTERVAL: Duration = Duration::from_secs(15);

/// Pause before another attempt when the rules cannot be applied.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// The kernel's largest notification of one rule is far smaller.
const DATAGRAM_BYTES: usize = 64 * 1_024;

/// Length of `struct nfgenmsg`, before the attributes.
const GENERIC_HEADER: usize = 4;

/// Every message about a part of a table has the table's name in this attribute (`NFTA_*_TABLE`).
const TABLE_ATTRIBUTE: u16 = 1;

/// Why rules cannot be applied.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    #[error("cannot run `nft`; install the package nftables")]
    NoProgram(#[source] io::Error),
    #[error(
        "nft refuses conman's rules: {reason}; Linux must have nf_tables with fib, nat and reject"
    )]
    Refused { reason: String },
    #[error("cannot receive notifications about nftables")]
    Notifications(#[source] io::Error),
    #[error("cannot prepare the rules inside sessions")]
    Namespace(#[source] io::Error),
}

/// Keeps one table as it is to be.
#[derive(Debug)]
pub struct RulesKeeper {
    instance: String,
    rules: RuleSet,
    table: String,
    /// What the fabric's sets are to hold.
    elements: watch::Receiver<Arc<FabricElements>>,
    /// What they were filled with last.
    filled: Arc<FabricElements>,
    /// A netlink socket; tokio has no type for one, and only its descriptor is used.
    notifications: UnixDatagram,
    /// The table as `nft` lists it after it was applied.
    applied: Option<Vec<u8>>,
}

impl RulesKeeper {
    /// Checks the rules against this host's kernel, in the network namespace of the calling thread. Changes
    /// nothing.
    pub async fn check(instance: &str, rules: &RuleSet) -> Result<Self, RulesError> {
        let script = rules.script(instance, &FabricElements::default());
        succeeded(&nft(&["--check", "-f", "-"], &script).await?)?;
        let notifications = open_netlink(Some(netlink::NETFILTER), NFTABLES_GROUP)
            .and_then(|socket| {
                rustix::io::ioctl_fionbio(&socket, true)?;
                UnixDatagram::from_std(StdDatagram::from(socket))
            })
            .map_err(RulesError::Notifications)?;
        metrics::describe_counter!(
            "conman_net_rules_restored_total",
            "Times that the host's rules for sessions were missing or changed, and restored"
        );
        Ok(Self {
            instance: instance.to_owned(),
            rules: rules.clone(),
            table: RuleSet::table(instance),
            elements: watch::Sender::default().subscribe(),
            filled: Arc::default(),
            notifications,
            applied: None,
        })
    }

    /// From here on, the fabric's sets hold these.
    pub fn fill_with(&mut self, elements: watch::Receiver<Arc<FabricElements>>) {
        self.elements = elements;
    }

    /// Applies the rules.
    pub async fn apply(&mut self) -> Result<(), RulesError> {
        self.filled = Arc::clone(&self.elements.borrow_and_update());
        let script = self.rules.script(&self.instance, &self.filled)
            + &self.rules.fill(&self.instance, &self.filled);
        self.run(&script).await
    }

    async fn run(&mut self, script: &str) -> Result<(), RulesError> {
        succeeded(&nft(&["-f", "-"], script).await?)?;
        let listed = self.list().await?;
        if !listed.status.success() {
            // It was removed meanwhile.
            self.applied = None;
            return Ok(());
        }
        self.applied = Some(listed.stdout);
        Ok(())
    }

    /// Removes the table of an instance. No keeper of it may be running.
    pub async fn remove(instance: &str) -> Result<(), RulesError> {
        let table = RuleSet::table(instance);
        // Deleting what is not there would be an error.
        let script = format!("table inet {table}\ndelete table inet {table}\n");
        succeeded(&nft(&["-f", "-"], &script).await?)
    }

    /// Restores the rules whenever they change, for as long as it is polled.
    pub async fn keep(&mut self) {
        let mut elements = self.elements.clone();
        loop {
            match self.restore_if_changed().await {
                Ok(false) => {
                    tokio::select! {
                        // Cancel safe: a notification that was read is covered by the next comparison.
                        () = self.changed() => tokio::time::sleep(SETTLE).await,
                        // Cancel safe: a change stays pending until it is read.
                        Ok(()) = elements.changed() => self.fill().await,
                        // Cancel safe: a dropped sleep is started again.
                        () = tokio::time::sleep(COMPARE_INTERVAL) => {}
                    }
                }
                Ok(true) => {
                    metrics::counter!("conman_net_rules_restored_total").increment(1);
                    tracing::warn!(table = self.table, "restored the host's rules for sessions");
                }
                Err(error) => {
                    tracing::error!(%error, "cannot restore the host's rules for sessions");
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    /// Changes the fabric's sets. If that fails, the next comparison finds out.
    async fn fill(&mut self) {
        let elements = Arc::clone(&self.elements.borrow_and_update());
        let filled = if self.rules.groups(&elements) == self.rules.groups(&self.filled) {
            self.filled = elements;
            let script = self.rules.fill(&self.instance, &self.filled);
            self.run(&script).await
        } else {
            // A group has sets and rules of its own.
            self.apply().await
        };
        if let Err(error) = filled {
            self.applied = None;
            tracing::warn!(%error, "cannot change the fabric's sets; restoring all rules");
        }
    }

    async fn restore_if_changed(&mut self) -> Result<bool, RulesError> {
        let listed = self.list().await?;
        if listed.status.success() && self.applied.as_ref() == Some(&listed.stdout) {
            return Ok(false);
        }
        self.apply().await?;
        Ok(true)
    }

    /// Without counters, which always change.
    async fn list(&self) -> Result<Output, RulesError> {
        nft(&["--stateless", "list", "table", "inet", &self.table], "").await
    }

    /// Waits for a notification about the table, or for lost ones.
    async fn changed(&self) {
        let mut buffer = vec![0; DATAGRAM_BYTES];
        loop {
            let received = self.notifications.async_io(Interest::READABLE, || {
                let (_, length) = recv(&self.notifications, &mut buffer[..], RecvFlags::empty())?;
                Ok(length)
            });
            match received.await {
                Ok(length) if !mentions(&buffer[..length.min(buffer.len())], &self.table) => {}
                // An error: notifications may be lost.
                _ => return,
            }
        }
    }
}

/// Whether a message in a datagram is about a part of the table.
fn mentions(mut datagram: &[u8], table: &str) -> bool {
    while let Ok(message) = NetlinkBuffer::new_checked(datagram) {
        let attributes = message.payload().get(GENERIC_HEADER..).unwrap_or_default();
        let names_table = NlasIterator::new(attributes)
            .map_while(Result::ok)
            .any(|attribute| {
                attribute.kind() == TABLE_ATTRIBUTE
                    && attribute.value().strip_suffix(&[0]) == Some(table.as_bytes())
            });
        if names_table {
            return true;
        }
        let length = (message.length() as usize).next_multiple_of(4);
        datagram = datagram.get(length..).unwrap_or_default();
    }
    false
}

async fn nft(arguments: &[&str], input: &str) -> Result<Output, RulesError> {
    let mut child = Command::new("nft")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(RulesError::NoProgram)?;
    if let Some(mut stdin) = child.stdin.take() {
        // If it has ended already, its status says why.
        let _ = stdin.write_all(input.as_bytes()).await;
    }
    child
        .wait_with_output()
        .await
        .map_err(RulesError::NoProgram)
}

pub(crate) fn succeeded(output: &Output) -> Result<(), RulesError> {
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(RulesError::Refused {
        reason: text.lines().take(3).collect::<Vec<_>>().join("; "),
    })
}
