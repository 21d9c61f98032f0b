//! Containers from the order to the certificate, through the socket of a real shim.

use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::sync::Arc;

use conman_linux::{Mount, MountAttributes, NetnsSockets, NewFilesystem};
use conman_shim::{
    BindSpec, CallError, ClientError, ContainerState, FenceState, Hardening, LaunchError,
    RUNTIME_CONFIG, RUNTIME_PROGRAM, Reply, Request, SHARED_IDS,
};

use crate::support::{SOON, Shim, available, maps_binds, next_end, subscribe, until, wait_dead};

#[test]
fn a_web_server_starts_answers_is_killed_by_its_pidfd_and_leaves_nothing() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    subscribe(&mut client);
    let spec = shim.spec("web.1", "exec httpd -f -p 80 -h /www");
    let launched = client
        .launch(spec)
        .unwrap_or_else(|error| panic!("{error}: {error:?}"));
    let process = Arc::new(launched.process.expect("a hold on it"));
    assert_eq!(get(&process), "hello from inside\n");

    assert!(process.kill().expect("killed"));
    assert!(process.wait_dead(SOON).expect("waited"));
    let ended = next_end(&mut client);
    assert_eq!(ended.name, "web.1");
    assert_eq!(ended.state, ContainerState::Signalled { signal: 9 });
    let names = vec!["web.1".to_owned()];
    client
        .ask(Request::Acknowledge { names })
        .expect("acknowledged");
    assert_eq!(client.list().expect("listed"), []);
    assert!(until(|| shim.sweep().is_empty()));
}

/// Speaks HTTP on port 80 in the network namespace of a process.
fn get(process: &Arc<conman_linux::PidFd>) -> String {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let sockets = NetnsSockets::start().expect("threads");
    let mut answer = String::new();
    let answered = until(|| {
        answer.clear();
        let socket = runtime.block_on(sockets.tcp_socket(Arc::clone(process), false));
        let socket = rustix_socket(socket.expect("a socket"));
        let Ok(mut stream) = socket else {
            return false;
        };
        stream
            .write_all(b"GET /index.html HTTP/1.0\r\n\r\n")
            .expect("sent");
        stream.read_to_string(&mut answer).expect("answered");
        true
    });
    assert!(answered, "nobody listens");
    answer
        .split("\r\n\r\n")
        .nth(1)
        .unwrap_or_default()
        .to_owned()
}

fn rustix_socket(stream: std::net::TcpStream) -> std::io::Result<std::net::TcpStream> {
    stream.set_nonblocking(false)?;
    let address = std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 80);
    rustix::net::connect(&stream, &address)?;
    Ok(stream)
}

#[test]
fn a_program_finds_its_arguments_environment_directory_user_files_and_host_name() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let script = "echo $$ $A; pwd; id -u; id -g; hostname; cat /etc/hosts; ls -n / | grep etc; \
                  touch /tmp/mine && stat -c %u /tmp/mine; ip addr show lo | grep -c 127.0.0.1";
    let mut spec = shim.spec("facts.1", script);
    spec.program.env.push(("A".to_owned(), "b c".to_owned()));
    spec.program.workdir = "/srv/new".to_owned();
    spec.files = vec![("/etc/hosts".to_owned(), "127.0.0.1 localhost\n".to_owned())];
    let log = shim.output(spec);
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(
        lines[..6],
        [
            "2 b c",
            "/srv/new",
            "0",
            "0",
            "inside",
            "127.0.0.1 localhost"
        ],
        "{log}"
    );
    // The image's files are root's through the mapping, and so are new ones.
    let owner: Vec<&str> = lines[6].split_ascii_whitespace().collect();
    assert_eq!(owner[2..4], ["0", "0"], "{log}");
    assert_eq!(lines[7..], ["0", "1"], "{log}");
    // On the host they are nobody's who exists.
    let mine = shim.path("scratch/facts.1/upper/tmp/mine");
    let data = std::fs::metadata(mine).expect("it is in the scratch directory");
    assert!(data.uid() >= SHARED_IDS, "{}", data.uid());
}

