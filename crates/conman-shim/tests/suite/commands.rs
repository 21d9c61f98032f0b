//! Commands in running containers.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use conman_linux::{Cgroups, Freezer, Signal};
use conman_observer::{open_terminal, slowness};
use conman_shim::{
    CallError, ClientError, ContainerState, ExecSpec, Hardening, KeptCommandSpec, KeptStreamsSpec,
    LaunchError, Reply, Request,
};

use crate::support::{
    Calls, Client, Launched, Shim, available, next_end, stopped_launcher, subscribe, until,
    wait_dead,
};

fn command(shim: &Shim, name: &str, script: &str) -> ExecSpec {
    ExecSpec {
        with_client: false,
        files: None,
        name: name.to_owned(),
        container: "home.1".to_owned(),
        program: shim.spec("unused", script).program,
        terminal: false,
        kept: None,
        ptys: 0,
        hardening: Hardening::default(),
    }
}

/// The same, on pipes that the shim keeps.
fn kept(spec: ExecSpec) -> ExecSpec {
    ExecSpec {
        name: format!("{}_{}", spec.container, spec.name),
        kept: Some(KeptCommandSpec {
            streams: KeptStreamsSpec::Pipes { stdin: true },
            timeout_ms: None,
            label: String::new(),
        }),
        ..spec
    }
}

/// A shim with a container that does nothing.
fn home(shim: &Shim) -> (Client, Launched) {
    let mut client = shim.client();
    let launched = client
        .launch(shim.spec("home.1", "exec sleep 1000"))
        .expect("launched");
    (client, launched)
}

/// Runs a command to its end and returns what it wrote.
fn run(client: &mut Client, spec: ExecSpec) -> Result<String, ClientError> {
    let null = File::open("/dev/null").expect("there is one");
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    client.exec(spec, [null.as_fd(), writer.as_fd(), writer.as_fd()])?;
    drop(writer);
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("readable");
    Ok(text)
}

#[test]
fn a_command_runs_in_the_containers_namespaces_cgroups_and_bounds() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let (mut client, launched) = home(&shim);
    subscribe(&mut client);
    let script = "hostname; id -u; for n in user pid mnt net uts ipc cgroup; do \
                  [ $(readlink /proc/self/ns/$n) = $(readlink /proc/2/ns/$n) ] || echo $n differs; \
                  done; grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; exit 5";
    let text = run(&mut client, command(&shim, "c.1", script)).expect("executed");
    let expected = "inside\n0\nCapEff:\t00000000000404fb\nCapBnd:\t00000000000404fb\n\
                    NoNewPrivs:\t1\nSeccomp:\t2\n";
    assert_eq!(text, expected);
    let ended = next_end(&mut client);
    assert_eq!(
        (ended.name.as_str(), ended.state),
        ("c.1", ContainerState::Exited { code: 5 })
    );
    assert_eq!(ended.exec_in.as_deref(), Some("home.1"));
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

#[test]
fn terminals_come_with_the_first_command_that_asks_for_them() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let mut spec = shim.spec("home.1", "exec sleep 1000");
    (spec.ptys, spec.ptys_when_asked) = (2, true);
    let launched = client.launch(spec).expect("launched");
    let script = "ls /dev/pts; grep -c ' /dev/pts ' /proc/self/mountinfo; \
                  grep -o 'mode=620.*' /proc/self/mountinfo";
    let mut seen = |name: &str, ptys| {
        let spec = command(&shim, name, script);
        run(&mut client, ExecSpec { ptys, ..spec }).expect("executed")
    };
    assert_eq!(seen("c.1", 0), "0\n");
    let mounted = "ptmx\n1\nmode=620,ptmxmode=666,max=2\n";
    assert_eq!(seen("c.2", 2), mounted);
    // They stay, and there are no second ones.
    assert_eq!(seen("c.3", 0), mounted);
    assert_eq!(seen("c.4", 2), mounted);
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

