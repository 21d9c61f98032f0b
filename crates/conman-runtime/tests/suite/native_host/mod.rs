//! What the native runtime needs of a host: an image, and a shim for each instance, which ends with
//! the test.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use conman_core::Instance;
use conman_core::naming::{CgroupDriver, instance_cgroup};
use conman_image::{ImageLimits, ImageStore};
use conman_proto::RuntimeKind;
use conman_runtime::{
    ContainerNetwork, FenceOpener, KeptLogLimits, NativeOptions, NativeRuntime, NativeTimeouts,
    OciOptions, RootStore, RuntimeError, ShimCommand,
};

/// What the store calls busybox.
pub(crate) const IMAGE: &str = "busybox:test";

const BUSYBOX: &str = "/usr/bin/busybox";

/// Bound on the start of a shim.
const PATIENCE: Duration = Duration::from_secs(20);

/// A store with an image, and this test's shims.
pub(crate) struct Host {
    directory: tempfile::TempDir,
    store: ImageStore,
    roots: RootStore,
    shims: Mutex<BTreeMap<Instance, Child>>,
}

impl Host {
    /// Or what the machine lacks.
    pub(crate) fn new() -> Result<Self, String> {
        Self::with_roots(RootStore::Overlay)
    }

    /// The same, with another way to make containers' roots.
    pub(crate) fn with_roots(roots: RootStore) -> Result<Self, String> {
        if !nix::unistd::geteuid().is_root() {
            return Err("containers are made by root".to_owned());
        }
        if !Path::new(BUSYBOX).exists() {
            return Err(format!("{BUSYBOX} is missing (package busybox-static)"));
        }
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("images");
        let store = ImageStore::open(&path, ImageLimits::default()).expect("a new store");
        store
            .import(&archive(directory.path()), &IMAGE.parse().expect("a name"))
            .expect("imported");
        Ok(Self {
            directory,
            store,
            roots,
            shims: Mutex::default(),
        })
    }

    pub(crate) fn open(&self, instance: &Instance, timeouts: NativeTimeouts) -> NativeRuntime {
        self.open_with_oci(instance, timeouts, no_oci())
    }

    pub(crate) fn open_with_oci(
        &self,
        instance: &Instance,
        timeouts: NativeTimeouts,
        oci: OciRuntimes,
    ) -> NativeRuntime {
        let socket = self.path(&format!("{instance}.sock"));
        let mut shims = self.shims.lock().expect("no test has panicked in here");
        shims
            .entry(instance.clone())
            .or_insert_with(|| start_shim(&socket, instance, self.directory.path()));
        let fence = FenceOpener::AnyConnection;
        self.open_under(instance, timeouts, None, (fence, oci))
    }

    /// Beside another one, on the same shim.
    pub(crate) fn open_by(&self, instance: &Instance, fence: FenceOpener) -> NativeRuntime {
        let timeouts = NativeTimeouts::default();
        self.open_under(instance, timeouts, None, (fence, no_oci()))
    }

    /// Without a shim but the one that `shim` becomes.
    pub(crate) fn open_with(
        &self,
        instance: &Instance,
        timeouts: NativeTimeouts,
        shim: Option<ShimCommand>,
    ) -> NativeRuntime {
        let fence = FenceOpener::AnyConnection;
        self.open_under(instance, timeouts, shim, (fence, no_oci()))
    }

    fn open_under(
        &self,
        instance: &Instance,
        timeouts: NativeTimeouts,
        shim: Option<ShimCommand>,
        (fence, oci): (FenceOpener, OciRuntimes),
    ) -> NativeRuntime {
        let opened = self.try_open(instance, timeouts, shim, (fence, oci));
        opened.expect("the host has cgroups")
    }

    pub(crate) fn try_open(
        &self,
        instance: &Instance,
        timeouts: NativeTimeouts,
        shim: Option<ShimCommand>,
        (fence, oci): (FenceOpener, OciRuntimes),
    ) -> Result<NativeRuntime, RuntimeError> {
        let options = NativeOptions {
            instance: instance.clone(),
            directory: self.path(instance.as_str()),
            images: self.store.clone(),
            roots: self.roots,
            bind_first_id: conman_core::DEFAULT_BIND_FIRST_ID,
            socket: self.path(&format!("{instance}.sock")),
            shim,
            fence,
            kept_logs: KeptLogLimits {
                bytes: 0,
                ..KeptLogLimits::default()
            },
            io: None,
            total_cpus: None,
            network: ContainerNetwork::default(),
            oci,
            timeouts,
        };
        NativeRuntime::open(options)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn store(&self) -> &ImageStore {
        &self.store
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let shims = self.shims.get_mut().expect("no test has panicked in here");
        for (instance, shim) in shims {
            let term = conman_linux::Signal::SIGTERM;
            let _ = conman_linux::signal_process(shim.id().cast_signed(), term);
            let _ = shim.wait();
            if let Ok(cgroups) = conman_linux::Cgroups::detect() {
                let _ = cgroups.remove_tree(&instance_cgroup(instance, CgroupDriver::Cgroupfs));
            }
        }
    }
}

fn start_shim(socket: &Path, instance: &Instance, root: &Path) -> Child {
    let shim = Command::new(env!("CARGO_BIN_EXE_conman-runtime-shim"))
        .arg(socket)
        .arg(instance_cgroup(instance, CgroupDriver::Cgroupfs))
        .arg(root)
        .spawn()
        .expect("the shim starts");
    let deadline = Instant::now() + PATIENCE;
    while let Err(error) = conman_shim::socket::connect(socket) {
        assert!(Instant::now() < deadline, "no shim answers: {error}");
        std::thread::park_timeout(Duration::from_millis(2));
    }
    shim
}

/// Makes an archive of a root filesystem with busybox and all its applets.
fn archive(directory: &Path) -> PathBuf {
    let root = directory.join("root");
    for name in ["bin", "etc", "run", "tmp"] {
        fs::create_dir_all(root.join(name)).expect("made");
    }
    fs::copy(BUSYBOX, root.join("bin/busybox")).expect("copied");
    fs::write(root.join("etc/passwd"), "root:x:0:0::/root:/bin/sh\n").expect("written");
    let listed = Command::new(BUSYBOX).arg("--list").output().expect("runs");
    for applet in String::from_utf8_lossy(&listed.stdout).lines() {
        if applet != "busybox" {
            symlink("busybox", root.join("bin").join(applet)).expect("linked");
        }
    }
    let path = directory.join("root.tar");
    let packed = Command::new("tar")
        .args(["--numeric-owner", "--owner=0", "--group=0", "-cf"])
        .arg(&path)
        .arg("-C")
        .arg(&root)
        .arg(".")
        .status()
        .expect("tar runs");
    assert!(packed.success(), "{packed}");
    path
}

type OciRuntimes = BTreeMap<RuntimeKind, OciOptions>;

fn no_oci() -> OciRuntimes {
    OciRuntimes::new()
}
