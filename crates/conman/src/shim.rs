//! `conman shim`: the parent of all native containers of this installation.
//!
//! The daemon starts one if none answers; a service manager may as well. It outlives the daemon
//! and ends by `conman shim --stop`, by SIGTERM, or when a daemon stops that runs no container.
//! Containers outlive it, too: the next shim takes them over.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use conman_cli::ShimArgs;
use conman_core::Instance;
use conman_core::naming::{CgroupDriver, instance_cgroup};
use conman_core::ownership::Timing;
use conman_linux::{CgroupPart, Cgroups, PidFd, Signal};
use conman_runtime::ShimCommand;
use conman_shim::{
    Client, ClientError, ENDING_TIMEOUT, IDS_FILE, IdPool, IdsTaken, Request, ShimOptions,
};

use crate::config::{self, Config, LogFormat};
use crate::serve::EXIT_CONFIG;
use crate::{state_dir, telemetry};

/// Where all shims of the host record how many sessions the kernel is prepared for.
const PREPARED: &str = "/run/conman.prepared";

/// Directory of files that must not outlive a boot.
const RUN: &str = "/run";
const SOCKET: &str = "shim.sock";
const STATE: &str = "shim.state";
const LOCK: &str = "shim.lock";
/// File in the state directory: error output of a shim that the daemon has started.
const COMPLAINTS: &str = "shim.log";

/// Bound on an answer of the shim, and on its end.
const PATIENCE: Duration = Duration::from_secs(10);

/// The shim's directory of an installation.
#[derive(Debug, Clone)]
pub(crate) struct ShimPlace {
    /// For root and this installation only.
    directory: PathBuf,
}

impl ShimPlace {
    /// Not in a directory of the daemon, which a service manager may remove with the daemon.
    pub(crate) fn of(instance: &Instance) -> Self {
        Self {
            directory: Path::new(RUN).join(format!("conman-{instance}")),
        }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join(SOCKET)
    }

    /// Removes files that are no longer needed.
    fn clear(&self) {
        for name in [STATE, LOCK] {
            let _ = fs::remove_file(self.directory.join(name));
        }
        // It stays if it has a successor's socket.
        let _ = fs::remove_dir(&self.directory);
    }
}

/// The program that the daemon runs if no shim answers.
pub(crate) fn command(config: &Config) -> Result<ShimCommand> {
    let state_dir = &config.state_dir;
    let sessions = config.limits.node.max_sessions;
    let mut arguments = vec![
        OsString::from("shim"),
        OsString::from("--state-dir"),
        state_dir.into(),
        OsString::from("--prepare-for"),
        sessions.to_string().into(),
        OsString::from("--id-range"),
        config.id_range.to_string().into(),
        OsString::from("--total-cpus"),
        config.limits.total_cpus.to_string().into(),
    ];
    if let Some(fleet) = &config.shared {
        arguments.push(OsString::from("--freeze-ms"));
        arguments.push(fleet.timing.freeze_ms.to_string().into());
    }
    Ok(ShimCommand {
        program: std::env::current_exe().context("cannot find conman's own program")?,
        arguments,
        stderr: state_dir.join(COMPLAINTS),
    })
}

/// The calling process has one thread.
pub(crate) fn run(arguments: &ShimArgs) -> ExitCode {
    let done = Installation::named(arguments).and_then(|installation| {
        let state_dir = &installation.state_dir;
        if arguments.stop {
            stop(state_dir)
        } else if arguments.replace {
            replace(state_dir)
        } else {
            be(&installation, arguments)
        }
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let failed = crate::fail(&format!("{error:#}"));
            // Restarting the shim's unit does not help if only a new configuration does.
            let io = error.downcast_ref::<std::io::Error>();
            let are_ids_taken = io
                .and_then(std::io::Error::get_ref)
                .is_some_and(|inner| inner.is::<IdsTaken>());
            if error.is::<config::ConfigError>() || are_ids_taken {
                ExitCode::from(EXIT_CONFIG)
            } else {
                failed
            }
        }
    }
}