#[test]
fn a_command_ends_with_its_clients_connection_if_it_is_to() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let (mut client, launched) = home(&shim);
    subscribe(&mut client);
    let null = File::open("/dev/null").expect("there is one");
    let mut other = shim.client();
    for (name, with_client) in [("stays", false), ("goes", true)] {
        let mut spec = command(&shim, name, "sleep 1000 & wait");
        spec.with_client = with_client;
        other.exec(spec, [null.as_fd(); 3]).expect("executed");
    }
    drop(other);
    let ended = next_end(&mut client);
    let killed = ContainerState::Signalled { signal: 9 };
    assert_eq!((ended.name.as_str(), ended.state), ("goes", killed));
    let views = client.list().expect("listed");
    let stays = views.iter().find(|view| view.name == "stays");
    assert!(stays.expect("known").state.is_alive());
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

#[test]
fn containers_without_ipc_are_in_one_namespace_that_is_not_the_hosts() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let script = "readlink /proc/self/ns/ipc";
    let mut namespaces = Vec::new();
    for (name, without_ipc) in [("home.1", true), ("other.1", true), ("own.1", false)] {
        let mut spec = shim.spec(name, "exec sleep 1000");
        spec.hardening.without_ipc = without_ipc;
        let hardening = spec.hardening.clone();
        client.launch(spec).expect("launched");
        let command = ExecSpec {
            container: name.to_owned(),
            hardening,
            ..command(&shim, &format!("in.{name}"), script)
        };
        namespaces.push(run(&mut client, command).expect("executed"));
    }
    let host = std::fs::read_link("/proc/self/ns/ipc").expect("readable");
    namespaces.push(format!("{}\n", host.display()));
    let [first, second, own, host] = &namespaces[..] else {
        panic!("{namespaces:?}");
    };
    assert_eq!(first, second);
    assert!(
        first != own && first != host && own != host,
        "{namespaces:?}"
    );
    client.kill_all().expect("killed");
}

#[test]
fn a_command_is_killed_alone_and_dies_with_its_container() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let (mut client, launched) = home(&shim);
    let null = File::open("/dev/null").expect("there is one");
    let streams = || [null.as_fd(); 3];
    let sleep = |name: &str| command(&shim, name, "exec sleep 1000");
    let first = client.exec(sleep("first"), streams()).expect("executed");
    let second = client.exec(sleep("second"), streams()).expect("executed");
    let cgroup = format!("{}/home.1", shim.cgroup);
    let cgroups = Cgroups::detect().expect("detected");
    assert!(cgroups.contains(&cgroup, first.pid) && cgroups.contains(&cgroup, second.pid));
    client
        .ask(Request::Kill {
            name: "first".to_owned(),
        })
        .expect("killed");
    wait_dead(&first);
    let process = launched.process.as_ref().expect("a hold");
    assert!(!process.is_dead().expect("asked"));
    client
        .ask(Request::Kill {
            name: "home.1".to_owned(),
        })
        .expect("killed");
    wait_dead(&launched);
    wait_dead(&second);
    assert!(until(|| client.list().expect("listed").iter().all(
        |view| { matches!(view.state, ContainerState::Signalled { signal: 9 }) }
    )));
}

#[test]
fn a_command_that_cannot_run_is_told_and_harms_nobody() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let (mut client, launched) = home(&shim);
    let mut spec = command(&shim, "none", "");
    spec.program.argv = vec!["nonesuch".to_owned()];
    let error = run(&mut client, spec).expect_err("it does not exist");
    let ClientError::Refused(CallError::Launch { error }) = error else {
        panic!("{error}");
    };
    assert_eq!(
        error,
        LaunchError::CommandNotFound {
            command: "nonesuch".to_owned()
        }
    );
    let mut elsewhere = command(&shim, "else", "true");
    elsewhere.container = "nobody.1".to_owned();
    let error = run(&mut client, elsewhere).expect_err("no such container");
    assert!(
        matches!(
            error,
            ClientError::Refused(CallError::NoSuchContainer { .. })
        ),
        "{error}"
    );
    assert_eq!(
        run(&mut client, command(&shim, "fine", "echo well")).expect("executed"),
        "well\n"
    );
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

