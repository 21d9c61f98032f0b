//! `cargo xtask clean`: lists and removes what the set-up and the tests leave on a machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::process::{output, target_dir};
use crate::setup::{self, IMAGES};

/// Folders and files of cargo's build folder that are not cargo's.
const BELOW_TARGET: [&str; 7] = [
    "dockerd.log",
    "earlier",
    "images",
    "test-logs",
    "tmp",
    "tools",
    "worker-vm",
];

/// How names of files for locks begin, in the folder for temporary files.
const LOCKS: [&str; 2] = ["conman-cluster.", "conman-e2e-docker."];

/// Where hosts have the hierarchies of cgroups.
const HIERARCHIES: &str = "/sys/fs/cgroup";

/// The cgroup that the shim makes in hierarchies of v1 where sessions have none.
const VIEW: &str = "conman-view";

/// Hierarchies, and the cgroup of a conman in that of cpusets.
const VIEW_DEPTH: usize = 3;

/// Arguments of `cargo xtask clean`.
#[derive(Debug, clap::Args)]
pub(crate) struct CleanArguments {
    /// Only list.
    #[arg(long)]
    dry_run: bool,
}

/// Something to remove.
#[derive(Debug)]
enum Leftover {
    Path(PathBuf),
    /// An image in the machine's Docker.
    Image(&'static str),
    /// A cgroup without processes.
    Cgroup(PathBuf),
}

pub(crate) fn run(arguments: &CleanArguments) -> Result<()> {
    let program = target_dir().join("debug/conman-cluster");
    if !arguments.dry_run && program.exists() {
        // Fleets of tests that were killed: processes, namespaces, cgroups, folders.
        output(Command::new(program).arg("sweep"))?;
    }
    let mut problems = Vec::new();
    for leftover in leftovers()? {
        println!("{}", leftover.shown());
        if !arguments.dry_run
            && let Err(error) = leftover.remove()
        {
            problems.push(format!("{error:#}"));
        }
    }
    let packages = setup::installed_packages();
    if !packages.is_empty() {
        println!(
            "packages that the set-up has installed stay; remove them with: apt-get purge {}",
            packages.join(" ")
        );
    }
    if problems.is_empty() {
        return Ok(());
    }
    bail!("not everything was removed: {}", problems.join("; "))
}

fn leftovers() -> Result<Vec<Leftover>> {
    let mut found = Vec::new();
    let below = BELOW_TARGET.map(|name| target_dir().join(name));
    found.extend(below.into_iter().filter(|path| path.exists()));
    let temporary = std::env::temp_dir();
    let entries =
        fs::read_dir(&temporary).with_context(|| format!("cannot list {}", temporary.display()))?;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if LOCKS.iter().any(|lock| name.starts_with(lock)) && entry.path().is_file() {
            found.push(entry.path());
        }
    }
    let has = |image: &&str| {
        let mut inspect = Command::new("docker");
        output(inspect.args(["image", "inspect", image])).is_ok()
    };
    let images = IMAGES.into_iter().filter(has).map(Leftover::Image);
    let mut cgroups = Vec::new();
    find_views(Path::new(HIERARCHIES), VIEW_DEPTH, &mut cgroups);
    Ok(found
        .into_iter()
        .map(Leftover::Path)
        .chain(images)
        .chain(cgroups.into_iter().map(Leftover::Cgroup))
        .collect())
}

/// Finds the cgroups that stand in for those that sessions have not. What lies below them is not searched.
fn find_views(below: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    let entries = fs::read_dir(below).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        if entry.file_name() == VIEW {
            found.push(entry.path());
        } else if depth > 0 {
            find_views(&entry.path(), depth - 1, found);
        }
    }
}

impl Leftover {
    fn shown(&self) -> String {
        match self {
            Self::Path(path) => {
                let size = output(Command::new("du").arg("-sh").arg(path));
                let size = size.map(|size| String::from_utf8_lossy(&size.stdout).into_owned());
                size.map_or_else(
                    |_| path.display().to_string(),
                    |size| size.trim().to_owned(),
                )
            }
            Self::Image(name) => format!("image {name} in Docker"),
            Self::Cgroup(path) => format!("cgroup {}", path.display()),
        }
    }

    fn remove(&self) -> Result<()> {
        match self {
            Self::Path(path) if path.is_dir() => fs::remove_dir_all(path),
            Self::Path(path) => fs::remove_file(path),
            // The kernel keeps one that still has processes: of a conman that runs.
            Self::Cgroup(path) => fs::remove_dir(path),
            Self::Image(name) => {
                return output(Command::new("docker").args(["image", "rm", name])).map(drop);
            }
        }
        .with_context(|| format!("cannot remove {}", self.shown()))
    }
}
