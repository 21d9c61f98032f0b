//! The directory of the store, and its lock.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use conman_linux::{empty_directory, remove_if_present};
use rustix::fs::{FlockOperation, flock};

use crate::digest::{ImageId, LayerId};
use crate::image::{Image, ImageGuard, ImageSummary};
use crate::index::{INDEX_FILE, ImageRecord, Index};
use crate::layers::{LAYER_ROOT, LayerLease, Layers};
use crate::limits::ImageLimits;
use crate::name::ImageName;
use crate::records::{self, RECORDS};

const LOCK_FILE: &str = "lock";
const LAYERS: &str = "layers";
const BLOBS: &str = "blobs";
const SCRATCH: &str = "tmp";

/// File name of the latest damaged index.
const DAMAGED_INDEX: &str = "images.json.damaged";

/// A failed operation on the store's directory.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the image store {} is in use by another process", path.display())]
    InUse { path: PathBuf },
    #[error("cannot {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("there is no image {name}")]
    NoSuchImage { name: String },
    #[error("the store has no image {id} any more")]
    NoSuchId { id: ImageId },
    #[error("layer {layer} of image {name} is missing from the store: import the image again")]
    MissingLayer { name: String, layer: LayerId },
}

pub(crate) fn failed<'a>(
    action: &'static str,
    path: &'a Path,
) -> impl FnOnce(io::Error) -> StoreError + 'a {
    move |source| StoreError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}

/// The store, open for writing. Cheap to clone; dropping the last clone releases the lock.
#[derive(Clone, Debug)]
pub struct ImageStore {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) directory: PathBuf,
    pub(crate) limits: ImageLimits,
    pub(crate) layers: Layers,
    state: Mutex<StoreState>,
    /// Held for its lock.
    _lock: File,
}

#[derive(Clone, Debug, Default)]
struct StoreState {
    index: Index,
    pins: BTreeMap<ImageId, usize>,
}

/// What a collection removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GcReport {
    pub images: Vec<ImageId>,
    pub layers: Vec<LayerId>,
    pub freed_bytes: u64,
}

impl ImageStore {
    /// [`Self::open_for`] kernels that map the owners of layers: the files' owners are the image's.
    pub fn open(directory: &Path, limits: ImageLimits) -> Result<Self, StoreError> {
        Self::open_for(directory, limits, 0)
    }

