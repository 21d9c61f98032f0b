//! Containers whose roots are BTRFS snapshots do what every runtime must, and no more than their limits.

#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "../suite/native_host/mod.rs"]
mod native_host;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use conman_core::Instance;
use conman_linux::{LoopDevice, Mount, MountAttributes, NewFilesystem};
use conman_runtime::{
    FenceOpener, LogOptions, NativeTimeouts, RootStore, Runtime, RuntimeError, SNAPSHOTS_FILE,
};
use conman_testkit::runtime_conformance;
use conman_testkit::runtime_conformance::{Harness, Running, Stage, say_skipped};
use futures_util::StreamExt as _;

use native_host::{Host, IMAGE};
use rustix::fs::{Dir, IFlags, Mode, OFlags, fstatvfs, ioctl_getflags, openat};

/// The file system of each instance.
const BYTES: u64 = 256 << 20;

const PATIENCE: Duration = Duration::from_secs(60);

struct OnBtrfs(Arc<Host>);

impl OnBtrfs {
    fn new() -> Result<Self, String> {
        let kernel = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
        if !kernel.contains("btrfs") {
            return Err("this kernel has no BTRFS".to_owned());
        }
        if !["/sbin", "/usr/sbin"]
            .iter()
            .any(|directory| Path::new(directory).join("mkfs.btrfs").exists())
        {
            return Err("mkfs.btrfs is missing (package btrfs-progs)".to_owned());
        }
        let host = Host::with_roots(RootStore::Btrfs(Some(BYTES)))?;
        Ok(Self(Arc::new(host)))
    }
}

impl Harness for OnBtrfs {
    fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime> {
        Arc::new(self.0.open(instance, NativeTimeouts::default()))
    }

    fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime> {
        let timeouts = NativeTimeouts {
            // Over as soon as the order is sent.
            start: Duration::ZERO,
            ..NativeTimeouts::default()
        };
        Arc::new(self.0.open(instance, timeouts))
    }

    fn image(&self) -> String {
        IMAGE.to_owned()
    }

    fn keeps_outputs_apart(&self) -> bool {
        false
    }
}

mod snapshots {
    use super::*;

    runtime_conformance!(
        OnBtrfs::new(),
        #[ignore = "one file system a test: `cargo xtask acceptance btrfs`"]
    );
}

/// A stage, and the host that it is on.
fn stage() -> Option<(Stage, Arc<Host>)> {
    let on_btrfs = OnBtrfs::new().map_err(|why| say_skipped(&why)).ok()?;
    let host = Arc::clone(&on_btrfs.0);
    Some((Stage::new(on_btrfs), host))
}

