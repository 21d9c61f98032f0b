use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::{Machine, Medium, say};

/// Threads of a test program: the machine's processors.
const THREADS: u32 = 2;

/// Bound on one program, which takes up to a minute on an idle host.
const PROGRAM_PATIENCE: Duration = Duration::from_secs(1200);

/// What containers of the tests are made of.
const BUSYBOX: &str = "/usr/bin/busybox";

/// Test programs of other packages, to be run on a machine.
#[derive(Debug)]
pub struct Programs {
    /// By package and target.
    chosen: BTreeMap<&'static str, PathBuf>,
}

impl Programs {
    /// Those of `wanted` (`PACKAGE/TARGET`) as `cargo xtask test` has built them last. `None` says
    /// on standard error which is missing.
    #[must_use]
    pub fn built(worker: &Path, wanted: &[&'static str]) -> Option<Self> {
        let list = fs::read_to_string(worker.join("programs")).unwrap_or_default();
        let mut chosen = BTreeMap::new();
        for name in wanted {
            let found = list
                .lines()
                .filter_map(|line| line.split_once(' '))
                .find(|(listed, path)| listed == name && Path::new(path).exists());
            let Some((_, path)) = found else {
                crate::lacks(&format!("{name} is not built, as with `--package`"));
                return None;
            };
            chosen.insert(*name, PathBuf::from(path));
        }
        Some(Self { chosen })
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
        self.chosen.iter().fold(medium, |medium, (name, path)| {
            medium.with_program(&file(name), path)
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
        for name in self.chosen.keys() {
            let command = format!(
                "cd /tmp && /media/{} --nocapture --test-threads={THREADS} 2>&1",
                file(name)
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
        let (_, path) = self.chosen.first_key_value()?;
        Some(path.ancestors().nth(2)?.join("conman-shim"))
    }
}

/// A name without a slash.
fn file(name: &str) -> String {
    name.replace('/', "-")
}
