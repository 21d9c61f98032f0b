//! Reads `[images]` of the configuration.

use std::collections::BTreeSet;
use std::time::Duration;

use conman_image::ImageLimits;
use conman_runtime::RootStore;

use super::reader::Section;
use super::{Images, Login};

/// What Docker's users leave out.
const DEFAULT_REGISTRY: &str = "docker.io";
/// Longest time between two collections: a year.
const MAX_COLLECT_EVERY_S: u64 = 31_536_000;
/// Fewest bytes of the file system of snapshots; BTRFS needs a large part of less itself.
const MIN_BTRFS_BYTES: u64 = 256 << 20;
/// Most bytes that a limit may have: what the largest file systems hold.
const MAX_BYTES: u64 = 1 << 60;

/// Reads `[images]`.
pub(super) fn images(section: &Section<'_, '_>) -> Images {
    let defaults = ImageLimits::default();
    let bytes = |field: &str, default: u64| {
        section
            .integer(field, 1 << 20..=MAX_BYTES)
            .unwrap_or(default)
    };
    let limits = ImageLimits {
        max_blob_bytes: bytes("max_archive_bytes", defaults.max_blob_bytes),
        max_unpacked_bytes: bytes("max_unpacked_bytes", defaults.max_unpacked_bytes),
        max_file_bytes: bytes("max_file_bytes", defaults.max_file_bytes),
        max_entries: section
            .integer("max_entries", 1..=1_000_000_000)
            .unwrap_or(defaults.max_entries),
        ..defaults
    };
    let collect_every_s = section
        .integer("collect_every_s", 0..=MAX_COLLECT_EVERY_S)
        .unwrap_or(3_600);
    let default_registry = section.parsed("default_registry", |name| {
        let valid = name.is_empty() || is_registry(name);
        valid
            .then(|| name.to_owned())
            .ok_or_else(|| "must be HOST or HOST:PORT, or \"\" for none".to_owned())
    });
    let default_registry = default_registry.unwrap_or_else(|| DEFAULT_REGISTRY.to_owned());
    let images = Images {
        default_registry: (!default_registry.is_empty()).then_some(default_registry),
        registries: registries(section, "registries"),
        insecure_registries: registries(section, "insecure_registries").unwrap_or_default(),
        logins: section
            .section("logins")
            .sections()
            .into_iter()
            .filter_map(|(registry, login)| Some((registry, self::login(&login)?)))
            .collect(),
        limits,
        roots: roots(section),
        collect_every: (collect_every_s > 0).then(|| Duration::from_secs(collect_every_s)),
    };
    section.finish();
    images
}

/// A size without that store has no effect, so that a change of the store is a change of one line.
fn roots(section: &Section<'_, '_>) -> RootStore {
    let is_btrfs = section.parsed("store", |store| match store {
        "overlay" => Ok(false),
        "btrfs" => Ok(true),
        _ => Err("must be \"overlay\" or \"btrfs\"".to_owned()),
    });
    let bytes = section.integer("btrfs_bytes", MIN_BTRFS_BYTES..=MAX_BYTES);
    match is_btrfs {
        Some(true) => RootStore::Btrfs(bytes),
        Some(false) | None => RootStore::Overlay,
    }
}

fn registries(section: &Section<'_, '_>, field: &str) -> Option<BTreeSet<String>> {
    let names = section.strings(field)?;
    for (index, name) in names.iter().enumerate() {
        if !is_registry(name) {
            section.mistake(
                &format!("{field}[{index}]"),
                "must be HOST or HOST:PORT, as it stands before the first `/` of an image's name",
            );
        }
    }
    Some(names.into_iter().collect())
}

fn is_registry(name: &str) -> bool {
    let (host, port) = match name.rsplit_once(':') {
        Some((host, port)) => (host, Some(port)),
        None => (name, None),
    };
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-".contains(&byte);
    !host.is_empty()
        && host.bytes().all(plain)
        && port.is_none_or(|port| port.parse::<u16>().is_ok())
}

fn login(section: &Section<'_, '_>) -> Option<Login> {
    let user = section.string("user");
    let password_file = section.path("password_file");
    section.finish();
    if user.is_none() {
        section.mistake("user", "is required");
    }
    if password_file.is_none() {
        section.mistake("password_file", "is required");
    }
    Some(Login {
        user: user?,
        password_file: password_file?,
    })
}
