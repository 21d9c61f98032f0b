//! Containers on hosts whose cgroups or kernel are others than this one's, as far as it can be them.

#![allow(clippy::print_stderr, reason = "a skipped test says so there")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use conman_linux::{CgroupLayout, CgroupLimits, CgroupPart, Cgroups, Freezer, Interface, Mount};
use conman_shim::{
    BindSpec, CallError, ClientError, ContainerState, LaunchError, MAX_LAYERS, Reply, Request,
    SHARED_IDS,
};
use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};

use crate::support::{
    SOON, Shim, available, next_end, own_by_the_shared_range, subscribe, until, wait_dead,
};

/// Whether the host has such hierarchies to freeze with.
fn has(part: CgroupPart) -> bool {
    let layout = CgroupLayout::detect().expect("readable").part(part);
    if Freezer::of(&layout).is_ok() {
        return true;
    }
    eprintln!("skipped: this host has no such cgroups: {part:?}");
    false
}

fn alone(part: CgroupPart) -> Cgroups {
    Cgroups::of(&CgroupLayout::detect().expect("readable").part(part))
}

#[test]
fn v1_alone_limits_freezes_and_kills() {
    if !available() || !has(CgroupPart::V1) {
        return;
    }
    let shim = Shim::start_with(&["--cgroups", "v1"]);
    let mut client = shim.client();
    subscribe(&mut client);
    let bomb = "(while true; do sleep 1000 & done 2>/dev/null) & exec sleep 1000";
    let mut spec = shim.spec("bomb.1", bomb);
    spec.limits.cpu_millis = Some(500);
    let launched = client
        .launch(spec)
        .unwrap_or_else(|error| panic!("{error}: {error:?}"));
    let cgroup = format!("{}/bomb.1", shim.cgroup);
    let v1 = alone(CgroupPart::V1);
    assert!(until(|| v1.pids_below(&cgroup).len() >= 30));
    assert!(v1.pids_below(&cgroup).len() <= 32);
    assert_eq!(alone(CgroupPart::Unified).pids_below(&cgroup), [0_i32; 0]);
    let name = || "bomb.1".to_owned();
    let frozen = until(|| {
        let reply = client.ask(Request::Freeze { name: name() });
        reply.expect("ordered") == Reply::Frozen { verified: true }
    });
    assert!(frozen);
    client.ask(Request::Kill { name: name() }).expect("killed");
    wait_dead(&launched);
    assert_eq!(
        next_end(&mut client).state,
        ContainerState::Signalled { signal: 9 }
    );

    let hog = "exec dd if=/dev/zero of=/dev/null bs=200M count=1";
    let launched = client.launch(shim.spec("hog.1", hog)).expect("launched");
    wait_dead(&launched);
    assert_eq!(
        next_end(&mut client).state,
        ContainerState::Signalled { signal: 9 }
    );
    assert!(until(|| shim.sweep().is_empty()));
}

#[test]
fn a_unified_hierarchy_alone_limits_or_refuses_to_start_without_the_limit() {
    if !available() || !has(CgroupPart::Unified) {
        return;
    }
    let shim = Shim::start_with(&["--cgroups", "unified"]);
    let mut client = shim.client();
    match client.launch(shim.spec("limited.1", "exec sleep 1000")) {
        Ok(launched) => {
            let process = launched.process.as_ref().expect("a hold");
            process.kill().expect("killed");
            wait_dead(&launched);
        }
        Err(ClientError::Refused(CallError::Launch {
            error: LaunchError::Step { step, reason, .. },
        })) => {
            assert_eq!(step, "make the cgroup");
            assert!(reason.contains("memory controller"), "{reason}");
            eprintln!("skipped in part: the controllers belong to v1 on this host");
            assert!(until(|| !shim.path("scratch/limited.1").exists()));
            assert_eq!(client.list().expect("listed"), []);
        }
        Err(error) => panic!("{error}: {error:?}"),
    }
    let mut spec = shim.spec("plain.1", "exec sleep 1000");
    spec.limits = CgroupLimits::default();
    let launched = client.launch(spec).expect("launched");
    let cgroup = format!("{}/plain.1", shim.cgroup);
    let unified = alone(CgroupPart::Unified);
    // Its init and its program.
    let inside = unified.pids_below(&cgroup);
    assert!(
        inside.len() == 2 && inside.contains(&launched.pid),
        "{inside:?}"
    );
    assert_eq!(alone(CgroupPart::V1).pids_below(&cgroup), [0_i32; 0]);
    client.kill_all().expect("killed");
    wait_dead(&launched);
}

