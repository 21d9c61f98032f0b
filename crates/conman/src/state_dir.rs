//! The state directory: its owner, and the id of the installation.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use conman_core::Instance;

/// File in the state directory that holds the installation's random id.
const INSTANCE_FILE: &str = "instance";

/// Makes the state directory, or checks that no other user could have put files into it.
pub(crate) fn prepare(directory: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .with_context(|| format!("cannot make the state directory {}", directory.display()))?;
    let metadata = fs::metadata(directory)
        .with_context(|| format!("cannot look at the state directory {}", directory.display()))?;
    let own = rustix::process::geteuid().as_raw();
    if metadata.uid() != own {
        bail!(
            "the state directory {} belongs to uid {} and conman runs as uid {own}; give it to \
             conman with chown, or name another one in `node.state_dir`",
            directory.display(),
            metadata.uid()
        );
    }
    if metadata.mode() & 0o077 != 0 {
        // Records name what runs here, and the key of connect tokens is stored with them.
        let private = fs::Permissions::from_mode(0o700);
        fs::set_permissions(directory, private)
            .with_context(|| format!("cannot keep others out of {}", directory.display()))?;
        tracing::warn!(
            path = %directory.display(),
            "removed other users' access to the state directory"
        );
    }
    Ok(())
}

/// The id of the installation whose directory this is, if there is one yet.
pub(crate) fn known_instance(directory: &Path) -> Option<Instance> {
    read_instance(&directory.join(INSTANCE_FILE)).ok()?
}

/// The id in the names of everything that this installation makes; created at the first start.
pub(crate) fn instance(directory: &Path) -> Result<Instance> {
    let path = directory.join(INSTANCE_FILE);
    match read_instance(&path)? {
        Some(instance) => Ok(instance),
        None => make_instance(&path),
    }
}

fn read_instance(path: &Path) -> Result<Option<Instance>> {
    match fs::read_to_string(path) {
        Ok(text) => Instance::parse(text.trim()).map(Some).with_context(|| {
            format!(
                "{} does not contain an instance id; restore it, since containers are found by it",
                path.display()
            )
        }),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// If the daemon and its shim create one at the same time, both get the same.
fn make_instance(path: &Path) -> Result<Instance> {
    let mut random = [0; 4];
    getrandom::fill(&mut random).context("cannot get random numbers for the instance id")?;
    let instance = Instance::new(random);
    let partial = path.with_extension(format!("new.{instance}"));
    let write = || -> std::io::Result<bool> {
        let mut options = fs::OpenOptions::new();
        let mut file = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&partial)?;
        writeln!(file, "{}", instance.as_str())?;
        file.sync_all()?;
        let first = match fs::hard_link(&partial, path) {
            Ok(()) => true,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(error),
        };
        fs::remove_file(&partial)?;
        // The id must be durable before any container has it in its name.
        fs::File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()?;
        Ok(first)
    };
    let first = write().with_context(|| format!("cannot write {}", path.display()))?;
    if first {
        Ok(instance)
    } else {
        read_instance(path)?.context("the instance id has disappeared")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_comes_second_gets_the_id_that_the_first_made() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(INSTANCE_FILE);
        let first = make_instance(&path).expect("made");
        assert_eq!(make_instance(&path).expect("found"), first);
        assert_eq!(instance(directory.path()).expect("read"), first);
        let left = fs::read_dir(directory.path()).expect("readable").count();
        assert_eq!(left, 1);
    }
}