#[test]
fn a_frozen_container_is_not_entered() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let (mut client, launched) = home(&shim);
    let name = || "home.1".to_owned();
    client
        .ask(Request::Freeze { name: name() })
        .expect("ordered");
    let error = run(&mut client, command(&shim, "late", "true")).expect_err("frozen");
    assert!(error.to_string().contains("frozen"), "{error}");
    client.ask(Request::Thaw { name: name() }).expect("thawed");
    assert_eq!(
        run(&mut client, command(&shim, "late", "echo now")).expect("executed"),
        "now\n"
    );
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

#[test]
fn a_command_that_waits_for_a_frozen_container_holds_up_no_start() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let (mut client, launched) = home(&shim);
    let freezer = Freezer::detect().expect("detected");
    let cgroup = format!("{}/home.1", shim.cgroup);
    // Behind the shim's back, so that it does not refuse the command.
    freezer.freeze(&cgroup).expect("frozen");
    assert!(until(|| freezer.is_frozen(&cgroup).expect("asked")));
    let waiting = || run(&mut shim.client(), command(&shim, "late", "echo now"));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(waiting);
        let cgroups = Cgroups::detect().expect("detected");
        assert!(
            until(|| cgroups.pids_below(&cgroup).len() > 1),
            "it is under way"
        );
        let other = shim.spec("other.1", "exec sleep 1000");
        let other = client.launch(other).expect("launched beside it");
        freezer.thaw(&cgroup).expect("thawed");
        let text = waiting.join().expect("joined").expect("executed");
        assert_eq!(text, "now\n");
        client.kill_all().expect("killed");
        wait_dead(&other);
    });
    wait_dead(&launched);
}

#[test]
fn a_terminal_controls_its_command() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let (mut client, launched) = home(&shim);
    let (master, slave) = open_terminal(24, 80).expect("a terminal");
    let mut spec = command(
        &shim,
        "tty",
        "[ -t 0 ] && echo terminal > /dev/tty; exec sleep 1000",
    );
    spec.terminal = true;
    let running = client.exec(spec, [slave.as_fd(); 3]).expect("executed");
    drop(slave);
    let mut master = File::from(master);
    let mut text = [0_u8; 10];
    master.read_exact(&mut text).expect("readable");
    assert_eq!(&text, b"terminal\r\n");
    // Ctrl-C reaches the foreground process.
    std::io::Write::write_all(&mut master, b"\x03").expect("typed");
    wait_dead(&running);
    client
        .ask(Request::Kill {
            name: "home.1".to_owned(),
        })
        .expect("killed");
    wait_dead(&launched);
}

fn launch_error(error: ClientError) -> LaunchError {
    match error {
        ClientError::Refused(CallError::Launch { error }) => error,
        other => panic!("{other}"),
    }
}

#[test]
fn a_working_directory_outside_the_container_or_a_missing_one_is_refused() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let script = "b=/bin/busybox; mkdir /work; $b ln -s /proc/self/cwd /cwd; \
                  $b ln -s /proc/self/fd/9 /nine; $b ln -s ../../../../bin /up; exec sleep 1000";
    let launched = client
        .launch(shim.spec("home.1", script))
        .expect("launched");
    let mut count = 0;
    let mut at = |client: &mut Client, workdir: &str| {
        count += 1;
        let mut spec = command(&shim, &format!("at.{count}"), "pwd; ls");
        spec.program.workdir = workdir.to_owned();
        run(client, spec)
    };
    assert!(until(|| at(&mut client, "/work").is_ok()));
    let mut text = String::new();
    assert!(until(|| {
        text = at(&mut client, "/up").unwrap_or_default();
        text.contains("busybox\n")
    }));
    assert!(text.starts_with("/bin\n"), "{text}");
    let descriptors = (0..40).map(|fd| format!("/proc/self/fd/{fd}"));
    let others = ["/cwd", "/nine", "/proc/self/root", "/proc/1/cwd", "/gone"];
    for workdir in descriptors.chain(others.map(str::to_owned)) {
        let error = at(&mut client, &workdir).expect_err(&workdir);
        let LaunchError::Step { step, .. } = launch_error(error) else {
            panic!("{workdir}");
        };
        assert_eq!(step, format!("enter the working directory {workdir}"));
    }
    // It was not made.
    let text = run(&mut client, command(&shim, "ls", "ls /")).expect("executed");
    assert!(!text.contains("gone"), "{text}");
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

