//! `conman bench`: connects the command line to the benchmarks.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use conman_bench::{
    DensityOptions, Fellows, ForwardTo, HopOptions, KillOptions, ProxyOptions, Report,
    StartOptions, TunnelsOptions, density, hop, kill, preempt, proxy, start, tunnels,
};
use conman_cli::{BenchArgs, BenchCommand, BenchForwardArgs};

pub(crate) async fn run(arguments: BenchArgs, json: bool) -> ExitCode {
    match carry_out(arguments.command, json).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => crate::fail(&format!("{error:#}")),
    }
}

async fn carry_out(command: BenchCommand, json: bool) -> Result<()> {
    let binary = std::env::current_exe().context("finding conman's own binary")?;
    let (report, svg) = match command {
        BenchCommand::Kill(arguments) => {
            let (count, rounds) = (size(arguments.count)?, size(arguments.rounds)?);
            (
                kill(&KillOptions {
                    binary,
                    count,
                    rounds,
                })
                .await?,
                arguments.svg,
            )
        }
        BenchCommand::Preempt(arguments) => (
            preempt(&KillOptions {
                binary,
                count: size(arguments.count)?,
                rounds: size(arguments.rounds)?,
            })
            .await?,
            arguments.svg,
        ),
        BenchCommand::Start(arguments) => {
            let (count, parallel) = (size(arguments.count)?, size(arguments.parallel)?);
            (
                start(&StartOptions {
                    binary,
                    count,
                    parallel,
                })
                .await?,
                arguments.svg,
            )
        }
        BenchCommand::Proxy(arguments) => {
            let (rounds, duration) = (size(arguments.rounds)?, arguments.duration);
            (
                proxy(&ProxyOptions {
                    binary,
                    rounds,
                    duration,
                })
                .await?,
                arguments.svg,
            )
        }
        BenchCommand::Tunnels(arguments) => (
            tunnels(&TunnelsOptions {
                binary,
                count: size(arguments.count)?,
            })
            .await?,
            None,
        ),
        BenchCommand::Hop(arguments) => {
            let (rounds, duration) = (size(arguments.rounds)?, arguments.duration);
            (
                hop(&HopOptions {
                    binary,
                    rounds,
                    duration,
                })
                .await?,
                arguments.svg,
            )
        }
        BenchCommand::Density(arguments) => (
            density(&DensityOptions {
                binary,
                runtime: arguments.runtime,
                count: size(arguments.count)?,
                parallel: size(arguments.parallel)?,
                rivals_at: size(arguments.rivals_at)?,
                rivals: size(arguments.rivals)?,
            })
            .await?,
            arguments.svg,
        ),
        BenchCommand::Echo(arguments) => return conman_bench::serve_echo(arguments.listen).await,
        BenchCommand::Forward(arguments) => {
            return conman_bench::serve_forward(arguments.listen, target(arguments)?).await;
        }
    };
    show(&report, svg, json)
}

fn target(arguments: BenchForwardArgs) -> Result<ForwardTo> {
    let fellows = |address| {
        let secret_file = arguments.secret_file.clone();
        let secret_file = secret_file.context("nodes know each other by --secret-file")?;
        anyhow::Ok(Fellows {
            address,
            secret_file,
        })
    };
    let peers = arguments.peers.map(fellows).transpose()?;
    match (arguments.backend, arguments.node) {
        (Some(backend), None) => Ok(ForwardTo::Backend { backend, peers }),
        (None, Some(node)) => Ok(ForwardTo::Node(fellows(node)?)),
        (Some(_), Some(_)) | (None, None) => bail!("give --backend or --node"),
    }
}

fn show(report: &Report, svg: Option<PathBuf>, json: bool) -> Result<()> {
    if json {
        crate::tell(&report.json.to_string());
    } else {
        crate::tell(&report.table);
    }
    if let Some(path) = svg {
        write(&path, &report.chart.to_svg()?)?;
    }
    match &report.missed {
        Some(missed) => bail!("not within the bounds: {missed}"),
        None => Ok(()),
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("writing the chart to {}", path.display()))
}

fn size(number: u32) -> Result<usize> {
    usize::try_from(number).context("a count too large for this machine")
}
