//! `conman bench`: becomes the program `conman-bench`, which measures this conman.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use conman_cli::BenchArgs;

const PROGRAM: &str = "conman-bench";

/// Returns only when the program cannot be started.
pub(crate) fn run(arguments: &BenchArgs, json: bool) -> ExitCode {
    let conman = match std::env::current_exe() {
        Ok(conman) => conman,
        Err(error) => return crate::fail(&format!("cannot find this program's own file: {error}")),
    };
    let beside = conman.with_file_name(PROGRAM);
    let program = if beside.is_file() {
        beside
    } else {
        PROGRAM.into()
    };
    let mut command = Command::new(&program);
    command.arg("--conman").arg(&conman);
    if json {
        command.arg("--json");
    }
    let error = command.args(&arguments.arguments).exec();
    if error.kind() == io::ErrorKind::NotFound {
        let folder = conman.with_file_name("");
        return crate::fail(&format!(
            "the benchmarks are a program of their own, `{PROGRAM}`, which is neither in {} nor in \
             PATH; install it from conman's packages, or build it with `cargo build --release \
             --locked --package {PROGRAM}`",
            folder.display()
        ));
    }
    crate::fail(&format!("cannot start {}: {error}", program.display()))
}