    /// Opens the store below `directory`, creates it if it is missing, and removes what an earlier
    /// process left unfinished. Fails with [`StoreError::InUse`] while another process has it open.
    ///
    /// The files of all layers belong to the range of ids that begins with `first_id`, user `n` of the
    /// image being its `n`th; with 0 the owners are the image's. A store that was opened for another
    /// range is changed first; its layers must not be in use then.
    pub fn open_for(
        directory: &Path,
        limits: ImageLimits,
        first_id: u32,
    ) -> Result<Self, StoreError> {
        make_private(directory)?;
        let path = directory.join(LOCK_FILE);
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(failed("open", &path))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(StoreError::InUse {
                    path: directory.to_owned(),
                });
            }
            Err(errno) => return Err(failed("lock", &path)(errno.into())),
        }
        for part in [LAYERS, BLOBS, SCRATCH, RECORDS] {
            make_private(&directory.join(part))?;
        }
        let scratch = directory.join(SCRATCH);
        empty_directory(&scratch).map_err(failed("empty", &scratch))?;
        let index = load_or_restore(directory)?;
        follow(&index, directory);
        let layers = Layers::new(directory.join(LAYERS), scratch, first_id);
        layers.own_all()?;
        Ok(Self {
            inner: Arc::new(Inner {
                layers,
                directory: directory.to_owned(),
                limits,
                state: Mutex::new(StoreState {
                    index,
                    pins: BTreeMap::new(),
                }),
                _lock: lock,
            }),
        })
    }

    pub fn directory(&self) -> &Path {
        &self.inner.directory
    }

    /// First id of the range that the files of layers belong to; 0: the ids are the image's.
    pub fn first_id(&self) -> u32 {
        self.inner.layers.first_id()
    }

    pub fn limits(&self) -> &ImageLimits {
        &self.inner.limits
    }

    /// All images, including unnamed ones.
    pub fn list(&self) -> Vec<ImageSummary> {
        let state = self.inner.state().clone();
        let ids = state.index.images.keys();
        ids.filter_map(|id| self.inner.summary(&state, id))
            .collect()
    }

    /// One entry of [`ImageStore::list`].
    pub fn summary(&self, name: &ImageName) -> Option<ImageSummary> {
        let state = self.inner.state().clone();
        self.inner.summary(&state, state.index.names.get(name)?)
    }

    pub fn get(&self, name: &ImageName) -> Option<Image> {
        self.inner.named(&self.inner.state().index, name)
    }

    /// Whether it has the image, under any name or none.
    pub fn has(&self, id: &ImageId) -> bool {
        self.inner.state().index.images.contains_key(id)
    }

    /// Keeps an image and its layers from being collected while the guard lives.
    pub fn pin(&self, name: &ImageName) -> Result<ImageGuard, StoreError> {
        let mut state = self.inner.state();
        let image = self.inner.named(&state.index, name);
        let image = image.ok_or_else(|| no_such(name))?;
        self.pin_found(&mut state, image, name)
    }

    /// [`ImageStore::pin`] by the image's id, since its name may have changed: for containers that
    /// outlived the process whose guards held their images. These must be pinned before the first
    /// collection of the new process.
    pub fn pin_id(&self, id: &ImageId) -> Result<ImageGuard, StoreError> {
        let mut state = self.inner.state();
        let image = self.inner.image(&state.index, id);
        let image = image.ok_or(StoreError::NoSuchId { id: *id })?;
        self.pin_found(&mut state, image, id)
    }

    /// Holds layers of images that the store no longer knows, for containers that outlived them.
    /// `roots` are the layers' directories below the store's; others are ignored.
    pub fn hold_layers<'a>(&self, roots: impl IntoIterator<Item = &'a Path>) -> Vec<LayerLease> {
        let layer = |root: &Path| {
            let home = root.parent()?.strip_prefix(LAYERS).ok()?;
            LayerId::from_hex(home.to_str()?).ok()
        };
        let layers = roots.into_iter().filter_map(layer);
        layers.map(|layer| self.inner.layers.hold(layer)).collect()
    }

    fn pin_found(
        &self,
        state: &mut StoreState,
        image: Image,
        asked: &dyn fmt::Display,
    ) -> Result<ImageGuard, StoreError> {
        if let Some(layer) = image.missing_layer() {
            return Err(StoreError::MissingLayer {
                name: asked.to_string(),
                layer,
            });
        }
        *state.pins.entry(image.id).or_default() += 1;
        Ok(ImageGuard::new(image, self.clone()))
    }

    /// Removes the name and returns its image, with the remaining names. The next
    /// [`ImageStore::collect`] removes the image itself, unless another name or a guard holds it.
    pub fn remove(&self, name: &ImageName) -> Result<ImageSummary, StoreError> {
        let mut state = self.inner.state();
        let mut index = state.index.clone();
        let id = index.names.remove(name).ok_or_else(|| no_such(name))?;
        self.inner.commit(&mut state, index)?;
        let after = state.clone();
        drop(state);
        let summary = self.inner.summary(&after, &id);
        summary.ok_or_else(|| no_such(name))
    }

    /// Free bytes for conman on the store's file system.
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        let directory = &self.inner.directory;
        let space = rustix::fs::statvfs(directory)
            .map_err(|errno| failed("read the free space of", directory)(errno.into()))?;
        Ok(space.f_bavail.saturating_mul(space.f_frsize))
    }

    /// Removes images that have no name and no guard, and layers that belong to no image, to no
    /// running import, and are not `in_use` (layers of running containers, which outlive this
    /// process's guards).
    pub fn collect(&self, in_use: &BTreeSet<LayerId>) -> Result<GcReport, StoreError> {
        let mut report = GcReport::default();
        let doomed = {
            let mut state = self.inner.state();
            let pinned = state.pins.keys().copied().collect();
            let mut index = state.index.clone();
            report.images = index.forget_unnamed(&pinned);
            if !report.images.is_empty() {
                self.inner.commit(&mut state, index)?;
            }
            let mut kept = in_use.clone();
            kept.extend(state.index.images.values().flat_map(|image| &image.layers));
            // Under the lock: an import that begins now leases its layers first.
            self.inner.layers.detach_unless(&kept)?
        };
        for layer in doomed {
            report.freed_bytes += layer.file_bytes;
            report.layers.push(layer.id);
            if let Err(error) = fs::remove_dir_all(&layer.path) {
                // It was moved away already; the next start removes it.
                tracing::warn!(path = %layer.path.display(), %error, "cannot remove a layer");
            }
        }
        report.freed_bytes += sweep_blobs(&self.blobs())?;
        Ok(report)
    }

    /// Names an image whose layers all exist and are leased by the caller until this returns.
    pub(crate) fn record(
        &self,
        name: &ImageName,
        id: ImageId,
        mut record: ImageRecord,
        _leases: &[LayerLease],
    ) -> Result<Image, StoreError> {
        record.imported_at_s = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs());
        let mut state = self.inner.state();
        let mut index = state.index.clone();
        index.images.insert(id, record);
        index.names.insert(name.clone(), id);
        self.inner.commit(&mut state, index)?;
        let image = self.inner.named(&state.index, name);
        image.ok_or_else(|| no_such(name))
    }

    pub(crate) fn unpin(&self, image: &ImageId) {
        let mut state = self.inner.state();
        if let Some(count) = state.pins.get_mut(image) {
            *count -= 1;
            if *count == 0 {
                state.pins.remove(image);
            }
        }
    }

    pub(crate) fn blobs(&self) -> PathBuf {
        self.inner.directory.join(BLOBS)
    }

    pub(crate) fn scratch(&self) -> PathBuf {
        self.inner.directory.join(SCRATCH)
    }
}