#[test]
fn an_unprivileged_user_stays_one() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let script = "id -u; id -g; grep CapEff /proc/self/status; \
                  cat /proc/sys/net/ipv4/ip_unprivileged_port_start";
    let mut spec = shim.spec("user.1", script);
    spec.program.uid = 1_000;
    spec.program.gid = 1_001;
    let log = shim.output(spec);
    assert_eq!(log, "1000\n1001\nCapEff:\t0000000000000000\n0\n");
}

#[test]
fn a_program_may_open_its_standard_output_anew() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut spec = shim.spec(
        "anew.1",
        "echo one; echo two >> /dev/stdout; echo three >> /dev/stderr",
    );
    spec.program.uid = 1_000;
    assert_eq!(shim.output(spec), "one\ntwo\nthree\n");
}

#[test]
fn exit_codes_are_kept_until_they_are_acknowledged() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let launched = client
        .launch(shim.spec("seven.1", "exit 7"))
        .expect("launched");
    wait_dead(&launched);
    drop(client);
    let mut later = shim.client();
    subscribe(&mut later);
    assert_eq!(
        next_end(&mut later).state,
        ContainerState::Exited { code: 7 }
    );
    let again = later
        .launch(shim.spec("seven.1", "true"))
        .expect_err("the name is taken");
    assert!(
        matches!(again, ClientError::Refused(CallError::Exists { .. })),
        "{again}"
    );
    let names = vec!["seven.1".to_owned(), "unknown".to_owned()];
    later
        .ask(Request::Acknowledge { names })
        .expect("acknowledged");
    assert_eq!(later.list().expect("listed"), []);
}

#[test]
fn a_command_that_does_not_exist_or_cannot_run_is_told_by_its_name() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    for (number, (command, code)) in [
        ("nonesuch", 127),
        ("/bin/nonesuch", 127),
        ("/etc/passwd", 126),
    ]
    .into_iter()
    .enumerate()
    {
        let mut spec = shim.spec(&format!("none.{number}"), "");
        let scratch = spec.root.scratch.clone();
        spec.program.argv = vec![command.to_owned()];
        let error = client.launch(spec).expect_err("it cannot run");
        let ClientError::Refused(CallError::Launch { error }) = error else {
            panic!("{error}");
        };
        assert_eq!(error.exit_code(), Some(code), "{error}");
        assert!(error.to_string().contains(command), "{error}");
        assert!(until(|| !scratch.exists()), "a failed start leaves nothing");
    }
    assert_eq!(client.list().expect("listed"), []);
}

#[test]
fn what_is_wrong_with_an_order_is_told_and_changes_nothing() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let mut orders = 0;
    let mut refused = |change: &dyn Fn(&mut conman_shim::LaunchSpec)| {
        // A name is free again once what began of a start is known to be dead.
        orders += 1;
        let mut spec = shim.spec(&format!("bad.{orders}"), "true");
        change(&mut spec);
        match client.launch(spec).expect_err("refused") {
            ClientError::Refused(error) => error,
            other => panic!("{other}"),
        }
    };
    let spec_error = |error| {
        matches!(
            error,
            CallError::Launch {
                error: LaunchError::Spec { .. }
            }
        )
    };
    assert!(spec_error(refused(&|spec| spec.name = "../x".to_owned())));
    assert!(spec_error(refused(
        &|spec| spec.root.layers = vec!["../..".into()]
    )));
    assert!(spec_error(refused(
        &|spec| spec.root.scratch = "/tmp/../etc/x".into()
    )));
    assert!(spec_error(refused(&|spec| spec.program.argv.clear())));
    assert!(spec_error(refused(&|spec| spec.program.uid = 65_536)));
    assert!(spec_error(refused(&|spec| {
        spec.hardening.capabilities = Some(vec!["EVERYTHING".to_owned()]);
    })));
    let outside = refused(&|spec| spec.cgroup = "/conman-other/x".to_owned());
    assert!(matches!(outside, CallError::Host { .. }), "{outside}");
    let step = |error: CallError| match error {
        CallError::Launch {
            error: LaunchError::Step { step, errno, .. },
        } => (step, errno),
        other => panic!("{other}"),
    };
    let missing = step(refused(&|spec| spec.root.layers = vec!["nonesuch".into()]));
    assert_eq!(missing, ("open a layer".to_owned(), libc::ENOENT));
    // Not below the shim's roots.
    let elsewhere = step(refused(&|spec| {
        spec.log = "/var/log/conman-shim-test".into()
    }));
    assert_eq!(elsewhere.0, "open the log");
    // The sweeper removes the files of a process that does not die at once.
    let scratch = shim.path("scratch");
    let left = || std::fs::read_dir(&scratch).expect("readable").count();
    assert!(until(|| left() == 0), "{} are left", left());
}

