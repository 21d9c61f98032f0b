//! Where the programs run: on the machine, in sessions, in Docker's containers.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use conman_proto::RuntimeKind;
use serde::Serialize;
use tokio::process::Command;

use super::loads::{self, Figures, Load, WORK};
use super::servers::{self, Server};
use super::{Measured, output};
use crate::arguments::Overhead;
use crate::daemon::{Daemon, gvisor_settings};
use crate::docker::{Docker, image_name};
use crate::image;

/// Memory of a session and of a container, in bytes: more than any load uses.
const MEMORY_BYTES: u64 = 4 << 30;
const IMAGE: &str = "conman-bench:overhead";
const LABEL: &str = "dev.conman.bench=overhead";
/// Directories of this machine that all places share, read-only: the programs are the same files everywhere.
const SHARED: [&str; 3] = ["/usr", "/etc/alternatives", "/etc/mysql"];

/// Where a load runs, and by which network clients reach its server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Place {
    Plain,
    /// A native session; a server's client is inside with it.
    Native,
    NativeRouted,
    NativeHost,
    /// A session of the chosen runtime, with its client inside.
    Gvisor,
    ConmanDocker,
    /// A container of Docker on the bridge, reached by its address.
    Docker,
    DockerPublished,
    DockerHost,
    /// A container of Docker with gVisor, on the bridge.
    DockerGvisor,
}

impl Place {
    const ALL: [Self; 10] = [
        Self::Plain,
        Self::Native,
        Self::NativeRouted,
        Self::NativeHost,
        Self::Gvisor,
        Self::ConmanDocker,
        Self::Docker,
        Self::DockerPublished,
        Self::DockerHost,
        Self::DockerGvisor,
    ];

    /// The places where some loads are measured with a chosen runtime.
    fn wanted(loads: &[Load], runtime: RuntimeKind) -> Vec<Self> {
        let has_servers = loads.iter().any(|load| load.is_server());
        let is_wanted = |place: &Self| match place.only_with() {
            Some(wanted) => runtime == wanted,
            None => has_servers || !place.is_about_network(),
        };
        Self::ALL.into_iter().filter(is_wanted).collect()
    }

    /// The runtime with which it is measured, if not always.
    const fn only_with(self) -> Option<RuntimeKind> {
        match self {
            Self::Gvisor | Self::DockerGvisor => Some(RuntimeKind::Gvisor),
            Self::ConmanDocker => Some(RuntimeKind::Docker),
            _ => None,
        }
    }

    /// Whether it differs from another one only by its network.
    const fn is_about_network(self) -> bool {
        matches!(
            self,
            Self::NativeRouted | Self::NativeHost | Self::DockerPublished | Self::DockerHost
        )
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain process",
            Self::Native => "conman native",
            Self::NativeRouted => "conman native, routed",
            Self::NativeHost => "conman native, host network",
            Self::Gvisor => "conman gVisor",
            Self::ConmanDocker => "conman on Docker",
            Self::Docker => "Docker, bridge by address",
            Self::DockerPublished => "Docker, published port",
            Self::DockerHost => "Docker, host network",
            Self::DockerGvisor => "Docker with gVisor",
        }
    }

    pub(super) const fn is_session(self) -> bool {
        matches!(
            self,
            Self::Native
                | Self::NativeRouted
                | Self::NativeHost
                | Self::Gvisor
                | Self::ConmanDocker
        )
    }

    /// The name of its session, template, container and directory.
    pub(super) const fn id(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Native => "native",
            Self::NativeRouted => "native-routed",
            Self::NativeHost => "native-host",
            Self::Gvisor => "gvisor",
            Self::ConmanDocker => "conman-docker",
            Self::Docker => "docker",
            Self::DockerPublished => "docker-published",
            Self::DockerHost => "docker-host",
            Self::DockerGvisor => "docker-gvisor",
        }
    }

    /// What its template has besides.
    const fn settings(self) -> &'static str {
        match self {
            Self::NativeRouted => "network = \"routed\"\n",
            Self::NativeHost => "network = \"host\"\n",
            Self::Gvisor => "runtime = \"gvisor\"\n",
            Self::ConmanDocker => "runtime = \"docker\"\n",
            _ => "",
        }
    }
}

