//! Whether the program of an OCI runtime is there, and is what it must be; of gVisor's, whether it runs programs on
//! this machine.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use conman_linux::{Signal, signal_group};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;
use tokio::time::{Instant, timeout};

use super::gvisor;
use super::oci::OciOptions;

/// Bounds on `--version`, and on a program in gVisor, which takes a tenth of a second.
const VERSION_PATIENCE: Duration = Duration::from_secs(3);
const PROGRAM_PATIENCE: Duration = Duration::from_secs(15);

/// Bound on the end of a killed program.
const END_PATIENCE: Duration = Duration::from_secs(1);

/// Most bytes that are read of what it prints, and shown of them.
const MAX_SAID_BYTES: u64 = 16 * 1_024;
const SHOWN_CHARACTERS: usize = 200;

/// What is between the name and the version of a program.
const VERSION: &str = " version ";

/// The day, as a number, of the first release whose default platform, systrap, needs neither KVM nor ptrace.
const OLDEST_DAY: u32 = 20_230_612;

/// What a program in it prints.
const GREETING: &str = "a program in gVisor";

const INSTALL: &str = "install the runtime from its makers' packages, and name the program in `path` of its \
                       section in `[runtimes]`";

/// Why sessions with an OCI runtime cannot start.
#[derive(Debug, thiserror::Error)]
pub enum OciFault {
    #[error("cannot find the OCI runtime at {}: {error}; {INSTALL}", path.display())]
    Missing { path: PathBuf, error: io::Error },
    #[error("{} is not an executable file; {INSTALL}", path.display())]
    NoProgram { path: PathBuf },
    #[error("cannot run {}: {error}; {INSTALL}", path.display())]
    NotRun { path: PathBuf, error: io::Error },
    #[error("`{} {command}` has not ended after {} s", path.display(), after.as_secs())]
    Silent {
        path: PathBuf,
        command: &'static str,
        after: Duration,
    },
    #[error(
        "`{} --version` does not print `{expected}`, but {said:?}; {INSTALL}",
        path.display()
    )]
    Other {
        path: PathBuf,
        expected: &'static str,
        said: String,
    },
    #[error("{} is gVisor's runsc: its section must be `[runtimes.gvisor]`", path.display())]
    IsGvisor { path: PathBuf },
    #[error(
        "{} is runsc {version}, which has no platform that works everywhere (systrap); {INSTALL}",
        path.display()
    )]
    TooOld { path: PathBuf, version: String },
    #[error("`{} run` does not run a program on this machine ({status}): {said}", path.display())]
    NoProgramRuns {
        path: PathBuf,
        status: ExitStatus,
        said: String,
    },
}

/// A file, as far as it is the same one while this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileIdentity(u64, u64, u64, i64, i64);

impl FileIdentity {
    fn of(data: &Metadata) -> Self {
        Self(
            data.dev(),
            data.ino(),
            data.len(),
            data.mtime(),
            data.mtime_nsec(),
        )
    }
}

impl OciOptions {
    /// The version that the program says it has. `known`: what it said before, and of which file.
    pub(super) async fn version_unless(
        &self,
        known: Option<(FileIdentity, String)>,
    ) -> Result<(FileIdentity, String), OciFault> {
        let path = || self.program.clone();
        let data = fs::metadata(&self.program).map_err(|error| OciFault::Missing {
            path: path(),
            error,
        })?;
        let identity = FileIdentity::of(&data);
        if let Some((_, version)) = known.filter(|(of, _)| *of == identity) {
            return Ok((identity, version));
        }
        if !data.is_file() || data.permissions().mode() & 0o111 == 0 {
            return Err(OciFault::NoProgram { path: path() });
        }
        let mut command = Command::new(&self.program);
        let answered = said(command.arg("--version"), VERSION_PATIENCE).await;
        let answered = answered.map_err(|error| OciFault::NotRun {
            path: path(),
            error,
        })?;
        let Some((_, output, _)) = answered else {
            return Err(OciFault::Silent {
                path: path(),
                command: "--version",
                after: VERSION_PATIENCE,
            });
        };
        let named = output.lines().find_map(|line| line.split_once(VERSION));
        let expected = match self.is_gvisor {
            true => "runsc version VERSION",
            false => "NAME version VERSION",
        };
        match named {
            Some((gvisor::NAME, _)) if !self.is_gvisor => Err(OciFault::IsGvisor { path: path() }),
            Some((name, version)) if !self.is_gvisor => {
                Ok((identity, shown(&format!("{name} {version}"))))
            }
            Some((gvisor::NAME, version)) => match day(version) {
                Some(day) if day < OLDEST_DAY => Err(OciFault::TooOld {
                    path: path(),
                    version: shown(version),
                }),
                _ => Ok((identity, shown(version))),
            },
            _ => Err(OciFault::Other {
                path: path(),
                expected,
                said: shown(&output),
            }),
        }
    }

