//! Containers made ahead: taken by starts of their kind, and never in the way of any.

use std::fs;
use std::path::Path;

use conman_linux::{CgroupLayout, Cgroups, Freezer, PidFd, Signal};
use conman_shim::{
    Ahead, ClientError, ContainerState, FenceState, LaunchSpec, NetworkSpec, Reply, Request,
};

use crate::support::fencing::{arm, is_fenced, state, unfence};
use crate::support::{
    Calls, Client, Launched, SOON, Shim, available, copy_program, next_end, stopped_launcher,
    subscribe, until, wait_dead,
};

const SCRIPT: &str = "hostname; echo $A; cat /etc/hosts; id -u; exec sleep 1000";

fn order(shim: &Shim, name: &str, spec: &LaunchSpec) -> LaunchSpec {
    let directory = shim.path("scratch").join(name);
    let mut order = spec.kind();
    order.name = name.to_owned();
    order.cgroup = format!("{}/{name}", shim.cgroup);
    order.root.scratch = directory.join("root");
    order.log = directory.join("log");
    order
}

/// Makes one, in a directory of its own as the daemon does, and returns its process.
fn make(shim: &Shim, client: &mut Client, name: &str, spec: &LaunchSpec) -> PidFd {
    fs::create_dir(shim.path("scratch").join(name)).expect("made");
    let made = client.launch(order(shim, name, spec));
    let pid = made
        .unwrap_or_else(|error| panic!("{error}: {error:?}"))
        .pid;
    PidFd::open(pid).expect("it waits")
}

/// The start of `spec` with this one; its directory is where the daemon has moved it.
fn taking(shim: &Shim, name: &str, spec: &LaunchSpec) -> LaunchSpec {
    let (from, to) = (
        shim.path("scratch").join(name),
        shim.path("scratch").join(format!("of-{}", spec.name)),
    );
    fs::rename(from, &to).expect("moved");
    let mut spec = spec.clone();
    spec.root.scratch = to.join("root");
    spec.ahead = Ahead::Take {
        name: name.to_owned(),
    };
    spec
}

fn start(client: &mut Client, spec: LaunchSpec) -> Launched {
    let started = client.launch(spec);
    started.unwrap_or_else(|error| panic!("{error}: {error:?}"))
}

fn session(shim: &Shim, name: &str) -> LaunchSpec {
    let mut spec = shim.spec(name, SCRIPT);
    spec.sys = true;
    spec.hostname = name.replace('.', "-");
    spec.program
        .env
        .push(("A".to_owned(), format!("secret of {name}")));
    spec.files = vec![("/etc/hosts".to_owned(), format!("127.0.0.1 {name}\n"))];
    spec
}

fn names(client: &mut Client) -> Vec<String> {
    let listed = client.list().expect("listed").into_iter();
    listed.map(|view| view.name).collect()
}

fn cgroups() -> Cgroups {
    Cgroups::detect().expect("detected")
}

/// Whether nothing of one is left that was not taken.
fn is_gone(shim: &Shim, name: &str) -> bool {
    let is_there = cgroups().children(&shim.cgroup).contains(&name.to_owned());
    !is_there && !shim.path("scratch").join(name).join("root").exists()
}

