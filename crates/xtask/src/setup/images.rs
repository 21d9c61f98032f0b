//! Images made locally from distribution packages, without an image registry: an archive of the root
//! directory, which conman imports, and Docker where it is used.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::packages;
use crate::process::{output, root, target_dir};
use crate::progress::Step;

/// Only busybox: the smallest image.
pub(crate) const BUSYBOX_IMAGE: &str = "conman-test:busybox";
/// busybox, python3 with pip and the websockets package, websocketd, and the demo's web console.
pub(crate) const DEMO_IMAGE: &str = "conman-demo:latest";
/// The same image under the name that the tests use.
const PYTHON_IMAGE: &str = "conman-test:python";

/// All images that the set-up makes in the machine's Docker.
pub(crate) const IMAGES: [&str; 3] = [BUSYBOX_IMAGE, DEMO_IMAGE, PYTHON_IMAGE];

/// Raised with every change of how images are made, so that older ones are rebuilt.
const RECIPE: &str = "4";
const RECIPE_LABEL: &str = "dev.conman.recipe";
const SEARCH_PATH: &str = "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin";

/// Packages of [`DEMO_IMAGE`].
const DEMO_PACKAGES: [&str; 5] = [
    "busybox-static",
    "python3",
    "python3-pip",
    "python3-websockets",
    "websocketd",
];

/// Packages of the image that the suite's tests of programs in sessions use; tmux needs the locale of libc-bin.
const SHELLS: [&str; 6] = [
    "busybox-static",
    "libc-bin",
    "openssh-server",
    "shellinabox",
    "sudo",
    "tmux",
];

/// Packages of the images for programs that take longer to install, with those of Python and npm below.
const PYTHON: [&str; 3] = ["busybox-static", "libstdc++6", "python3"];
const WEB: [&str; 2] = ["busybox-static", "libstdc++6"];
const BUILD: [&str; 2] = ["busybox-static", "golang-go"];
const DATABASE: [&str; 3] = ["busybox-static", "libc-bin", "postgresql"];
const LAB: [&str; 1] = ["jupyterlab"];
const PYTHON_WEB: [&str; 2] = ["aiohttp", "streamlit"];
const NPM_PROGRAMS: [&str; 4] = ["vite@5", "ws@8", "y-websocket@1", "yjs@13"];
const NEXT: [&str; 3] = ["next@16", "react@19", "react-dom@19"];
/// VS Code, and the version of node that it needs.
const CODE_SERVER: &str = "code-server@4.139.1";
const NODE: &str = "24";

/// Makes the images that Docker lacks.
pub(crate) fn make() -> Result<()> {
    if !is_current(BUSYBOX_IMAGE) {
        let archive = archive("busybox", &["busybox-static"], |_| Ok(()))?;
        import(&archive, &[BUSYBOX_IMAGE])?;
    }
    if !is_current(DEMO_IMAGE) || !is_current(PYTHON_IMAGE) {
        import(&demo_archive()?, &[DEMO_IMAGE, PYTHON_IMAGE])?;
    }
    Ok(())
}

/// Makes the archive of [`DEMO_IMAGE`] where it is missing, and returns its path.
pub(crate) fn demo_archive() -> Result<PathBuf> {
    archive("demo", &DEMO_PACKAGES, |_| Ok(()))
}

/// Makes the archive with OpenSSH, sudo, tmux and a terminal in a web page.
pub(crate) fn shells_archive() -> Result<PathBuf> {
    archive("shells", &SHELLS, |_| Ok(()))
}

/// Makes the archives for JupyterLab; for Streamlit and aiohttp; for Vite and Yjs; for Next; for VS Code; for Go; for
/// PostgreSQL. One of all would take each test long to import.
pub(crate) fn slow_archives() -> Result<()> {
    archive("notebook", &PYTHON, |rootfs| {
        add_python(&rootfs.join("opt/lab"), &LAB)
    })?;
    archive("python-web", &PYTHON, |rootfs| {
        add_python(&rootfs.join("opt/web"), &PYTHON_WEB)
    })?;
    archive("web", &WEB, |rootfs| add_node(rootfs, &NPM_PROGRAMS))?;
    archive("next", &WEB, |rootfs| add_node(rootfs, &NEXT))?;
    archive("editor", &WEB, |rootfs| add_node(rootfs, &[CODE_SERVER]))?;
    archive("build", &BUILD, |_| Ok(()))?;
    archive("database", &DATABASE, |_| Ok(()))?;
    Ok(())
}