/// Why there is no virtual machine among the places.
pub(super) fn no_virtual_machine() -> String {
    let kvm = Path::new("/dev/kvm").exists();
    let module = Path::new("/sys/module/kvm_pvm").exists();
    match (kvm, module) {
        (false, _) => "there is no /dev/kvm".to_owned(),
        (true, true) => {
            "/dev/kvm is of kvm_pvm, which boots no kernel of a distribution".to_owned()
        }
        (true, false) => "this version of the benchmark starts no virtual machine".to_owned(),
    }
}

/// Everything that runs for the benchmark.
pub(super) struct Places {
    conman: PathBuf,
    /// With the sessions.
    daemon: Option<(Daemon, Vec<Place>)>,
    /// With the containers; its image is there as long as this.
    docker: Option<(Docker, BTreeMap<Place, String>)>,
    servers: Vec<Server>,
    /// The directory of each place, bound as [`WORK`].
    scratch: tempfile::TempDir,
}

impl Places {
    /// Starts all that can be started here.
    ///
    /// # Errors
    /// When even the plain process cannot be.
    pub(super) async fn start(
        conman: &Path,
        (loads, runtime): (&[Load], RuntimeKind),
        measured: &mut Measured,
    ) -> Result<Self> {
        // On a disk: a directory in memory takes no direct I/O.
        let scratch = tempfile::tempdir_in("/var/tmp").context("making a folder")?;
        let mut places = Self {
            conman: conman.to_owned(),
            daemon: None,
            docker: None,
            servers: Vec::new(),
            scratch,
        };
        let wanted = Place::wanted(loads, runtime);
        for place in &wanted {
            servers::make_folder(&places.folder(*place), *place)?;
        }
        if let Err(error) = places.start_docker(&wanted, measured).await {
            measured.skip("Docker", format!("{error:#}"));
        }
        if let Err(error) = places.start_sessions(&wanted, measured).await {
            measured.skip("conman", format!("{error:#}"));
        }
        if let Err(error) = places.start_servers(loads).await {
            places.stop().await?;
            return Err(error);
        }
        Ok(places)
    }

    /// The places of a load, the plain process first.
    pub(super) fn of(&self, load: Load) -> Vec<Place> {
        let exists = |place: &Place| match *place {
            Place::Plain => true,
            place if place.is_session() => {
                let daemon = self.daemon.as_ref();
                daemon.is_some_and(|(_, sessions)| sessions.contains(&place))
            }
            place => {
                let docker = self.docker.as_ref();
                docker.is_some_and(|(_, containers)| containers.contains_key(&place))
            }
        };
        let is_wanted = |place: &Place| load.is_server() || !place.is_about_network();
        let places = Place::ALL.into_iter().filter(exists);
        places.filter(is_wanted).collect()
    }

    /// Runs a load once.
    pub(super) async fn run(
        &self,
        load: Load,
        place: Place,
        options: &Overhead,
    ) -> Result<Figures> {
        let folder = match place {
            Place::Plain => self.folder(place).display().to_string(),
            _ => WORK.to_owned(),
        };
        match load {
            Load::Hpcc => {
                let input = self.folder(place).join("hpccinf.txt");
                fs::write(&input, loads::hpcc_input(options.size))
                    .context("writing hpccinf.txt")?;
                let script = loads::hpcc_script(&folder);
                loads::hpcc_figures(&self.inside(place, &script).await?)
            }
            Load::Disk => {
                let script = loads::fio_script(&folder, options);
                loads::fio_figures(&self.inside(place, &script).await?, "on a bind")
            }
            Load::Root => {
                let root = if place == Place::Plain { &folder } else { "/" };
                let script = loads::fio_script(root, options);
                loads::fio_figures(&self.inside(place, &script).await?, "on the root")
            }
            Load::Redis | Load::Oltp => {
                let server = self
                    .servers
                    .iter()
                    .find(|one| one.place == place && one.load == load);
                let server = server.context("its server did not start")?;
                server.ask(self, options).await
            }
        }
    }

    /// Runs a script in a place. Returns what it prints.
    pub(super) async fn inside(&self, place: Place, script: &str) -> Result<String> {
        output(&mut self.command(place, script)?).await
    }