#[test]
fn a_directory_that_became_a_link_to_a_descriptor_is_not_entered() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let mut spec = shim.spec(
        "home.1",
        "cd /; b=/bin/busybox; n=0; while [ $n -lt 40 ]; do $b ln -s /proc/self/fd/$n /work.$n; \
         n=$((n + 1)); done; $b rmdir /work; $b ln -s work.9 /work; exec sleep 1000",
    );
    spec.program.workdir = "/work".to_owned();
    let launched = client.launch(spec).expect("launched");
    let link = shim.path("scratch/home.1/upper/work");
    assert!(until(|| link.is_symlink()));
    let directories = (0..40).map(|number| format!("/work.{number}"));
    for workdir in directories.chain(["/work".to_owned()]) {
        let mut spec = command(&shim, "in", "pwd; ls ../../..");
        spec.program.workdir = workdir;
        let error = run(&mut client, spec).expect_err("refused");
        assert!(error.to_string().contains("working directory"), "{error}");
    }
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

/// Those of the descriptors from 3 on that are open when the program's path is resolved: a path
/// that leads through another one does not exist.
fn open_while_executing(mut start: impl FnMut(String) -> ClientError) -> Vec<u32> {
    let mut open = Vec::new();
    for number in 3..64 {
        match launch_error(start(format!("/proc/self/fd/{number}"))) {
            LaunchError::CommandNotFound { .. } => {}
            LaunchError::NotExecutable { .. } => open.push(number),
            other => panic!("{other}"),
        }
    }
    open
}

#[test]
fn a_program_begins_with_its_streams_and_none_of_the_launchers_descriptors() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let (mut client, launched) = home(&shim);
    let list = "ls /proc/$$/fd; true";
    let text = run(&mut client, command(&shim, "ls", list)).expect("executed");
    assert_eq!(text, "0\n1\n2\n");
    assert_eq!(shim.output(shim.spec("ls.1", list)), "0\n1\n2\n");
    // The socket to the launcher, and a command's streams once more.
    let open = open_while_executing(|path| {
        let mut spec = command(&shim, "fd", "");
        spec.program.argv = vec![path];
        run(&mut client, spec).expect_err("no program")
    });
    assert!(open.len() <= 4, "{open:?}");
    let mut count = 0;
    let open = open_while_executing(|path| {
        count += 1;
        let mut spec = shim.spec(&format!("fd.{count}"), "");
        spec.program.argv = vec![path];
        client.launch(spec).expect_err("no program")
    });
    // The socket to the launcher, and the pipe that ended when the init was executed.
    assert!(open.len() <= 2, "{open:?}");
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

#[test]
fn an_image_chooses_no_working_directory_outside_its_root() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    for number in 0..40 {
        let mut spec = shim.spec(&format!("fd.{number}"), "pwd; ls ../../..");
        spec.program.workdir = format!("/proc/self/fd/{number}");
        let error = client.launch(spec).expect_err("refused");
        assert!(error.to_string().contains("working directory"), "{error}");
    }
    let mut spec = shim.spec("own.1", "pwd");
    spec.program.workdir = "/srv/made/here".to_owned();
    assert_eq!(shim.output(spec), "/srv/made/here\n");
}

/// Commands that wait or are under way, of one container.
const COMMANDS_OF_ONE: usize = 64;

/// Bounds on a usual machine: what a start and a command beside a throttled container take, and its death.
const HELD_UP: Duration = Duration::from_secs(6);
const DEATH: Duration = Duration::from_secs(6);

