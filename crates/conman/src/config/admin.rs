//! The address of this host's daemon for callers that have no configuration, such as a service
//! unit.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use conman_cli::DEFAULT_SOCKET;
use toml::de::DeTable;

use super::load::{DEFAULT_PATH, read};

const ROOT: u32 = 0;
/// Permission bits of users other than the owner to write.
const OTHERS_WRITE: u32 = 0o022;

/// `listen.admin` of the host's configuration, if it has the field and only root can have written
/// the file. `None` if the file does not exist but the default socket does, as for a daemon that
/// runs with another configuration.
pub(crate) fn admin_socket() -> Option<PathBuf> {
    let named = named_by(Path::new(DEFAULT_PATH), ROOT)?;
    (named.exists() || !Path::new(DEFAULT_SOCKET).exists()).then_some(named)
}

/// The daemon reports mistakes elsewhere in the file.
fn named_by(path: &Path, owner: u32) -> Option<PathBuf> {
    let is_owners = |metadata: &Metadata| {
        metadata.is_file() && metadata.uid() == owner && metadata.mode() & OTHERS_WRITE == 0
    };
    // Checked before it is opened, since opening a pipe blocks.
    fs::metadata(path).ok().filter(is_owners)?;
    let text = read(path).ok()?;
    let (table, _mistakes) = DeTable::parse_recoverable(&text);
    let listen = table.get_ref().get("listen")?.get_ref();
    let admin = Path::new(listen.get("admin")?.get_ref().as_str()?);
    admin.is_absolute().then(|| admin.to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_socket_is_believed_of_a_file_that_its_owner_alone_can_have_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("conman.toml");
        let me = nix::unistd::geteuid().as_raw();
        let write = |text: &str, mode: u32| {
            fs::write(&path, text).expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("chmod");
        };
        assert_eq!(named_by(&path, me), None, "there is none");
        let text = "[limits]\nno_such_thing = 1\n[listen]\nadmin = \"/run/own/admin.sock\"\n";
        write(text, 0o640);
        let named = Some(PathBuf::from("/run/own/admin.sock"));
        assert_eq!(named_by(&path, me), named);
        assert_eq!(named_by(&path, me + 1), None);
        write(text, 0o660);
        assert_eq!(named_by(&path, me), None);
        for other in [
            "",
            "listen = 1\n",
            "[listen]\nadmin = 1\n",
            "[listen]\nadmin = \"here\"\n",
            "\u{0}",
        ] {
            write(other, 0o600);
            assert_eq!(named_by(&path, me), None, "{other:?}");
        }
        assert_eq!(named_by(folder.path(), me), None, "it is no file");
    }
}