#[test]
fn a_container_outlives_the_client_and_the_launcher() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let launched = client
        .launch(shim.spec("long.1", "exec sleep 1000"))
        .expect("launched");
    let process = launched.process.expect("a hold");
    drop(client);
    kill_launcher(&shim);
    let mut client = shim.client();
    assert!(!process.is_dead().expect("asked"));
    let listed = client.list().expect("listed");
    assert_eq!(listed[0].state, ContainerState::Running);
    // There is a new launcher.
    let second = client
        .launch(shim.spec("second.1", "exec sleep 1000"))
        .expect("launched");
    client.kill_all().expect("killed");
    wait_dead(&second);
    assert!(process.wait_dead(SOON).expect("waited"));
}

/// The shim's only child of this name that is no container.
fn kill_launcher(shim: &Shim) {
    let pid = shim.process.id();
    let path = format!("/proc/{pid}/task/{pid}/children");
    let children = std::fs::read_to_string(path).expect("readable");
    let cgroups = conman_linux::Cgroups::detect().expect("detected");
    let launchers: Vec<i32> = children
        .split_ascii_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .filter(|pid| !cgroups.contains(&shim.cgroup, *pid))
        .filter(|pid| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
            name.is_ok_and(|name| name == "shim-launcher\n")
        })
        .collect();
    assert_eq!(launchers.len(), 1, "{children}");
    let launcher = conman_linux::PidFd::open(launchers[0]).expect("it lives");
    launcher.kill().expect("killed");
    assert!(launcher.wait_dead(SOON).expect("waited"));
}

#[test]
fn a_frozen_container_stands_still_and_dies_frozen() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let script = "while true; do echo x >> /tmp/count; sleep 0.01; done";
    let launched = client
        .launch(shim.spec("tick.1", script))
        .expect("launched");
    let count = shim.path("scratch/tick.1/upper/tmp/count");
    let size = || std::fs::metadata(&count).map_or(0, |data| data.len());
    assert!(until(|| size() > 4));
    let name = || "tick.1".to_owned();
    let frozen = until(|| {
        let reply = client
            .ask(Request::Freeze { name: name() })
            .expect("ordered");
        reply == Reply::Frozen { verified: true }
    });
    assert!(frozen);
    let before = size();
    client.ask(Request::Thaw { name: name() }).expect("thawed");
    assert!(until(|| size() > before));
    let frozen = until(|| {
        let reply = client
            .ask(Request::Freeze { name: name() })
            .expect("ordered");
        reply == Reply::Frozen { verified: true }
    });
    assert!(frozen);
    let before = size();
    client.ask(Request::Kill { name: name() }).expect("killed");
    wait_dead(&launched);
    assert_eq!(size(), before);
}

