//! Pulls images from registries.
//!
//! One task for each image that is being pulled, for all its callers. They wait on its watch
//! channel, which holds the latest progress and finally the outcome. The task does not end with
//! its callers, since its download is needed again; its waits and attempts are bounded. It
//! downloads a few blobs at a time into `blobs/` and passes unpacking to a blocking thread.
//!
//! The digests of every manifest, configuration and blob are verified, and those of unpacked
//! layers. The size of a manifest is checked only once it has been read, because the
//! client library reads it whole.

mod download;
mod error;
mod remote;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::{StreamExt as _, TryStreamExt as _};
use oci_client::Reference;
use tokio::sync::{Semaphore, watch};

use crate::blobs::{Plan, carry_out, layer_blobs, open_layer, plan};
use crate::digest::Digest;
use crate::image::Image;
use crate::name::ImageName;
use crate::store::ImageStore;
use download::Downloads;
pub use error::PullError;
use remote::Remote;

/// Most concurrent pulls; more wait. Two fill a gigabit.
const MAX_PULLS: usize = 4;

/// Most pulls under way and waiting. More mean that a client requests them in a loop.
const MAX_FLIGHTS: usize = 64;

/// Most layers of one image downloaded at a time, as Docker does.
const MAX_DOWNLOADS: usize = 3;

/// Most characters of a bad reference that an error repeats.
const SHOWN_CHARS: usize = 200;

/// The operator's settings of registries.
#[derive(Clone, Debug, Default)]
pub struct PullConfig {
    /// `HOST[:PORT]` of the registry of references that name none; they are refused if absent.
    pub default_registry: Option<String>,
    /// `HOST[:PORT]` of the registries that images may come from; any if absent.
    pub allowed_registries: Option<BTreeSet<String>>,
    /// `HOST:PORT` of registries that use plain HTTP. Those on this machine's loopback always do.
    pub insecure_registries: BTreeSet<String>,
    /// By `HOST:PORT`, as it occurs in references.
    pub credentials: HashMap<String, Login>,
}

#[derive(Clone)]
pub struct Login {
    pub user: String,
    pub password: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Login({}, …)", self.user)
    }
}

