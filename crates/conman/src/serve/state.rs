//! Opens and locks what is in the state directory.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use conman_core::Instance;
use conman_etcd::Orders;
use conman_image::ImageStore;
use conman_linux::{Features, Interface};
use conman_proto::Generation;
use conman_registry::{
    EmbeddedOptions, EmbeddedRegistry, Fleet, Journal, PartRegistry, Registry, SoloFleet,
};
use conman_shim::SHARED_IDS;
use conman_watchdog::Watchdog;

use super::fleet;
use crate::config::Config;
use crate::state_dir;

/// Directory of the image store in the state directory.
const IMAGES: &str = "images";

/// The state directory, locked by this process.
pub(super) struct LockedState {
    pub(super) registry: Arc<dyn Registry>,
    pub(super) fleet: Arc<dyn Fleet>,
    /// The parts of the fabric's pool, if there are other nodes.
    pub(super) parts: Option<Arc<dyn PartRegistry>>,
    /// The sessions that the registry ended, if other nodes may own this node's.
    pub(super) orders: Option<Arc<Orders>>,
    pub(super) journal: Arc<Journal>,
    pub(super) instance: Instance,
    pub(super) images: ImageStore,
    /// Watches the tasks that the daemon cannot do without.
    pub(super) watchdog: Watchdog,
}

impl LockedState {
    /// Opens everything in the state directory. After the installation's id comes the registry: its
    /// lock excludes a second daemon, which must not change anything.
    pub(super) fn open(config: &Config, generation_floor: Option<Generation>) -> Result<Self> {
        let directory = &config.state_dir;
        state_dir::prepare(directory)?;
        let instance = state_dir::instance(directory)?;
        let watchdog = Watchdog::default();
        // The registry's lock comes first.
        let journal = || {
            let opened = Journal::open(directory, &config.name, config.limits.max_events);
            opened
                .map(Arc::new)
                .context("cannot open the journal of events")
        };
        type Opened = (
            Arc<dyn Registry>,
            Arc<dyn Fleet>,
            Option<(Arc<Orders>, Arc<dyn PartRegistry>)>,
            Arc<Journal>,
        );
        let (registry, fleet, shared, journal): Opened = match &config.shared {
            Some(fleet) => {
                let registry =
                    fleet::registry(config, fleet, &instance, generation_floor, &watchdog)?;
                let (orders, journal) = (registry.orders(), journal()?);
                registry.record_events(Arc::clone(&journal));
                let shared = Some((orders, Arc::clone(&registry) as _));
                (Arc::clone(&registry) as _, registry, shared, journal)
            }
            None => {
                let options = EmbeddedOptions { generation_floor };
                let registry = EmbeddedRegistry::open(directory, options)
                    .context("cannot open the registry")?;
                let alone = SoloFleet::new(config.name.clone());
                (Arc::new(registry), Arc::new(alone), None, journal()?)
            }
        };
        let (orders, parts) = shared.unzip();
        Ok(Self {
            registry,
            fleet,
            parts,
            orders,
            journal,
            instance,
            images: images(&directory.join(IMAGES), config)?,
            watchdog,
        })
    }
}

/// The image store. The runtimes take the guards of images, at a start or when they adopt running
/// containers, before the first collection.
fn images(directory: &Path, config: &Config) -> Result<ImageStore> {
    let features = Features::probe().context("cannot detect the kernel's features")?;
    let first_id = if features.has(Interface::MappedLayers) {
        0
    } else {
        SHARED_IDS
    };
    let opened = ImageStore::open_for(directory, config.images.limits.clone(), first_id);
    opened.with_context(|| {
        format!(
            "cannot open the image store; if {} cannot be repaired, move it away and import the \
             images again",
            directory.display()
        )
    })
}
