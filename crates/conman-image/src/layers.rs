//! Unpacked layers: each one is made once, and is complete or absent.
//!
//! A layer is unpacked in the scratch directory of the same file system, synced, and renamed to
//! `layers/HEX` with `layer.json` next to its tree. Imports lease layers before they look for
//! them, and a collection does not remove leased ones. If several imports need the same layer,
//! one unpacks it and the others wait.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat, syncfs};
use serde::{Deserialize, Serialize};

use crate::beneath::read_bounded;
use crate::digest::LayerId;
use crate::limits::Allowance;
use crate::owners::Move;
use crate::store::{StoreError, failed};
use crate::unpack::{UnpackError, UnpackedLayer, unpack};

/// The tree in a layer's directory.
pub(crate) const LAYER_ROOT: &str = "root";
const FACTS_FILE: &str = "layer.json";
const MAX_FACTS_BYTES: u64 = 4096;

/// A layer that could not be brought into the store.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A layer's properties besides its tree.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct LayerFacts {
    pub(crate) file_bytes: u64,
    pub(crate) skipped_devices: u64,
    /// See [`UnpackedLayer::owners_out_of_range`].
    #[serde(default)]
    pub(crate) owners_out_of_range: u64,
    pub(crate) hides_all_below: bool,
    /// First id of the range that its files belong to; 0: the ids are the image's.
    pub(crate) first_id: u32,
}

impl LayerFacts {
    pub(crate) fn load(layer: &Path) -> Option<Self> {
        let file = File::open(layer.join(FACTS_FILE)).ok()?;
        serde_json::from_slice(&read_bounded(file, MAX_FACTS_BYTES).ok()?).ok()
    }

    fn store(&self, layer: &Path) -> io::Result<()> {
        let file = File::create_new(layer.join(FACTS_FILE))?;
        serde_json::to_writer(&file, self)?;
        file.sync_all()
    }
}

#[derive(Debug)]
pub(crate) struct Layers {
    directory: PathBuf,
    scratch: PathBuf,
    /// First id of the range that the files of all layers belong to; 0: the ids are the image's.
    first_id: u32,
    leases: Arc<Mutex<BTreeMap<LayerId, Leased>>>,
}

#[derive(Debug, Default)]
struct Leased {
    holders: usize,
    /// Held by the import that unpacks.
    turn: Arc<Mutex<()>>,
}

/// Keeps a layer from being collected between its unpacking and its entry in the index.
#[derive(Debug)]
pub struct LayerLease {
    pub(crate) layer: LayerId,
    leases: Arc<Mutex<BTreeMap<LayerId, Leased>>>,
}

impl Drop for LayerLease {
    fn drop(&mut self) {
        let mut leases = lock(&self.leases);
        if let Some(leased) = leases.get_mut(&self.layer) {
            leased.holders -= 1;
            if leased.holders == 0 {
                leases.remove(&self.layer);
            }
        }
    }
}

/// A layer that a collection removed from the store.
pub(crate) struct Detached {
    pub(crate) id: LayerId,
    pub(crate) path: PathBuf,
    pub(crate) file_bytes: u64,
}

impl Layers {
    pub(crate) fn new(directory: PathBuf, scratch: PathBuf, first_id: u32) -> Self {
        Self {
            directory,
            scratch,
            first_id,
            leases: Arc::default(),
        }
    }

    pub(crate) fn first_id(&self) -> u32 {
        self.first_id
    }

    /// Moves the files of layers that belong to another range to this one, while they are unused. A
    /// layer that was interrupted meanwhile is no longer valid.
    pub(crate) fn own_all(&self) -> Result<(), StoreError> {
        let directory = &self.directory;
        for entry in fs::read_dir(directory).map_err(failed("read", directory))? {
            let layer = entry.map_err(failed("read", directory))?.path();
            let Some(mut facts) = LayerFacts::load(&layer) else {
                continue;
            };
            if facts.first_id == self.first_id {
                continue;
            }
            tracing::info!(layer = %layer.display(), "changing the owners of the layer's files");
            let give = failed("change the owners of the files of", &layer);
            self.own(&layer, &mut facts).map_err(give)?;
        }
        Ok(())
    }