    /// The version that the program says it has.
    ///
    /// # Errors
    /// When it is missing, something else, or too old.
    pub async fn version(&self) -> Result<String, OciFault> {
        Ok(self.version_unless(None).await?.1)
    }

    /// Runs a program of this machine in gVisor, and returns how long that took.
    ///
    /// # Errors
    /// When it does not run: the platform does not work here, for example.
    pub async fn probe(&self) -> Result<Duration, OciFault> {
        let path = || self.program.clone();
        let not_run = |error| OciFault::NotRun {
            path: path(),
            error,
        };
        let bundle = bundle().map_err(not_run)?;
        let begun = Instant::now();
        let answered = said(&mut self.in_bundle(bundle.path(), "run"), PROGRAM_PATIENCE).await;
        let took = begun.elapsed();
        // Of one that was killed.
        let mut delete = self.in_bundle(bundle.path(), "delete");
        let _ = said(&mut delete, VERSION_PATIENCE).await;
        match answered.map_err(not_run)? {
            None => Err(OciFault::Silent {
                path: path(),
                command: "run",
                after: PROGRAM_PATIENCE,
            }),
            Some((status, output, _)) if status.success() && output.trim() == GREETING => Ok(took),
            Some((status, output, errors)) => Err(OciFault::NoProgramRuns {
                path: path(),
                status,
                said: match errors.trim() {
                    "" => format!("it printed {:?}", shown(&output)),
                    errors => shown(errors.lines().next_back().unwrap_or_default()),
                },
            }),
        }
    }

    /// A command about the container of a bundle, with the settings that it has outside of a session's container.
    fn in_bundle(&self, bundle: &Path, command: &str) -> Command {
        let mut runsc = Command::new(&self.program);
        runsc.arg(format!("--root={}", bundle.join("state").display()));
        // Without a network it would leave a mount behind.
        runsc.args(["--network=host", "--ignore-cgroups", "--overlay2=none"]);
        runsc.args(&self.arguments).arg(command);
        match command {
            "run" => runsc.arg("--bundle").arg(bundle),
            _ => runsc.arg("--force"),
        };
        runsc.arg("conman-doctor");
        runsc
    }
}

/// The directory of a container that greets: of this machine's files, which it cannot change.
fn bundle() -> io::Result<tempfile::TempDir> {
    let bundle = tempfile::tempdir()?;
    let configuration = json!({
        "ociVersion": "1.2.0",
        "root": { "path": "/", "readonly": true },
        "process": {
            "user": { "uid": 65_534, "gid": 65_534 },
            "args": ["/bin/echo", GREETING],
            "env": ["PATH=/usr/bin:/bin"],
            "cwd": "/",
            "noNewPrivileges": true,
        },
        "mounts": [{ "destination": "/proc", "type": "proc", "source": "proc" }],
        "linux": {
            "namespaces": [
                { "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" },
            ],
        },
    });
    fs::write(bundle.path().join("config.json"), configuration.to_string())?;
    Ok(bundle)
}

/// How a command ended and what it printed, as output and as errors; `None`: it did not end in time, and was killed.
async fn said(
    command: &mut Command,
    patience: Duration,
) -> io::Result<Option<(ExitStatus, String, String)>> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()?;
    let (output, errors) = (child.stdout.take(), child.stderr.take());
    let ended = timeout(patience, async {
        // What is beyond the bound is not read: its writer gets SIGPIPE.
        let (output, errors) = tokio::join!(beginning(output), beginning(errors));
        Ok((child.wait().await?, output, errors))
    });
    match ended.await {
        Ok(ended) => ended.map(Some),
        Err(_) => {
            if let Some(leader) = child.id() {
                // A group that has ended needs no signal.
                let _ = signal_group(leader.cast_signed(), Signal::SIGKILL);
            }
            // One that the disk keeps from ending is reaped later.
            let _ = timeout(END_PATIENCE, child.wait()).await;
            Ok(None)
        }
    }
}

