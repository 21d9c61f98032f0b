//! The program of every session, and the file that it writes to.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use conman_core::DEFAULT_BIND_FIRST_ID;
use rustix::time::{ClockId, clock_gettime};

use super::{Line, answer};
use crate::layout::Layout;

/// The name of the template.
pub const TEMPLATE: &str = "witness";

/// The name of the template of those that answer WebSockets as well.
pub const SERVING: &str = "serving-witness";
/// The name of the template of those that Docker runs, where [the cluster](Layout) has it as well.
pub const DOCKERS: &str = "docker-witness";
/// The name of the template of those that answer WebSockets and write seldom, for fleets of hundreds.
pub const CALM: &str = "calm-witness";
/// Where those that answer do.
const PORT: u16 = 8080;

/// Between two lines of a witness, unless it is told otherwise.
const PAUSE: Duration = Duration::from_millis(20);
const CALM_PAUSE_MS: u64 = 250;
/// Where it finds the shared directory.
const MOUNT: &str = "/shared";
const FILE: &str = "journal";
/// What it is told its host by.
const HOST_VARIABLE: &str = "WITNESS_HOST";

/// The file that all witnesses of a cluster write to.
#[must_use]
pub fn journal(layout: &Layout) -> PathBuf {
    folder(layout).join(FILE)
}

/// All that its sessions bind.
fn folder(layout: &Layout) -> PathBuf {
    layout.shared().join(TEMPLATE)
}

/// Makes it, writable for every user inside: sessions see its owner as their root.
///
/// # Errors
/// When it cannot be made.
pub fn make_journal(layout: &Layout) -> Result<()> {
    let (folder, path) = (folder(layout), journal(layout));
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make {}", folder.display()))?;
    let made = File::create(&path);
    made.and_then(|file| file.set_permissions(Permissions::from_mode(0o666)))
        .and_then(|()| chown(&folder, Some(DEFAULT_BIND_FIRST_ID), None))
        .and_then(|()| {
            chown(
                &path,
                Some(DEFAULT_BIND_FIRST_ID),
                Some(DEFAULT_BIND_FIRST_ID),
            )
        })
        .with_context(|| format!("cannot make {}", path.display()))
}

/// The templates of sessions that witness, on a node of this name.
#[must_use]
pub fn template(layout: &Layout, node: &str) -> String {
    let common = format!(
        "image = \"{}\"\n\
         env = {{ {HOST_VARIABLE} = \"{node}\" }}\n\
         binds = [\"{}:{MOUNT}\"]\n\
         memory_bytes = 67108864\n",
        conman_e2e::ROOT,
        folder(layout).display()
    );
    let program = crate::image::WITNESS;
    let dockers = match layout.docker_too {
        true => format!(
            "[templates.{DOCKERS}]\n\
             runtime = \"docker\"\n\
             command = [\"{program}\", \"{MOUNT}/{FILE}\"]\n\
             {common}"
        ),
        false => String::new(),
    };
    format!(
        "[templates.{TEMPLATE}]\n\
         command = [\"{program}\", \"{MOUNT}/{FILE}\"]\n\
         {common}\
         [templates.{SERVING}]\n\
         command = [\"{program}\", \"{MOUNT}/{FILE}\", \"{PORT}\"]\n\
         port = {PORT}\n\
         start_on_connect = true\n\
         {common}\
         [templates.{CALM}]\n\
         command = [\"{program}\", \"{MOUNT}/{FILE}\", \"{PORT}\", \"{CALM_PAUSE_MS}\"]\n\
         port = {PORT}\n\
         start_on_connect = true\n\
         {common}\
         {dockers}"
    )
}

/// Runs a witness: appends a line to the file at `path` every `pause_ms`, and sends the same line to each client of
/// the port, if it has one.
///
/// # Errors
/// When it lacks what it needs or cannot write any more.
#[expect(
    clippy::disallowed_methods,
    reason = "a program with nothing else to do"
)]
pub fn write(path: &Path, port: Option<u16>, pause_ms: Option<u64>) -> io::Result<()> {
    let pause = pause_ms.map_or(PAUSE, Duration::from_millis);
    let variable = |name| {
        std::env::var(name).map_err(|error| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("{name}: {error}"))
        })
    };
    let generation = variable("CONMAN_GENERATION")?;
    let generation = generation.parse().map_err(io::Error::other)?;
    let mut line = Line {
        session: variable("CONMAN_SESSION_ID")?,
        generation,
        host: variable(HOST_VARIABLE)?,
        life: random()?,
        monotonic_ns: monotonic_ns(),
    };
    if let Some(port) = port {
        answer(port, &line)?;
    }
    // One write a line, at the end as it is then: lines of several writers do not mix.
    let mut file = OpenOptions::new().append(true).open(path)?;
    loop {
        line.monotonic_ns = monotonic_ns();
        let mut text = serde_json::to_string(&line).map_err(io::Error::other)?;
        text.push('\n');
        file.write_all(text.as_bytes())?;
        std::thread::sleep(pause);
    }
}

fn random() -> io::Result<String> {
    let mut bytes = [0; 8];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.map(|byte| format!("{byte:02x}")).concat())
}

/// What witnesses read: CLOCK_MONOTONIC.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // Neither is ever negative.
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}