    fn own(&self, layer: &Path, facts: &mut LayerFacts) -> io::Result<()> {
        let moved = Move {
            from: facts.first_id,
            to: self.first_id,
        };
        facts.first_id = self.first_id;
        fs::remove_file(layer.join(FACTS_FILE))?;
        File::open(layer)?.sync_all()?;
        let root = File::open(layer.join(LAYER_ROOT))?;
        moved.apply(&root)?;
        syncfs(&root)?;
        facts.store(layer)?;
        File::open(layer)?.sync_all()
    }

    pub(crate) fn contains(&self, layer: &LayerId) -> bool {
        LayerFacts::load(&self.directory.join(layer.hex())).is_some()
    }

    /// Adds the layer with this digest; `open` is called only if it must be unpacked. `explain` adds to an error
    /// which layer it is.
    pub(crate) fn ensure<R: Read, E>(
        &self,
        layer: LayerId,
        allowance: &mut Allowance,
        open: impl FnOnce() -> Result<R, E>,
        explain: impl FnOnce(LayerError) -> E,
    ) -> Result<LayerLease, E> {
        let (lease, turn) = self.lease(layer);
        let _turn = lock(&turn);
        if !self.contains(&layer) {
            let draft = self.draft(open()?, Some(layer), allowance);
            let published = draft.and_then(|draft| Ok(self.publish(draft)?));
            published.map_err(explain)?;
        }
        Ok(lease)
    }

    /// Adds a layer whose digest is unknown.
    pub(crate) fn add(
        &self,
        source: impl Read,
        allowance: &mut Allowance,
    ) -> Result<LayerLease, LayerError> {
        let draft = self.draft(source, None, allowance)?;
        let (lease, turn) = self.lease(draft.unpacked.id);
        let _turn = lock(&turn);
        if !self.contains(&draft.unpacked.id) {
            self.publish(draft)?;
        }
        Ok(lease)
    }

    /// Moves layers that are neither kept nor leased out of the store.
    pub(crate) fn detach_unless(
        &self,
        kept: &BTreeSet<LayerId>,
    ) -> Result<Vec<Detached>, StoreError> {
        let leases = lock(&self.leases);
        let mut detached = Vec::new();
        let directory = &self.directory;
        for entry in fs::read_dir(directory).map_err(failed("read", directory))? {
            let entry = entry.map_err(failed("read", directory))?;
            let name = entry.file_name();
            let Some(id) = name.to_str().and_then(|hex| LayerId::from_hex(hex).ok()) else {
                continue;
            };
            if kept.contains(&id) || leases.contains_key(&id) {
                continue;
            }
            let facts = LayerFacts::load(&entry.path());
            let away = tempfile::Builder::new()
                .prefix("gone-")
                .tempdir_in(&self.scratch)
                .map_err(failed("write to", &self.scratch))?
                .keep();
            fs::rename(entry.path(), away.join(&name))
                .map_err(failed("move away", &entry.path()))?;
            detached.push(Detached {
                id,
                path: away,
                file_bytes: facts.map_or(0, |facts| facts.file_bytes),
            });
        }
        Ok(detached)
    }

    /// Keeps a layer from being collected, whether it exists yet or not.
    pub(crate) fn hold(&self, layer: LayerId) -> LayerLease {
        self.lease(layer).0
    }

    fn lease(&self, layer: LayerId) -> (LayerLease, Arc<Mutex<()>>) {
        let mut leases = lock(&self.leases);
        let leased = leases.entry(layer).or_default();
        leased.holders += 1;
        let lease = LayerLease {
            layer,
            leases: self.leases.clone(),
        };
        (lease, leased.turn.clone())
    }

