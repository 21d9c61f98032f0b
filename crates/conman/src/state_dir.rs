//! The state directory: its owner, and the id of the installation.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use conman_core::Instance;
use conman_linux::{FORMAT, StateFile};
use conman_registry::fleet_mark::was_in_fleet;
use conman_registry::{start_afresh, used_through};
use serde::{Deserialize, Serialize};

/// File in the state directory that holds the installation's random id.
const INSTANCE_FILE: &str = "instance";

/// Makes the state directory, or the shim's, or checks that no other user could have put files into it.
pub(crate) fn prepare(directory: &Path) -> Result<()> {
    let shown = directory.display();
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .with_context(|| format!("cannot make the directory {shown}"))?;
    let metadata =
        fs::metadata(directory).with_context(|| format!("cannot look at the directory {shown}"))?;
    let own = nix::unistd::geteuid().as_raw();
    if metadata.uid() != own {
        bail!(
            "the directory {shown} belongs to uid {} and conman runs as uid {own}; give it to \
             conman with chown",
            metadata.uid()
        );
    }
    if metadata.mode() & 0o077 != 0 {
        // Records name what runs here, and the key of connect tokens is stored with them.
        let private = fs::Permissions::from_mode(0o700);
        fs::set_permissions(directory, private)
            .with_context(|| format!("cannot keep others out of {shown}"))?;
        tracing::warn!(path = %shown, "removed other users' access to the directory");
    }
    Ok(())
}

/// Content of the file. Every program of the installation reads it first, so its version is that of the
/// whole state directory.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    instance: Instance,
}

/// The id of the installation whose directory this is, if there is one yet.
pub(crate) fn known_instance(directory: &Path) -> Option<Instance> {
    read_instance(directory).ok()?
}

/// The id in the names of everything that this installation makes; created at the first start. If the
/// daemon and its shim create one at the same time, both get the same.
pub(crate) fn instance(directory: &Path) -> Result<Instance> {
    if let Some(instance) = read_instance(directory)? {
        return Ok(instance);
    }
    let mut random = [0; 4];
    getrandom::fill(&mut random).context("cannot get random numbers for the instance id")?;
    let instance = Instance::new(random);
    let file = file(directory);
    // The id is durable before any container has it in its name.
    file.create(&Stored { instance })
        .with_context(|| format!("cannot write {}", file.path().display()))?;
    read_instance(directory)?.context("the instance id has disappeared")
}

fn file(directory: &Path) -> StateFile {
    StateFile::new(directory.join(INSTANCE_FILE))
}

fn read_instance(directory: &Path) -> Result<Option<Instance>> {
    let file = file(directory);
    let error = match file.read::<Stored>() {
        Ok(stored) => return Ok(stored.map(|stored| stored.instance)),
        Err(error) => error,
    };
    let path = file.path().display();
    match error.kind() {
        // Before 0.1.0 it held nothing but the id.
        _ if fs::read_to_string(file.path()).is_ok_and(|text| Instance::parse(text.trim()).is_ok()) => {
            let hint = start_afresh(FORMAT - 1, floor(directory));
            bail!("{} is of a conman from before 0.1.0; {hint}", directory.display())
        }
        ErrorKind::Unsupported => {
            let hint = start_afresh(FORMAT + 1, None);
            bail!("{path} is of another conman: {error}; {hint}")
        }
        ErrorKind::InvalidData | ErrorKind::UnexpectedEof => Err(error).with_context(|| {
            format!("{path} does not contain an instance id; restore it, since containers are found by it")
        }),
        _ => Err(error).with_context(|| format!("cannot read {path}")),
    }
}

/// The greatest generation that the node may have used; `None` if it is not known, as for a node that has
/// been in a fleet, whose generations the fleet gave out.
fn floor(directory: &Path) -> Option<u64> {
    match was_in_fleet(directory) {
        Ok(false) => used_through(directory),
        Ok(true) | Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_that_comes_second_gets_the_id_that_the_first_made() {
        let directory = tempfile::tempdir().expect("a directory");
        let first = instance(directory.path()).expect("made");
        let created = file(directory.path()).create(&Stored {
            instance: Instance::new([9; 4]),
        });
        assert!(!created.expect("there is one"));
        assert_eq!(instance(directory.path()).expect("read"), first);
        let left = fs::read_dir(directory.path()).expect("readable").count();
        assert_eq!(left, 1);
    }

    #[test]
    fn a_state_directory_from_before_the_first_release_is_refused_with_its_floor_and_left_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(INSTANCE_FILE);
        let refusal = |text: &str| {
            fs::write(&path, text).expect("written");
            let error = instance(directory.path()).expect_err("of another format");
            assert_eq!(fs::read_to_string(&path).expect("there"), text);
            format!("{error:#}")
        };
        let older = refusal("1a2b3c4d\n");
        assert!(older.contains("--generation-floor N`, N above"), "{older}");
        // As format 1 wrote it: both slots cover every generation up to 1000.
        let mut slot = [0; 512];
        slot[..8].copy_from_slice(b"conmanHW");
        slot[8] = 1;
        slot[16..24].copy_from_slice(&1_000_u64.to_le_bytes());
        let checksum = crc(&slot[..508]).to_le_bytes();
        slot[508..].copy_from_slice(&checksum);
        fs::write(directory.path().join("generations"), slot).expect("written");
        let older = refusal("1a2b3c4d\n");
        assert!(older.contains("--generation-floor 1000"), "{older}");
        let later = refusal(r#"{"version":3,"instance":"1a2b3c4d"}"#);
        assert!(later.contains("newer conman"), "{later}");
        let damaged = refusal(r#"{"vers"#);
        assert!(damaged.contains("restore it"), "{damaged}");
    }

    /// CRC-32, as in zip.
    fn crc(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                (crc >> 1) ^ (0xEDB8_8320 * (crc & 1))
            })
        })
    }
}