/// The installation of a shim.
#[derive(Debug, PartialEq, Eq)]
struct Installation {
    state_dir: PathBuf,
    /// Sessions that the kernel is prepared for.
    prepare_for: u32,
    ids: IdPool,
    total_cpu_millis: Option<u64>,
}

impl Installation {
    fn named(arguments: &ShimArgs) -> Result<Self> {
        let mut installation = match &arguments.state_dir {
            Some(directory) if directory.is_absolute() => Self {
                state_dir: directory.clone(),
                prepare_for: 0,
                ids: IdPool::default(),
                total_cpu_millis: None,
            },
            Some(directory) => bail!("--state-dir {} is not absolute", directory.display()),
            None => {
                let config = config::load(arguments.config.as_deref())?;
                Self {
                    prepare_for: native_sessions(&config),
                    state_dir: config.state_dir,
                    ids: config.id_range,
                    total_cpu_millis: Some(millis(config.limits.total_cpus)),
                }
            }
        };
        if let Some(sessions) = arguments.prepare_for {
            installation.prepare_for = sessions;
        }
        if let Some(text) = &arguments.id_range {
            let ids = text.parse::<IdPool>();
            installation.ids = ids.map_err(|rule| anyhow!("--id-range {text} {rule}"))?;
        }
        if let Some(cpus) = arguments.total_cpus {
            installation.total_cpu_millis = Some(millis(cpus));
        }
        Ok(installation)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a negative number becomes 0, one beyond 2^64 the highest"
)]
fn millis(cpus: f64) -> u64 {
    ((cpus * 1e3).round() as u64).max(1)
}

/// Most containers that a shim may make.
fn native_sessions(config: &Config) -> u32 {
    match config.has_native_containers() {
        true => u32::try_from(config.limits.node.max_sessions).unwrap_or(u32::MAX),
        false => 0,
    }
}

fn be(installation: &Installation, arguments: &ShimArgs) -> Result<()> {
    let state_dir = &installation.state_dir;
    telemetry::init(LogFormat::Text);
    state_dir::prepare(state_dir)?;
    let instance = state_dir::instance(state_dir)?;
    let place = ShimPlace::of(&instance);
    state_dir::prepare(&place.directory)?;
    // No signal of a terminal arrives here. A process that leads a group has a session already, or
    // its parent chose its session.
    let _ = nix::unistd::setsid();
    let fence_cgroup = instance_cgroup(&instance, CgroupDriver::Cgroupfs);
    let fence_slice = instance_cgroup(&instance, CgroupDriver::Systemd);
    let hold = conman_shim::run(ShimOptions {
        socket: place.socket(),
        roots: vec![state_dir.clone()],
        fence_cgroup: fence_cgroup.clone(),
        fence_slice: fence_slice.clone(),
        state_file: place.directory.join(STATE),
        ids: installation.ids,
        ids_file: PathBuf::from(IDS_FILE),
        total_cpu_millis: installation.total_cpu_millis,
        do_without: Vec::new(),
        cgroups: CgroupPart::All,
        prepare_for: installation.prepare_for,
        prepared_file: PathBuf::from(PREPARED),
        standby: arguments.standby,
        freeze_patience: Duration::from_millis(arguments.freeze_ms),
        frozen_max: Duration::from_millis(Timing::default().frozen_max_ms),
    })
    .context("the shim cannot continue")?;
    let is_empty = Cgroups::detect().is_ok_and(|cgroups| {
        let places = [&fence_cgroup, &fence_slice];
        places
            .iter()
            .all(|place| matches!(cgroups.try_pids_below(place).as_deref(), Ok([])))
    });
    if hold.is_alone() && is_empty {
        place.clear();
    }
    // A successor has taken everything over, or starts with nothing.
    drop(hold);
    Ok(())
}

/// Interval between looks for a shim of this installation.
const CLAIM_POLL: Duration = Duration::from_millis(200);

