//! Sessions with each kind of network, each of a separate conman: what an installed conman does not
//! know, it refuses in its configuration.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result, ensure};
use conman_proto::{RuntimeKind, Session};

use super::namespaces::{Place, WIRE};
use super::services::{PORT, PORTS};
use crate::daemon::Daemon;

/// The image's name in conman's store.
const IMAGE: &str = "conman-bench:net";
/// The id of every session and the name of every template.
pub(super) const ID: &str = "net";

/// What differs between the sessions.
#[derive(Debug, Clone)]
pub(super) struct Template {
    /// Where the session's services listen.
    pub(super) listen: SocketAddr,
    /// Further lines of the template.
    pub(super) settings: String,
    /// Lines of the table `net`; none for a conman without a network plane.
    pub(super) net: String,
}

pub(super) struct Starter<'a> {
    pub(super) conman: &'a Path,
    pub(super) archive: &'a Path,
}

impl Starter<'_> {
    /// Starts a conman and its session.
    pub(super) async fn start(&self, template: &Template) -> Result<NetSession> {
        let Template {
            listen,
            settings,
            net,
        } = template;
        let table = if net.is_empty() { "" } else { "[net]\n" };
        let text = format!(
            "{table}{net}\n[templates.{ID}]\nimage = \"{IMAGE}\"\nport = {}\n\
             command = [\"/bin/conman-bench\", \"services\", \"--listen\", \"{listen}\"]\n\
             {settings}\n",
            listen.port()
        );
        let daemon = Daemon::with_templates(self.conman, RuntimeKind::Native, 8, &text).await?;
        let opened = async {
            daemon.import(self.archive, IMAGE).await?;
            daemon.open_one(ID.to_owned(), ID).await
        };
        match opened.await {
            Ok(session) => Ok(NetSession { daemon, session }),
            Err(error) => {
                daemon.stop_all().await?;
                Err(error)
            }
        }
    }
}

/// A conman with one running session.
pub(super) struct NetSession {
    pub(super) daemon: Daemon,
    session: Session,
}

impl NetSession {
    /// Its network namespace.
    pub(super) fn inside(&self) -> Result<Place> {
        let pid = self.session.pid.context("the session has no pid")?;
        Ok(Place::of_process(pid))
    }

    /// The address of its link.
    pub(super) async fn address(&self) -> Result<IpAddr> {
        let mut command = self.inside()?.command(Path::new("ip"));
        command.args(["-json", "-4", "address", "show", "dev", "eth0"]);
        let output = command.output().await.context("starting ip")?;
        let found: serde_json::Value =
            serde_json::from_slice(&output.stdout).context("the session has no link eth0")?;
        let address = found[0]["addr_info"][0]["local"].as_str();
        let address = address.context("the session's link has no address")?;
        address.parse().context("reading an address")
    }

    /// Lets Docker's rules forward what comes from or goes to this conman's links, as operators do.
    pub(super) fn forwarded_by_docker(&self) -> Result<Vec<DockerRule>> {
        let links = format!("c{}+", self.daemon.instance);
        let rules = ["-i", "-o"].map(|direction| DockerRule::insert(direction, &links));
        rules.into_iter().collect()
    }

    pub(super) fn sessions_listener(&self) -> Result<SocketAddr> {
        let address = self.daemon.sessions.parse();
        address.context("reading conman's address")
    }
}

/// A rule in Docker's table that accepts what it forwards, until this is dropped.
#[derive(Debug)]
pub(super) struct DockerRule {
    rule: [String; 4],
}

impl DockerRule {
    fn insert(direction: &str, links: &str) -> Result<Self> {
        let rule = [direction, links, "-j", "ACCEPT"].map(str::to_owned);
        let status = iptables("-I", &rule).context("starting iptables, which Docker needs")?;
        ensure!(status.success(), "iptables cannot change DOCKER-USER");
        Ok(Self { rule })
    }
}

impl Drop for DockerRule {
    fn drop(&mut self) {
        // It names links that nobody else has.
        let _ = iptables("-D", &self.rule);
    }
}

fn iptables(change: &str, rule: &[String; 4]) -> std::io::Result<ExitStatus> {
    let mut command = Command::new("iptables");
    command.args(["-w", change, "DOCKER-USER"]).args(rule);
    command.status()
}

/// A template's list of what the benchmark's sessions connect to.
pub(super) fn egress() -> String {
    let services: Vec<String> = (PORT..PORT + PORTS)
        .map(|port| format!("\"{WIRE}/32:{port}\""))
        .collect();
    format!("egress = [{}]", services.join(", "))
}
