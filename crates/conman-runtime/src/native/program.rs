//! The program of a container: from the spec, or else from the image.

use std::path::Path;

use conman_image::{ImageConfig, UserError, resolve_user};
use conman_linux::{CgroupLimits, IoLimits};
use conman_proto::ResolvedSpec;
use conman_shim_protocol::ProgramSpec;

use super::failure::refused;
use crate::shared::container_files::{egress_environment, generation_environment};
use crate::{ContainerKey, ExecPlan, RuntimeError};

/// Search path for commands if neither image nor spec sets one: Docker's.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// `TERM` if neither image nor spec sets it.
const TERM: &str = "xterm";

/// Open files of one program of a native session: enough for most, and few enough for programs
/// that close every possible one.
pub const SESSION_OPEN_FILES: u64 = 65_536;

/// Programs rarely work with fewer.
const LEAST_OPEN_FILES: u64 = 1_024;

/// All processes of one session may open the host's open files divided by this.
const OPEN_FILES_PART: u64 = 4;

/// The least memory that an open file takes, in bytes: the memory limit bounds their number as well.
const OPEN_FILE_BYTES: u64 = 192;

const MILLIS_PER_CPU: f64 = 1e3;

/// The container's first program. `layers`: the image's directories, the topmost first.
pub(super) fn first_program(
    key: &ContainerKey,
    spec: &ResolvedSpec,
    image: &ImageConfig,
    layers: &[&Path],
    host_open_files: u64,
) -> Result<ProgramSpec, RuntimeError> {
    let refuse = |reason: String| refused("create", key, reason);
    let argv = image
        .argv(&spec.command, &spec.args)
        .map_err(|error| refuse(error.to_string()))?;
    let user = image.user.as_deref().unwrap_or_default();
    let user = resolve_user(layers, user).map_err(|error| refuse(error.to_string()))?;
    let mut env = Environment::default();
    env.set("PATH", DEFAULT_PATH);
    env.set("HOSTNAME", key.session.as_str());
    env.set("HOME", user.home.as_deref().unwrap_or("/"));
    if spec.tty {
        env.set("TERM", TERM);
    }
    for pair in &image.env {
        if let Some((name, value)) = pair.split_once('=') {
            env.set(name, value);
        }
    }
    for (name, value) in egress_environment(spec) {
        env.set(&name, &value);
    }
    for (name, value) in &spec.env {
        env.set(name, value);
    }
    for (name, value) in generation_environment(key) {
        env.set(&name, &value);
    }
    Ok(ProgramSpec {
        argv,
        env: env.0,
        workdir: image.workdir.clone().unwrap_or_else(|| "/".to_owned()),
        uid: user.uid,
        gid: user.gid,
        groups: user.groups,
        nofile: Some(open_files(spec, host_open_files)),
    })
}

fn no_such_user(key: &ContainerKey, error: UserError) -> RuntimeError {
    let (subject, reason) = (key.to_string(), error.to_string());
    match error {
        UserError::NoSuchUser { .. } | UserError::NoSuchGroup { .. } => {
            RuntimeError::NoSuchUser { subject, reason }
        }
        UserError::Read { .. } | UserError::Open { .. } => refused("run a command in", key, reason),
    }
}

/// A command in a container: like `first`, except for what `plan` sets. `directories`: the
/// container's root, the topmost directory first.
pub(super) fn command(
    key: &ContainerKey,
    first: &ProgramSpec,
    plan: &ExecPlan,
    directories: &[&Path],
) -> Result<ProgramSpec, RuntimeError> {
    let mut program = ProgramSpec {
        argv: plan.command.clone(),
        ..first.clone()
    };
    let mut env = Environment(std::mem::take(&mut program.env));
    if plan.tty.is_some() {
        env.set_absent("TERM", TERM);
    }
    if let Some(user) = &plan.user {
        let user = resolve_user(directories, user).map_err(|error| no_such_user(key, error))?;
        env.set("HOME", user.home.as_deref().unwrap_or("/"));
        (program.uid, program.gid, program.groups) = (user.uid, user.gid, user.groups);
    }
    for (name, value) in &plan.env {
        env.set(name, value);
    }
    if let Some(workdir) = &plan.workdir {
        program.workdir.clone_from(workdir);
    }
    program.env = env.0;
    Ok(program)
}

/// Open files of one program. `host_open_files`: `fs.file-max`. Where neither the memory limit nor the number of
/// processes keeps a session from opening more than its part of that, a program gets fewer.
fn open_files(spec: &ResolvedSpec, host_open_files: u64) -> u64 {
    let part = host_open_files / OPEN_FILES_PART;
    let memory = spec.memory_bytes.unwrap_or(u64::MAX);
    if memory / OPEN_FILE_BYTES <= part {
        return SESSION_OPEN_FILES;
    }
    let each = part / u64::from(spec.pids.max(1));
    each.clamp(LEAST_OPEN_FILES, SESSION_OPEN_FILES)
}

pub(super) fn limits(spec: &ResolvedSpec, io: Option<IoLimits>) -> CgroupLimits {
    CgroupLimits {
        memory_bytes: spec.memory_bytes,
        // The init is not one of the program's.
        pids: Some(u64::from(spec.pids) + u64::from(spec.has_own_init())),
        cpu_millis: spec.cpus.map(millis),
        cpu_weighted: true,
        io,
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a checked spec asks for more than nothing and far less than 2^63"
)]
pub(super) fn millis(cpus: f64) -> u64 {
    ((cpus * MILLIS_PER_CPU).round() as u64).max(1)
}

