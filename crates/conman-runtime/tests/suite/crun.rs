//! Sessions that `crun` runs do what every runtime must.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use conman_proto::TerminalSize;
use conman_runtime::ExecPlan;
use conman_testkit::runtime_conformance;
use conman_testkit::runtime_conformance::{Stage, say_skipped};

use crate::oci_host::WithRuntime;

runtime_conformance!(WithRuntime::crun());

/// Bound on the end of a program that does little.
const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_ends_at_once_has_started() {
    let Ok(host) = WithRuntime::crun().map_err(|why| say_skipped(&why)) else {
        return;
    };
    let stage = Stage::new(host);
    // Whether a look at the program falls into its life is chance.
    for number in 0..10 {
        let mut plan = stage.plan(&format!("short-{number}"), &["true"]);
        plan.spec.cpus = Some(1.0);
        stage.runtime().create(&plan).await.expect("created");
        let started = stage.runtime().start(&plan.key).await;
        started.expect("it has started");
        let code = stage.runtime().exit_code(&plan.key, PATIENCE).await;
        assert_eq!(code, Some(0), "{number}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_files_of_a_kept_command_are_removed_once_it_has_ended_and_another_begins() {
    let Ok(host) = WithRuntime::crun().map_err(|why| say_skipped(&why)) else {
        return;
    };
    let directory = host.host.path("");
    let stage = Stage::new(host);
    let key = stage.run_idle("alice").await.key;
    let plan = |program: &[&str]| ExecPlan {
        command: program.iter().copied().map(str::to_owned).collect(),
        tty: Some(TerminalSize {
            columns: 80,
            rows: 24,
        }),
        ..ExecPlan::default()
    };
    let runtime = stage.runtime();
    let first = runtime.keep_exec(&key, plan(&["true"])).await;
    let first = first.expect("begun").id;
    let files = |id: String| {
        let mut found = Vec::new();
        find(&directory, &id, &mut found);
        found
    };
    let running = async {
        while runtime.kept_exec(&key, first).await.expect("kept").running {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, running)
        .await
        .expect("it ends");
    assert_eq!(files(first.to_string()).len(), 2);
    let second = runtime.keep_exec(&key, plan(&["sleep", "1000"])).await;
    let second = second.expect("begun").id;
    assert!(files(first.to_string()).is_empty());
    assert!(!files(second.to_string()).is_empty());
}

/// Adds the files below `directory` with `part` in their names.
fn find(directory: &Path, part: &str, found: &mut Vec<PathBuf>) {
    // What is removed meanwhile is not looked for.
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            find(&entry.path(), part, found);
        } else if entry.file_name().to_string_lossy().contains(part) {
            found.push(entry.path());
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod filter {
    //! The system call filter as the kernel applies it.

    use std::os::unix::fs::PermissionsExt as _;

    use conman_runtime::BindPlan;

    use super::*;
    use crate::oci_trouble::program;

    /// A bit that the kernel ignores in arguments of 32.
    const HIGH: u64 = 1 << 32;

    /// Numbers, arguments, and what a shell tests of the error. An answer other than the filter's would be EFAULT or
    /// EBADF, unless it says that the call is allowed.
    const CALLS: [(u32, [u64; 4], &str); 28] = [
        // socket: AF_VSOCK, AF_ALG; MPTCP and the audit log; TCP, AF_UNIX.
        (41, [HIGH | 40, 1, 0, 0], "= 1"),
        (41, [38, 5, 0, 0], "= 1"),
        (41, [2, 1, 262, 0], "= 93"),
        (41, [HIGH | 2, 1, HIGH | 262, 0], "= 93"),
        (41, [16, 3, 9, 0], "= 93"),
        (41, [2, 1, 6, 0], "-gt 200"),
        (41, [1, 1, 0, 0], "-gt 200"),
        // socketpair
        (53, [2, 1, 0, 0], "= 1"),
        // seccomp and prctl: a filter.
        (317, [HIGH | 1, 0, 0, 0], "= 22"),
        (157, [HIGH | 22, 2, 0, 0], "= 22"),
        // setsockopt: SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF; SO_REUSEADDR.
        (54, [99, 1, 26, 0], "= 22"),
        (54, [99, HIGH | 1, HIGH | 51, 0], "= 22"),
        (54, [99, 1, 2, 0], "= 9"),
        // setrlimit and prlimit64: RLIMIT_CORE.
        (160, [HIGH | 4, 0, 0, 0], "= 0"),
        (302, [0, 4, 8, 0], "= 0"),
        // mmap, memfd_create, shmget: huge pages.
        (9, [0, 4_096, 3, 0x4_0022], "= 22"),
        (319, [0, 4, 0, 0], "= 22"),
        (29, [0, 4_096, 0o5600, 0], "= 22"),
        // clone: a user namespace; unshare, clone3.
        (56, [HIGH | 0x1000_0011, 0, 0, 0], "= 1"),
        (272, [0x1000_0000, 0, 0, 0], "= 1"),
        (435, [0, 0, 0, 0], "= 38"),
        // ioctl: TIOCSTI, a subvolume; TCGETS, FICLONE.
        (16, [99, HIGH | 0x5412, 0, 0], "= 1"),
        (16, [99, 0x5000_940E, 0, 0], "= 1"),
        (16, [99, 0x5401, 0, 0], "= 9"),
        (16, [99, 0x4004_9409, 0, 0], "= 9"),
        // personality: without randomisation; its query.
        (135, [0x4_0000, 0, 0, 0], "= 1"),
        (135, [0xFFFF_FFFF, 0, 0, 0], "= 0"),
        // mlockall
        (151, [1, 0, 0, 0], "= 1"),
    ];

    /// Makes the call and exits with its error, or with 256 less what it returns.
    fn code(number: u32, arguments: [u64; 4]) -> Vec<u8> {
        let mut code = Vec::new();
        // mov to rdi, rsi, rdx and r10
        let moves = [[0x48, 0xbf], [0x48, 0xbe], [0x48, 0xba], [0x49, 0xba]];
        for (to, argument) in moves.into_iter().zip(arguments) {
            code.extend(to);
            code.extend(argument.to_le_bytes());
        }
        code.push(0xb8);
        code.extend(number.to_le_bytes());
        // syscall, neg eax, mov edi, eax; exit
        code.extend([0x0f, 0x05, 0xf7, 0xd8, 0x89, 0xc7]);
        code.extend([0xb8, 60, 0, 0, 0, 0x0f, 0x05]);
        code
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_filter_refuses_what_native_sessions_are_refused_whatever_the_kernel_ignores() {
        let Ok(host) = WithRuntime::crun().map_err(|why| say_skipped(&why)) else {
            return;
        };
        let stage = Stage::new(host);
        let calls = stage.dir().join("calls");
        fs::create_dir(&calls).expect("a new directory");
        let mut script = String::new();
        for (place, (number, arguments, test)) in CALLS.into_iter().enumerate() {
            let path = calls.join(place.to_string());
            fs::write(&path, program(&code(number, arguments))).expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("changed");
            script += &format!(
                "/calls/{place}; e=$?; [ $e {test} ] || {{ echo call {place}: $e; exit {}; }}\n",
                place + 1
            );
        }
        let mut plan = stage.plan("alice", &["sh", "-c", &script]);
        plan.binds = vec![BindPlan {
            root: stage.dir().to_owned(),
            below: "calls".into(),
            target: "/calls".to_owned(),
            read_only: true,
        }];
        stage.runtime().create(&plan).await.expect("created");
        stage.runtime().start(&plan.key).await.expect("started");
        let code = stage.runtime().exit_code(&plan.key, PATIENCE).await;
        let failed = code.and_then(|code| CALLS.get(usize::try_from(code - 1).ok()?));
        assert_eq!(code, Some(0), "{failed:?}");
    }
}