async fn beginning(stream: Option<impl AsyncRead + Unpin>) -> String {
    let mut bytes = Vec::new();
    if let Some(stream) = stream {
        // What was read before an error counts.
        let _ = stream.take(MAX_SAID_BYTES).read_to_end(&mut bytes).await;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn shown(text: &str) -> String {
    let printable = text.trim().chars().filter(|one| !one.is_control());
    printable.take(SHOWN_CHARACTERS).collect()
}

/// The day in a version such as `release-20260831.0`, as a number.
fn day(version: &str) -> Option<u32> {
    let mut numbers = version.split(|one: char| !one.is_ascii_digit());
    numbers.find(|number| number.len() == 8)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that behaves so.
    fn program(script: &str) -> (tempfile::TempDir, OciOptions) {
        let directory = tempfile::tempdir().expect("a directory");
        let program = directory.path().join("runsc");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).expect("written");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&program, mode).expect("changed");
        let options = OciOptions {
            program,
            ..OciOptions::gvisor()
        };
        (directory, options)
    }

    async fn fault(script: &str) -> String {
        let (_directory, options) = program(script);
        let fault = options.version().await.expect_err("it is not runsc");
        assert!(fault.to_string().contains("/runsc"), "{fault}");
        fault.to_string()
    }

    #[tokio::test]
    async fn another_program_is_not_taken_for_runsc() {
        let (_directory, options) =
            program("echo runsc version release-20260831.0; echo spec: 1.2.0");
        let (identity, version) = options.version_unless(None).await.expect("it is");
        assert_eq!(version, "release-20260831.0");
        // It is not asked again while the file is the same.
        let known = Some((identity, "before".to_owned()));
        let again = options.version_unless(known).await.expect("it is");
        assert_eq!(again.1, "before");
        let (_directory, options) = program("echo runsc version VERSION_MISSING");
        assert_eq!(
            options.version().await.expect("a build of Go"),
            "VERSION_MISSING"
        );

        let other = OciOptions {
            is_gvisor: false,
            ..options
        };
        let error = other.version().await.expect_err("it is gVisor");
        assert!(error.to_string().contains("[runtimes.gvisor]"), "{error}");
        let (_directory, options) = program("echo crun version 1.8.1; echo commit: f8a096b");
        let other = OciOptions {
            is_gvisor: false,
            ..options.clone()
        };
        assert_eq!(other.version().await.expect("it is"), "crun 1.8.1");
        options.version().await.expect_err("it is not gVisor");

        let old = fault("echo runsc version 0.0~20221219.0").await;
        assert!(old.contains("systrap"), "{old}");
        let rubbish = fault("yes rubbish").await;
        assert!(
            rubbish.contains("rubbish") && rubbish.len() < 1_000,
            "{rubbish}"
        );
        let nothing = fault("exit 0").await;
        assert!(
            nothing.contains("does not print `runsc version VERSION`"),
            "{nothing}"
        );
        let hangs = fault("sleep 1000").await;
        assert!(hangs.contains("has not ended after 3 s"), "{hangs}");
    }

    #[tokio::test]
    async fn a_missing_program_is_named_with_what_to_do() {
        let missing = OciOptions {
            program: "/no/such/runsc".into(),
            ..OciOptions::gvisor()
        };
        let directory = OciOptions {
            program: "/etc".into(),
            ..OciOptions::gvisor()
        };
        for options in [missing, directory] {
            let fault = options
                .version()
                .await
                .expect_err("it is missing")
                .to_string();
            assert!(fault.contains("install the runtime"), "{fault}");
            assert!(
                fault.contains(&options.program.display().to_string()),
                "{fault}"
            );
        }
    }

    #[tokio::test]
    async fn a_program_counts_as_run_only_if_it_did_what_it_does() {
        for (script, expected) in [
            ("exit 0", "it printed \"\""),
            ("echo rubbish", "it printed \"rubbish\""),
            (
                "echo the platform does not work >&2; exit 1",
                "the platform does not work",
            ),
        ] {
            let (_directory, options) = program(script);
            let fault = options.probe().await.expect_err("nothing ran").to_string();
            assert!(fault.contains(expected), "{fault}");
        }
        let (_directory, options) = program(&format!("echo {GREETING}"));
        options.probe().await.expect("it seems to run");
    }
}