#[test]
fn where_the_kernel_kills_no_cgroup_all_of_its_processes_are_killed() {
    if !available() || !has(CgroupPart::Unified) {
        return;
    }
    let shim = Shim::start_with(&["--without", "cgroup_kill"]);
    let mut client = shim.client();
    let script = "cat /proc/self/cgroup; exec sleep 1000";
    let launched = client
        .launch(shim.spec("joined.1", script))
        .unwrap_or_else(|error| panic!("{error}: {error:?}"));
    let cgroup = format!("{}/joined.1", shim.cgroup);
    let inside = alone(CgroupPart::Unified).pids_below(&cgroup);
    // And perhaps what it has started itself.
    assert!(inside.contains(&launched.pid), "{inside:?}");
    // Its cgroup namespace begins there.
    assert!(until(|| shim.log("joined.1").contains("0::/\n")));
    let process = launched.process.as_ref().expect("a hold");
    client.kill_all().expect("killed");
    assert!(process.wait_dead(SOON).expect("waited"));
    let features = shim.client().features().cloned().expect("told");
    assert!(!features.has(Interface::CgroupKill));
}

#[test]
fn a_kernel_that_cannot_map_layers_refuses_and_says_what_it_lacks() {
    if !available() {
        return;
    }
    for lacking in [Interface::MappedLayers, Interface::MountAttributes] {
        let shim = Shim::start_with(&["--without", lacking.name()]);
        let mut client = shim.client();
        let mut spec = shim.spec("old.1", "true");
        spec.root.shared_ids = false;
        let error = client.launch(spec).expect_err("it cannot");
        let text = error.to_string();
        assert!(text.contains("Linux 5.19"), "{text}");
        // The sweeper removes what belongs to a process that does not die at once.
        assert!(until(|| !shim.path("scratch/old.1").exists()));
        assert_eq!(client.list().expect("listed"), []);
        let freezer = Freezer::detect().expect("detected");
        let cgroups = || freezer.children(&shim.cgroup).expect("listed");
        assert!(until(|| cgroups().is_empty()), "{:?}", cgroups());
    }
}

#[test]
fn where_no_owners_are_mapped_containers_share_a_range_of_ids() {
    if !available() {
        return;
    }
    for lacking in [
        &[Interface::MappedLayers][..],
        &[Interface::MountAttributes],
        &[Interface::MountAttributes, Interface::OverlayFdLayers],
    ] {
        let flags: Vec<&str> = lacking
            .iter()
            .flat_map(|one| ["--without", one.name()])
            .collect();
        let shim = Shim::start_with(&flags);
        own_by_the_shared_range(&shim.path("store"));
        let mut client = shim.client();
        let script = "stat -c %u /bin/busybox /www /tmp; touch /tmp/own && stat -c %u /tmp/own; \
                      grep -c ' /dev/shm .*noexec' /proc/self/mountinfo; \
                      grep -c ' /proc/sys ro,' /proc/self/mountinfo; \
                      echo x > /proc/sys/kernel/domainname; exec sleep 1000";
        let mut launched = Vec::new();
        for name in ["one.1", "two.1"] {
            let mut spec = shim.spec(name, script);
            spec.root.shared_ids = true;
            spec.files = vec![("/own".to_owned(), name.to_owned())];
            let one = client
                .launch(spec)
                .unwrap_or_else(|error| panic!("{error}: {error:?}"));
            assert!(until(|| shim.log(name).contains("domainname")));
            let log = shim.log(name);
            assert!(log.starts_with("0\n0\n0\n0\n1\n1\n"), "{log}");
            assert!(log.contains("Read-only file system"), "{log}");
            let map = fs::read_to_string(format!("/proc/{}/uid_map", one.pid)).expect("a map");
            let map: Vec<&str> = map.split_ascii_whitespace().collect();
            assert_eq!(map, ["0", &SHARED_IDS.to_string(), "65536"]);
            launched.push(one);
        }
        for (one, name) in launched.iter().zip(["one.1", "two.1"]) {
            let own = fs::read_to_string(format!("/proc/{}/root/own", one.pid));
            assert_eq!(own.expect("it lives"), name);
        }
        client.kill_all().expect("killed");
        for one in &launched {
            wait_dead(one);
        }
    }
}

#[test]
fn what_is_read_only_is_so_without_mount_setattr_too() {
    if !available() {
        return;
    }
    let shim = Shim::start_with(&["--without", "mount_attributes"]);
    own_by_the_shared_range(&shim.path("store"));
    let work = shim.path("work");
    fs::create_dir(&work).expect("made");
    fs::write(work.join("greeting"), "from the host\n").expect("written");
    fs::set_permissions(&work, fs::Permissions::from_mode(0o777)).expect("open to all");
    let script = "cat /read/greeting /greeting; echo x > /read/x; echo x > /own; \
                  echo x > /write/x && echo done; touch /x; stat -c %u /read/greeting";
    let mut spec = shim.spec("ro.1", script);
    spec.root.shared_ids = true;
    spec.root.read_only = true;
    spec.files = vec![("/own".to_owned(), "own".to_owned())];
    let bind = |target: &str, read_only| BindSpec {
        target: target.to_owned(),
        read_only,
        first_id: conman_core::DEFAULT_BIND_FIRST_ID,
    };
    spec.binds = vec![
        bind("/read", true),
        bind("/greeting", true),
        bind("/write", false),
    ];
    let copy = |path: &Path| Mount::copy_of(rustix::fs::CWD, path).expect("copied");
    let mut mounts = [copy(&work), copy(&work.join("greeting")), copy(&work)];
    let mut client = shim.client();
    let mut unsafe_spec = spec.clone();
    unsafe_spec.name = "unsafe.1".to_owned();
    let refused = client.launch_with(unsafe_spec, &mounts);
    let refused = refused.expect_err("a bind that can be written to without mapped owners");
    assert!(refused.to_string().contains("/write"), "{refused}");
    // As a host without mount_setattr(2) does it.
    mount_bind(&work, &work).expect("bound");
    let nosuid = MountFlags::BIND | MountFlags::NOSUID;
    mount_remount(&work, nosuid, c"").expect("set");
    mounts[2] = copy(&work);
    unmount(&work, UnmountFlags::DETACH).expect("unmounted");
    let launched = client
        .launch_with(spec, &mounts)
        .unwrap_or_else(|error| panic!("{error}: {error:?}"));
    wait_dead(&launched);
    let log = shim.log("ro.1");
    assert!(log.starts_with("from the host\nfrom the host\n"), "{log}");
    for path in ["/read/x", "/own", "/x"] {
        let refused = |line: &str| line.contains(path) && line.contains("Read-only file system");
        assert!(log.lines().any(refused), "{path}: {log}");
    }
    assert!(log.contains("done\n"), "{log}");
    // The host's owners are nobody inside: theirs could not be mapped.
    assert!(log.ends_with("65534\n"), "{log}");
}