/// The number after a word that a container's program prints.
async fn said(stage: &Stage, running: &Running, word: &str) -> u64 {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let log = stage
            .runtime()
            .logs(&running.key, LogOptions::default())
            .await;
        let mut log = log.expect("there is a log");
        let mut text = String::new();
        while let Some(chunk) = log.next().await {
            text.push_str(&String::from_utf8_lossy(&chunk.expect("read").bytes));
        }
        let line = text.lines().find_map(|line| line.strip_prefix(word));
        if let Some(number) = line.and_then(|rest| rest.trim().parse().ok()) {
            return number;
        }
        assert!(tokio::time::Instant::now() < deadline, "{word}: {text}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Writes data, or as many files as there is room for, and says how much that was.
const WRITE: &str =
    "dd if=/dev/zero of=/big bs=64k count=2000 2>/dev/null; sync; echo bytes $(wc -c < /big)
    sleep 1000";
const MAKE_FILES: &str =
    "mkdir /d; i=0; while [ $i -lt 100000 ] && echo > /d/$i; do i=$((i+1)); done
    echo files $i; sleep 1000";

#[tokio::test]
async fn a_session_takes_its_limit_of_the_disk_in_data_or_files_and_leaves_the_rest_to_others() {
    let Some((stage, host)) = stage() else { return };
    let limited = |name: &str, script, bytes| {
        let mut plan = stage.plan(name, &["sh", "-c", script]);
        plan.spec.disk_bytes = Some(bytes);
        plan
    };
    let writer = stage.run(&limited("writer", WRITE, 24 << 20)).await;
    let bytes = said(&stage, &writer, "bytes").await;
    assert!(
        (16 << 20..=24 << 20).contains(&bytes),
        "{bytes} bytes of 24 MiB"
    );
    let maker = stage.run(&limited("maker", MAKE_FILES, 4 << 20)).await;
    let files = said(&stage, &maker, "files").await;
    assert!(
        (500..50_000).contains(&files),
        "{files} files within 4 MiB of metadata"
    );
    // A limit that is enforced is not measured.
    let limits = conman_linux::DiskUsage {
        bytes: 1,
        inodes: 1,
    };
    let excess = stage
        .runtime()
        .excess_disk_usage(&maker.key, limits, false)
        .await;
    assert_eq!(excess.expect("looked at"), None);
    // Both are full, the file system is not.
    let other = stage.run(&limited("other", WRITE, 16 << 20)).await;
    let bytes = said(&stage, &other, "bytes").await;
    assert!(bytes >= 8 << 20, "{bytes} bytes of 16 MiB");
    let file = file(&host, &stage);
    assert!(LoopDevice::find(&file).expect("looked for").is_some());
    drop(stage);
    // No runtime and no container uses it.
    unmounted(&file);
}

fn file(host: &Host, stage: &Stage) -> PathBuf {
    host.path(&format!("{}/{SNAPSHOTS_FILE}", stage.instance()))
}

/// Waits until nothing has the file system mounted.
fn unmounted(file: &Path) {
    let deadline = std::time::Instant::now() + PATIENCE;
    while LoopDevice::find(file).expect("looked for").is_some() {
        assert!(std::time::Instant::now() < deadline, "it stays mounted");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

fn mounted(file: &Path) -> Mount {
    let device = LoopDevice::find(file).expect("looked for");
    let device = device.expect("it is mounted");
    let file_system = NewFilesystem::open("btrfs").expect("begun");
    let source = device.node().to_str().expect("text");
    file_system.set("source", source).expect("set");
    let mounted = file_system.mount(MountAttributes::empty());
    mounted.expect("mounted")
}

/// The subvolumes in a directory of the file system.
fn subvolumes(file: &Path, directory: &str) -> Vec<String> {
    let mount = mounted(file);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let opened = openat(&mount, directory, flags, Mode::empty()).expect("opened");
    let entries = Dir::read_from(opened).expect("listed");
    let names = entries.map(|entry| entry.expect("listed").file_name().to_owned());
    let names = names.map(|name| name.into_string().expect("text"));
    names.filter(|name| !name.starts_with('.')).collect()
}

/// An error with its source.
fn with_causes(error: &RuntimeError) -> String {
    let source = std::error::Error::source(error).map(ToString::to_string);
    format!("{error}: {}", source.unwrap_or_default())
}

#[tokio::test]
async fn what_no_container_and_no_image_uses_is_removed() {
    let Some((stage, host)) = stage() else { return };
    let file = file(&host, &stage);
    let kept = stage.run_idle("kept").await;
    let lost = stage.plan("lost", &["sleep", "1000"]);
    stage.runtime().create(&lost).await.expect("created");
    assert_eq!(subvolumes(&file, "sessions").len(), 2);
    // As if the daemon had died in the middle of its creation.
    let directory = host.path(&format!("{}/containers/lost.7", stage.instance()));
    std::fs::remove_dir_all(directory).expect("removed");
    let next = stage.another_runtime();
    assert_eq!(subvolumes(&file, "sessions"), ["kept.7"]);
    assert_eq!(subvolumes(&file, "images").len(), 1);
    let name = IMAGE.parse().expect("a name");
    host.store().remove(&name).expect("removed");
    kept.kill();
    for runtime in [&*next, stage.runtime()] {
        for removed in runtime.remove(&[kept.key.clone(), lost.key.clone()]).await {
            removed.expect("removed");
        }
    }
    let deadline = std::time::Instant::now() + PATIENCE;
    let left = |directory| !subvolumes(&file, directory).is_empty();
    while left("sessions") || left("images") {
        assert!(std::time::Instant::now() < deadline, "a root stays");
        host.store().collect(&BTreeSet::new()).expect("collected");
        next.remove(&[]).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Imports an image that the file system has no room for, and returns its name.
fn import_large(host: &Host) -> String {
    const LARGE: &str = "large:test";
    let root = host.path("large");
    std::fs::create_dir(&root).expect("made");
    let content = vec![7; usize::try_from(BYTES).expect("it fits into memory")];
    std::fs::write(root.join("file"), content).expect("written");
    let archive = host.path("large.tar");
    let packed = Command::new("tar")
        .arg("-cf")
        .arg(&archive)
        .arg("-C")
        .arg(&root)
        .arg(".")
        .status();
    assert!(packed.expect("tar runs").success());
    let imported = host
        .store()
        .import(&archive, &LARGE.parse().expect("a name"));
    imported.expect("imported");
    LARGE.to_owned()
}

#[tokio::test]
async fn a_full_file_system_refuses_a_start_and_says_what_to_do() {
    let Some((stage, host)) = stage() else { return };
    let mut large = stage.plan("large", &["sleep", "1000"]);
    large.spec.image = import_large(&host);
    let error = stage.runtime().create(&large).await.expect_err("no room");
    let text = with_causes(&error);
    assert!(
        text.contains("is full") && text.contains("images.btrfs_bytes"),
        "{text}"
    );
    // Half of an image is not left, so that others have room as soon as the kernel has freed it.
    let small = stage.plan("small", &["sleep", "1000"]);
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while let Err(error) = stage.runtime().create(&small).await {
        assert!(
            tokio::time::Instant::now() < deadline,
            "{}",
            with_causes(&error)
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(subvolumes(&file(&host, &stage), "images").len(), 1);
}

#[tokio::test]
async fn a_damaged_file_system_names_the_ways_out_and_the_next_boot_makes_another() {
    let Ok(on_btrfs) = OnBtrfs::new().map_err(|why| say_skipped(&why)) else {
        return;
    };
    let host = on_btrfs.0;
    let instance = Instance::new([1, 2, 3, 4]);
    let open = || {
        let fence = FenceOpener::AnyConnection;
        host.try_open(
            &instance,
            NativeTimeouts::default(),
            None,
            (fence, BTreeMap::new()),
        )
    };
    drop(open().expect("made"));
    let path = host.path(&format!("{instance}/{SNAPSHOTS_FILE}"));
    unmounted(&path);
    let file = std::fs::File::options().write(true).open(&path);
    // The first superblock.
    let damaged = file.expect("opened").write_all_at(&[0; 4_096], 64 << 10);
    damaged.expect("damaged");
    let text = with_causes(&open().expect_err("damaged"));
    assert!(
        text.contains("remove the file") && text.contains("overlay"),
        "{text}"
    );
    let boot = host.path(&format!("{instance}/snapshots.boot"));
    std::fs::write(boot, "another").expect("written");
    open().expect("made again");
}

#[tokio::test]
async fn a_file_system_whose_growth_was_interrupted_grows_when_it_is_opened_next() {
    let Ok(on_btrfs) = OnBtrfs::new().map_err(|why| say_skipped(&why)) else {
        return;
    };
    let host = on_btrfs.0;
    let instance = Instance::new([1, 2, 3, 5]);
    drop(host.open(&instance, NativeTimeouts::default()));
    let path = host.path(&format!("{instance}/{SNAPSHOTS_FILE}"));
    unmounted(&path);
    let file = std::fs::File::options().write(true).open(&path);
    file.expect("opened").set_len(2 * BYTES).expect("set");
    let _runtime = host.open(&instance, NativeTimeouts::default());
    let found = fstatvfs(mounted(&path)).expect("read");
    let bytes = found.f_blocks * found.f_frsize;
    assert!(bytes > BYTES * 3 / 2, "{bytes} bytes of {}", 2 * BYTES);
}

/// What a session sees of its root and may do with it.
const LOOK: &str = "echo owner $(stat -c %u /bin/busybox); echo x > /etc/new && chown 1000 /etc/new
    echo new $(stat -c %u /etc/new); rm /bin/vi && echo gone $?; sleep 1000";

#[tokio::test]
async fn a_snapshots_files_belong_to_the_sessions_users_and_changes_stay_in_it() {
    let Some((stage, _host)) = stage() else {
        return;
    };
    for name in ["one", "two"] {
        let running = stage.run(&stage.plan(name, &["sh", "-c", LOOK])).await;
        assert_eq!(said(&stage, &running, "owner").await, 0, "{name}");
        assert_eq!(said(&stage, &running, "new").await, 1000, "{name}");
        // The second one has the file that the first one removed.
        assert_eq!(said(&stage, &running, "gone").await, 0, "{name}");
        // So it is never compressed.
        let file = std::fs::File::open(format!("/proc/{}/root/etc/new", running.pid));
        let flags = ioctl_getflags(file.expect("opened")).expect("read");
        assert!(flags.contains(IFlags::NOCOW), "{flags:?}");
        let mounts = std::fs::read_to_string(format!("/proc/{}/mountinfo", running.pid));
        let mounts = mounts.expect("it lives");
        assert!(
            mounts.contains(" / / ") || mounts.contains("btrfs"),
            "{mounts}"
        );
        assert!(!mounts.contains("overlay"), "{mounts}");
        assert!(
            !mounts.contains(&stage.dir().display().to_string()),
            "{mounts}"
        );
    }
}
