//! Archives by `docker save`, and by apko: `manifest.json`, configurations, and layers, which apko compresses.

use serde::Deserialize;

use crate::archive::{Members, Section};
use crate::beneath::read_bounded;
use crate::blobs::{carry_out, parse, plan};
use crate::digest::Digest;
use crate::image::Image;
use crate::import::ImportError;
use crate::name::ImageName;
use crate::store::ImageStore;

/// An image in `manifest.json`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

pub(crate) fn import(
    store: &ImageStore,
    members: &Members,
    name: &ImageName,
) -> Result<Image, ImportError> {
    let saved: Vec<Saved> = parse("manifest.json", &read(store, members, "manifest.json")?)?;
    let saved = choose(saved, name)?;
    let bytes = read(store, members, &saved.config)?;
    verify_name(&saved.config, Digest::of(&bytes))?;
    let plan = plan(&bytes, saved.layers.len(), store)?;
    carry_out(store, plan, name, |index| {
        open(members, &saved.layers[index])
    })
}

fn open(members: &Members, member: &str) -> Result<Section, ImportError> {
    members.open(member).ok_or_else(|| ImportError::Missing {
        what: shown(member),
    })
}

/// The only image, or the one with the name.
fn choose(mut saved: Vec<Saved>, name: &ImageName) -> Result<Saved, ImportError> {
    if saved.len() > 1 {
        let wanted = name.to_string();
        let bears = |one: &Saved| one.repo_tags.iter().flatten().any(|tag| *tag == wanted);
        let Some(at) = saved.iter().position(bears) else {
            let tags = saved.iter().flat_map(|one| one.repo_tags.iter().flatten());
            let present: Vec<&str> = tags.map(String::as_str).take(8).collect();
            return Err(ImportError::Ambiguous {
                count: saved.len(),
                present: present.join(", ").chars().take(300).collect(),
            });
        };
        return Ok(saved.swap_remove(at));
    }
    saved.pop().ok_or_else(|| ImportError::Missing {
        what: "any image in manifest.json".to_owned(),
    })
}

/// Every version of Docker names configurations by their digest, and apko with `sha256:`. Some other tools that
/// write this format do not.
fn verify_name(member: &str, actual: Digest) -> Result<(), ImportError> {
    let file = member.rsplit('/').next().unwrap_or(member);
    let stem = file.strip_suffix(".json").unwrap_or(file);
    let stem = stem.strip_prefix("sha256:").unwrap_or(stem);
    match Digest::from_hex(stem) {
        Ok(expected) if expected != actual => Err(ImportError::DigestMismatch {
            what: "the configuration".to_owned(),
            expected,
            actual,
        }),
        Ok(_) | Err(_) => Ok(()),
    }
}

fn read(store: &ImageStore, members: &Members, member: &str) -> Result<Vec<u8>, ImportError> {
    let what = || shown(member);
    let section = open(members, member)?;
    let size = section.size();
    let bytes = read_bounded(section, store.limits().max_json_bytes).map_err(|source| {
        ImportError::ReadPart {
            what: what(),
            source,
        }
    })?;
    if (bytes.len() as u64) < size {
        return Err(ImportError::SizeMismatch {
            what: what(),
            expected: size,
            actual: bytes.len() as u64,
        });
    }
    Ok(bytes)
}

fn shown(member: &str) -> String {
    format!(
        "the member {:?}",
        member.chars().take(100).collect::<String>()
    )
}
