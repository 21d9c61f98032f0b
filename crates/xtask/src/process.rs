//! Child processes that end with the command that started them.

use std::path::PathBuf;
use std::process::{Child, Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::progress::shown;

/// Poll interval while waiting for a condition.
const POLL: Duration = Duration::from_millis(50);

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    let manifest = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    manifest
        .ancestors()
        .nth(2)
        .map_or(manifest.clone(), PathBuf::from)
}

/// The cargo that runs this command, without what it sets for this program: `ring` and all that depends on it are
/// compiled again when `CARGO_MANIFEST_DIR` differs from the previous build's, which a person may have typed.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    let ours = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(ours) {
            command.env_remove(name);
        }
    }
    command
}

/// Features of the daemon with which all development builds share their dependencies.
pub(crate) const DEV_BUILD: [&str; 2] = ["--features", "conman/dev-build"];

/// What cargo starts instead of rustc for the crates of this workspace.
const COMPILER: &str = "crates/xtask/lint-compile-document.sh";

/// `cargo build` for development. Lints, documentation, tests, the tour and the hostile battery share what it
/// makes.
pub(crate) fn cargo_build() -> Command {
    with_our_compiler("build")
}

/// Targets of these packages in their form for tests, which the caller must name (`--lib`, `--test NAME`): the daemon
/// is selected, too, so that dependencies have the features that [`cargo_build_workspace`] selects, and has neither.
pub(crate) fn cargo_test_of<P: AsRef<str>>(packages: &[P]) -> Command {
    let mut command = with_our_compiler("test");
    command.args(["--package", "conman"]).args(DEV_BUILD);
    for package in packages {
        command.args(["--package", package.as_ref()]);
    }
    command
}

fn with_our_compiler(subcommand: &str) -> Command {
    let mut command = cargo();
    command.args([subcommand, "--locked"]);
    command.env("RUSTC_WORKSPACE_WRAPPER", root().join(COMPILER));
    command
}

/// A development build of the daemon.
pub(crate) fn cargo_build_conman() -> Command {
    let mut command = cargo_build();
    command.args(["--package", "conman"]).args(DEV_BUILD);
    command
}

/// The same for people who only want to see it run: without lints, documentation and debug information.
pub(crate) fn cargo_build_for_show() -> Command {
    let mut command = cargo();
    command.args(["build", "--locked", "--package", "conman"]);
    command.args(DEV_BUILD);
    command.env("CARGO_PROFILE_DEV_DEBUG", "false");
    command
}

/// A development build of everything.
pub(crate) fn cargo_build_workspace() -> Command {
    let mut command = cargo_build();
    command.args(["--workspace", "--all-targets"]);
    command.args(DEV_BUILD);
    command
}

/// The tests of everything.
pub(crate) fn cargo_test_workspace() -> Command {
    let mut command = with_our_compiler("test");
    command.args(["--workspace", "--tests", "--bins"]);
    command.args(DEV_BUILD);
    command
}

/// Cargo's build folder.
pub(crate) fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

/// A daemon started by this command. When dropped, it is stopped, by force if necessary.
#[derive(Debug)]
pub(crate) struct Daemon {
    name: &'static str,
    child: Child,
    patience: Duration,
    kept: bool,
}

impl Daemon {
    pub(crate) fn start(
        name: &'static str,
        command: &mut Command,
        patience: Duration,
    ) -> Result<Self> {
        let child = command
            .spawn()
            .with_context(|| format!("starting `{}`", shown(command)))?;
        Ok(Self {
            name,
            child,
            patience,
            kept: false,
        })
    }

    /// Its exit status if it has ended already.
    pub(crate) fn ended(&mut self) -> Result<Option<std::process::ExitStatus>> {
        self.child
            .try_wait()
            .with_context(|| format!("looking after {}", self.name))
    }

    /// Lets it continue after this command.
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }

    /// Sends SIGTERM and waits; kills it if it does not stop.
    pub(crate) fn stop(&mut self) -> Result<()> {
        if self.kept || self.ended()?.is_some() {
            return Ok(());
        }
        let pid = i32::try_from(self.child.id()).ok().map(Pid::from_raw);
        if let Some(pid) = pid {
            kill(pid, Signal::SIGTERM).with_context(|| format!("stopping {}", self.name))?;
        }
        let stopped = wait_until(self.patience, || Ok(self.child.try_wait()?.is_some()))?;
        if !stopped {
            self.child
                .kill()
                .with_context(|| format!("killing {}", self.name))?;
            self.child
                .wait()
                .with_context(|| format!("waiting for {}", self.name))?;
            bail!(
                "{} did not stop within {} s and was killed",
                self.name,
                self.patience.as_secs()
            );
        }
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("warning: {error:#}");
        }
    }
}

/// Waits until `condition` holds; `false` if it does not in time.
pub(crate) fn wait_until(
    patience: Duration,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<bool> {
    let deadline = Instant::now() + patience;
    loop {
        if condition()? {
            return Ok(true);
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
        pause(POLL);
    }
}

/// Runs a command and returns its output; an error if it fails.
pub(crate) fn output(command: &mut Command) -> Result<Output> {
    let output = command
        .output()
        .with_context(|| format!("starting `{}`", shown(command)))?;
    if !output.status.success() {
        let told = String::from_utf8_lossy(&output.stderr);
        bail!(
            "`{}` failed ({}): {}",
            shown(command),
            output.status,
            told.trim()
        );
    }
    Ok(output)
}

/// Whether a program can be started by name.
pub(crate) fn installed(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|paths| {
        std::env::split_paths(&paths)
            .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
            .any(|directory| directory.join(program).is_file())
    })
}

/// A flag that Ctrl-C, SIGTERM and SIGHUP raise.
pub(crate) fn interrupted() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [
        signal_hook::consts::SIGINT,
        signal_hook::consts::SIGTERM,
        signal_hook::consts::SIGHUP,
    ] {
        signal_hook::flag::register(signal, Arc::clone(&flag)).context("watching for Ctrl-C")?;
    }
    Ok(flag)
}

/// Whether the flag was raised.
pub(crate) fn is_raised(flag: &AtomicBool) -> bool {
    flag.load(Ordering::Relaxed)
}

#[expect(
    clippy::disallowed_methods,
    reason = "this program has no async runtime to block"
)]
pub(crate) fn pause(time: Duration) {
    std::thread::sleep(time);
}