impl Inner {
    /// The index is replaced as a whole and changes do not panic half-way, so a poisoned lock still
    /// guards a valid state.
    fn state(&self) -> MutexGuard<'_, StoreState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn image(&self, index: &Index, id: &ImageId) -> Option<Image> {
        let record = index.images.get(id)?;
        Some(Image::new(*id, record, &self.directory.join(LAYERS)))
    }

    fn named(&self, index: &Index, name: &ImageName) -> Option<Image> {
        self.image(index, index.names.get(name)?)
    }

    fn summary(&self, state: &StoreState, id: &ImageId) -> Option<ImageSummary> {
        let image = self.image(&state.index, id)?;
        let record = state.index.images.get(id)?;
        let (names, in_use) = (state.index.names_of(id), state.pins.contains_key(id));
        Some(ImageSummary::new(image, record, names, in_use))
    }

    /// The file first: a change that cannot be written does not take effect in memory either.
    fn commit(&self, state: &mut StoreState, index: Index) -> Result<(), StoreError> {
        index
            .store(&self.directory)
            .map_err(failed("write the index of", &self.directory))?;
        follow(&index, &self.directory);
        state.index = index;
        Ok(())
    }
}

/// Rebuilds a damaged index from the images' records, and keeps the damaged file. The index is
/// never missing meanwhile: a missing one is empty, and all images would be collected.
fn load_or_restore(directory: &Path) -> Result<Index, StoreError> {
    let path = directory.join(INDEX_FILE);
    let error = match Index::load(directory) {
        Err(error) if records::is_damage(&error) => error,
        other => return other.map_err(failed("read", &path)),
    };
    let aside = directory.join(DAMAGED_INDEX);
    let index =
        records::index(directory).map_err(failed("read the records of images in", directory))?;
    if index.images.is_empty() && has_entries(&directory.join(LAYERS))? {
        // There are images, but no records that this version can read.
        return Err(failed("read", &path)(error));
    }
    remove_if_present(&aside).map_err(failed("remove", &aside))?;
    fs::hard_link(&path, &aside).map_err(failed("keep a copy of", &path))?;
    index
        .store(directory)
        .map_err(failed("write the index of", directory))?;
    tracing::error!(
        %error, images = index.images.len(), names = index.names.len(), aside = %aside.display(),
        "the list of images was damaged; it was rebuilt from the records of the images. \
         Import missing images again"
    );
    Ok(index)
}

fn has_entries(directory: &Path) -> Result<bool, StoreError> {
    let mut entries = fs::read_dir(directory).map_err(failed("list", directory))?;
    Ok(entries.next().is_some())
}

/// The next change or opening repairs a failure; until then only the index has the image.
fn follow(index: &Index, directory: &Path) {
    if let Err(error) = records::follow(index, directory) {
        tracing::warn!(%error, "cannot write an image's record");
    }
}

fn no_such(name: &ImageName) -> StoreError {
    StoreError::NoSuchImage {
        name: name.to_string(),
    }
}

/// Layers contain set-user-id programs: only root may access them.
fn make_private(directory: &Path) -> Result<(), StoreError> {
    use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(failed("make", directory))?;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o700))
        .map_err(failed("close to others", directory))
}

/// Downloads that no pull has touched for this long will not be resumed.
const BLOB_KEEP: Duration = Duration::from_secs(24 * 60 * 60);

/// Removes abandoned downloads; returns their bytes.
fn sweep_blobs(blobs: &Path) -> Result<u64, StoreError> {
    let mut freed = 0;
    for entry in fs::read_dir(blobs).map_err(failed("read", blobs))? {
        let path = entry.map_err(failed("read", blobs))?.path();
        // A pull that ends at this moment removes its file.
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            continue;
        };
        let age = metadata
            .modified()
            .ok()
            .and_then(|time| time.elapsed().ok());
        if age.is_some_and(|age| age > BLOB_KEEP) && fs::remove_file(&path).is_ok() {
            freed += metadata.len();
        }
    }
    Ok(freed)
}

/// Where a layer's files are.
pub(crate) fn layer_root(layers: &Path, layer: &LayerId) -> PathBuf {
    layers.join(layer.hex()).join(LAYER_ROOT)
}