#[test]
fn the_fence_freezes_everything_at_its_deadline_and_lets_nothing_start() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let launched = client
        .launch(shim.spec("one.1", "exec sleep 1000"))
        .expect("launched");
    let until_boottime_ns = crate::support::boottime_ns() + 50_000_000;
    client
        .ask(Request::ExtendDeadline { until_boottime_ns })
        .expect("armed");
    let fenced = until(|| {
        let reply = client.ask(Request::Fence).expect("asked");
        matches!(
            reply,
            Reply::Fence {
                state: FenceState::Fenced { .. }
            }
        )
    });
    assert!(fenced);
    let freezer = conman_linux::Freezer::detect().expect("detected");
    assert!(freezer.is_frozen(&shim.cgroup).expect("asked"));
    let refused = client
        .launch(shim.spec("two.1", "true"))
        .expect_err("fenced");
    assert!(
        matches!(refused, ClientError::Refused(CallError::Fenced)),
        "{refused}"
    );
    let unfence = |until_boottime_ns| Request::Unfence {
        until_boottime_ns,
        names: None,
    };
    let refused = client
        .ask(unfence(Some(until_boottime_ns + 1)))
        .expect_err("the deadline has passed");
    assert!(
        matches!(refused, ClientError::Refused(CallError::Fenced)),
        "{refused}"
    );
    let thaw = Request::Thaw {
        name: "one.1".to_owned(),
    };
    let refused = client.ask(thaw).expect_err("it is closed");
    assert!(matches!(refused, ClientError::Refused(CallError::Fenced)));
    assert!(freezer.is_frozen(&shim.cgroup).expect("asked"));
    client.ask(unfence(None)).expect("lifted");
    assert!(!freezer.is_frozen(&shim.cgroup).expect("asked"));
    let process = launched.process.as_ref().expect("a hold");
    assert!(!process.is_dead().expect("asked"));
    client.launch(shim.spec("two.1", "true")).expect("launched");
}

#[test]
fn a_read_only_root_can_be_read_and_not_be_written() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut spec = shim.spec(
        "ro.1",
        "cat /www/index.html; touch /x /etc/x /bin/x; echo $?",
    );
    spec.root.read_only = true;
    let log = shim.output(spec);
    assert!(log.starts_with("hello from inside\n"), "{log}");
    assert!(
        log.ends_with("1\n") && log.contains("Read-only file system"),
        "{log}"
    );
}

#[test]
fn a_stranger_to_the_protocol_is_dropped_and_others_are_served() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    for bytes in [
        &b"not json"[..],
        b"{}",
        b"{\"id\":1,\"request\":\"list_all\"}",
        b"\xff\xfe",
    ] {
        let address = rustix::net::SocketAddrUnix::new(shim.socket()).expect("an address");
        let stranger = rustix::net::socket_with(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .expect("a socket");
        rustix::net::connect(&stranger, &address).expect("connected");
        rustix::net::send(&stranger, bytes, rustix::net::SendFlags::NOSIGNAL).expect("sent");
        let mut answer = [0_u8; 64];
        let (_, length) =
            rustix::net::recv(&stranger, &mut answer[..], rustix::net::RecvFlags::empty())
                .expect("closed");
        assert_eq!(length, 0, "{}", String::from_utf8_lossy(bytes));
    }
    assert_eq!(client.list().expect("still served"), []);
}

/// Host id of user 0 in binds' files.
const FIRST_ID: u32 = conman_core::DEFAULT_BIND_FIRST_ID;

fn bind(target: &str, read_only: bool) -> BindSpec {
    BindSpec {
        target: target.to_owned(),
        read_only,
        first_id: FIRST_ID,
    }
}

/// A directory of the host for binds, with a file in it, both of which are the container's root's.
fn work_directory(shim: &Shim) -> std::path::PathBuf {
    let work = shim.path("work");
    std::fs::create_dir(&work).expect("made");
    std::fs::write(work.join("greeting"), "from the host\n").expect("written");
    for path in [&work, &work.join("greeting")] {
        chown(path, Some(FIRST_ID), Some(FIRST_ID)).expect("owned");
    }
    work
}

fn copy_of(path: &std::path::Path) -> Mount {
    Mount::copy_of(rustix::fs::CWD, path).expect("copied")
}

