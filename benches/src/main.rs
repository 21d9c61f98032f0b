//! The `conman-bench` program: end-to-end benchmarks, which `conman bench` starts.
//!
//! Each one runs a separate conman (temporary state, free ports) and removes it at the end, so that
//! a benchmark never touches the sessions of a machine. The images are made on the way. A result
//! is data ([`Report`]), printed as text or as JSON, and written to an HTML file with charts.
//!
//! Compared variants are measured in one run and in alternation: figures of different runs or
//! machines are hardly comparable, ratios within one run are.
#![forbid(unsafe_code)]

mod arguments;
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
mod needs;
mod net;
mod observer;
mod overhead;
mod pause;
mod plain;
mod preempt;
mod proxy;
mod report;
mod rivals;
mod start;
mod start_pool;
mod statistics;
mod storm;
mod tunnels;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Parser as _;

use arguments::{Arguments, Benchmark};
use report::{Report, Setting};

/// The name by which this program is the program of the storm's sessions.
const WITNESS: &str = "witness";

fn main() -> ExitCode {
    let name = std::env::args_os().next().map(PathBuf::from);
    let is_witness = name.is_some_and(|name| name.ends_with(WITNESS));
    let ended = match is_witness {
        true => storm::witness(),
        false => measure(Arguments::parse()),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // An error of standard error cannot be reported.
            let _ = writeln!(std::io::stderr(), "conman-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn measure(arguments: Arguments) -> Result<()> {
    let conman = || match arguments.conman {
        Some(path) => Ok(path),
        None => installed_conman(),
    };
    if arguments.benchmark.measures() {
        interruption::listen()?;
    }
    let setting = Setting::begin();
    let report = match arguments.benchmark {
        Benchmark::Kill(kill) => kill::kill(&conman()?, &kill).await?,
        Benchmark::Preempt(kill) => preempt::preempt(&conman()?, &kill).await?,
        Benchmark::Start(start) => match start.pool {
            Some(pool) => start_pool::start_pool(&conman()?, &start, pool).await?,
            None => start::start(&conman()?, &start).await?,
        },
        Benchmark::Proxy(echo) => proxy::proxy(&conman()?, &echo).await?,
        Benchmark::Hop(echo) => hop::hop(&echo).await?,
        Benchmark::Net(net) => net::net(&conman()?, &net).await?,
        Benchmark::Tunnels(tunnels) => tunnels::tunnels(&conman()?, &tunnels).await?,
        Benchmark::Files(copying) => files::files(&conman()?, &copying).await?,
        Benchmark::Density(density) => density::density(&conman()?, &density).await?,
        Benchmark::Pause(pausing) => pause::pause(&conman()?, &pausing).await?,
        Benchmark::Storm(storming) => storm::storm(&conman()?, &storming).await?,
        Benchmark::Overhead(overhead) => overhead::overhead(&conman()?, &overhead).await?,
        Benchmark::Echo(echo) => return echo::serve_echo(echo.listen).await,
        Benchmark::OldNode(node) => return storm::old::serve(node).await,
        Benchmark::Services(services) => return net::serve_services(services.listen).await,
        Benchmark::Load(load) => return net::load(load).await,
        Benchmark::Forward(forward) => return forward::serve_forward(forward).await,
    };
    let default = PathBuf::from(format!("conman-bench-{}.html", report.name()));
    let path = arguments
        .report
        .or_else(|| (!arguments.json).then_some(default));
    show(&report, &setting, path.as_deref(), arguments.json)
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

fn show(report: &Report, setting: &Setting, path: Option<&Path>, json: bool) -> Result<()> {
    let text = match json {
        true => report.to_json(setting).to_string(),
        false => report.to_text(),
    };
    // A reader that has gone is a normal end.
    let _ = writeln!(std::io::stdout(), "{text}");
    if let Some(path) = path {
        let json = report.save(path, setting)?;
        let (path, json) = (path.display(), json.display());
        let _ = writeln!(std::io::stderr(), "report: {path}, its data: {json}");
    }
    match &report.missed {
        Some(missed) => bail!("not within the bounds: {missed}"),
        None => Ok(()),
    }
}
