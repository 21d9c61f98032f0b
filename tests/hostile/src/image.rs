//! The images: one with python3 and the attacks, and hostile ones made for a single probe.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};

const PYTHON: &str = "/usr/bin/python3";
const BUSYBOX: &str = "/usr/bin/busybox";
const INSIDE: &str = include_str!("inside.py");

/// Prints the files that python3 needs for the attacks: its modules, and the libraries that are
/// mapped once all of these are loaded.
const NEEDS: &str = r#"
import sys, ctypes, fcntl, mmap, os, re, resource, select, signal, socket, stat, struct
import termios, threading, time, traceback, encodings.idna, encodings.ascii, encodings.latin_1
found = {os.path.realpath(sys.executable)}
for module in list(sys.modules.values()):
    path = getattr(module, "__file__", None)
    if path:
        found.add(path)
for line in open("/proc/self/maps"):
    path = line.split(None, 5)[-1].strip()
    if path.startswith("/") and ".so" in path:
        found.add(path)
        # Programs ask for a library by another name, a link to the file.
        for entry in os.scandir(os.path.dirname(path)):
            if entry.is_symlink() and os.path.realpath(entry.path) == path:
                found.add(entry.path)
print("\n".join(sorted(found)))
"#;

/// What a machine lacks for the images.
pub(crate) fn missing() -> Option<String> {
    let lacks = |path: &str| !Path::new(path).exists();
    lacks(PYTHON).then(|| format!("{PYTHON} is missing (package python3)"))
}

/// Makes the archive of the image with python3, busybox and the attacks.
pub(crate) fn attacks(directory: &Path) -> PathBuf {
    let root = directory.join("attacks");
    for name in ["bin", "etc", "root", "run", "tmp", "usr/bin", "work"] {
        fs::create_dir_all(root.join(name)).expect("made");
    }
    fs::copy(BUSYBOX, root.join("bin/busybox")).expect("copied");
    for applet in [
        "sh", "ls", "cat", "sleep", "id", "stat", "true", "grep", "[",
    ] {
        let _ = std::os::unix::fs::symlink("busybox", root.join("bin").join(applet));
    }
    let listed = Command::new(PYTHON)
        .args(["-I", "-S", "-c", NEEDS])
        .output();
    let listed = listed.expect("python3 runs");
    assert!(listed.status.success(), "{listed:?}");
    for path in String::from_utf8_lossy(&listed.stdout).lines() {
        copy(Path::new(path), &root);
    }
    // The loader is named by the program itself.
    copy(Path::new("/lib64/ld-linux-x86-64.so.2"), &root);
    let program = fs::canonicalize(PYTHON).expect("python3 is there");
    let _ = std::os::unix::fs::symlink(program, root.join("usr/bin/python3"));
    fs::write(root.join("inside.py"), INSIDE).expect("written");
    fs::write(
        root.join("etc/passwd"),
        "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n",
    )
    .expect("written");
    let path = directory.join("attacks.tar");
    let packed = Command::new("tar")
        .args(["--numeric-owner", "--owner=0", "--group=0", "-cf"])
        .arg(&path)
        .arg("-C")
        .arg(&root)
        .arg(".")
        .status();
    assert!(packed.expect("tar runs").success());
    path
}

fn copy(path: &Path, root: &Path) {
    let target = root.join(path.strip_prefix("/").expect("absolute"));
    fs::create_dir_all(target.parent().expect("a parent")).expect("made");
    fs::copy(path, target).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// An entry of a hostile layer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Entry<'a> {
    File(&'a str, &'a str),
    Directory(&'a str),
    Link(&'a str, &'a str),
    HardLink(&'a str, &'a str),
    Fifo(&'a str),
    /// A block device, 8:0.
    Disk(&'a str),
}

/// Appends an entry exactly as it is, with whatever path.
fn append(archive: &mut Builder<Vec<u8>>, entry: Entry<'_>) {
    let mut header = Header::new_gnu();
    header.set_mode(0o755);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    let (kind, name, target, content) = match entry {
        Entry::File(name, content) => (EntryType::Regular, name, None, content),
        Entry::Directory(name) => (EntryType::Directory, name, None, ""),
        Entry::Link(name, target) => (EntryType::Symlink, name, Some(target), ""),
        Entry::HardLink(name, target) => (EntryType::Link, name, Some(target), ""),
        Entry::Fifo(name) => (EntryType::Fifo, name, None, ""),
        Entry::Disk(name) => (EntryType::Block, name, None, ""),
    };
    header.set_entry_type(kind);
    header.set_size(content.len() as u64);
    let gnu = header.as_gnu_mut().expect("made as one");
    gnu.name[..name.len()].copy_from_slice(name.as_bytes());
    if let Some(target) = target {
        gnu.linkname[..target.len()].copy_from_slice(target.as_bytes());
    }
    if matches!(entry, Entry::Disk(_)) {
        header.set_device_major(8).expect("small");
        header.set_device_minor(0).expect("small");
    }
    header.set_cksum();
    archive
        .append(&header, content.as_bytes())
        .expect("appended");
}

/// A layer of these entries, and of busybox as `/bin/sh`.
fn layer(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut archive = Builder::new(Vec::new());
    let mut busybox = File::open(BUSYBOX).expect("busybox is there");
    archive
        .append_file("bin/busybox", &mut busybox)
        .expect("appended");
    for applet in ["sh", "cat", "ls", "stat", "id", "sleep", "grep", "["] {
        append(
            &mut archive,
            Entry::Link(&format!("bin/{applet}"), "busybox"),
        );
    }
    for entry in entries {
        append(&mut archive, *entry);
    }
    archive.into_inner().expect("finished")
}

/// An archive as `docker save` writes it, of one layer with busybox and these entries; `config` is
/// the part of the image's configuration that a container is started with.
pub(crate) fn hostile(path: &Path, config: &Value, entries: &[Entry<'_>]) {
    let layer = layer(entries);
    let directory = tempfile::tempdir().expect("a directory");
    let write = |name: &str, content: &[u8]| {
        let mut file = File::create(directory.path().join(name)).expect("created");
        file.write_all(content).expect("written");
    };
    write("layer.tar", &layer);
    let summed = Command::new("sha256sum")
        .arg(directory.path().join("layer.tar"))
        .output()
        .expect("sha256sum runs");
    let digest = String::from_utf8_lossy(&summed.stdout[..64]).into_owned();
    let image = json!({
        "architecture": if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" },
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
    });
    write("config.json", image.to_string().as_bytes());
    let manifest = json!([{"Config": "config.json", "RepoTags": null, "Layers": ["layer.tar"]}]);
    write("manifest.json", manifest.to_string().as_bytes());
    let packed = Command::new("tar")
        .arg("-cf")
        .arg(path)
        .arg("-C")
        .arg(directory.path())
        .args(["manifest.json", "config.json", "layer.tar"])
        .status();
    assert!(packed.expect("tar runs").success());
}