    pub(super) fn command(&self, place: Place, script: &str) -> Result<Command> {
        let mut command;
        if place == Place::Plain {
            command = Command::new("sh");
        } else if place.is_session() {
            let (daemon, _) = self.daemon.as_ref().context("conman does not run")?;
            command = Command::new(&self.conman);
            command.arg("--socket").arg(daemon.socket());
            command.args(["exec", place.id(), "--", "sh"]);
        } else {
            let (_, containers) = self.docker.as_ref().context("Docker does not run")?;
            let id = containers
                .get(&place)
                .context("the container did not start")?;
            command = Command::new("docker");
            command.args(["exec", id, "sh"]);
        }
        command.args([
            "-c",
            &format!("PATH=/usr/sbin:/usr/bin:/sbin:/bin; export PATH; {script}"),
        ]);
        Ok(command)
    }

    pub(super) fn folder(&self, place: Place) -> PathBuf {
        self.scratch.path().join(place.id())
    }

    /// The process id of the first process of a session, for its address.
    pub(super) async fn address(&self, place: Place) -> Result<String> {
        match place {
            Place::NativeRouted => {
                let text = self
                    .inside(place, "hostname -I || ip -4 -o addr show eth0")
                    .await?;
                let address = text.split_whitespace().find(|word| word.contains('.'));
                let address = address.context("the session has no address")?;
                Ok(address.split('/').next().unwrap_or(address).to_owned())
            }
            Place::Docker | Place::DockerGvisor => {
                let (docker, containers) = self.docker.as_ref().context("Docker does not run")?;
                let id = containers
                    .get(&place)
                    .context("the container did not start")?;
                docker.inspect(id, "{{.NetworkSettings.IPAddress}}").await
            }
            _ => Ok("127.0.0.1".to_owned()),
        }
    }

    async fn start_sessions(&mut self, wanted: &[Place], measured: &mut Measured) -> Result<()> {
        let root = image::root(&self.scratch.path().join("image"))?;
        link_usr(&root)?;
        let archive = image::archive(&root)?;
        let all = wanted.iter().copied().filter(|place| place.is_session());
        let templates: String = all.clone().map(|place| self.template(place)).collect();
        let allowed: Vec<String> = shared()
            .chain([self.scratch.path().display().to_string()])
            .collect();
        // Sessions on the host's network reach the API, which therefore asks for tokens; none is used.
        let tokens = tokens_file(&self.scratch.path().join("tokens.toml"))?;
        let settings = format!(
            "[auth]\ntokens_file = \"{tokens}\"\n[net]\npool = [\"198.18.0.0/24\"]\n[binds]\nallow = {allowed:?}\n\
             {}{templates}",
            gvisor_settings()
        );
        let daemon =
            Daemon::with_templates(&self.conman, RuntimeKind::Native, 8, &settings).await?;
        let mut sessions = Vec::new();
        let opened = async {
            daemon.import(&archive, IMAGE).await?;
            for place in all {
                match daemon.open_one(place.id().to_owned(), place.id()).await {
                    Ok(_) => sessions.push(place),
                    Err(error) if place.only_with().is_some() => {
                        measured.skip(place.name(), format!("{error:#}"));
                    }
                    Err(error) => return Err(error),
                }
            }
            anyhow::Ok(())
        };
        if let Err(error) = opened.await {
            daemon.stop_all().await?;
            return Err(error);
        }
        self.daemon = Some((daemon, sessions));
        Ok(())
    }

    fn template(&self, place: Place) -> String {
        let binds: Vec<String> = shared()
            .map(|path| format!("{path}:{path}:ro"))
            .chain([format!("{}:{WORK}", self.folder(place).display())])
            .collect();
        let image = match place {
            Place::ConmanDocker => image_name(),
            _ => IMAGE.to_owned(),
        };
        format!(
            "[templates.{}]\nimage = \"{image}\"\ncommand = [\"/bin/busybox\", \"sleep\", \"1000000\"]\n{}\
             binds = {binds:?}\nmemory_bytes = {MEMORY_BYTES}\npids = 4096\n",
            place.id(),
            place.settings()
        )
    }