/// Refuses user ids that another conman of this host uses. A shim that runs has claimed its own.
pub(crate) fn check_ids(config: &Config) -> Result<()> {
    let has_shim = || {
        // One that does not answer is a shim, too.
        state_dir::known_instance(&config.state_dir).is_some()
            && !matches!(connect(&config.state_dir), Ok(None))
    };
    let mut waited = Duration::ZERO;
    loop {
        if has_shim() {
            return Ok(());
        }
        // A shim of this installation claims its ids before it answers.
        match conman_shim::ids_taken(Path::new(IDS_FILE), config.id_range, CLAIM_POLL)? {
            Some(taken) if waited >= ENDING_TIMEOUT => return Err(taken.into()),
            Some(_) => waited += CLAIM_POLL,
            None => return Ok(()),
        }
    }
}

/// Connects to the shim of an installation; `None` if there is none.
fn connect(state_dir: &Path) -> Result<Option<Client>> {
    let socket = ShimPlace::of(&state_dir::instance(state_dir)?).socket();
    match Client::connect(&socket, PATIENCE) {
        Ok(client) => Ok(Some(client)),
        Err(ClientError::Io(error))
            if matches!(
                error.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(error).with_context(|| format!("no answer on {}", socket.display())),
    }
}

/// Makes the shim continue as this program.
fn replace(state_dir: &Path) -> Result<()> {
    let program = std::env::current_exe().context("cannot find conman's own program")?;
    let Some(mut client) = connect(state_dir)? else {
        bail!("no shim runs");
    };
    let request = Request::Replace {
        program: Some(program.clone()),
    };
    client.ask(request).context("the shim stays what it is")?;
    crate::tell(&format!("the shim continues as {}", program.display()));
    Ok(())
}

/// Ends the shim of an installation, unless containers live.
fn stop(state_dir: &Path) -> Result<()> {
    let Some(mut client) = connect(state_dir)? else {
        crate::tell("no shim runs");
        return Ok(());
    };
    let shim = PidFd::open(client.shim_pid()).context("the shim has just gone")?;
    // It answered after the pidfd was opened, so the pidfd is the shim's.
    let views = client.list().context("cannot list the shim's containers")?;
    let alive = views.iter().filter(|view| view.state.is_alive()).count();
    if alive > 0 {
        bail!(
            "{alive} containers and commands live; stop the sessions first (`conman rm`), or leave \
             the shim running"
        );
    }
    shim.signal(Signal::SIGTERM)
        .context("cannot stop the shim")?;
    if !shim
        .wait_dead(PATIENCE)
        .context("cannot wait for the shim")?
    {
        bail!("the shim (process {}) has not ended", shim.pid());
    }
    crate::tell("the shim has ended");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments() -> ShimArgs {
        ShimArgs {
            config: None,
            state_dir: None,
            prepare_for: None,
            id_range: None,
            total_cpus: None,
            freeze_ms: 1_000,
            standby: true,
            replace: false,
            stop: false,
        }
    }

    fn prepares_for(arguments: &ShimArgs) -> u32 {
        let installation = Installation::named(arguments).expect("an installation");
        installation.prepare_for
    }

    #[test]
    fn the_kernel_is_prepared_for_as_many_sessions_as_the_configuration_allows() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, text).expect("written");
            ShimArgs {
                config: Some(path),
                ..arguments()
            }
        };
        let native = write("native.toml", "[limits]\nmax_sessions = 4321\n");
        let docker = "[node]\nruntime = \"docker\"\n[limits]\nmax_sessions = 4321\n";
        let docker = write("docker.toml", docker);
        let told = ShimArgs {
            prepare_for: Some(7),
            ..native.clone()
        };
        let unknown = ShimArgs {
            state_dir: Some(folder.path().to_owned()),
            ..arguments()
        };
        let all = [&native, &told, &docker, &unknown];
        assert_eq!(all.map(prepares_for), [4321, 7, 0, 0]);
    }
}
