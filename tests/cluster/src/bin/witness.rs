//! What sessions of the overlap test run: it writes down, again and again, that it runs.
#![forbid(unsafe_code)]
#![expect(clippy::print_stderr, reason = "a program's complaints")]

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: witness FILE");
        return ExitCode::from(2);
    };
    match conman_cluster::overlap::write(&path) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}: {error}", path.display());
            ExitCode::FAILURE
        }
    }
}
