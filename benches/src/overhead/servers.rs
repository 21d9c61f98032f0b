//! The servers of a place, and their clients.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use conman_core::DEFAULT_BIND_FIRST_ID;
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use super::loads::{self, Figures, Load, WORK};
use super::output;
use super::places::{Place, Places};
use crate::arguments::Overhead;

/// Bound on the start of a server, and on its tables.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);
/// Of the database: small, so that it stays in memory as in the published study.
const ROWS: &str = "10000";

/// A running server.
pub(super) struct Server {
    pub(super) load: Load,
    pub(super) place: Place,
    /// The command that runs it, in its place.
    process: Child,
    address: String,
}

/// The port of a server: each place on the network of the machine has another one.
pub(super) fn port(load: Load, place: Place) -> u16 {
    let first = match load {
        Load::Oltp => 13_306,
        _ => 16_379,
    };
    first
        + match place {
            Place::Plain => 10,
            Place::NativeHost => 20,
            Place::DockerHost => 30,
            Place::DockerPublished => 40,
            Place::Native
            | Place::NativeRouted
            | Place::Gvisor
            | Place::ConmanDocker
            | Place::Docker
            | Place::DockerGvisor => 0,
        }
}

/// The port that the server itself listens on.
fn inner_port(load: Load, place: Place) -> u16 {
    match place {
        Place::DockerPublished => port(load, Place::Docker),
        place => port(load, place),
    }
}

/// Makes the directory of a place, which belongs to root there.
pub(super) fn make_folder(folder: &Path, place: Place) -> Result<()> {
    let is_own = place.is_session() && place != Place::ConmanDocker;
    let root = is_own.then_some(DEFAULT_BIND_FIRST_ID);
    fs::create_dir_all(folder)
        .and_then(|()| fs::set_permissions(folder, fs::Permissions::from_mode(0o777)))
        .and_then(|()| std::os::unix::fs::chown(folder, root, root))
        .with_context(|| format!("making {}", folder.display()))
}

impl Server {
    /// Starts it and waits until it answers. A database gets its tables.
    pub(super) async fn start(load: Load, place: Place, places: &Places) -> Result<Self> {
        let folder = match place {
            Place::Plain => places.folder(place).display().to_string(),
            _ => WORK.to_owned(),
        };
        let port = inner_port(load, place);
        let script = match load {
            Load::Oltp => format!(
                "cd {folder} && mkdir mysql && mariadb-install-db --no-defaults --user=root --datadir={folder}/mysql \
                 --skip-test-db --auth-root-authentication-method=normal >install.log 2>&1 && exec mariadbd \
                 --no-defaults --user=root --datadir={folder}/mysql --socket={folder}/mysql.sock --port={port} \
                 --pid-file={folder}/mysql.pid --bind-address=0.0.0.0 --innodb-buffer-pool-size=256M \
                 --skip-name-resolve --max-connections=500"
            ),
            _ => format!(
                "exec redis-server --port {port} --bind 0.0.0.0 --protected-mode no --save '' --dir {folder}"
            ),
        };
        let mut command = places.command(place, &script)?;
        let process = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting the server of {}", place.name()))?;
        let mut server = Self {
            load,
            place,
            process,
            address: places.address(place).await?,
        };
        server.wait(places).await?;
        if load == Load::Oltp {
            server.prepare(places, &folder).await?;
        }
        Ok(server)
    }

    async fn wait(&mut self, places: &Places) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let port = self.port();
        // Inside, since only there all are reached.
        let inner = inner_port(self.load, self.place);
        let probe = format!("bash -c 'exec 3<>/dev/tcp/127.0.0.1/{inner}'");
        while places.inside(self.place, &probe).await.is_err() {
            if let Some(status) = self.process.try_wait().context("looking after a server")? {
                bail!(
                    "{} in {} ended: {status}",
                    self.load.name(),
                    self.place.name()
                );
            }
            if Instant::now() > deadline {
                bail!(
                    "{} in {} does not listen on {port}",
                    self.load.name(),
                    self.place.name()
                );
            }
            sleep(POLL).await;
        }
        Ok(())
    }

    /// Lets clients of other addresses in, and makes the tables.
    async fn prepare(&self, places: &Places, folder: &str) -> Result<()> {
        let grant = "CREATE DATABASE sbtest; CREATE USER 'bench'@'%'; GRANT ALL ON sbtest.* TO 'bench'@'%';";
        let script = format!(
            "mariadb --no-defaults --user=root --socket={folder}/mysql.sock -e \"{grant}\""
        );
        places.inside(self.place, &script).await?;
        self.sysbench(places, 1, 0.0, "prepare").await.map(drop)
    }

    /// Asks it once for all figures.
    pub(super) async fn ask(&self, places: &Places, options: &Overhead) -> Result<Figures> {
        if self.load == Load::Redis {
            let words = loads::redis_arguments(&self.address, self.port());
            let script = format!("redis-benchmark {}", words.join(" "));
            return loads::redis_figures(&self.client(places, &script).await?);
        }
        let mut figures = Figures::new();
        for threads in &options.threads {
            let text = self
                .sysbench(places, *threads, options.seconds, "run")
                .await?;
            let rate = loads::sysbench_rate(&text)?;
            figures.push((format!("OLTP transactions/s, {threads} threads"), rate));
        }
        Ok(figures)
    }

    async fn sysbench(
        &self,
        places: &Places,
        threads: usize,
        seconds: f64,
        what: &str,
    ) -> Result<String> {
        let script = format!(
            "sysbench /usr/share/sysbench/oltp_read_write.lua --mysql-host={} --mysql-port={} --mysql-user=bench \
             --tables=1 --table-size={ROWS} --threads={threads} --time={:.0} {what}",
            self.address,
            self.port(),
            seconds.ceil()
        );
        self.client(places, &script).await
    }

    /// A client on the machine; inside the session where nothing else reaches it.
    async fn client(&self, places: &Places, script: &str) -> Result<String> {
        if matches!(
            self.place,
            Place::Native | Place::Gvisor | Place::ConmanDocker
        ) {
            return places.inside(self.place, script).await;
        }
        output(Command::new("sh").args(["-c", script])).await
    }

    fn port(&self) -> u16 {
        port(self.load, self.place)
    }

    /// The plain server ends with its process, the others with their session or container.
    pub(super) async fn stop(mut self) {
        if let Some(leader) = self.process.id() {
            // A group that has ended already needs no signal.
            let _ = conman_linux::signal_group(leader.cast_signed(), conman_linux::Signal::SIGKILL);
        }
        let _ = self.process.wait().await;
    }
}