/// Progress of a pull.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PullProgress {
    pub phase: PullPhase,
    /// The layers to download; those that the store has are not listed.
    pub layers: Vec<LayerProgress>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PullPhase {
    #[default]
    Waiting,
    Resolving,
    Downloading,
    Unpacking,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerProgress {
    pub blob: Digest,
    pub total_bytes: u64,
    pub done_bytes: u64,
}

/// Pulls images into a store.
#[derive(Clone, Debug)]
pub struct Puller {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    store: ImageStore,
    config: PullConfig,
    downloads: Downloads,
    permits: Semaphore,
    flights: Mutex<HashMap<Flight, watch::Receiver<PullState>>>,
}

type Flight = (String, ImageName);
type Outcome = Result<Image, Arc<PullError>>;

#[derive(Clone, Debug, Default)]
struct PullState {
    progress: PullProgress,
    outcome: Option<Outcome>,
}

impl Puller {
    pub fn new(store: ImageStore, config: PullConfig) -> Self {
        Self {
            shared: Arc::new(Shared {
                downloads: Downloads::new(store.blobs()),
                store,
                config,
                permits: Semaphore::new(MAX_PULLS),
                flights: Mutex::default(),
            }),
        }
    }

    /// Pulls `reference` (`HOST[:PORT]/NAME[:TAG][@DIGEST]`) and names it `name`. Callers that request
    /// the same while it is under way share one pull. `on_progress` gets the latest state at its
    /// caller's pace. Dropping the future leaves the pull running.
    pub async fn pull(
        &self,
        reference: &str,
        name: &ImageName,
        mut on_progress: impl FnMut(&PullProgress),
    ) -> Outcome {
        let parsed = self.check(reference).map_err(Arc::new)?;
        let mut states = self.join(&parsed, name).map_err(Arc::new)?;
        loop {
            let state = states.borrow_and_update().clone();
            on_progress(&state.progress);
            if let Some(outcome) = state.outcome {
                return outcome;
            }
            if states.changed().await.is_err() {
                return Err(Arc::new(PullError::Aborted {
                    reference: parsed.to_string(),
                }));
            }
        }
    }

    /// The reference, if it is valid and its registry is allowed.
    fn check(&self, text: &str) -> Result<Reference, PullError> {
        let shown = || text.chars().take(SHOWN_CHARS).collect();
        // The client library would always use its default registry.
        let whole = match (names_registry(text), &self.shared.config.default_registry) {
            (true, _) => text.to_owned(),
            (false, Some(registry)) => format!("{registry}/{text}"),
            (false, None) => return Err(PullError::NoRegistry { reference: shown() }),
        };
        let reference: Reference = whole.parse().map_err(|source| PullError::Reference {
            reference: shown(),
            source,
        })?;
        match &self.shared.config.allowed_registries {
            Some(allowed) if !allowed.contains(reference.registry()) => {
                let names: Vec<&str> = allowed.iter().map(String::as_str).collect();
                Err(PullError::NotAllowed {
                    registry: reference.registry().to_owned(),
                    allowed: if names.is_empty() {
                        "none is".to_owned()
                    } else {
                        names.join(", ")
                    },
                })
            }
            _ => Ok(reference),
        }
    }

    fn join(
        &self,
        reference: &Reference,
        name: &ImageName,
    ) -> Result<watch::Receiver<PullState>, PullError> {
        let flight = (reference.whole(), name.clone());
        let mut flights = self.shared.flights();
        if let Some(states) = flights.get(&flight) {
            return Ok(states.clone());
        }
        if flights.len() >= MAX_FLIGHTS {
            return Err(PullError::Busy { limit: MAX_FLIGHTS });
        }
        let (sender, receiver) = watch::channel(PullState::default());
        flights.insert(flight.clone(), receiver.clone());
        drop(flights);
        let landing = Landing {
            shared: self.shared.clone(),
            flight,
        };
        let (reference, name) = (reference.clone(), name.clone());
        tokio::spawn(async move {
            let outcome = landing.shared.run(&reference, &name, &sender).await;
            // Off the list first: later callers get a new attempt.
            drop(landing);
            sender.send_modify(|state| state.outcome = Some(outcome.map_err(Arc::new)));
        });
        Ok(receiver)
    }
}

/// Whether the text before the first slash is a host, by the rule of Docker and OCI.
fn names_registry(reference: &str) -> bool {
    reference
        .split_once('/')
        .is_some_and(|(first, _)| first == "localhost" || first.contains(['.', ':']))
}

/// The name of an image pulled from `reference` unless another is requested: the reference
/// itself. A reference with only a digest has none.
pub fn name_of_reference(reference: &str) -> Option<ImageName> {
    let (name, by_digest) = match reference.split_once('@') {
        Some((name, _)) => (name, true),
        None => (reference, false),
    };
    let last = name.rsplit('/').next().unwrap_or(name);
    if by_digest && !last.contains(':') {
        return None;
    }
    name.parse().ok()
}

/// Removes a pull from the list, however its task ends.
struct Landing {
    shared: Arc<Shared>,
    flight: Flight,
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.shared.flights().remove(&self.flight);
    }
}

