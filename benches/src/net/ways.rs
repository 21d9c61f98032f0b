//! What is started for the measurements, and which client reaches which services.

use std::fs::Permissions;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::namespaces::{FAR, MACHINE, Namespaces, Place, WIRE, WIRE_TO_FAR};
use super::services::{PORT, PORTS, Services, programs};
use super::sessions::{DockerRule, ID, NetSession, Starter, Template, egress};
use super::{Name, Side, Unmeasured};
use crate::daemon::free_ports;
use crate::docker::Docker;
use crate::image;
use crate::rivals::{self, Rival, wait_listening};

/// The first of the published ports of the container on Docker's bridge.
const PUBLISHED_PORT: u16 = PORT + 10;
/// The first ports of a container and of a session in the machine's namespace.
const CONTAINER_HOST_PORT: u16 = PORT + 20;
const SESSION_HOST_PORT: u16 = PORT + 30;
/// conman's HTTP proxy in a session's namespace.
const EGRESS_PROXY: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 3128);
/// Configuration of a network plane: sessions may reach the benchmark's namespaces, and routed ones
/// have addresses that nothing else here uses.
const ALLOWED: &str = "allow_addresses = [\"198.18.0.0/16\"]";
const POOLS: [&str; 2] = ["198.19.0.0/17", "198.19.128.0/17"];
/// The network of the cable, and the addresses of sessions there.
const CABLE: &str = "198.18.0.0/24";
const RANGE: &str = "198.18.0.128/28";

/// The ways' names in the table.
pub(super) const PLAIN: &str = "plain process";
pub(super) const FORWARDED: &str = "plain process, forwarded over two veth pairs";
pub(super) const HOST: &str = "conman, host";
pub(super) const LOOPBACK: &str = "conman, loopback";
pub(super) const LOOPBACK_INSIDE: &str = "conman, loopback, client inside";
pub(super) const EGRESS: &str = "conman, loopback with egress";
pub(super) const ROUTED: &str = "conman, routed";
pub(super) const MACVLAN: &str = "conman, macvlan";
pub(super) const HAPROXY: &str = "HAProxy in TCP mode, from loopback";
pub(super) const BRIDGE: &str = "Docker bridge, by address";
pub(super) const BRIDGE_PROXIED: &str = "conman's proxy to Docker bridge";
pub(super) const BRIDGE_OUT: &str = "Docker bridge, masqueraded";
pub(super) const NAT: &str = "Docker published port, NAT";
pub(super) const USERLAND: &str = "Docker published port, userland proxy";
pub(super) const DOCKER_HOST: &str = "Docker host network";

/// A client, and the services that it reaches in this way.
#[derive(Debug, Clone)]
pub(super) struct Way {
    pub(super) name: Name,
    pub(super) client: Place,
    pub(super) services: Services,
}

/// Everything that is started for the measurements.
#[derive(Default)]
pub(super) struct Stage {
    pub(super) ways: Vec<Way>,
    unmeasured: Vec<Unmeasured>,
    sessions: Vec<NetSession>,
    forwarded: Vec<DockerRule>,
    // Dropped in this order: processes before the namespaces that they run in.
    processes: Vec<Rival>,
    docker: Option<Docker>,
    namespaces: Option<Namespaces>,
    scratch: Option<tempfile::TempDir>,
}

impl Stage {
    pub(super) async fn prepare(&mut self, conman: &Path) -> Result<()> {
        let archive = self.image()?;
        self.namespaces = Some(Namespaces::new()?);
        self.plain().await?;
        self.docker(&archive).await?;
        self.haproxy().await?;
        self.sessions(conman, &archive).await?;
        Ok(())
    }

    /// Ends everything; the ways that could not be prepared.
    pub(super) async fn stop(mut self) -> Result<Vec<Unmeasured>> {
        let mut stopped = Ok(());
        for session in self.sessions.drain(..) {
            stopped = stopped.and(session.daemon.stop_all().await);
        }
        if let Some(docker) = &self.docker {
            let ids = docker.ids(&label()).await?;
            if !ids.is_empty() {
                stopped = stopped.and(docker.remove(&ids).await);
            }
        }
        stopped.map(|()| self.unmeasured)
    }

    fn image(&mut self) -> Result<PathBuf> {
        let scratch = tempfile::tempdir().context("making a temporary folder")?;
        let root = image::root(scratch.path())?;
        image::add_this_program(&root)?;
        for program in programs()? {
            let name = program.file_name().context("a program has a name")?;
            image::add_program(&root, &name.to_string_lossy(), &program)?;
        }
        self.scratch = Some(scratch);
        image::archive(&root)
    }