#[test]
fn own_files_cover_what_the_image_has_and_binds_cover_them() {
    if !available() || !maps_binds() {
        return;
    }
    let shim = Shim::start();
    let etc = shim.path("store/base/etc");
    std::fs::write(etc.join("hosts"), "the image's\n").expect("written");
    std::os::unix::fs::symlink("passwd", etc.join("resolv.conf")).expect("linked");
    shim.made_layer("base");
    let script = "cd /etc; cat hosts resolv.conf /new/file; \
                  stat -c %u:%g:%a hosts; cat passwd; echo x >> hosts; rm hosts; echo $?";
    let file = |path: &str, content: &str| (path.to_owned(), content.to_owned());
    let mut client = shim.client();
    // The second one has the first one's ids.
    for number in 1..=2 {
        let name = format!("files.{number}");
        let mut spec = shim.spec(&name, script);
        spec.files = vec![
            file("/etc/hosts", &format!("hosts {number}\n")),
            file("/etc/resolv.conf", "resolver\n"),
            file("/new/file", "new\n"),
        ];
        let log = shim.output(spec);
        let expected = format!("hosts {number}\nresolver\nnew\n0:0:644\nroot:x:0:0::/:/bin/sh\n");
        assert!(log.starts_with(&expected), "{log}");
        assert!(log.contains("Read-only file system"), "{log}");
        assert!(log.contains("busy") && log.ends_with("1\n"), "{log}");
        let names = vec![name];
        client
            .ask(Request::Acknowledge { names })
            .expect("acknowledged");
    }
    let work = work_directory(&shim);
    let mut spec = shim.spec("covered.1", "ls /etc");
    spec.files = vec![file("/etc/hosts", "hosts\n")];
    spec.binds = vec![bind("/etc", false)];
    let launched = client
        .launch_with(spec, &[copy_of(&work)])
        .unwrap_or_else(|error| panic!("{error}: {error:?}"));
    wait_dead(&launched);
    assert_eq!(shim.log("covered.1"), "greeting\n");
    let mut spec = shim.spec("long.1", "true");
    spec.files = vec![file("/etc/hosts", &"x".repeat(4_097))];
    let refused = client.launch(spec).expect_err("it is too long");
    assert!(refused.to_string().contains("files"), "{refused}");
}

#[test]
fn binds_show_the_hosts_files_and_are_read_only_where_requested() {
    if !available() || !maps_binds() {
        return;
    }
    let shim = Shim::start();
    let work = work_directory(&shim);
    let mut spec = shim.spec(
        "bind.1",
        "cat /work/greeting; stat -c %u:%g /work/greeting; touch /work/new; echo $?; \
         cat /etc/greeting; touch /read/x; echo $?",
    );
    spec.binds = vec![
        bind("/work", false),
        bind("/etc/greeting", true),
        bind("/read", true),
    ];
    let mounts = [
        copy_of(&work),
        copy_of(&work.join("greeting")),
        copy_of(&work),
    ];
    let mut client = shim.client();
    let refused = client
        .launch_with(spec.clone(), &mounts[..2])
        .expect_err("one is missing");
    assert!(refused.to_string().contains("binds"), "{refused}");
    let launched = client
        .launch_with(spec, &mounts)
        .unwrap_or_else(|error| panic!("{error}: {error:?}"));
    wait_dead(&launched);
    let log = shim.log("bind.1");
    assert!(
        log.starts_with("from the host\n0:0\n0\nfrom the host\n"),
        "{log}"
    );
    assert!(log.contains("Read-only file system\n1\n"), "{log}");
}

