//! What OCI runtimes run, as the specification has it: the session's program, and commands.

use std::ffi::CStr;

use conman_shim_protocol::{LaunchSpec, ProgramSpec, SESSION_ROOT, TerminalSize, proc_paths};
use serde_json::{Value, json};

use super::{gvisor, oci_filter};

/// Capabilities of root in the session, over the session's own resources: those of a native session.
const CAPABILITIES: [&str; 9] = [
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_NET_BIND_SERVICE",
    "CAP_SYS_CHROOT",
];

/// What a runtime runs, as an OCI specification.
pub(super) fn configuration(is_gvisor: bool, session: &ProgramSpec, launch: &LaunchSpec) -> Value {
    let mut linux = json!({
        "namespaces": [
            { "type": "pid" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" },
        ],
    });
    let mounts = match is_gvisor {
        true => gvisor::mounts(),
        false => {
            linux["seccomp"] = oci_filter::filter();
            linux["maskedPaths"] = in_proc(&proc_paths::MASKED);
            linux["readonlyPaths"] = in_proc(&proc_paths::READ_ONLY);
            mounts(launch.ptys)
        }
    };
    json!({
        "ociVersion": "1.0.2",
        "hostname": launch.hostname,
        "root": { "path": SESSION_ROOT, "readonly": launch.root.read_only },
        "process": process(is_gvisor, session, launch.terminal),
        "mounts": mounts,
        "linux": linux,
    })
}

/// The paths of these names.
fn in_proc(names: &[&CStr]) -> Value {
    let paths = names
        .iter()
        .map(|name| format!("/proc/{}", name.to_string_lossy()));
    paths.collect()
}

/// A program of the session, as an OCI specification.
pub(super) fn process(
    is_gvisor: bool,
    program: &ProgramSpec,
    terminal: Option<TerminalSize>,
) -> Value {
    let env: Vec<_> = program
        .env
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    let held: &[&str] = match program.uid {
        0 => &CAPABILITIES,
        _ => &[],
    };
    let mut process = json!({
        "terminal": terminal.is_some(),
        "user": {
            "uid": program.uid,
            "gid": program.gid,
            "additionalGids": program.groups,
        },
        "args": program.argv,
        "env": env,
        "cwd": program.workdir,
        "noNewPrivileges": true,
        "capabilities": { "bounding": CAPABILITIES, "permitted": held, "effective": held },
    });
    if let Some(size) = terminal {
        process["consoleSize"] = json!({ "height": size.rows, "width": size.cols });
    }
    // On the host's kernel the runtime has the limit, and passes it on.
    if is_gvisor {
        let open_files = program.nofile.unwrap_or(1_024);
        process["rlimits"] =
            json!([{ "type": "RLIMIT_NOFILE", "soft": open_files, "hard": open_files }]);
    }
    process
}

/// The file systems of a session whose kernel is the host's, with at most so many terminals.
fn mounts(ptys: u32) -> Value {
    let terminals = format!("max={ptys}");
    json!([
        { "destination": "/proc", "type": "proc", "source": "proc" },
        { "destination": "/dev", "type": "tmpfs", "source": "tmpfs",
          "options": ["nosuid", "strictatime", "mode=755", "size=65536k"] },
        { "destination": "/dev/pts", "type": "devpts", "source": "devpts",
          "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", terminals] },
        { "destination": "/dev/shm", "type": "tmpfs", "source": "shm",
          "options": ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"] },
        { "destination": "/sys", "type": "bind", "source": "/sys", "options": ["rbind", "ro"] },
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_native_sessions_do_not_see_in_proc_is_hidden() {
        let hidden = in_proc(&proc_paths::MASKED);
        for path in [
            "/proc/kcore",
            "/proc/cmdline",
            "/proc/config.gz",
            "/proc/interrupts",
        ] {
            let hidden = hidden.as_array().expect("a list");
            assert!(hidden.contains(&json!(path)), "{path}");
        }
        assert_eq!(in_proc(&[c"sys"]), json!(["/proc/sys"]));
    }

    #[test]
    fn a_program_has_its_user_and_only_root_has_capabilities() {
        let mut program = ProgramSpec {
            argv: vec!["python3".to_owned(), "-i".to_owned()],
            env: vec![("A".to_owned(), "1".to_owned())],
            workdir: "/srv".to_owned(),
            uid: 7,
            gid: 8,
            groups: vec![9],
            nofile: Some(64),
        };
        let size = TerminalSize { rows: 24, cols: 80 };
        let users = process(true, &program, Some(size));
        assert_eq!(users["consoleSize"], json!({ "height": 24, "width": 80 }));
        assert_eq!(users["capabilities"]["effective"], json!([]));
        assert_eq!(users["capabilities"]["permitted"], json!([]));
        assert_eq!(
            users["user"],
            json!({ "uid": 7, "gid": 8, "additionalGids": [9] })
        );
        assert_eq!(
            (&users["env"], &users["cwd"]),
            (&json!(["A=1"]), &json!("/srv"))
        );
        program.uid = 0;
        let roots = process(false, &program, None);
        assert_eq!(roots["terminal"], json!(false));
        assert_eq!(roots["capabilities"]["effective"], json!(CAPABILITIES));
    }
}
