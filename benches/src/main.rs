//! The `conman-bench` program: end-to-end benchmarks, which `conman bench` starts.
//!
//! Each one runs a separate conman (temporary state, free ports) and removes it at the end, so that
//! a benchmark never touches the sessions of a machine. The images are made on the way. A result
//! is data ([`Report`]), printed as a table or as JSON, and drawn as a chart.
//!
//! Compared variants are measured in one run and in alternation: figures of different runs or
//! machines are hardly comparable, ratios within one run are.
#![forbid(unsafe_code)]

mod arguments;
mod chart;
mod daemon;
mod density;
mod docker;
mod echo;
mod files;
mod forward;
mod hop;
mod http_client;
mod image;
mod interruption;
mod kill;
mod load;
mod net;
mod observer;
mod pause;
mod preempt;
mod proxy;
mod rivals;
mod start;
mod statistics;
mod tunnels;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Parser as _;

use arguments::{Arguments, Benchmark};
use chart::Chart;

/// A benchmark's result.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    /// For people.
    pub(crate) table: String,
    /// For programs.
    pub(crate) json: serde_json::Value,
    /// A picture.
    pub(crate) chart: Chart,
    /// The bound that is not met, as text.
    pub(crate) missed: Option<String>,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Arguments::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // An error of standard error cannot be reported.
            let _ = writeln!(std::io::stderr(), "conman-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(arguments: Arguments) -> Result<()> {
    let conman = || match arguments.conman {
        Some(path) => Ok(path),
        None => installed_conman(),
    };
    let report = match arguments.benchmark {
        Benchmark::Kill(kill) => kill::kill(&conman()?, &kill).await?,
        Benchmark::Preempt(kill) => preempt::preempt(&conman()?, &kill).await?,
        Benchmark::Start(start) => start::start(&conman()?, &start).await?,
        Benchmark::Proxy(echo) => proxy::proxy(&conman()?, &echo).await?,
        Benchmark::Hop(echo) => hop::hop(&echo).await?,
        Benchmark::Net(net) => net::net(&conman()?, &net).await?,
        Benchmark::Tunnels(tunnels) => tunnels::tunnels(&conman()?, &tunnels).await?,
        Benchmark::Files(copying) => files::files(&conman()?, &copying).await?,
        Benchmark::Density(density) => density::density(&conman()?, &density).await?,
        Benchmark::Pause(pausing) => pause::pause(&conman()?, &pausing).await?,
        Benchmark::Echo(echo) => return echo::serve_echo(echo.listen).await,
        Benchmark::Services(services) => return net::serve_services(services.listen).await,
        Benchmark::Load(load) => return net::load(load).await,
        Benchmark::Forward(forward) => return forward::serve_forward(forward).await,
    };
    show(&report, arguments.svg.as_deref(), arguments.json)
}

/// The conman beside this program, or else the one in `PATH`.
fn installed_conman() -> Result<PathBuf> {
    let this = std::env::current_exe().context("finding this program")?;
    let beside = this.with_file_name("conman");
    let found = match beside.is_file() {
        true => Some(beside),
        false => std::env::var_os("PATH").and_then(|path| {
            std::env::split_paths(&path)
                .map(|folder| folder.join("conman"))
                .find(|program| program.is_file())
        }),
    };
    found.context("there is no `conman` beside this program or in PATH; name one with --conman")
}

fn show(report: &Report, svg: Option<&Path>, json: bool) -> Result<()> {
    let text = match json {
        true => report.json.to_string(),
        false => report.table.clone(),
    };
    // A reader that has gone is a normal end.
    let _ = writeln!(std::io::stdout(), "{text}");
    if let Some(path) = svg {
        std::fs::write(path, report.chart.to_svg()?)
            .with_context(|| format!("writing the chart to {}", path.display()))?;
    }
    match &report.missed {
        Some(missed) => bail!("not within the bounds: {missed}"),
        None => Ok(()),
    }
}
