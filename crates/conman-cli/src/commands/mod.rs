//! One module for each subcommand that calls the daemon.

mod attach;
mod completions;
mod cp;
mod drain;
mod events;
mod exec;
mod execs;
mod followed;
mod forward;
mod image;
mod inspect;
mod logs;
mod ls;
mod man;
mod net;
mod nodes;
mod ports;
mod preempt;
mod processes;
mod ps;
mod rm;
mod run;
mod run_rm;
mod session_orders;
mod session_pages;
mod stats;
mod token;
mod top;
mod version;
mod watch;
mod why;

use crate::args::{ClientCommand, Globals, ImageArgs, ImageCommand};
use crate::client::{Client, ClientError};
use crate::failure::{Exit, Failure};
use crate::output::Output;

/// The context of every command.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) output: Output,
}

/// Runs one command.
pub(crate) async fn dispatch(
    command: ClientCommand,
    globals: &Globals,
    output: Output,
) -> Result<Exit, Failure> {
    if let ClientCommand::Completions(args) = &command {
        return completions::run(&output, args);
    }
    if let ClientCommand::Man(args) = &command {
        return man::run(args);
    }
    let client = match Client::new(globals, |name| std::env::var_os(name)) {
        Ok(client) => client,
        Err(error) => return Err(misconfigured(&command, error)),
    };
    let context = &Context { client, output };
    // Boxed: `exec` holds a terminal's state, which the others need not carry.
    match command {
        ClientCommand::Run(args) => Box::pin(run::run(context, &args)).await,
        ClientCommand::Ps(args) => Box::pin(ps::run(context, &args)).await,
        ClientCommand::Inspect(args) => Box::pin(inspect::run(context, &args)).await,
        ClientCommand::Rm(args) => Box::pin(rm::run(context, args)).await,
        ClientCommand::Pause(args) => Box::pin(session_orders::pause(context, &args)).await,
        ClientCommand::Resume(args) => Box::pin(session_orders::resume(context, &args)).await,
        ClientCommand::Restart(args) => Box::pin(session_orders::restart(context, &args)).await,
        ClientCommand::Update(args) => Box::pin(session_orders::update(context, &args)).await,
        ClientCommand::Kill(args) => Box::pin(session_orders::kill(context, &args)).await,
        ClientCommand::Exec(args) => Box::pin(exec::run(context, args)).await,
        ClientCommand::Execs(args) => Box::pin(execs::run(context, &args)).await,
        ClientCommand::Attach(args) => Box::pin(attach::run(context, args)).await,
        ClientCommand::Cp(args) => Box::pin(cp::run(context, args)).await,
        ClientCommand::Ls(args) => Box::pin(ls::run(context, &args)).await,
        ClientCommand::Watch(args) => Box::pin(watch::run(context, &args)).await,
        ClientCommand::Logs(args) => Box::pin(logs::run(context, &args)).await,
        ClientCommand::Stats(args) => Box::pin(stats::run(context, &args)).await,
        ClientCommand::Processes(args) => Box::pin(processes::run(context, &args)).await,
        ClientCommand::Top => Box::pin(top::run(context)).await,
        ClientCommand::Events(args) => Box::pin(events::run(context, &args)).await,
        ClientCommand::Why(args) => Box::pin(why::run(context, &args)).await,
        ClientCommand::Port(args) => Box::pin(ports::run(context, &args)).await,
        ClientCommand::Net(args) => Box::pin(net::run(context, &args)).await,
        ClientCommand::Forward(args) => Box::pin(forward::run(context, &args)).await,
        ClientCommand::Token(args) => Box::pin(token::run(context, &args)).await,
        ClientCommand::Image(args) => Box::pin(image::run(context, args)).await,
        ClientCommand::Images(args) => in_images(context, ImageCommand::Ls(args)).await,
        ClientCommand::Pull(args) => in_images(context, ImageCommand::Pull(args)).await,
        ClientCommand::Rmi(args) => in_images(context, ImageCommand::Rm(args)).await,
        ClientCommand::Nodes(args) => Box::pin(nodes::run(context, &args)).await,
        ClientCommand::Drain(args) => Box::pin(drain::drain(context, args)).await,
        ClientCommand::Rebalance(args) => Box::pin(drain::rebalance(context, &args)).await,
        ClientCommand::Undrain(args) => Box::pin(drain::undrain(context, &args)).await,
        ClientCommand::Cordon(args) => Box::pin(nodes::change(context, &args, "cordon")).await,
        ClientCommand::Uncordon(args) => Box::pin(nodes::change(context, &args, "uncordon")).await,
        ClientCommand::Preempt(args) => Box::pin(preempt::preempt(context, args)).await,
        ClientCommand::Readmit(args) => Box::pin(preempt::readmit(context, &args)).await,
        ClientCommand::Version => Box::pin(version::run(context)).await,
        ClientCommand::Completions(args) => completions::run(&output, &args),
        ClientCommand::Man(args) => man::run(&args),
    }
}

async fn in_images(context: &Context, command: ImageCommand) -> Result<Exit, Failure> {
    Box::pin(image::run(context, ImageArgs { command })).await
}

/// A wrong address or token file. Under `exec` every failure of conman has one code.
fn misconfigured(command: &ClientCommand, error: ClientError) -> Failure {
    let failure = Failure::from(error);
    match command {
        ClientCommand::Exec(_) | ClientCommand::Attach(_) => failure.with_exit(Exit::NOT_RUN),
        _ => failure,
    }
}
