//! Behind `cargo xtask cluster`: a cluster for people on this machine.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "a command's output")]
#![expect(clippy::print_stderr, reason = "a command's errors and progress")]

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Parser, Subcommand};
use conman_cluster::bench;
use conman_cluster::overlap::{Drive, Fault, Scale};
use conman_cluster::people::{self, Part};
use conman_cluster::{Cluster, Layout, has_docker, requirements};

/// A fleet on this machine: nodes and etcd members in network namespaces.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask cluster", bin_name = "cargo xtask cluster")]
struct Arguments {
    /// A cluster beside that of people, which goes with this process.
    #[arg(long, hide = true)]
    owner: Option<i32>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make the fleet and start it.
    Up {
        #[arg(long, default_value_t = 3)]
        nodes: u8,
        /// etcd members; an odd number, so that a minority may fail.
        #[arg(long, default_value_t = 3)]
        members: u8,
    },
    /// What runs and what it answers.
    Status,
    /// Run a command on a host; `conman` there is that node's.
    Exec {
        host: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<String>,
    },
    /// SIGKILL everything of a host, sessions included, as if its power had failed.
    Kill {
        host: String,
        /// Only the daemon; sessions live on.
        #[arg(long, conflicts_with = "shim")]
        daemon: bool,
        /// Only the shim.
        #[arg(long)]
        shim: bool,
    },
    /// Start a host that was killed.
    Start { host: String },
    /// SIGSTOP the daemon and the shim of a host.
    Stop { host: String },
    /// SIGCONT them.
    Continue { host: String },
    /// Cut a host off all others.
    Cut {
        host: String,
        /// Only off these.
        #[arg(long)]
        from: Vec<String>,
        /// Lose only what it sends.
        #[arg(long)]
        one_way: bool,
    },
    /// Take every cut back.
    Heal,
    /// End and remove everything.
    Down,
    /// Remove the clusters of tests that were killed.
    #[command(hide = true)]
    Sweep,
    /// The long form of the overlap test, on a cluster of its own.
    #[command(hide = true)]
    Overlap {
        #[arg(long)]
        handovers: usize,
        #[arg(long)]
        seed: Option<u64>,
    },
    /// How soon the sessions of a node that goes are served elsewhere, on a cluster of its own.
    #[command(hide = true)]
    Bench {
        #[arg(long)]
        sessions: usize,
        #[arg(long)]
        clients: usize,
        #[arg(long)]
        docker: bool,
        #[arg(long)]
        lost: bool,
        #[arg(long)]
        apart: Option<bench::Apart>,
        #[arg(long)]
        json: bool,
    },
    /// Forward ports of loopback; `up` runs this.
    #[command(hide = true)]
    Forward,
}

