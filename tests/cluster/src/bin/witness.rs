//! What sessions of the overlap test run: it writes down, again and again, that it runs. With `--echo`,
//! what people's sessions run.
#![forbid(unsafe_code)]
#![expect(clippy::print_stderr, reason = "a program's complaints")]

use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1).peekable();
    if arguments.peek().is_some_and(|first| first == "--echo") {
        return match conman_cluster::echo::serve() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let path = arguments.next().map(PathBuf::from);
    let port = arguments.next().map(|port| port.parse::<u16>());
    let pause_ms = arguments.next().map(|ms| ms.parse::<u64>());
    let (Some(path), Ok(port), Ok(pause_ms)) = (path, port.transpose(), pause_ms.transpose())
    else {
        eprintln!("usage: witness FILE [PORT [PAUSE_MS]] | --echo");
        return ExitCode::from(2);
    };
    match conman_cluster::overlap::write(&path, port, pause_ms) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}: {error}", path.display());
            ExitCode::FAILURE
        }
    }
}
