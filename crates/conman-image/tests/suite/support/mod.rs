//! A store beside a tree that nothing may touch, and archives byte by byte.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::print_stderr, reason = "a skipped test says so")]

pub(crate) mod private_mounts;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use conman_image::{ImageLimits, ImageName, ImageStore, ImportError, Refusal, UnpackError};
use tar::{Builder, EntryType, Header};

/// Unpacking sets owners and makes whiteouts: both are root's.
pub(crate) fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("skipped: layers are unpacked as root");
    }
    root
}

/// The test goes without what `cargo xtask test` installs.
///
/// # Panics
/// With `CONMAN_NO_SKIPS` set.
pub(crate) fn lacks(what: &str) {
    assert!(
        std::env::var_os("CONMAN_NO_SKIPS").is_none(),
        "{what}, and CONMAN_NO_SKIPS is set"
    );
    eprintln!("skipped: {what}");
}

pub(crate) fn name(text: &str) -> ImageName {
    text.parse().expect("an image name")
}

pub(crate) struct Stage {
    directory: tempfile::TempDir,
    canary: BTreeMap<PathBuf, String>,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().expect("temporary directory");
        let canary = directory.path().join("canary");
        fs::create_dir_all(canary.join("dir")).expect("canary");
        fs::write(canary.join("file"), "untouched").expect("canary");
        fs::write(canary.join("dir/file"), "untouched too").expect("canary");
        let canary = snapshot(&canary);
        Self { directory, canary }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn canary(&self) -> PathBuf {
        self.path().join("canary")
    }

    pub(crate) fn store(&self) -> ImageStore {
        self.store_with(ImageLimits::default())
    }

    pub(crate) fn store_with(&self, limits: ImageLimits) -> ImageStore {
        ImageStore::open(&self.path().join("store"), limits).expect("store")
    }

    pub(crate) fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.path().join(name);
        fs::write(&path, content).expect("write");
        path
    }

    pub(crate) fn assert_canary_untouched(&self) {
        assert_eq!(snapshot(&self.canary()), self.canary);
    }

    /// Imports what must be refused, and looks whether anything of it is left anywhere.
    pub(crate) fn refused(&self, store: &ImageStore, archive: &[u8]) -> ImportError {
        let path = self.file("hostile.tar", archive);
        let before = snapshot(store.directory());
        let error = store
            .import(&path, &name("hostile:1"))
            .expect_err("must be refused");
        assert_eq!(snapshot(store.directory()), before, "{error:?}");
        self.assert_canary_untouched();
        error
    }
}

pub(crate) fn refusal(error: ImportError) -> Refusal {
    match error {
        ImportError::Archive(unpack) => match *unpack {
            UnpackError::Refused { why, .. } => why,
            other => panic!("another error: {other}"),
        },
        other => panic!("another error: {other}"),
    }
}

pub(crate) fn unpack_error(error: ImportError) -> UnpackError {
    match error {
        ImportError::Archive(unpack) => *unpack,
        ImportError::Layer { source, .. } => *source,
        other => panic!("another error: {other}"),
    }
}

/// Every file below, with what an intruder could have changed of it.
pub(crate) fn snapshot(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut pending = vec![root.to_owned()];
    while let Some(path) = pending.pop() {
        let metadata = fs::symlink_metadata(&path).expect("metadata");
        let content = if metadata.is_file() {
            fs::read(&path).expect("read")
        } else {
            Vec::new()
        };
        // Making and removing a scratch file changes a directory's times and nothing else.
        let links = if metadata.is_dir() {
            0
        } else {
            metadata.nlink()
        };
        found.insert(
            path.clone(),
            format!(
                "{:o} {}:{} {links} {content:?}",
                metadata.mode(),
                metadata.uid(),
                metadata.gid()
            ),
        );
        if metadata.is_dir() {
            for entry in fs::read_dir(&path).expect("read_dir") {
                pending.push(entry.expect("entry").path());
            }
        }
    }
    found
}

/// An archive whose headers are written as they are told, however wrong.
pub(crate) struct Tar(Builder<Vec<u8>>);

impl Tar {
    pub(crate) fn new() -> Self {
        Self(Builder::new(Vec::new()))
    }

    pub(crate) fn entry(
        mut self,
        kind: EntryType,
        path: impl AsRef<[u8]>,
        target: impl AsRef<[u8]>,
        data: &[u8],
        change: impl FnOnce(&mut Header),
    ) -> Self {
        let mut header = Header::new_gnu();
        put(&mut header.as_old_mut().name, path.as_ref());
        put(&mut header.as_old_mut().linkname, target.as_ref());
        header.set_entry_type(kind);
        header.set_size(data.len() as u64);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_700_000_000);
        change(&mut header);
        header.set_cksum();
        self.0.append(&header, data).expect("into memory");
        self
    }

    pub(crate) fn file(self, path: impl AsRef<[u8]>, data: &[u8]) -> Self {
        self.entry(EntryType::Regular, path, "", data, |_| {})
    }

    pub(crate) fn directory(self, path: impl AsRef<[u8]>) -> Self {
        self.entry(EntryType::Directory, path, "", b"", |header| {
            header.set_mode(0o755)
        })
    }

    pub(crate) fn symlink(self, path: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Self {
        self.entry(EntryType::Symlink, path, target, b"", |_| {})
    }

    pub(crate) fn link(self, path: impl AsRef<[u8]>, target: impl AsRef<[u8]>) -> Self {
        self.entry(EntryType::Link, path, target, b"", |_| {})
    }

    /// PAX records for the next entry.
    pub(crate) fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut data = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let mut length = rest;
            while length != rest + length.to_string().len() {
                length = rest + length.to_string().len();
            }
            write!(data, "{length} {key}=").expect("into memory");
            data.extend_from_slice(value);
            data.push(b'\n');
        }
        self.entry(EntryType::XHeader, "pax", "", &data, |_| {})
    }

    pub(crate) fn bytes(self) -> Vec<u8> {
        self.0.into_inner().expect("into memory")
    }
}

fn put(field: &mut [u8], bytes: &[u8]) {
    field[..bytes.len()].copy_from_slice(bytes);
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    encoder.write_all(bytes).expect("into memory");
    encoder.finish().expect("into memory")
}

pub(crate) fn zstd(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
}

/// Without compression, which takes the encoder very long unoptimized, but with a checksum.
pub(crate) fn zstd_stored(bytes: &[u8]) -> Vec<u8> {
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Uncompressed)
}
