//! Going on as the program that is in place now, before anything of the shim's has begun.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use super::replacing::check_file;

/// What this process runs, wherever its file is by now.
const OWN: &str = "/proc/self/exe";

/// After another shim was waited for: executes what is at the path that this program had, where that
/// is another one since, as after an upgrade. Otherwise an older program would succeed a newer one.
/// The lock is given up by that, so that the other program takes its turn for it.
pub(super) fn renew(program: &Path) {
    let (Ok(own), Ok(found)) = (check_file(Path::new(OWN)), check_file(program)) else {
        // None that root can trust: better an old one than none.
        return;
    };
    if own == found {
        return;
    }
    tracing::info!(program = %program.display(), "the program was replaced; beginning as that");
    let mut arguments = std::env::args_os();
    let mut command = Command::new(program);
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    let error = command.args(arguments).exec();
    tracing::warn!(
        program = %program.display(), %error,
        "the program that was put in this one's place cannot be executed; going on as what it was"
    );
}