#[test]
fn a_start_takes_one_and_has_all_that_is_its_own() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    subscribe(&mut client);
    let mut spec = session(&shim, "alice.1");
    spec.limits.cpu_millis = Some(500);
    let process = make(&shim, &mut client, "ahead_1", &spec);
    assert!(names(&mut client).is_empty(), "it is no session's");
    let environment = fs::read(format!("/proc/{}/environ", process.pid())).expect("readable");
    assert!(!String::from_utf8_lossy(&environment).contains("secret"));
    let cgroup = format!("{}/ahead_1", shim.cgroup);
    assert_eq!(cgroups().label(&cgroup).as_deref(), Some(""));
    // The start does not wait for it.
    assert!(cgroups().cpu_limit(&cgroup).is_some());

    let started = start(&mut client, taking(&shim, "ahead_1", &spec));
    assert_eq!((started.pid, started.phases.ahead), (process.pid(), true));
    assert_eq!(names(&mut client), ["alice.1"]);
    assert_eq!(cgroups().label(&cgroup).as_deref(), Some("alice.1"));
    let expected = "alice-1\nsecret of alice.1\n127.0.0.1 alice.1\n0\n";
    assert!(
        until(|| shim.log("alice.1") == expected),
        "{}",
        shim.log("alice.1")
    );
    // The one mapping of its name to its cgroup is the shim's record.
    let freezer = Freezer::of(&CgroupLayout::detect().expect("detected")).expect("a freezer");
    let name = || "alice.1".to_owned();
    let frozen = || {
        client
            .ask(Request::Freeze { name: name() })
            .expect("ordered")
    };
    let mut frozen = frozen;
    assert!(until(|| frozen() == Reply::Frozen { verified: true }));
    assert!(freezer.is_frozen(&cgroup).expect("asked"));
    client.ask(Request::Thaw { name: name() }).expect("thawed");
    client.ask(Request::Kill { name: name() }).expect("killed");
    assert!(process.wait_dead(SOON).expect("waited"));
    let end = next_end(&mut client);
    assert_eq!(
        (&*end.name, end.state),
        ("alice.1", ContainerState::Signalled { signal: 9 })
    );
}

#[test]
fn one_of_another_kind_that_is_dead_or_unknown_fails_no_start() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    subscribe(&mut client);
    let other = session(&shim, "other.1");
    let waits = make(&shim, &mut client, "ahead_1", &other);
    let mut spec = session(&shim, "more.1");
    spec.limits.memory_bytes = Some(65 << 20);
    let more = start(&mut client, taking(&shim, "ahead_1", &spec));
    assert!(!more.phases.ahead && !waits.is_dead().expect("asked"));

    let dead = make(&shim, &mut client, "ahead_2", &other);
    dead.kill().expect("killed");
    assert!(dead.wait_dead(SOON).expect("waited"));
    let after_dead = start(&mut client, taking(&shim, "ahead_2", &other));
    assert!(!after_dead.phases.ahead);
    fs::create_dir_all(shim.path("scratch/ahead_3/root/upper")).expect("as one that has ended");
    let unknown = session(&shim, "unknown.1");
    let after_unknown = start(&mut client, taking(&shim, "ahead_3", &unknown));
    assert!(!after_unknown.phases.ahead);
    assert_eq!(names(&mut client), ["more.1", "other.1", "unknown.1"]);

    let name = "ahead_1".to_owned();
    client.ask(Request::Kill { name }).expect("ended");
    assert!(until(|| is_gone(&shim, "ahead_1")) && is_gone(&shim, "ahead_2"));
    for launched in [&more, &after_dead, &after_unknown] {
        let process = launched.process.as_ref().expect("a hold on it");
        process.kill().expect("killed");
        wait_dead(launched);
        // No end of one that was made ahead came before.
        assert!(!next_end(&mut client).name.starts_with("ahead"));
    }
}

/// One that a start has taken while the launcher stands still, which gets the start's order afterwards.
struct Taken {
    process: PidFd,
    launcher: PidFd,
    calls: Calls,
}

impl Taken {
    fn new(shim: &Shim, client: &mut Client, spec: &LaunchSpec) -> Self {
        let process = make(shim, client, "ahead_1", spec);
        let launcher = stopped_launcher(shim);
        let mut calls = Calls::connect(shim);
        calls.send(Request::Launch(Box::new(taking(shim, "ahead_1", spec))));
        let mut is_taken = || {
            let name = spec.name.clone();
            let found = client.ask(Request::Find { name });
            matches!(found, Ok(Reply::Found { container: Some(view), .. }) if view.pid == process.pid())
        };
        assert!(until(&mut is_taken));
        Self {
            process,
            launcher,
            calls,
        }
    }

    /// The answer to the start.
    fn answer(mut self) -> Reply {
        assert!(self.process.wait_dead(SOON).expect("waited"));
        let going_on = self.launcher.signal(Signal::SIGCONT);
        going_on.expect("continued");
        self.calls.next().1
    }
}