fn add_python(directory: &Path, programs: &[&str]) -> Result<()> {
    // The image's python3 is the same package as the host's.
    let mut pip = Command::new("/usr/bin/python3");
    pip.args(["-m", "pip", "install", "--quiet", "--target"]);
    output(pip.arg(directory).args(programs)).map(drop)
}

/// Adds node and programs to /opt/web. Node is npm's: code-server needs a newer one than distributions
/// have, and compiles modules for it.
fn add_node(rootfs: &Path, programs: &[&str]) -> Result<()> {
    let directory = rootfs.join("opt/web");
    fs::create_dir_all(&directory).with_context(|| format!("making {}", directory.display()))?;
    // Recent versions of npm run only the scripts of listed packages.
    let settings = "{\"allowScripts\": {\"code-server\": true}}";
    fs::write(directory.join("package.json"), settings).context("writing package.json")?;
    let architecture = match std::env::consts::ARCH {
        "aarch64" => "arm64",
        _ => "x64",
    };
    let node = format!("node-linux-{architecture}");
    let install = || {
        let mut npm = Command::new("npm");
        npm.args(["install", "--no-audit", "--no-fund", "--prefix"]);
        npm.arg(&directory);
        npm
    };
    output(install().arg(format!("{node}@{NODE}")))?;
    let node = Path::new("node_modules").join(node);
    symlink(node.join("bin"), directory.join("bin")).context("linking node")?;
    let mut path = directory.join("bin").into_os_string();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    output(
        install()
            .env("PATH", path)
            .env("npm_config_nodedir", directory.join(node))
            // code-server's script refuses to run as root without it.
            .env("npm_config_unsafe_perm", "true")
            .args(programs),
    )?;
    Ok(())
}

fn is_current(image: &str) -> bool {
    let format = format!("{{{{index .Config.Labels \"{RECIPE_LABEL}\"}}}}");
    output(Command::new("docker").args(["image", "inspect", "--format", &format, image]))
        .is_ok_and(|output| output.stdout.trim_ascii() == RECIPE.as_bytes())
}

/// `add` puts more than packages into the root.
fn archive(
    name: &str,
    programs: &[&str],
    add: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let directory = target_dir().join("images");
    let path = directory.join(format!("{name}-{RECIPE}.tar"));
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(&directory).with_context(|| format!("making {}", directory.display()))?;
    let step = Step::start(format!("making the image {name}"));
    let work = tempfile::tempdir_in(&directory).context("making a temporary folder")?;
    let (packages_dir, rootfs) = (work.path().join("packages"), work.path().join("rootfs"));
    for directory in [&packages_dir, &rootfs] {
        fs::create_dir(directory).with_context(|| format!("making {}", directory.display()))?;
    }
    fs::set_permissions(&rootfs, fs::Permissions::from_mode(0o755)).context("opening the root")?;
    packages::download(&step, programs, &packages_dir)?;
    merge_usr(&rootfs)?;
    for entry in fs::read_dir(&packages_dir).context("listing the fetched packages")? {
        let package = entry.context("listing the fetched packages")?.path();
        step.note(&package.file_name().unwrap_or_default().to_string_lossy());
        unpack(&package, &rootfs)?;
    }
    trim(&rootfs)?;
    furnish(&rootfs)?;
    link_busybox(&rootfs)?;
    add(&rootfs)?;
    let draft = work.path().join("archive");
    output(
        Command::new("tar")
            .args(["--create", "--numeric-owner", "--owner=0", "--group=0"])
            .args(["--file".as_ref(), draft.as_os_str()])
            .args(["--directory".as_ref(), rootfs.as_os_str(), ".".as_ref()]),
    )?;
    fs::rename(&draft, &path).with_context(|| format!("writing {}", path.display()))?;
    step.done();
    Ok(path)
}