#[test]
fn an_oci_runtime_has_a_root_of_its_own_that_the_sessions_links_do_not_lead_into() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let base = shim.path("store/base");
    std::fs::create_dir_all(base.join("tmp")).expect("made");
    std::fs::write(base.join("tmp/file"), "the session's\n").expect("written");
    shim.made_layer("base");
    let config = shim.path("config.json");
    std::fs::write(&config, "what it runs\n").expect("written");
    let files = || {
        [
            copy_of(std::path::Path::new("/usr/bin/busybox")),
            copy_of(&config),
        ]
    };
    let work = work_directory(&shim);
    let mut client = shim.client();
    let mut run = |name: &str, layers: &[&str], target: Option<&str>, script: &str| {
        let mut spec = shim.spec(name, "");
        spec.binds = target
            .map(|target| bind(target, true))
            .into_iter()
            .collect();
        let binds = target.map(|_| copy_of(&work)).into_iter();
        let mounts: Vec<Mount> = binds.chain(files()).collect();
        spec.hardening = Hardening::of_oci_runtime(&[RUNTIME_PROGRAM, RUNTIME_CONFIG]);
        spec.root.layers = layers.iter().map(std::path::PathBuf::from).collect();
        // The test's runtime is the session's busybox.
        let argv = ["/rootfs/bin/busybox", "sh", "-c", script];
        spec.program.argv = argv.map(str::to_owned).to_vec();
        spec.program.env = vec![("PATH".to_owned(), "/rootfs/bin".to_owned())];
        let launched = client
            .launch_with(spec, &mounts)
            .unwrap_or_else(|error| panic!("{error}: {error:?}"));
        wait_dead(&launched);
        shim.log(name)
    };
    let script = "cat /config.json; ls -d /runtime; cat /session-tmp/file; echo new >/session-tmp/new; \
                  ls /rootfs/tmp; echo x >>/config.json; echo $?; mkdir /state/one && unshare -m true && echo able";
    let log = run("runtime.1", &["base"], None, script);
    let seen = "what it runs\n/runtime\nthe session's\nfile\nnew\n";
    assert!(log.starts_with(seen) && log.ends_with("1\nable\n"), "{log}");
    // It sees binds there by both paths.
    for (name, target) in [("bound.1", "/tmp"), ("bound.2", "/tmp/below")] {
        let script = format!(
            "cat /rootfs{target}/greeting /session-{}/greeting",
            &target[1..]
        );
        let log = run(name, &["base"], Some(target), &script);
        assert_eq!(log, "from the host\nfrom the host\n", "{target}");
    }

    // An image that would have the runtime take its own state for the session's files.
    let linked = shim.path("store/linked");
    std::fs::create_dir(&linked).expect("made");
    std::os::unix::fs::symlink("/state", linked.join("tmp")).expect("linked");
    shim.made_layer("linked");
    let script = "echo secret >/state/file; ls /session-tmp; echo end";
    assert_eq!(run("runtime.2", &["linked", "base"], None, script), "end\n");

    let mut spec = shim.spec("runtime.3", "true");
    spec.hardening = Hardening::of_oci_runtime(&[RUNTIME_PROGRAM, RUNTIME_CONFIG]);
    let refused = client
        .launch_with(spec, &files()[..1])
        .expect_err("one is missing");
    assert!(refused.to_string().contains("binds"), "{refused}");
}

#[test]
fn files_made_in_a_bind_belong_to_no_user_of_the_host() {
    if !available() || !maps_binds() {
        return;
    }
    let shim = Shim::start();
    let work = work_directory(&shim);
    let roots = shim.path("roots");
    std::fs::create_dir(&roots).expect("made");
    for directory in [&work, &roots] {
        std::fs::set_permissions(directory, PermissionsExt::from_mode(0o777)).expect("set");
    }
    let mut client = shim.client();
    let mut run = |name: &str, script: &str, uid: u32| {
        let mut spec = shim.spec(name, &format!("{script}; echo end; exec sleep 1000"));
        (spec.program.uid, spec.program.gid) = (uid, uid);
        spec.binds = vec![bind("/work", false), bind("/roots", false)];
        let launched = client
            .launch_with(spec, &[copy_of(&work), copy_of(&roots)])
            .unwrap_or_else(|error| panic!("{error}: {error:?}"));
        assert!(until(|| shim.log(name).ends_with("end\n")));
        launched
    };
    // The second and third container have other ids of the host than the first, which still runs.
    let copy = "for x in /roots/x /work/x; do cp /bin/busybox $x && chmod 6755 $x; done";
    let setuid = run("setuid.1", copy, 0);
    let user = run("user.1", "touch /work/user", 1_000);
    let script = "cd /work; stat -c %u:%g:%a x; stat -c %u user; echo more >> x; chown 7 x";
    let other = run("other.1", script, 0);
    for launched in [setuid, user, other] {
        let process = launched.process.as_ref().expect("a hold");
        process.kill().expect("killed");
        wait_dead(&launched);
    }
    let made = std::fs::metadata(roots.join("x"));
    assert!(made.is_err(), "the host's root has a program: {made:?}");
    assert!(shim.log("other.1").starts_with("0:0:6755\n1000\nend\n"));
    let owner = |name: &str| std::fs::metadata(work.join(name)).expect("made");
    let (program, file) = (owner("x"), owner("user"));
    assert_eq!((program.uid(), program.gid()), (FIRST_ID + 7, FIRST_ID));
    assert_eq!(
        (file.uid(), file.gid()),
        (FIRST_ID + 1_000, FIRST_ID + 1_000)
    );
}