#[test]
fn a_start_whose_container_ends_as_it_is_taken_goes_the_usual_way() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    subscribe(&mut client);
    let spec = session(&shim, "alice.1");
    let taken = Taken::new(&shim, &mut client, &spec);
    taken.process.kill().expect("killed");
    let answer = taken.answer();
    let Reply::Launched { pid, phases } = answer else {
        panic!("{answer:?}");
    };
    assert!(!phases.ahead);
    assert_eq!(names(&mut client), ["alice.1"]);
    assert!(until(|| shim.log("alice.1").ends_with("\n0\n")));
    assert!(until(|| is_gone(&shim, "ahead_1")));
    let name = "alice.1".to_owned();
    client.ask(Request::Kill { name }).expect("killed");
    let end = next_end(&mut client);
    assert_eq!((&*end.name, end.pid), ("alice.1", pid), "the only end");
}

#[test]
fn a_start_that_is_killed_as_it_takes_one_ends() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let spec = session(&shim, "alice.1");
    let taken = Taken::new(&shim, &mut client, &spec);
    let name = "alice.1".to_owned();
    client.ask(Request::Kill { name }).expect("killed");
    let answer = taken.answer();
    assert!(matches!(answer, Reply::Failed { .. }), "{answer:?}");
    assert!(names(&mut client).is_empty() && is_gone(&shim, "ahead_1"));
}

#[test]
fn an_order_that_knows_something_of_a_session_is_refused() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let spec = session(&shim, "alice.1");
    let changes: [fn(&mut LaunchSpec); 4] = [
        |order| order.hostname = "alice".to_owned(),
        |order| order.program.argv = vec!["true".to_owned()],
        |order| order.program.env = vec![("A".to_owned(), "b".to_owned())],
        |order| order.files = vec![("/etc/hosts".to_owned(), String::new())],
    ];
    for change in changes {
        let mut order = order(&shim, "ahead_1", &spec);
        change(&mut order);
        assert!(matches!(client.launch(order), Err(ClientError::Refused(_))));
    }
}

#[test]
fn it_ends_with_the_client_that_ordered_it() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let spec = session(&shim, "alice.1");
    let waits = make(&shim, &mut client, "ahead_1", &spec);
    let taken = make(&shim, &mut client, "ahead_2", &spec);
    start(&mut client, taking(&shim, "ahead_2", &spec));
    drop(client);
    assert!(waits.wait_dead(SOON).expect("waited"));
    assert!(until(|| is_gone(&shim, "ahead_1")));
    let mut client = shim.client();
    assert_eq!(names(&mut client), ["alice.1"]);
    assert!(!taken.is_dead().expect("asked"));
    client.kill_all().expect("killed");
}

#[test]
fn what_a_shim_leaves_of_them_when_it_dies_is_removed_by_the_next_one() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let spec = session(&shim, "alice.1");
    let waits = make(&shim, &mut client, "ahead_1", &spec);
    make(&shim, &mut client, "ahead_2", &spec);
    let taken = start(&mut client, taking(&shim, "ahead_2", &spec));
    shim.succeed();
    assert!(waits.wait_dead(SOON).expect("waited"));
    let mut client = shim.client();
    assert!(until(|| is_gone(&shim, "ahead_1")));
    assert_eq!(names(&mut client), ["alice.1"]);
    // One that has lost its state knows it by the label of its cgroup.
    fs::remove_file(shim.path("shim.state")).expect("removed");
    shim.succeed();
    let mut client = shim.client();
    assert_eq!(names(&mut client), ["alice.1"]);
    client.kill_all().expect("killed");
    assert!(
        PidFd::open(taken.pid).is_err()
            || taken
                .process
                .is_some_and(|it| it.wait_dead(SOON).expect("waited"))
    );
}

#[test]
fn what_a_shim_leaves_of_one_when_it_dies_with_its_state_is_removed_by_the_next_one() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let mut client = shim.client();
    let spec = session(&shim, "alice.1");
    let waits = make(&shim, &mut client, "ahead_1", &spec);
    let process = PidFd::open(client.shim_pid()).expect("it lives");
    process.kill().expect("killed");
    assert!(waits.wait_dead(SOON).expect("waited"));
    fs::remove_file(shim.path("shim.state")).expect("removed");
    shim.succeed();
    let mut client = shim.client();
    let is_there = || {
        let left = cgroups().children(&shim.cgroup);
        left.contains(&"ahead_1".to_owned())
    };
    assert!(until(|| !is_there()));
    assert_eq!(state(&mut client), FenceState::Unarmed, "nothing lived");
}