/// Debian and Ubuntu expect /bin, /sbin and /lib to be links into /usr; unpacking a package into
/// an empty folder would make real folders of them.
fn merge_usr(rootfs: &Path) -> Result<()> {
    for name in ["bin", "sbin", "lib", "lib64"] {
        let real = rootfs.join("usr").join(name);
        fs::create_dir_all(&real).with_context(|| format!("making {}", real.display()))?;
        symlink(Path::new("usr").join(name), rootfs.join(name))
            .with_context(|| format!("linking /{name}"))?;
    }
    Ok(())
}

/// `dpkg-deb --extract` would replace the links of [`merge_usr`]; tar keeps them.
fn unpack(package: &Path, rootfs: &Path) -> Result<()> {
    let mut contents = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .stdout(Stdio::piped())
        .spawn()
        .context("starting dpkg-deb")?;
    let archive = contents.stdout.take().context("reading from dpkg-deb")?;
    let unpacked = Command::new("tar")
        .args(["--extract", "--keep-directory-symlink", "--directory"])
        .arg(rootfs)
        .stdin(archive)
        .status()
        .context("starting tar")?;
    let packed = contents.wait().context("waiting for dpkg-deb")?;
    if !unpacked.success() || !packed.success() {
        bail!("cannot unpack {}", package.display());
    }
    Ok(())
}

fn trim(rootfs: &Path) -> Result<()> {
    for name in [
        "usr/share/doc",
        "usr/share/man",
        "usr/share/locale",
        "usr/share/perl",
    ] {
        match fs::remove_dir_all(rootfs.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("removing {name} from the image"));
            }
            _ => {}
        }
    }
    Ok(())
}

fn furnish(rootfs: &Path) -> Result<()> {
    for name in [
        "dev", "etc", "proc", "root", "run", "srv", "sys", "tmp", "var/tmp",
    ] {
        let path = rootfs.join(name);
        fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
    }
    for name in ["tmp", "var/tmp"] {
        fs::set_permissions(rootfs.join(name), fs::Permissions::from_mode(0o1777))
            .with_context(|| format!("opening /{name} to all users"))?;
    }
    let users = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n";
    fs::write(rootfs.join("etc/passwd"), users).context("writing /etc/passwd")?;
    fs::write(rootfs.join("etc/group"), "root:x:0:\nnogroup:x:65534:\n")
        .context("writing /etc/group")?;
    let console = root().join("deploy/demo");
    for name in ["index.html", "console.sh"] {
        fs::copy(console.join(name), rootfs.join("srv").join(name))
            .with_context(|| format!("copying deploy/demo/{name} into the image"))?;
    }
    fs::set_permissions(
        rootfs.join("srv/console.sh"),
        fs::Permissions::from_mode(0o755),
    )
    .context("making the console executable")
}

/// One link for each of busybox's programs that no package contains.
fn link_busybox(rootfs: &Path) -> Result<()> {
    let busybox = rootfs.join("usr/bin/busybox");
    let listed = output(Command::new(&busybox).arg("--list"))?;
    let programs = String::from_utf8(listed.stdout).context("reading busybox's list")?;
    for program in programs.lines().filter(|name| *name != "busybox") {
        match symlink("busybox", rootfs.join("usr/bin").join(program)) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("linking {program} to busybox"));
            }
            _ => {}
        }
    }
    Ok(())
}

fn import(archive: &Path, names: &[&str]) -> Result<()> {
    let (first, others) = names.split_first().context("an image without a name")?;
    let step = Step::start(format!("importing the image {first} into Docker"));
    let label = format!("LABEL {RECIPE_LABEL}={RECIPE}");
    let env = format!("ENV {SEARCH_PATH}");
    let imported = Command::new("docker")
        .args([
            "import",
            "--change",
            &label,
            "--change",
            &env,
            "--change",
            "CMD [\"/bin/sh\"]",
        ])
        .arg(archive)
        .arg(first)
        .stdout(Stdio::null())
        .status()
        .context("starting docker import")?;
    if !imported.success() {
        bail!("cannot import {first} into Docker; `docker info` shows whether it is healthy");
    }
    for name in others {
        output(Command::new("docker").args(["tag", first, name]))?;
    }
    step.done();
    Ok(())
}
