//! Runs test programs on a machine.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::{Machine, Medium, say};

/// Threads of a test program: the machine's processors.
const THREADS: u32 = 2;

/// Bound on one module, which takes up to a minute on an idle host.
const PROGRAM_PATIENCE: Duration = Duration::from_secs(1200);

/// The name of each package's test program.
const PROGRAM: &str = "suite";

/// What containers of the tests are made of.
const BUSYBOX: &str = "/usr/bin/busybox";

/// Tests of other packages, to be run on a machine: modules of their test programs.
#[derive(Debug)]
pub struct Programs {
    /// As `PACKAGE/MODULE`.
    modules: Vec<&'static str>,
    /// By package.
    programs: BTreeMap<&'static str, PathBuf>,
}

impl Programs {
    /// The programs of `wanted` (`PACKAGE/MODULE`) as `cargo xtask test` has built them last. `None`
    /// says on standard error which is missing.
    #[must_use]
    pub fn built(worker: &Path, wanted: &[&'static str]) -> Option<Self> {
        let list = fs::read_to_string(worker.join("programs")).unwrap_or_default();
        let mut programs = BTreeMap::new();
        for module in wanted {
            let program = format!("{}/{PROGRAM}", package(module));
            let found = list
                .lines()
                .filter_map(|line| line.split_once(' '))
                .find(|(listed, path)| *listed == program && Path::new(path).exists());
            let Some((_, path)) = found else {
                crate::lacks(&format!("{program} is not built, as with `--package`"));
                return None;
            };
            programs.insert(package(module), PathBuf::from(path));
        }
        Some(Self {
            modules: wanted.to_vec(),
            programs,
        })
    }

    /// Puts them on a medium, with what they need.
    ///
    /// # Panics
    /// When there is no room for them.
    #[must_use]
    pub fn on(&self, medium: Medium) -> Medium {
        let medium = medium.with_file("busybox", Path::new(BUSYBOX));
        let medium = match self.shim() {
            Some(shim) => medium.with_program("conman-shim", &shim),
            None => medium,
        };
        self.programs
            .iter()
            .fold(medium, |medium, (package, path)| {
                medium.with_program(&file(package), path)
            })
    }

    /// Runs them on a machine that has the medium mounted at /media, one after the other, and says
    /// what they leave out.
    ///
    /// # Panics
    /// When one fails.
    pub fn pass(&self, machine: &Machine) {
        let release = machine.run("uname -r").ok();
        let release = release.trim();
        let _ = machine.run("install /media/busybox /usr/bin/busybox").ok();
        if let Some(shim) = self.shim() {
            // Where the programs were told that it is.
            let place = shim.display();
            let put = format!("mkdir -p $(dirname {place}) && ln -sf /media/conman-shim {place}");
            let _ = machine.run(&put).ok();
        }
        for name in &self.modules {
            let (package, module) = parts(name);
            let command = format!(
                "cd /tmp && /media/{} {module}:: --nocapture --test-threads={THREADS} 2>&1",
                file(package)
            );
            let began = Instant::now();
            let told = machine.run_within(&command, PROGRAM_PATIENCE).ok();
            let seconds = began.elapsed().as_secs();
            for line in told.lines().filter(|line| line.contains("skipped")) {
                say(&format!("Linux {release}: {name}: {line}"));
            }
            let result = told
                .lines()
                .find(|line| line.starts_with("test result: ok."));
            let result = result.unwrap_or_else(|| panic!("{name} has no result:\n{told}"));
            assert!(!result.contains(" 0 passed"), "{name}: {result}");
            say(&format!("Linux {release}: {name}, {seconds} s: {result}"));
        }
    }

    /// The shim that belongs to the programs, beside the folder that they lie in.
    fn shim(&self) -> Option<PathBuf> {
        let (_, path) = self.programs.first_key_value()?;
        Some(path.ancestors().nth(2)?.join("conman-shim"))
    }
}

/// Package and module of a `PACKAGE/MODULE`.
fn parts(name: &'static str) -> (&'static str, &'static str) {
    name.split_once('/').expect("a module has a package")
}

fn package(name: &'static str) -> &'static str {
    parts(name).0
}

/// A package's test program on the medium.
fn file(package: &str) -> String {
    format!("{package}-tests")
}