    /// A session in the host's network needs an API that asks for tokens; none is used.
    fn tokens_file(&self) -> Result<String> {
        let scratch = self.scratch.as_ref().context("there is no folder")?;
        let path = scratch.path().join("tokens.toml");
        std::fs::write(&path, "").context("writing a token file")?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600))
            .context("protecting a token file")?;
        Ok(path.display().to_string())
    }

    fn add(&mut self, side: Side, way: &'static str, client: Place, services: Services) {
        let name = Name { side, way };
        self.ways.push(Way {
            name,
            client,
            services,
        });
    }

    fn not_measured(&mut self, side: Side, way: &'static str, error: &anyhow::Error) {
        self.unmeasured.push(Unmeasured {
            name: Name { side, way },
            why: format!("{error:#}"),
        });
    }

    fn namespaces(&self) -> Result<&Namespaces> {
        self.namespaces.as_ref().context("there are no namespaces")
    }

    /// A place among the benchmark's namespaces.
    fn place(&self, name: &str) -> Result<Place> {
        Ok(self.namespaces()?.place(name))
    }

    async fn serve(&mut self, place: &Place, address: Ipv4Addr) -> Result<()> {
        let this = std::env::current_exe().context("finding this program")?;
        let mut command = place.command(&this);
        command.args(["services", "--listen", &format!("{address}:{PORT}")]);
        self.processes
            .push(rivals::announcing("conman-bench services", command).await?);
        Ok(())
    }

    async fn plain(&mut self) -> Result<()> {
        let (wire, far) = (self.place("wire")?, self.place("far")?);
        self.serve(&Place::Machine, Ipv4Addr::LOCALHOST).await?;
        self.serve(&Place::Machine, MACHINE).await?;
        self.serve(&wire, Ipv4Addr::UNSPECIFIED).await?;
        self.serve(&far, Ipv4Addr::UNSPECIFIED).await?;
        let at = |address: Ipv4Addr| Services::at(address, PORT);
        let here = Place::Machine;
        self.add(Side::Local, PLAIN, here.clone(), at(Ipv4Addr::LOCALHOST));
        self.add(Side::Inbound, PLAIN, wire.clone(), at(MACHINE));
        self.add(Side::Inbound, FORWARDED, wire, at(FAR));
        self.add(Side::Outbound, PLAIN, here, at(WIRE));
        self.add(Side::Outbound, FORWARDED, far, at(WIRE_TO_FAR));
        Ok(())
    }

    async fn docker(&mut self, archive: &Path) -> Result<()> {
        let docker = Docker::with_image(archive).await?;
        let docker = self.docker.insert(docker);
        let publish = |address: Ipv4Addr| {
            let [published, inside] = [PUBLISHED_PORT, PORT].map(|port| port + PORTS - 1);
            format!("{address}:{PUBLISHED_PORT}-{published}:{PORT}-{inside}")
        };
        let [local, wired] = [Ipv4Addr::LOCALHOST, MACHINE].map(publish);
        let listen = |address, port| format!("{address}:{port}");
        let options = ["--publish", local.as_str(), "--publish", wired.as_str()];
        let any = listen(Ipv4Addr::UNSPECIFIED, PORT);
        let command = |listen| ["/bin/conman-bench", "services", "--listen", listen];
        let bridged = docker.run(&label(), &options, &command(&any)).await?;
        let address = "{{.NetworkSettings.IPAddress}}";
        let address: IpAddr = docker.inspect(&bridged, address).await?.parse()?;
        let pid = docker.inspect(&bridged, "{{.State.Pid}}").await?.parse()?;
        let own = listen(MACHINE, CONTAINER_HOST_PORT);
        let options = ["--network", "host"];
        docker.run(&label(), &options, &command(&own)).await?;
        wait_listening(SocketAddr::new(address, PORT)).await?;
        wait_listening(SocketAddr::from((MACHINE, CONTAINER_HOST_PORT))).await?;

        let at = |address: IpAddr, port| Services::at(address, port);
        let published = |address: Ipv4Addr| Services::at(address, PUBLISHED_PORT);
        let (here, wire) = (Place::Machine, self.place("wire")?);
        let proxied = self.behind_conman(SocketAddr::new(address, PORT)).await?;
        self.add(Side::Local, BRIDGE, here.clone(), at(address, PORT));
        self.add(Side::Local, BRIDGE_PROXIED, here.clone(), proxied);
        self.add(Side::Local, NAT, here.clone(), published(MACHINE));
        self.add(Side::Local, USERLAND, here, published(Ipv4Addr::LOCALHOST));
        self.add(Side::Inbound, BRIDGE, wire.clone(), at(address, PORT));
        self.add(Side::Inbound, NAT, wire.clone(), published(MACHINE));
        self.add(
            Side::Inbound,
            DOCKER_HOST,
            wire,
            at(MACHINE.into(), CONTAINER_HOST_PORT),
        );
        let inside = Place::of_process(pid);
        self.add(Side::Outbound, BRIDGE_OUT, inside, at(WIRE.into(), PORT));
        Ok(())
    }

    /// conman's proxy alone, in front of services.
    async fn behind_conman(&mut self, backend: SocketAddr) -> Result<Services> {
        let [port] = free_ports()?;
        self.processes.push(rivals::conman(port, backend).await?);
        let proxy = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Ok(Services::of_session(proxy, ID))
    }

    async fn haproxy(&mut self) -> Result<()> {
        let namespaces = self.namespaces()?;
        let scratch = self.scratch.as_ref().context("there is no folder")?;
        let [port] = free_ports()?;
        let (name, quiet) = (namespaces.name("quiet"), namespaces.place("quiet"));
        let backend = SocketAddr::from((WIRE, PORT));
        let haproxy = rivals::haproxy_tcp(scratch.path(), (port, &name, PORT), backend).await?;
        self.processes.push(haproxy);
        let mut services = Services::at(Ipv4Addr::LOCALHOST, PORT);
        services.tools = None;
        self.add(Side::Outbound, HAPROXY, quiet, services);
        Ok(())
    }

    async fn sessions(&mut self, conman: &Path, archive: &Path) -> Result<()> {
        let starter = Starter { conman, archive };
        let plain = Template {
            listen: SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT)),
            settings: String::new(),
            net: String::new(),
        };
        let session = starter.start(&plain).await?;
        let proxy = session.sessions_listener()?;
        let inside = Services::at(Ipv4Addr::LOCALHOST, PORT);
        let proxied = Services::of_session(proxy, ID);
        self.add(Side::Local, LOOPBACK_INSIDE, session.inside()?, inside);
        self.add(Side::Local, LOOPBACK, Place::Machine, proxied);
        self.sessions.push(session);

        let with = |settings: &str, net: &str| Template {
            settings: settings.to_owned(),
            net: net.to_owned(),
            ..plain.clone()
        };
        let [lower, upper] = POOLS.map(|pool| format!("pool = [\"{pool}\"]"));
        let routed = "network = \"routed\"";
        match starter.start(&with(routed, &lower)).await {
            Ok(session) => {
                let services = Services::at(session.address().await?, PORT);
                self.add(Side::Local, ROUTED, Place::Machine, services);
                self.sessions.push(session);
            }
            Err(error) => self.not_measured(Side::Local, ROUTED, &error),
        }
        let wire = Services::at(WIRE, PORT);
        let cable = self.namespaces()?.cable();
        let macvlan = format!("network = \"macvlan:{cable}\"");
        let cable = format!("interfaces.{cable} = {{ subnet = \"{CABLE}\", range = \"{RANGE}\" }}");
        let outbound = [
            (
                EGRESS,
                with(&egress(), ALLOWED),
                wire.clone().through(EGRESS_PROXY),
            ),
            (
                ROUTED,
                with(
                    &format!("{routed}\n{}", egress()),
                    &format!("{upper}\n{ALLOWED}"),
                ),
                wire.clone(),
            ),
            (MACVLAN, with(&macvlan, &cable), wire),
        ];
        for (way, template, services) in outbound {
            match starter.start(&template).await {
                Ok(session) => {
                    self.forwarded.extend(session.forwarded_by_docker()?);
                    self.add(Side::Outbound, way, session.inside()?, services);
                    self.sessions.push(session);
                }
                Err(error) => self.not_measured(Side::Outbound, way, &error),
            }
        }
        let tokens = self.tokens_file()?;
        let host = Template {
            // conman connects to it over loopback.
            listen: SocketAddr::from((Ipv4Addr::UNSPECIFIED, SESSION_HOST_PORT)),
            ..with(
                "network = \"host\"",
                &format!("[auth]\ntokens_file = \"{tokens}\""),
            )
        };
        match starter.start(&host).await {
            Ok(session) => {
                let services = Services::at(MACHINE, SESSION_HOST_PORT);
                self.add(Side::Inbound, HOST, self.place("wire")?, services);
                self.sessions.push(session);
            }
            Err(error) => self.not_measured(Side::Inbound, HOST, &error),
        }
        Ok(())
    }
}

/// The label of the benchmark's containers.
fn label() -> String {
    format!("dev.conman.bench=net-{}", std::process::id())
}