    async fn start_docker(&mut self, wanted: &[Place], measured: &mut Measured) -> Result<()> {
        let root = image::root(&self.scratch.path().join("docker-image"))?;
        link_usr(&root)?;
        let docker = Docker::with_image(&image::archive(&root)?).await?;
        let gvisor = docker.gvisor().await?;
        let mut containers = BTreeMap::new();
        let others = wanted.iter().copied();
        let others = others.filter(|place| *place != Place::Plain && !place.is_session());
        for place in others {
            if place == Place::DockerGvisor && gvisor.is_none() {
                let why = "Docker has no runtime runsc (`runsc install`, then restart Docker)";
                measured.skip(place.name(), why.to_owned());
                continue;
            }
            let mut options: Vec<String> = shared()
                .flat_map(|path| ["--volume".to_owned(), format!("{path}:{path}:ro")])
                .collect();
            options.extend([
                "--volume".to_owned(),
                format!("{}:{WORK}", self.folder(place).display()),
            ]);
            options.extend(["--memory".to_owned(), MEMORY_BYTES.to_string()]);
            match place {
                Place::DockerPublished => {
                    for load in [Load::Redis, Load::Oltp] {
                        let (inner, outer) = (
                            servers::port(load, Place::Docker),
                            servers::port(load, place),
                        );
                        options
                            .extend(["--publish".to_owned(), format!("127.0.0.1:{outer}:{inner}")]);
                    }
                }
                Place::DockerHost => options.extend(["--network".to_owned(), "host".to_owned()]),
                Place::DockerGvisor => {
                    options.push("--runtime".to_owned());
                    options.extend(gvisor.clone());
                }
                _ => {}
            }
            let options: Vec<&str> = options.iter().map(String::as_str).collect();
            let id = docker
                .run(LABEL, &options, &["/bin/busybox", "sleep", "1000000"])
                .await
                .with_context(|| format!("{}, image {}", place.name(), image_name()))?;
            containers.insert(place, id);
        }
        self.docker = Some((docker, containers));
        Ok(())
    }

    async fn start_servers(&mut self, loads: &[Load]) -> Result<()> {
        for load in loads.iter().filter(|load| load.is_server()) {
            for place in self.of(*load) {
                let server = Server::start(*load, place, self).await?;
                self.servers.push(server);
            }
        }
        Ok(())
    }

    /// Ends and removes everything.
    pub(super) async fn stop(mut self) -> Result<()> {
        for server in std::mem::take(&mut self.servers) {
            server.stop().await;
        }
        let mut results = Vec::new();
        // A session on Docker uses its image.
        if let Some((daemon, _)) = self.daemon.take() {
            results.push(daemon.stop_all().await);
        }
        if let Some((docker, containers)) = self.docker.take() {
            let ids: Vec<String> = containers.into_values().collect();
            results.push(docker.remove(&ids).await);
        }
        results.into_iter().collect()
    }
}

/// A file of tokens without any, as text.
fn tokens_file(path: &Path) -> Result<String> {
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    fs::write(path, "")
        .and_then(|()| fs::set_permissions(path, mode))
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(path.display().to_string())
}

fn shared() -> impl Iterator<Item = String> {
    let exists = SHARED.into_iter().filter(|path| Path::new(path).exists());
    exists.map(str::to_owned)
}

/// Makes the root show the programs and libraries of `/usr`, where that is bound.
fn link_usr(root: &Path) -> Result<()> {
    for name in [
        "usr",
        "var/tmp",
        "root",
        "run",
        "etc/mysql",
        "etc/alternatives",
    ] {
        fs::create_dir_all(root.join(name)).with_context(|| format!("making /{name}"))?;
    }
    for name in ["lib", "lib64", "sbin"] {
        std::os::unix::fs::symlink(format!("usr/{name}"), root.join(name))
            .with_context(|| format!("linking /{name}"))?;
    }
    let users = "root:x:0:0:root:/root:/bin/sh\n";
    fs::write(root.join("etc/passwd"), users).context("writing /etc/passwd")?;
    ensure!(
        Path::new("/usr/lib64").exists() || Path::new("/usr/lib").exists(),
        "this machine's /usr is not merged"
    );
    Ok(())
}