#[test]
fn one_that_a_shim_was_making_when_it_died_is_removed_by_the_next_one() {
    if !available() {
        return;
    }
    let mut shim = Shim::start();
    let spec = session(&shim, "alice.1");
    fs::create_dir(shim.path("scratch/ahead_1")).expect("made");
    let launcher = stopped_launcher(&shim);
    let mut calls = Calls::connect(&shim);
    calls.send(Request::Launch(Box::new(order(&shim, "ahead_1", &spec))));
    let mut client = shim.client();
    let name = || "ahead_1".to_owned();
    let mut is_known = || match client.ask(Request::Find { name: name() }) {
        Ok(Reply::Found { starting, .. }) => starting,
        other => panic!("{other:?}"),
    };
    assert!(until(&mut is_known));
    launcher.signal(Signal::SIGCONT).expect("continued");
    shim.succeed();
    let mut client = shim.client();
    assert!(until(|| is_gone(&shim, "ahead_1")));
    assert!(names(&mut client).is_empty());
}

#[test]
fn a_fence_that_closes_ends_them_and_starts_go_the_usual_way_afterwards() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let spec = session(&shim, "alice.1");
    let before = make(&shim, &mut client, "ahead_1", &spec);
    arm(&mut client, 60_000);
    let armed = make(&shim, &mut client, "ahead_2", &spec);
    client.ask(Request::FreezeAll).expect("frozen");
    for process in [before, armed] {
        assert!(process.wait_dead(SOON).expect("waited"));
    }
    assert!(is_fenced(&mut client));
    client.ask(unfence(None)).expect("opened");
    let started = start(&mut client, taking(&shim, "ahead_2", &spec));
    assert!(!started.phases.ahead);
    assert!(until(
        || is_gone(&shim, "ahead_1") && is_gone(&shim, "ahead_2")
    ));
    client.kill_all().expect("killed");
    wait_dead(&started);
}

#[test]
fn none_is_handed_over_to_another_program() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let spec = session(&shim, "alice.1");
    let waits = make(&shim, &mut client, "ahead_1", &spec);
    let path = shim.path("newer");
    copy_program(Path::new(env!("CARGO_BIN_EXE_conman-shim")), &path);
    let program = Some(path);
    client.ask(Request::Replace { program }).expect("replaced");
    assert!(waits.wait_dead(SOON).expect("waited"));
    assert!(is_gone(&shim, "ahead_1"));
    let again = make(&shim, &mut client, "ahead_2", &spec);
    let started = start(&mut client, taking(&shim, "ahead_2", &spec));
    assert!(started.phases.ahead && started.pid == again.pid());
    client.kill_all().expect("killed");
    wait_dead(&started);
}

#[test]
fn one_with_a_link_offers_its_namespace_when_it_is_taken() {
    if !available() {
        return;
    }
    let shim = Shim::start();
    let mut client = shim.client();
    let mut spec = session(&shim, "alice.1");
    spec.network = NetworkSpec::Linked;
    let process = make(&shim, &mut client, "ahead_1", &spec);
    let own = fs::read_link(format!("/proc/{}/ns/net", process.pid())).expect("readable");
    let (ours, theirs) = conman_shim::link_socket::pair().expect("a pair");
    let offered = std::thread::spawn(move || {
        rustix::io::ioctl_fionbio(&ours, false).expect("set");
        let namespace = conman_shim::link_socket::receive(&ours).expect("received");
        let namespace = namespace.expect("offered");
        conman_shim::link_socket::answer(&ours, Ok(())).expect("answered");
        let file = std::os::fd::AsRawFd::as_raw_fd(&namespace.file);
        fs::read_link(format!("/proc/self/fd/{file}")).expect("readable")
    });
    let spec = taking(&shim, "ahead_1", &spec);
    let mount = conman_linux::Mount::from_fd(theirs);
    let started = client.launch_with(spec, &[mount]);
    let started = started.unwrap_or_else(|error| panic!("{error}: {error:?}"));
    assert!(started.phases.ahead);
    assert_eq!(offered.join().expect("no panic"), own);
    client.kill_all().expect("killed");
    wait_dead(&started);
}
