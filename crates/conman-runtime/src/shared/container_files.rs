//! A container's own small files: `hosts`, `resolv.conf` and `hostname`, which Docker does not
//! supply when its networking is off. They lie on the host, except those of a native container,
//! which are in the shim's memory.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use conman_core::egress::egress_variables;
use conman_linux::{remove_if_present, spread_directories};
use conman_proto::ResolvedSpec;

use crate::{ContainerKey, RuntimeError};

/// Readable by the container's unprivileged users. No process in the container can write it
/// (read-only mount).
const FILE_MODE: u32 = 0o644;
const DIR_MODE: u32 = 0o755;

const HOSTS: &str = "hosts";
const RESOLV_CONF: &str = "resolv.conf";
const HOSTNAME: &str = "hostname";

/// The files of a container without a network of the runtime: names below their directory on the
/// host, and paths in the container.
pub const OWN_FILES: [(&str, &str); 3] = [
    (HOSTS, "/etc/hosts"),
    (RESOLV_CONF, "/etc/resolv.conf"),
    (HOSTNAME, "/etc/hostname"),
];

/// Contents of each of [`OWN_FILES`], in their order.
///
/// `name_servers` is empty for a container that has none.
pub fn contents(key: &ContainerKey, name_servers: &[IpAddr]) -> [String; OWN_FILES.len()] {
    let session = &key.session;
    [
        format!("127.0.0.1\tlocalhost {session}\n::1\tlocalhost ip6-localhost ip6-loopback\n"),
        resolv_conf(name_servers),
        format!("{session}\n"),
    ]
}

/// The name servers of a container whose namespace has conman's resolver.
pub fn own_resolver(spec: &ResolvedSpec) -> Vec<IpAddr> {
    spec.has_resolver()
        .then(|| Ipv4Addr::LOCALHOST.into())
        .into_iter()
        .collect()
}

fn resolv_conf(name_servers: &[IpAddr]) -> String {
    if name_servers.is_empty() {
        // Resolvers use 127.0.0.1 then, which refuses at once unless the session serves names. The
        // options bound the wait when it does but does not answer.
        return "# no name server\noptions attempts:1 timeout:1\n".to_owned();
    }
    let lines = name_servers
        .iter()
        .map(|server| format!("nameserver {server}\n"));
    lines.collect()
}

/// The files below one `files_dir`.
#[derive(Debug, Clone)]
pub struct ContainerFiles {
    dir: PathBuf,
}

impl ContainerFiles {
    pub fn at(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
        }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn hosts(&self) -> PathBuf {
        self.dir.join(HOSTS)
    }

    pub fn resolv_conf(&self) -> PathBuf {
        self.dir.join(RESOLV_CONF)
    }

    pub fn hostname(&self) -> PathBuf {
        self.dir.join(HOSTNAME)
    }

    /// Makes only the directory. Files of an earlier attempt stay.
    pub fn make(&self) -> Result<(), RuntimeError> {
        make_directory(&self.dir)?;
        if let Some(parent) = self.dir.parent() {
            spread_directories(parent);
        }
        Ok(())
    }

    /// Writes every file, replacing those of an earlier attempt.
    pub fn write(&self, key: &ContainerKey, name_servers: &[IpAddr]) -> Result<(), RuntimeError> {
        self.make()?;
        for ((name, _), text) in OWN_FILES.iter().zip(contents(key, name_servers)) {
            let path = self.dir.join(name);
            // The mode is set separately, so that no umask narrows it.
            fs::write(&path, text)
                .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(FILE_MODE)))
                .map_err(|source| host_error("write", &path, source))?;
        }
        Ok(())
    }

    /// Removes the files by name and then the directories, so that a wrong path cannot remove
    /// anything else. Files that do not exist are ignored.
    pub fn remove(&self) -> Result<(), RuntimeError> {
        for path in OWN_FILES.map(|(name, _)| self.dir.join(name)) {
            remove_if_present(&path).map_err(|source| host_error("remove", &path, source))?;
        }
        if_present(fs::remove_dir(&self.dir))
            .map(drop)
            .map_err(|source| host_error("remove", &self.dir, source))
    }
}

/// The environment variables that state a container's session and generation.
pub fn generation_environment(key: &ContainerKey) -> [(String, String); 2] {
    [
        ("CONMAN_SESSION_ID".to_owned(), key.session.to_string()),
        ("CONMAN_GENERATION".to_owned(), key.generation.to_string()),
    ]
}

/// The environment variables by which programs find the egress proxy; none without `egress`.
pub fn egress_environment(spec: &ResolvedSpec) -> Vec<(String, String)> {
    if !spec.has_egress_proxy() {
        return Vec::new();
    }
    egress_variables()
}

fn make_directory(path: &Path) -> Result<(), RuntimeError> {
    DirBuilder::new()
        .recursive(true)
        .mode(DIR_MODE)
        .create(path)
        .map_err(|source| host_error("make", path, source))
}

/// `None` if there is no such file.
pub fn if_present<T>(outcome: io::Result<T>) -> io::Result<Option<T>> {
    match outcome {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        outcome => outcome.map(Some),
    }
}

pub fn host_error(action: &'static str, path: &Path, source: io::Error) -> RuntimeError {
    RuntimeError::Host {
        action,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use conman_proto::Generation;

    use super::*;

    fn key() -> ContainerKey {
        ContainerKey::new(
            "alice".parse().expect("a valid id"),
            Generation::new(7).expect("not zero"),
        )
    }

    #[test]
    fn what_was_written_is_removed_again_and_removing_it_twice_is_fine() {
        let root = tempfile::tempdir().expect("a directory");
        let files = ContainerFiles::at(&root.path().join("alice.7"));
        files.write(&key(), &[]).expect("written");
        files
            .write(&key(), &[])
            .expect("written again after a failed attempt");
        let hostname = fs::read_to_string(files.hostname());
        assert_eq!(hostname.expect("a file"), "alice\n");
        files.remove().expect("removed");
        files.remove().expect("nothing left to remove");
        assert_eq!(fs::read_dir(root.path()).expect("readable").count(), 0);
    }

    #[test]
    fn only_a_container_with_egress_has_a_name_server() {
        let root = tempfile::tempdir().expect("a directory");
        let files = ContainerFiles::at(root.path());
        for has_egress in [true, false] {
            let resolver = has_egress.then(|| Ipv4Addr::LOCALHOST.into());
            files.write(&key(), resolver.as_slice()).expect("written");
            let text = fs::read_to_string(files.resolv_conf()).expect("a file");
            assert_eq!(text.contains("nameserver 127.0.0.1"), has_egress, "{text}");
        }
    }

    #[test]
    fn a_directory_that_holds_something_else_is_left_with_it() {
        let root = tempfile::tempdir().expect("a directory");
        let files = ContainerFiles::at(root.path());
        files.write(&key(), &[]).expect("written");
        fs::write(root.path().join("precious"), "x").expect("written");
        let error = files.remove().expect_err("the directory is not empty");
        assert!(matches!(error, RuntimeError::Host { .. }), "{error}");
        assert!(root.path().join("precious").exists());
    }
}
