//! Small files of the state directory: JSON with a version, replaced atomically, read with a bound.

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Version of every format that conman stores or speaks: the state directory, etcd's keys, the shim's
/// protocol. Another version is refused. Fields that readers may ignore are added without a new one.
pub const FORMAT: u32 = 2;

/// Longest file, unless another limit is given.
const MAX_BYTES: u64 = 16_384;

/// A small file with a struct or map as its content.
///
/// Fields that a later conman adds are ignored. A file of another [`FORMAT`] is an error of the kind
/// [`ErrorKind::Unsupported`], damage one of another kind. All methods block on the disk.
#[derive(Debug, Clone)]
pub struct StateFile {
    path: PathBuf,
    max_bytes: u64,
}

#[derive(Serialize)]
struct Versioned<'a, T> {
    version: u32,
    #[serde(flatten)]
    content: &'a T,
}

#[derive(Deserialize)]
struct Head {
    /// Missing in files from before 0.1.0.
    version: Option<u32>,
}

impl StateFile {
    #[must_use]
    pub fn new(path: PathBuf) -> Self {
        Self::with_limit(path, MAX_BYTES)
    }

    /// A file that may have up to `max_bytes`.
    #[must_use]
    pub fn with_limit(path: PathBuf, max_bytes: u64) -> Self {
        Self { path, max_bytes }
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the content, or `None` if there is no file.
    pub fn read<T: DeserializeOwned>(&self) -> io::Result<Option<T>> {
        let file = match File::open(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        file.take(self.max_bytes).read_to_end(&mut bytes)?;
        // First and separately: another version may have other fields.
        let Head { version } = serde_json::from_slice(&bytes)?;
        let found = version.unwrap_or(1);
        if found != FORMAT {
            let what = format!("it has format {found}, and this conman uses format {FORMAT}");
            return Err(io::Error::new(ErrorKind::Unsupported, what));
        }
        Ok(Some(serde_json::from_slice(&bytes)?))
    }

    /// Replaces the file durably.
    pub fn write<T: Serialize>(&self, content: &T) -> io::Result<()> {
        replace_file(&self.path, &self.versioned(content)?)
    }

    /// Replaces the file without waiting for the disk: after a crash of the machine it may be missing or
    /// damaged.
    pub fn write_unsynced<T: Serialize>(&self, content: &T) -> io::Result<()> {
        replace(&self.path, &self.versioned(content)?, false)
    }

    /// Creates the file durably, unless there is one. Of several processes one succeeds. Returns whether
    /// this one did.
    pub fn create<T: Serialize>(&self, content: &T) -> io::Result<bool> {
        let draft = with_suffix(&self.path, &format!(".new.{}", std::process::id()));
        write_draft(&draft, &self.versioned(content)?, true)?;
        let created = match fs::hard_link(&draft, &self.path) {
            Ok(()) => true,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
            Err(error) => return Err(error),
        };
        fs::remove_file(&draft)?;
        sync_parent(&self.path)?;
        Ok(created)
    }

    /// Removes the file durably, if there is one.
    pub fn remove(&self) -> io::Result<()> {
        remove_if_present(&self.path)?;
        sync_parent(&self.path)
    }

    /// Fails if [`StateFile::read`] could not read all of it.
    fn versioned<T: Serialize>(&self, content: &T) -> io::Result<Vec<u8>> {
        let version = FORMAT;
        let bytes = serde_json::to_vec(&Versioned { version, content })?;
        if bytes.len() as u64 > self.max_bytes {
            let what = format!("it would be longer than {} bytes", self.max_bytes);
            return Err(io::Error::new(ErrorKind::FileTooLarge, what));
        }
        Ok(bytes)
    }
}

/// Writes a file durably: after a crash either the old or the new file is there. Only its owner may read it.
/// A file of the same name with `.new` appended is overwritten.
pub fn replace_file(path: &Path, bytes: &[u8]) -> io::Result<()> {
    replace(path, bytes, true)
}

fn replace(path: &Path, bytes: &[u8], durably: bool) -> io::Result<()> {
    let draft = with_suffix(path, ".new");
    let written = write_draft(&draft, bytes, durably);
    if let Err(error) = written.and_then(|()| fs::rename(&draft, path)) {
        // On a full disk, this frees a block for other files.
        let _ = fs::remove_file(&draft);
        return Err(error);
    }
    if durably { sync_parent(path) } else { Ok(()) }
}

fn write_draft(draft: &Path, bytes: &[u8], durably: bool) -> io::Result<()> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    let mut file = options.open(draft)?;
    // A leftover file keeps the permissions that it was created with.
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.write_all(bytes)?;
    if durably { file.sync_all() } else { Ok(()) }
}

/// Appends to the last part of a path.
#[must_use]
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Removes a file, if there is one.
pub fn remove_if_present(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Makes the creation, renaming or removal of a file durable.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => File::open(".")?.sync_all(),
        Some(parent) => File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_or_stays() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("state.json");
        let draft = dir.path().join("state.json.new");
        fs::write(&draft, "left behind, and to be read by all").expect("written");
        replace_file(&path, b"one and more").expect("made");
        replace_file(&path, b"two").expect("replaced");
        assert_eq!(fs::read(&path).expect("read"), b"two");
        let mode = fs::metadata(&path).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        // Where it cannot be written, nothing changes.
        fs::create_dir(&draft).expect("made");
        replace_file(&path, b"three").expect_err("there is a directory");
        assert_eq!(fs::read(&path).expect("read"), b"two");
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Content {
        name: String,
    }

    fn content(name: &str) -> Content {
        Content {
            name: name.to_owned(),
        }
    }

    #[test]
    fn what_is_written_is_read_back_until_it_is_removed() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = StateFile::new(dir.path().join("state.json"));
        assert_eq!(file.read::<Content>().expect("none yet"), None);
        file.write(&content("a")).expect("written");
        assert_eq!(file.read().expect("read"), Some(content("a")));
        file.write_unsynced(&content("b")).expect("written");
        assert_eq!(file.read().expect("read"), Some(content("b")));
        file.remove().expect("removed");
        file.remove().expect("still removed");
        assert_eq!(file.read::<Content>().expect("none"), None);
        assert!(file.create(&content("c")).expect("created"));
        assert!(!file.create(&content("d")).expect("there is one"));
        assert_eq!(file.read().expect("read"), Some(content("c")));
        assert_eq!(fs::read_dir(dir.path()).expect("readable").count(), 1);
    }

    #[test]
    fn a_later_field_is_ignored_and_another_version_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = StateFile::new(dir.path().join("state.json"));
        let read = |text: String| {
            fs::write(file.path(), text).expect("written");
            file.read::<Content>()
        };
        let later = format!(r#"{{"version":{FORMAT},"name":"a","more":1}}"#);
        assert_eq!(read(later).expect("read"), Some(content("a")));
        for version in [FORMAT - 1, FORMAT + 1] {
            let other = read(format!(r#"{{"version":{version},"title":"a"}}"#));
            let error = other.expect_err("another version");
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.to_string().contains(&format!("format {version}")));
        }
        let error = read(r#"{"name":"a"}"#.to_owned()).expect_err("from before 0.1.0");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let error = read(r#"{"na"#.to_owned()).expect_err("damaged");
        assert_ne!(error.kind(), ErrorKind::Unsupported);
    }
}
