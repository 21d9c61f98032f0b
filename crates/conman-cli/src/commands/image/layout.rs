//! The directory of an OCI image layout, packed for sending.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

const MARK: &str = "oci-layout";
const INDEX: &str = "index.json";
const BLOBS: &str = "blobs";

/// Whether a directory is an OCI image layout.
pub(super) fn is_layout(directory: &Path) -> bool {
    directory.join(MARK).is_file()
}

/// Packs the layout's files: its two metadata files, and its blobs by algorithm and digest.
/// Nothing else, and no symbolic link.
pub(super) fn pack(directory: &Path, to: impl Write) -> io::Result<()> {
    let mut archive = tar::Builder::new(to);
    for name in [MARK, INDEX] {
        append(&mut archive, &directory.join(name), Path::new(name))?;
    }
    let blobs = directory.join(BLOBS);
    for algorithm in names(&blobs)? {
        let within = blobs.join(&algorithm);
        if !fs::symlink_metadata(&within)?.is_dir() {
            continue;
        }
        for digest in names(&within)? {
            let path = within.join(&digest);
            if fs::symlink_metadata(&path).map_err(named(&path))?.is_file() {
                let name = [OsStr::new(BLOBS), &algorithm, &digest];
                append(
                    &mut archive,
                    &path,
                    &name.iter().collect::<std::path::PathBuf>(),
                )?;
            }
        }
    }
    archive.into_inner()?.flush()
}

fn named(path: &Path) -> impl Fn(io::Error) -> io::Error + '_ {
    move |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Sorted, so that the same layout makes the same archive.
fn names(directory: &Path) -> io::Result<Vec<std::ffi::OsString>> {
    let entries = fs::read_dir(directory).map_err(named(directory))?;
    let mut names = entries
        .map(|entry| Ok(entry?.file_name()))
        .collect::<io::Result<Vec<_>>>()
        .map_err(named(directory))?;
    names.sort();
    Ok(names)
}

fn append(archive: &mut tar::Builder<impl Write>, path: &Path, name: &Path) -> io::Result<()> {
    if !fs::symlink_metadata(path).map_err(named(path))?.is_file() {
        let error = io::Error::new(io::ErrorKind::InvalidInput, "not a regular file");
        return Err(named(path)(error));
    }
    let mut file = File::open(path).map_err(named(path))?;
    let mut header = tar::Header::new_gnu();
    header.set_size(file.metadata().map_err(named(path))?.len());
    header.set_mode(0o644);
    // A blob that grows meanwhile would corrupt the archive; one that shrinks does, and is reported.
    let length = header.size()?;
    let mut content = io::Read::take(&mut file, length);
    archive.append_data(&mut header, name, &mut content)?;
    if content.limit() > 0 {
        return Err(named(path)(io::ErrorKind::UnexpectedEof.into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn a_layout_is_packed_with_its_blobs_and_nothing_else() {
        let directory = tempfile::tempdir().expect("a directory");
        let at = directory.path();
        assert!(!is_layout(at));
        fs::create_dir_all(at.join("blobs/sha256")).expect("made");
        for (name, content) in [
            ("oci-layout", "{}"),
            ("index.json", "[]"),
            ("blobs/sha256/aa", "first"),
            ("blobs/sha256/bb", ""),
            ("blobs/readme", "no algorithm"),
            ("secret", "not of the layout"),
        ] {
            fs::write(at.join(name), content).expect("written");
        }
        std::os::unix::fs::symlink("/etc/passwd", at.join("blobs/sha256/cc")).expect("linked");
        assert!(is_layout(at));
        let mut bytes = Vec::new();
        pack(at, &mut bytes).expect("packed");
        let mut archive = tar::Archive::new(&bytes[..]);
        let mut found = Vec::new();
        for entry in archive.entries().expect("an archive") {
            let mut entry = entry.expect("an entry");
            let path = entry.path().expect("a path").display().to_string();
            let mut content = String::new();
            entry.read_to_string(&mut content).expect("readable");
            found.push((path, content));
        }
        let expected = [
            ("oci-layout", "{}"),
            ("index.json", "[]"),
            ("blobs/sha256/aa", "first"),
            ("blobs/sha256/bb", ""),
        ];
        assert_eq!(found, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
        fs::remove_file(at.join("index.json")).expect("removed");
        std::os::unix::fs::symlink("/etc/passwd", at.join("index.json")).expect("linked");
        let error = pack(at, io::sink()).expect_err("it may lead anywhere");
        assert!(error.to_string().contains("not a regular file"), "{error}");
        fs::remove_file(at.join("index.json")).expect("removed");
        let error = pack(at, io::sink()).expect_err("something is missing");
        assert!(error.to_string().contains("index.json"), "{error}");
    }
}