impl Shared {
    /// Changes of the map do not panic half-way.
    fn flights(&self) -> MutexGuard<'_, HashMap<Flight, watch::Receiver<PullState>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn run(
        self: &Arc<Self>,
        reference: &Reference,
        name: &ImageName,
        states: &watch::Sender<PullState>,
    ) -> Result<Image, PullError> {
        let aborted = || PullError::Aborted {
            reference: reference.to_string(),
        };
        let _permit = self.permits.acquire().await.map_err(|_| aborted())?;
        let enter = |phase| states.send_modify(|state| state.progress.phase = phase);
        enter(PullPhase::Resolving);
        let store = &self.store;
        let remote = Remote::new(reference, &self.config, store.limits().max_json_bytes)?;
        let manifest = remote.manifest().await?;
        let blobs = remote.read(layer_blobs(&manifest, store))?;
        let config = remote.config(manifest.config()).await?;
        let plan = remote.read(plan(&config, blobs.len(), store))?;

        enter(PullPhase::Downloading);
        // From here on a collection does not remove the layers needed below.
        let leases: Vec<_> = plan
            .layers
            .iter()
            .map(|layer| store.inner.layers.hold(*layer))
            .collect();
        self.download(&remote, &plan, &blobs, states).await?;

        enter(PullPhase::Unpacking);
        let (shared, name) = (self.clone(), name.clone());
        let unpacked = tokio::task::spawn_blocking(move || {
            let image = carry_out(&shared.store, plan, &name, |index| {
                open_layer(&shared.downloads, &blobs[index].0, index)
            })?;
            for (blob, _) in &blobs {
                shared.downloads.remove(blob);
            }
            drop(leases);
            Ok(image)
        });
        remote.read(unpacked.await.map_err(|_| aborted())?)
    }

    /// Downloads the layers that the store lacks.
    async fn download(
        &self,
        remote: &Remote,
        plan: &Plan,
        blobs: &[(Digest, u64)],
        states: &watch::Sender<PullState>,
    ) -> Result<(), PullError> {
        let store = self.store.clone();
        let layers: Vec<_> = plan.layers.iter().copied().zip(blobs.to_vec()).collect();
        let listing = tokio::task::spawn_blocking(move || {
            let mut seen = BTreeSet::new();
            layers
                .into_iter()
                .enumerate()
                .filter(|(_, (layer, _))| !store.inner.layers.contains(layer))
                .filter(|(_, (_, (blob, _)))| seen.insert(*blob))
                .map(|(index, (_, (blob, size)))| (format!("layer {}", index + 1), blob, size))
                .collect::<Vec<_>>()
        });
        let missing = listing.await.map_err(|_| PullError::Aborted {
            reference: remote.reference().to_string(),
        })?;
        states.send_modify(|state| {
            state.progress.layers = missing
                .iter()
                .map(|(_, blob, size)| LayerProgress {
                    blob: *blob,
                    total_bytes: *size,
                    done_bytes: 0,
                })
                .collect();
        });
        let downloads =
            missing
                .into_iter()
                .enumerate()
                .map(|(row, (what, blob, size))| async move {
                    let progress = |done_bytes| {
                        states.send_modify(|state| {
                            state.progress.layers[row].done_bytes = done_bytes
                        });
                    };
                    self.downloads
                        .fetch(remote, &what, blob, size, &progress)
                        .await
                });
        futures_util::stream::iter(downloads)
            .buffer_unordered(MAX_DOWNLOADS)
            .try_collect::<()>()
            .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pulled_image_is_named_as_it_was_asked_for_unless_by_digest_alone() {
        let digest = format!("sha256:{}", "0".repeat(64));
        for (reference, name) in [
            ("r.example/a/b:1", Some("r.example/a/b:1")),
            ("r.example:5000/a", Some("r.example:5000/a:latest")),
            (&format!("r.example/a:1@{digest}"), Some("r.example/a:1")),
            (&format!("r.example:5000/a@{digest}"), None),
        ] {
            let found = name_of_reference(reference).map(|name| name.to_string());
            assert_eq!(found.as_deref(), name, "{reference}");
        }
    }

    #[test]
    fn only_a_host_before_the_first_slash_names_a_registry() {
        for named in ["localhost/a", "r.example/a", "r:5000/a", "127.0.0.1:1/a/b"] {
            assert!(names_registry(named), "{named}");
        }
        for unnamed in ["python", "python:3.12", "library/python", "a.b:1"] {
            assert!(!names_registry(unnamed), "{unnamed}");
        }
    }
}
