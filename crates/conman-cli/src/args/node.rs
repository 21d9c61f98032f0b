//! Arguments of the subcommands about nodes.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::quantity::{parse_duration, parse_duration_ms};

/// Arguments of `conman rebalance`.
#[derive(Debug, Clone, Args)]
pub struct RebalanceArgs {
    /// Only show what would be moved
    #[arg(long)]
    pub dry_run: bool,
    /// Return once it has begun; the node continues
    #[arg(long, conflicts_with = "dry_run")]
    pub no_wait: bool,
    #[command(flatten)]
    pub node: NodeArgs,
}

/// Arguments of `conman drain`.
#[derive(Debug, Clone, Args)]
pub struct DrainArgs {
    /// Only show what would happen, in which order and how long it would take
    #[arg(long)]
    pub dry_run: bool,
    /// Return once it has begun; the node continues
    #[arg(long, conflicts_with = "dry_run")]
    pub no_wait: bool,
    /// Sessions that are stopped at a time; 8 unless given
    #[arg(long, value_name = "N")]
    pub parallel: Option<u32>,
    /// Signal to send first, for example SIGTERM; each session's preempt signal unless given
    #[arg(long, value_name = "SIGNAL")]
    pub signal: Option<String>,
    /// Time between the signal and SIGKILL; each session's unless given, or 10s if it has none and
    /// --signal is given
    #[arg(long, value_name = "DURATION", value_parser = parse_duration_ms)]
    pub grace: Option<u32>,
    /// Reason, for the journal and for connected clients
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    #[command(flatten)]
    pub node: NodeArgs,
}

/// Arguments of `conman nodes`.
#[derive(Debug, Clone, Args)]
pub struct NodesArgs {
    /// Without a subcommand: lists the nodes
    #[command(subcommand)]
    pub command: Option<NodesCommand>,
}

/// Commands about the list of nodes.
#[derive(Debug, Clone, Subcommand)]
pub enum NodesCommand {
    /// Forget a node that is fenced and owns nothing; the fleet does so automatically after a day
    Rm {
        /// Its name
        #[arg(value_name = "NODE")]
        node: String,
    },
}

/// The node that a command is about.
#[derive(Debug, Clone, Args)]
pub struct NodeArgs {
    /// Name of a node of the fleet; the node that answers unless given
    #[arg(value_name = "NODE")]
    pub node: Option<String>,
}

/// Arguments of `conman preempt`.
#[derive(Debug, Clone, Args)]
pub struct PreemptArgs {
    /// Only show what would happen
    #[arg(long)]
    pub dry_run: bool,
    /// Time until the machine stops; bounds every grace period
    #[arg(long, value_name = "DURATION", value_parser = parse_budget)]
    pub budget: Option<Duration>,
    /// Reason, for the journal
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
    #[command(flatten)]
    pub node: NodeArgs,
    /// Do not ask; required without a terminal to ask at
    #[arg(short, long)]
    pub yes: bool,
}

fn parse_budget(text: &str) -> Result<Duration, String> {
    parse_duration_ms(text)?;
    parse_duration(text)
}