fn main() -> ExitCode {
    let Arguments { owner, command } = Arguments::parse();
    match run(owner, command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(owner: Option<i32>, command: Command) -> Result<()> {
    match command {
        Command::Up { nodes, members } => up(owner, nodes, members),
        Command::Status => {
            status(&people::current(owner)?);
            Ok(())
        }
        Command::Exec { host, command } => {
            let mut command = people::command(&people::current(owner)?, &host, &command)?;
            Err(command.exec()).with_context(|| format!("cannot run {command:?}"))
        }
        Command::Kill { host, daemon, shim } => {
            let part = match (daemon, shim) {
                (true, _) => Part::Daemon,
                (_, true) => Part::Shim,
                _ => Part::Machine,
            };
            people::kill(&people::current(owner)?, &host, part)
        }
        Command::Start { host } => people::start(&people::current(owner)?, &host),
        Command::Stop { host } => people::pause(&people::current(owner)?, &host, true),
        Command::Continue { host } => people::pause(&people::current(owner)?, &host, false),
        Command::Cut {
            host,
            from,
            one_way,
        } => people::cut(&people::current(owner)?, &host, &from, one_way),
        Command::Heal => people::heal(&people::current(owner)?),
        Command::Sweep => conman_cluster::sweep(),
        Command::Down => {
            let was = people::down(owner)?;
            eprintln!(
                "{}",
                if was {
                    "it is gone"
                } else {
                    "no cluster is up"
                }
            );
            Ok(())
        }
        Command::Overlap { handovers, seed } => overlap(
            handovers,
            seed.unwrap_or_else(|| fastrand::u64(..1_000_000)),
        ),
        Command::Bench {
            sessions,
            clients,
            docker,
            lost,
            apart,
            json,
        } => {
            let options = bench::Options {
                sessions,
                clients,
                docker,
                lost,
                apart,
            };
            measure(&options, json)
        }
        Command::Forward => people::forward_for_ever(owner),
    }
}

fn up(owner: Option<i32>, nodes: u8, members: u8) -> Result<()> {
    let Some(ready) = requirements() else {
        bail!("this machine lacks what is named above");
    };
    let builder = Cluster::builder().nodes(nodes).members(members);
    let step = &mut |what: &str| eprintln!("  … {what}");
    let layout = people::up(owner, &builder, &ready, &witness()?, step)?;
    status(&layout);
    suggest(&layout);
    Ok(())
}

/// Bound on the long form: on the whole a handover takes less, as does a fault, even on a loaded
/// machine.
const A_HANDOVER: Duration = Duration::from_secs(20);
/// Sessions of the overlap test …
const SESSIONS: usize = 9;
/// … and those that Docker runs, where there is one.
const DOCKERS: usize = 3;

fn overlap(handovers: usize, seed: u64) -> Result<()> {
    let Some(ready) = requirements() else {
        bail!("this machine lacks what is named above");
    };
    let witness = witness()?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start a runtime")?;
    eprintln!("seed {seed}");
    let driven = runtime.block_on(async {
        let dockers = if has_docker() { DOCKERS } else { 0 };
        // With the times that nodes derive for themselves.
        let builder = Cluster::builder().members(3).derived();
        let builder = match dockers {
            0 => builder,
            _ => builder.docker_too(),
        };
        if !builder.is_joined() {
            bail!("the nodes share no registry");
        }
        let cluster = Cluster::start(&builder, &ready, &witness).await?;
        let kinds = Fault::kinds(dockers > 0).len();
        let drive = Drive {
            seed,
            sessions: SESSIONS + dockers,
            dockers,
            handovers,
            every_kind: true,
            most: A_HANDOVER * u32::try_from(handovers + kinds)?,
            scale: Scale::of(builder.timing()),
        };
        let tell = &mut |what: &str| eprintln!("{what}");
        // Dropping the cluster half-way is what its end is made for.
        tokio::select! {
            report = drive.run(&cluster, tell) => report,
            _ = tokio::signal::ctrl_c() => bail!("interrupted"),
        }
    });
    let report = driven.with_context(|| format!("seed {seed}"))?;
    println!("seed {seed}: {report}");
    for violation in &report.violations {
        println!("  {violation}");
    }
    if !report.violations.is_empty() || report.handovers < handovers {
        bail!("failed with seed {seed}");
    }
    Ok(())
}

fn measure(options: &bench::Options, json: bool) -> Result<()> {
    let Some(ready) = requirements() else {
        bail!("this machine lacks what is named above");
    };
    let witness = witness()?;
    let runtime = tokio::runtime::Runtime::new().context("cannot start a runtime")?;
    let figures = runtime.block_on(async {
        let tell = &mut |what: &str| eprintln!("  … {what}");
        // Dropping the cluster half-way is what its end is made for.
        tokio::select! {
            figures = bench::fleet(options, &ready, &witness, tell) => figures,
            _ = tokio::signal::ctrl_c() => bail!("interrupted"),
        }
    })?;
    if json {
        let text = serde_json::to_string_pretty(&figures).context("figures are plain")?;
        println!("{text}");
    } else {
        print!("{figures}");
    }
    if !figures.met {
        bail!("not within the bounds");
    }
    Ok(())
}

/// Built beside this program.
fn witness() -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the own program")?;
    Ok(own.with_file_name("witness"))
}

fn status(layout: &Layout) {
    for one in people::status(layout) {
        let machine = one.machine.map_or_else(String::new, |[api, sessions]| {
            format!("  API http://{api}  sessions http://{sessions}")
        });
        let processes: Vec<String> = one
            .processes
            .iter()
            .map(|(role, pid)| format!("{role} {pid}"))
            .collect();
        println!(
            "{:4} {:12} {}{machine}  [{}]",
            one.host.name,
            one.host.address,
            one.answer,
            processes.join(", ")
        );
    }
}

fn suggest(layout: &Layout) {
    let [api, sessions] = layout.machine_addresses(0);
    let (front, name) = match people::has_balancer(layout) {
        true => (layout.balancer_address(), "HAProxy"),
        false => (
            sessions,
            "n1; install haproxy for one in front of three nodes",
        ),
    };
    println!(
        "\nTry (clients are at {front}, {name}; templates `echo`, `web`, `idle`):\n\n  \
         curl -X PUT -H 'content-type: application/json' -d '{{\"template\":\"{}\"}}' \\\n       \
         http://{api}/v1/sessions/alice\n  \
         curl -d hello http://{front}/s/alice/      # HTTP; it starts again if it has ended\n  \
         websocat ws://{front}/s/alice/             # WebSocket: type, and it answers\n\n  \
         cargo xtask cluster exec n1 conman ps      # also nodes, why alice, events, sh, etcdctl, …\n  \
         cargo xtask cluster exec n1 conman drain   # its sessions move; `conman undrain` after that\n  \
         cargo xtask cluster kill n1                # its power fails; `start n1` brings it back\n  \
         cargo xtask cluster cut n1                 # off all others; `heal` takes it back\n  \
         cargo xtask cluster status\n  \
         cargo xtask cluster down                   # nothing is left\n\n\
         Each node is reached directly, too: its addresses are above. Everything lies in {}, logs \
         included.",
        conman_cluster::echo::TEMPLATE,
        layout.directory.display()
    );
}