    /// Unpacks into the scratch directory; a failure leaves nothing there.
    fn draft(
        &self,
        source: impl Read,
        expected: Option<LayerId>,
        allowance: &mut Allowance,
    ) -> Result<Draft, LayerError> {
        let scratch = tempfile::Builder::new()
            .prefix("layer-")
            .tempdir_in(&self.scratch)
            .map_err(failed("write to", &self.scratch))?;
        let root_path = scratch.path().join(LAYER_ROOT);
        let made = |errno: rustix::io::Errno| failed("make", &root_path)(errno.into());
        mkdirat(CWD, &root_path, Mode::from_raw_mode(0o755)).map_err(made)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = openat(CWD, &root_path, flags, Mode::empty()).map_err(made)?;
        rustix::fs::fchmod(&root, Mode::from_raw_mode(0o755)).map_err(made)?;
        let synced = root.try_clone().map_err(failed("open", &root_path))?;
        let unpacked = unpack(source, root, expected, allowance)?;
        if self.first_id != 0 {
            let moved = Move {
                from: 0,
                to: self.first_id,
            };
            let given = moved.apply(&synced);
            given.map_err(failed("change the owners of the files of", &root_path))?;
        }
        // One call for thousands of files; syncing each would need a journal commit for each.
        syncfs(&synced).map_err(|errno| failed("sync", &root_path)(errno.into()))?;
        Ok(Draft { scratch, unpacked })
    }

    fn publish(&self, draft: Draft) -> Result<(), StoreError> {
        let path = draft.scratch.path();
        let facts = LayerFacts {
            file_bytes: draft.unpacked.file_bytes,
            skipped_devices: draft.unpacked.skipped_devices,
            owners_out_of_range: draft.unpacked.owners_out_of_range,
            hides_all_below: draft.unpacked.hides_all_below,
            first_id: self.first_id,
        };
        facts.store(path).map_err(failed("write", path))?;
        sync(path)?;
        let home = self.directory.join(draft.unpacked.id.hex());
        if home.exists() {
            // Without readable properties it is not a valid layer.
            let away = draft.scratch.path().with_extension("damaged");
            fs::rename(&home, &away).map_err(failed("move away", &home))?;
            fs::remove_dir_all(&away).map_err(failed("remove", &away))?;
        }
        fs::rename(path, &home).map_err(failed("put in place", &home))?;
        // It was renamed: there is nothing to remove any more.
        let _moved = draft.scratch.keep();
        sync(&self.directory)
    }
}

struct Draft {
    scratch: tempfile::TempDir,
    unpacked: UnpackedLayer,
}

fn sync(directory: &Path) -> Result<(), StoreError> {
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(failed("sync", directory))
}

/// Changes under these locks are single steps, so a panic elsewhere leaves the maps valid.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::ImageLimits;

    #[test]
    #[expect(clippy::print_stderr, reason = "tests report there what they skip")]
    fn a_leased_layer_is_collected_only_after_its_last_lease() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: unpacking layers needs root");
            return;
        }
        let stage = tempfile::tempdir().expect("temporary directory");
        let (home, scratch) = (stage.path().join("layers"), stage.path().join("tmp"));
        for directory in [&home, &scratch] {
            fs::create_dir(directory).expect("directory");
        }
        let layers = Layers::new(home, scratch, 0);
        let mut allowance = Allowance::new(&ImageLimits::default());
        // An archive without entries: only its end mark.
        let first = layers
            .add(&[0_u8; 1024][..], &mut allowance)
            .expect("added");
        let second = layers.hold(first.layer);
        let id = first.layer;
        let collected = || {
            let detached = layers.detach_unless(&BTreeSet::new()).expect("collected");
            detached.iter().map(|layer| layer.id).collect::<Vec<_>>()
        };
        assert_eq!(collected(), []);
        drop(first);
        assert_eq!(collected(), []);
        assert!(layers.contains(&id));
        drop(second);
        assert_eq!(collected(), [id]);
        assert!(!layers.contains(&id));
    }
}
