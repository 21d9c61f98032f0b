//! Tests that mount something, in a mount namespace of their own.

use std::path::Path;
use std::process::Command;

use super::is_root;

const INSIDE: &str = "CONMAN_TEST_INSIDE";

/// True in the namespace; outside it runs the test there and says false.
pub(crate) fn inside(test: &str) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    if !is_root() {
        return false;
    }
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private"])
        .arg(std::env::current_exe().expect("this program"))
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output();
    match output {
        Ok(output) => {
            let told = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && told.contains("1 passed"),
                "{told}{}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Err(error) => eprintln!("skipped: unshare cannot be run: {error}"),
    }
    false
}

pub(crate) fn mount(arguments: &[&str], target: &Path) {
    let output = Command::new("mount")
        .args(arguments)
        .arg(target)
        .output()
        .expect("mount");
    assert!(
        output.status.success(),
        "mount {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}
