//! `conman man DIR`: writes the manual pages.

use clap::CommandFactory as _;

use crate::args::{Cli, ManArgs};
use crate::failure::{Exit, Failure};

pub(super) fn run(args: &ManArgs) -> Result<Exit, Failure> {
    let written = clap_mangen::generate_to(Cli::command(), &args.directory);
    written.map_err(|error| {
        let title = "The manual pages cannot be written";
        let detail = format!("{}: {error}", args.directory.display());
        Failure::new(Exit::Failed, "output", title, detail)
    })?;
    Ok(Exit::Done)
}