#[test]
fn as_many_layers_as_there_may_be_are_found_by_paths() {
    if !available() {
        return;
    }
    let shim = Shim::start_with(&["--without", "overlay_fd_layers"]);
    let mut spec = shim.spec("many.1", "cat /top /bottom");
    spec.root.layers.clear();
    for number in 1..MAX_LAYERS {
        let name = format!("layer with a long name, and strange: {number}");
        let layer = shim.path("store").join(&name);
        fs::create_dir(&layer).expect("made");
        let file = if number == 1 { "top" } else { "bottom" };
        fs::write(layer.join(file), format!("{file} of {number}\n")).expect("written");
        shim.made_layer(&name);
        spec.root.layers.push(PathBuf::from(name));
    }
    spec.root.layers.push(PathBuf::from("base"));
    assert_eq!(shim.output(spec), "top of 1\nbottom of 2\n");
}

#[test]
fn the_kernel_is_prepared_once_and_nothing_of_it_stays() {
    if !available() {
        return;
    }
    let shim = Shim::start_with(&["--prepare-for", "40"]);
    let mut client = shim.client();
    let note = shim.socket().with_extension("prepared");
    let mut runs = |name: &str| {
        let launched = client
            .launch(shim.spec(name, "true"))
            .unwrap_or_else(|error| panic!("{error}: {error:?}"));
        wait_dead(&launched);
    };
    runs("first.1");
    let text = std::fs::read_to_string(&note).expect("noted before the first start");
    let boot = conman_linux::boot_id().expect("readable");
    assert!(text.starts_with(&boot), "{text}");
    // Who did it ends by itself, and is reaped at the next start.
    let mut number = 0;
    let gone = until(|| {
        number += 1;
        runs(&format!("next.{number}"));
        helpers_of_the_launcher(shim.process.id()).is_empty()
    });
    assert!(gone);
}

/// Children of the shim's children that are not containers.
fn helpers_of_the_launcher(shim: u32) -> Vec<String> {
    let children = |pid: &str| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let text = text.unwrap_or_default();
        text.split_ascii_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let own = children(&shim.to_string());
    own.iter().flat_map(|pid| children(pid)).collect()
}

#[test]
fn all_containers_share_what_processors_they_have_in_total() {
    if !available() {
        return;
    }
    let shim = Shim::start_with(&["--total-cpu-millis", "700"]);
    let mut client = shim.client();
    // Of both kinds of hierarchies, whichever has the controller.
    let quota = |cgroup: &str| {
        let base = Path::new("/sys/fs/cgroup");
        let v1 = base.join("cpu").join(&cgroup[1..]).join("cpu.cfs_quota_us");
        let unified = base.join(&cgroup[1..]).join("cpu.max");
        let text = fs::read_to_string(v1)
            .or_else(|_| fs::read_to_string(unified))
            .ok()?;
        Some(text.split_ascii_whitespace().next()?.to_owned())
    };
    for (name, millis) in [
        ("none.1", None),
        ("less.1", Some(300)),
        ("more.1", Some(2_000)),
    ] {
        let mut spec = shim.spec(name, "exec sleep 1000");
        spec.limits.cpu_millis = millis;
        spec.limits.cpu_weighted = true;
        let launched = client.launch(spec);
        launched.unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    assert_eq!(quota(&shim.cgroup).as_deref(), Some("70000"));
    let of = |name: &str| quota(&format!("{}/{name}", shim.cgroup));
    let none = of("none.1").expect("it has a cgroup to be weighed by");
    assert!(matches!(none.as_str(), "-1" | "max"), "{none}");
    assert_eq!(of("less.1").as_deref(), Some("30000"));
    // Either at the birth or a moment later.
    assert!(until(|| of("more.1").as_deref() == Some("70000")));
    client.kill_all().expect("killed");
}