#[test]
fn a_writable_bind_whose_owners_cannot_be_mapped_is_refused_unless_it_is_nosuid() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let mut launch = |name: &str, read_only: bool, attributes: MountAttributes| {
        // This file system has no mapped owners.
        let ramfs = NewFilesystem::open("ramfs").expect("opened");
        let mount = ramfs.mount(attributes).expect("mounted");
        let mut spec = shim.spec(name, "stat -c %u /work");
        spec.binds = vec![bind("/work", read_only)];
        client.launch_with(spec, &[mount])
    };
    let refused = launch("refused.1", false, MountAttributes::empty()).expect_err("unsafe");
    for words in ["/work", "cannot map owners", "nosuid"] {
        assert!(refused.to_string().contains(words), "{refused}");
    }
    let harmless = [
        ("nosuid.1", false, MountAttributes::MOUNT_ATTR_NOSUID),
        ("reads.1", true, MountAttributes::empty()),
    ];
    for (name, read_only, attributes) in harmless {
        let launched = launch(name, read_only, attributes);
        wait_dead(&launched.unwrap_or_else(|error| panic!("{name}: {error}")));
        assert_eq!(shim.log(name), "65534\n", "{name}");
    }
}

#[test]
fn a_writable_bind_with_the_hosts_own_ids_is_refused() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let work = work_directory(&shim);
    let mut spec = shim.spec("own.1", "true");
    spec.binds = vec![BindSpec {
        first_id: 0,
        ..bind("/work", false)
    }];
    let refused = shim.client().launch_with(spec, &[copy_of(&work)]);
    let refused = refused.expect_err("it could make files of the host's root");
    assert!(refused.to_string().contains("binds"), "{refused}");
}

#[test]
fn a_kernel_whose_overlays_take_only_paths_serves_as_well() {
    if !available() {
        return;
    }
    let shim = Shim::start_with(&["--without", "overlay_fd_layers"]);
    let mut client = shim.client();
    for name in ["one.1", "two.1"] {
        let script = "cat /www/index.html; echo x > /tmp/x; stat -c %u /www /tmp/x";
        let launched = client
            .launch(shim.spec(name, script))
            .unwrap_or_else(|error| panic!("{error}: {error:?}"));
        wait_dead(&launched);
        assert_eq!(shim.log(name), "hello from inside\n0\n0\n");
    }
}

#[test]
fn one_is_found_by_its_name_whether_it_lives_has_ended_or_never_was() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let launched = client
        .launch(shim.spec("found.1", "sleep 1000"))
        .expect("launched");
    let mut find = |name: &str| {
        let name = name.to_owned();
        match client.ask(Request::Find { name }).expect("answered") {
            Reply::Found {
                container,
                starting,
                ..
            } => (container.map(|one| (one.pid, one.state)), starting),
            other => panic!("{other:?}"),
        }
    };
    let alive = (launched.pid, ContainerState::Running);
    assert_eq!(find("found.1"), (Some(alive), false));
    assert_eq!(find("found.2"), (None, false));
    let process = launched.process.as_ref().expect("a hold on it");
    process.kill().expect("killed");
    wait_dead(&launched);
    let dead = (launched.pid, ContainerState::Signalled { signal: 9 });
    assert!(until(|| find("found.1") == (Some(dead), false)));
}