/// Environment variables, each once; the latest value counts.
#[derive(Debug, Default)]
struct Environment(Vec<(String, String)>);

impl Environment {
    fn set(&mut self, name: &str, value: &str) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => value.clone_into(old),
            None => self.0.push((name.to_owned(), value.to_owned())),
        }
    }

    fn set_absent(&mut self, name: &str, value: &str) {
        if self.0.iter().all(|(known, _)| known != name) {
            self.set(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use conman_proto::{Generation, RuntimeKind};
    use conman_testkit::resolved_spec;

    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn key() -> ContainerKey {
        ContainerKey::new(
            "alice".parse().expect("a session id"),
            Generation::new(7).expect("not zero"),
        )
    }

    fn spec() -> ResolvedSpec {
        ResolvedSpec {
            env: BTreeMap::from([("A".to_owned(), "spec".to_owned())]),
            cpus: Some(0.5),
            pids: 64,
            ..resolved_spec(RuntimeKind::Native, "a:b")
        }
    }

    fn value<'a>(program: &'a ProgramSpec, name: &str) -> Option<&'a str> {
        let found = program.env.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    #[test]
    fn programs_find_the_egress_proxy_by_variables_that_the_spec_may_replace() {
        let image = ImageConfig::default();
        let variable = |spec: &ResolvedSpec, name: &str| {
            let program = first_program(&key(), spec, &image, &[], u64::MAX).expect("a program");
            let found = program.env.into_iter().find(|(known, _)| known == name);
            found.map(|(_, value)| value)
        };
        let mut spec = ResolvedSpec {
            command: words("sh"),
            ..spec()
        };
        assert_eq!(variable(&spec, "http_proxy"), None, "without egress");
        spec.egress = words("internet");
        for name in ["http_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"] {
            let proxy = Some("http://127.0.0.1:3128".to_owned());
            assert_eq!(variable(&spec, name), proxy, "{name}");
        }
        spec.env.insert("http_proxy".to_owned(), "mine".to_owned());
        assert_eq!(variable(&spec, "http_proxy").as_deref(), Some("mine"));
    }

    #[test]
    fn what_the_spec_leaves_open_is_the_images() {
        let root = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(root.path().join("etc")).expect("made");
        let passwd = "web:x:33:44::/srv/web:/bin/sh\nother:x:55:66::/:/bin/sh\n";
        std::fs::write(root.path().join("etc/passwd"), passwd).expect("written");
        let image = ImageConfig {
            entrypoint: words("serve"),
            cmd: words("--all"),
            env: vec!["A=image".to_owned(), "B=image".to_owned()],
            user: Some("web".to_owned()),
            workdir: Some("/srv".to_owned()),
            ..ImageConfig::default()
        };
        let layers = [root.path()];
        let program = first_program(&key(), &spec(), &image, &layers, u64::MAX).expect("a program");
        assert_eq!(program.argv, words("serve --all"));
        assert_eq!((program.uid, program.gid), (33, 44));
        assert_eq!(program.workdir, "/srv");
        for (name, expected) in [
            ("A", "spec"),
            ("B", "image"),
            ("HOME", "/srv/web"),
            ("PATH", DEFAULT_PATH),
            ("CONMAN_GENERATION", "7"),
        ] {
            assert_eq!(value(&program, name), Some(expected), "{name}");
        }

        let plan = ExecPlan {
            command: words("sh"),
            user: Some("other".to_owned()),
            env: vec![("B".to_owned(), "exec".to_owned())],
            ..ExecPlan::default()
        };
        let unknown = ExecPlan {
            user: Some("77".to_owned()),
            ..plan.clone()
        };
        let unknown = super::command(&key(), &program, &unknown, &layers).expect("a command");
        assert_eq!((unknown.uid, value(&unknown, "HOME")), (77, Some("/")));
        let command = command(&key(), &program, &plan, &layers).expect("a command");
        assert_eq!((command.uid, command.gid), (55, 66));
        assert_eq!(command.workdir, "/srv");
        assert_eq!(
            (value(&command, "A"), value(&command, "B")),
            (Some("spec"), Some("exec"))
        );
        assert_eq!(limits(&spec(), None).cpu_millis, Some(500));
    }

    #[test]
    fn no_session_can_open_more_than_its_part_of_the_hosts_files() {
        let files = |memory_bytes, pids, host| {
            let limited = ResolvedSpec {
                memory_bytes,
                pids,
                ..spec()
            };
            open_files(&limited, host)
        };
        let host = 2_400_000;
        assert_eq!(files(Some(512 << 20), 256, host), 600_000 / 256);
        assert_eq!(files(Some(512 << 20), 4, host), SESSION_OPEN_FILES);
        assert_eq!(files(None, 32_768, host), LEAST_OPEN_FILES);
        // Its memory holds fewer.
        assert_eq!(files(Some(96 << 20), 256, host), SESSION_OPEN_FILES);
        assert_eq!(files(None, 32_768, u64::MAX), SESSION_OPEN_FILES);
    }

    #[test]
    fn an_image_without_a_program_and_an_unknown_user_are_refused() {
        let nothing = ImageConfig::default();
        let error =
            first_program(&key(), &spec(), &nothing, &[], u64::MAX).expect_err("no program");
        assert!(error.to_string().contains("give a command"), "{error}");
        let image = ImageConfig {
            cmd: words("sh"),
            user: Some("no-such-user".to_owned()),
            ..ImageConfig::default()
        };
        let error =
            first_program(&key(), &spec(), &image, &[], u64::MAX).expect_err("no such user");
        assert!(error.to_string().contains("no-such-user"), "{error}");
    }
}
