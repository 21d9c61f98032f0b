//! Arguments of `conman net`.

use std::str::FromStr as _;

use clap::{Args, Subcommand};
use conman_proto::{InterfaceName, LinkTarget, SessionId};

/// Arguments of `conman net`.
#[derive(Debug, Clone, Args)]
pub struct NetArgs {
    #[command(subcommand)]
    pub command: NetCommand,
}

/// Commands about links.
#[derive(Debug, Clone, Subcommand)]
pub enum NetCommand {
    /// Give a running session an interface on one of its node's interfaces or bridges
    Attach(NetAttachArgs),
    /// Remove an attached interface from a running session
    Detach {
        #[arg(value_name = "SESSION")]
        id: SessionId,
        /// The interface's name in the session
        #[arg(value_parser = InterfaceName::from_str)]
        name: InterfaceName,
    },
    /// List attached interfaces
    Ls {
        /// One session; all running ones unless given
        #[arg(value_name = "SESSION")]
        id: Option<SessionId>,
    },
}

/// Arguments of `conman net attach`.
#[derive(Debug, Clone, Args)]
pub struct NetAttachArgs {
    #[arg(value_name = "SESSION")]
    pub id: SessionId,
    /// macvlan:INTERFACE, ipoib:INTERFACE or bridge:BRIDGE of the session's node
    #[arg(long, value_name = "LINK", value_parser = LinkTarget::from_str)]
    pub to: LinkTarget,
    /// Its name in the session; the first free one of eth1, eth2, ... unless given
    #[arg(long, value_parser = InterfaceName::from_str)]
    pub name: Option<InterfaceName>,
    /// Such as 192.168.7.5/24; may be repeated
    #[arg(long, value_name = "ADDRESS/LENGTH")]
    pub address: Vec<String>,
    /// Such as "10.0.0.0/8 via 192.168.7.1" or "default via 192.168.7.1"; may be repeated
    #[arg(long, value_name = "ROUTE")]
    pub route: Vec<String>,
}