#[test]
fn a_throttled_container_full_of_commands_holds_up_nobody_and_dies_soon() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut spec = shim.spec("home.1", "while :; do :; done & while :; do :; done");
    spec.limits.cpu_millis = Some(10);
    spec.limits.pids = Some(256);
    let mut client = shim.client();
    let throttled = client.launch(spec).expect("launched");
    let mut calls = Calls::connect(&shim);
    for number in 0..=COMMANDS_OF_ONE {
        let script = "while :; do :; done";
        let spec = kept(command(&shim, &format!("c{number}"), script));
        calls.send(Request::Exec(Box::new(spec)));
    }
    // The last is one too many, unless the first ones have begun by then.
    let begun = Instant::now();
    let other = client
        .launch(shim.spec("other.1", "exec sleep 1000"))
        .expect("launched");
    let mut inside = command(&shim, "inside", "echo here");
    inside.container = "other.1".to_owned();
    assert_eq!(run(&mut client, inside).expect("executed"), "here\n");
    let took = begun.elapsed();
    assert!(took < HELD_UP * slowness(), "it waited for {took:?}");
    let begins = until(|| {
        let views = client.list().expect("listed");
        let inside = views
            .iter()
            .filter(|view| view.exec_in.as_deref() == Some("home.1"));
        inside.count() > 1
    });
    assert!(begins, "no command begins");
    let killed = Instant::now();
    client
        .ask(Request::Kill {
            name: "home.1".to_owned(),
        })
        .expect("killed");
    wait_dead(&throttled);
    let took = killed.elapsed();
    assert!(took < DEATH * slowness(), "it died for {took:?}");
    client.kill_all().expect("killed");
    wait_dead(&other);
}

#[test]
fn commands_beyond_a_containers_share_are_refused_and_another_containers_are_not() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let mut spec = shim.spec("home.1", "exec sleep 1000");
    // For all the commands at once.
    spec.limits.pids = Some(256);
    let home = client.launch(spec).expect("launched");
    let other = client
        .launch(shim.spec("other.1", "exec sleep 1000"))
        .expect("launched");
    // It takes no order, so that all of them wait.
    let launcher = stopped_launcher(&shim);
    let mut calls = Calls::connect(&shim);
    let mut send = |name: &str, container: &str| {
        let mut spec = command(&shim, name, "true");
        spec.container = container.to_owned();
        calls.send(Request::Exec(Box::new(kept(spec))));
    };
    for number in 0..COMMANDS_OF_ONE {
        send(&format!("c{number}"), "home.1");
    }
    send("too-many", "home.1");
    send("others", "other.1");
    let (id, reply) = calls.next();
    let full = CallError::Full {
        what: "commands of this container under way".to_owned(),
    };
    assert_eq!(id, COMMANDS_OF_ONE as u64 + 2, "of the one too many");
    assert_eq!(reply, Reply::Failed { error: full });
    launcher.signal(Signal::SIGCONT).expect("goes on");
    for _ in 0..=COMMANDS_OF_ONE {
        let (_, reply) = calls.next();
        assert!(matches!(reply, Reply::Launched { .. }), "{reply:?}");
    }
    client.kill_all().expect("killed");
    wait_dead(&home);
    wait_dead(&other);
}

#[test]
fn the_oom_killer_prefers_a_session_whatever_it_writes_and_spares_the_shim() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let own = "cat /proc/self/oom_score_adj; echo 499 > /proc/self/oom_score_adj; \
               cat /proc/self/oom_score_adj";
    let script = format!("{own}; exec sleep 1000");
    let launched = client
        .launch(shim.spec("home.1", &script))
        .expect("launched");
    let inside = run(&mut client, command(&shim, "c.1", own)).expect("executed");
    // Without it neither has a process a bound below, nor the shim the right to a lower score.
    let status = std::fs::read_to_string("/proc/self/status").expect("readable");
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = u64::from_str_radix(effective.expect("a line").trim(), 16);
    let has_resource = effective.expect("a number") & (1 << 24) != 0;
    let is_kept =
        |text: &str| text.starts_with("500\n") && (!has_resource || text.ends_with("\n500\n"));
    assert!(is_kept(&inside), "{inside}");
    assert!(
        until(|| is_kept(&shim.log("home.1"))),
        "{}",
        shim.log("home.1")
    );
    let score = |pid: u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj"));
        text.expect("readable")
            .trim()
            .parse::<i32>()
            .expect("a number")
    };
    assert!(!has_resource || score(shim.process.id()) < 0);
    client.kill_all().expect("killed");
    wait_dead(&launched);
}
