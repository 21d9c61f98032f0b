//! `records/HEX.json`: a copy of each image's data in the index.
//!
//! The layers' trees do not show how they make up an image, and the index is one file. If that
//! file is damaged, it is rebuilt from these records. They are written after it, and used only
//! then.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::Path;

use conman_linux::replace_file;
use serde::{Deserialize, Serialize};

use crate::beneath::read_bounded;
use crate::digest::ImageId;
use crate::index::{ImageRecord, Index};
use crate::name::ImageName;

/// Their directory below the store's.
pub(crate) const RECORDS: &str = "records";

const SUFFIX: &str = ".json";

/// Most bytes of a record: configurations have far lower limits.
const MAX_RECORD_BYTES: u64 = 16 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct StoredImage {
    names: Vec<ImageName>,
    image: ImageRecord,
}

/// Writes the records of all images that have changed, and continues after an error: a failure
/// may have left any of them out of date.
pub(crate) fn follow(index: &Index, directory: &Path) -> io::Result<()> {
    let records = directory.join(RECORDS);
    let mut names: BTreeMap<&ImageId, Vec<ImageName>> = BTreeMap::new();
    for (name, image) in &index.names {
        names.entry(image).or_default().push(name.clone());
    }
    let mut outcome = Ok(());
    for (id, image) in &index.images {
        let kept = StoredImage {
            names: names.remove(id).unwrap_or_default(),
            image: image.clone(),
        };
        if let Err(error) = write(&records, id, &kept) {
            outcome = Err(error);
        }
    }
    for entry in fs::read_dir(&records)? {
        let entry = entry?;
        let listed = image_of(&entry.file_name()).is_some_and(|id| index.images.contains_key(&id));
        if !listed && let Err(error) = fs::remove_file(entry.path()) {
            outcome = Err(error);
        }
    }
    outcome
}

fn write(records: &Path, id: &ImageId, kept: &StoredImage) -> io::Result<()> {
    let json = serde_json::to_vec(kept)?;
    let path = records.join(format!("{}{SUFFIX}", id.hex()));
    let present = File::open(&path).and_then(|file| read_bounded(file, MAX_RECORD_BYTES));
    if present.is_ok_and(|present| present == json) {
        return Ok(());
    }
    replace_file(&path, &json)
}

/// An index of all records. If several have a name, the latest one gets it.
pub(crate) fn index(directory: &Path) -> io::Result<Index> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory.join(RECORDS))? {
        let entry = entry?;
        let Some(id) = image_of(&entry.file_name()) else {
            continue;
        };
        match read(&entry.path()) {
            Ok(kept) => found.push((id, kept)),
            Err(error) if is_damage(&error) => {
                let path = entry.path();
                tracing::warn!(
                    path = %path.display(), %error,
                    "cannot restore an image; import it again"
                );
            }
            // It may be readable the next time.
            Err(error) => return Err(error),
        }
    }
    found.sort_by_key(|(_, kept)| kept.image.imported_at_s);
    let mut index = Index::default();
    for (id, kept) in found {
        index
            .names
            .extend(kept.names.into_iter().map(|name| (name, id)));
        index.images.insert(id, kept.image);
    }
    Ok(index)
}

fn read(path: &Path) -> io::Result<StoredImage> {
    Ok(serde_json::from_slice(&read_bounded(
        File::open(path)?,
        MAX_RECORD_BYTES,
    )?)?)
}

fn image_of(file: &std::ffi::OsStr) -> Option<ImageId> {
    ImageId::from_hex(file.to_str()?.strip_suffix(SUFFIX)?).ok()
}

/// Whether an error means that a file has invalid content.
pub(crate) fn is_damage(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::InvalidData | ErrorKind::UnexpectedEof | ErrorKind::FileTooLarge
    )
}
