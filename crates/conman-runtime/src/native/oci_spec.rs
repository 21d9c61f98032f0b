//! What OCI runtimes run, as the specification has it: the session's program, and commands.

use conman_shim_protocol::{LaunchSpec, ProgramSpec, SESSION_ROOT, TerminalSize};
use serde_json::{Value, json};

use super::gvisor;

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

/// System calls that a session may not make where its kernel is the host's: `EPERM`, and `ENOSYS` where programs then
/// do without. What needs a capability that the session lacks is not listed: with `unshare` and `clone` it has none.
const REFUSED: [&str; 9] = [
    "unshare",
    "setns",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "fanotify_init",
    "keyctl",
    "add_key",
    "request_key",
];
const UNKNOWN: [&str; 5] = [
    "clone3",
    "io_setup",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
];
const EPERM: u32 = 1;
const ENOSYS: u32 = 38;

/// With these first arguments `clone`, `socket`, `seccomp` and `prctl` are refused.
const CLONE_NEWUSER: u64 = 0x1000_0000;
/// `AF_ALG` and `AF_VSOCK`.
const REFUSED_FAMILIES: [u64; 2] = [38, 40];
const SECCOMP_SET_MODE_FILTER: u64 = 1;
const PR_SET_SECCOMP: u64 = 22;

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
            linux["seccomp"] = seccomp();
            linux["maskedPaths"] = json!([
                "/proc/acpi",
                "/proc/kcore",
                "/proc/keys",
                "/proc/latency_stats",
                "/proc/locks",
                "/proc/pressure",
                "/proc/sched_debug",
                "/proc/scsi",
                "/proc/timer_list",
            ]);
            linux["readonlyPaths"] = json!([
                "/proc/bus",
                "/proc/fs",
                "/proc/irq",
                "/proc/sys",
                "/proc/sysrq-trigger",
            ]);
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

/// The system call filter of a session whose kernel is the host's.
fn seccomp() -> Value {
    let refuse = |call: &str, value: u64, bits: bool| {
        let condition = match bits {
            true => {
                json!({ "index": 0, "value": value, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ" })
            }
            false => json!({ "index": 0, "value": value, "op": "SCMP_CMP_EQ" }),
        };
        json!({ "names": [call], "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM, "args": [condition] })
    };
    let mut calls = vec![
        json!({ "names": REFUSED, "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM }),
        json!({ "names": UNKNOWN, "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS }),
        refuse("clone", CLONE_NEWUSER, true),
        // Compiled filters take memory of a pool that all programs of the host share.
        refuse("seccomp", SECCOMP_SET_MODE_FILTER, false),
        refuse("prctl", PR_SET_SECCOMP, false),
    ];
    calls.extend(REFUSED_FAMILIES.map(|family| refuse("socket", family, false)));
    json!({ "defaultAction": "SCMP_ACT_ALLOW", "syscalls": calls })
}

#[cfg(test)]
mod tests {
    use super::*;

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
