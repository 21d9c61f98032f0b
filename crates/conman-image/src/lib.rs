//! The image store: the images of the native runtime's sessions.
//!
//! Below one directory, which only root may enter:
//! - `layers/HEX/root`: a layer, unpacked once in overlayfs's format, named by the digest of its
//!   uncompressed archive; `layer.json` next to it. Complete or absent, never changed.
//! - `images.json`: names, and for each image its configuration and its layers. Replaced as a
//!   whole.
//! - `records/HEX.json`: the data of each image in `images.json`, from which a damaged one is
//!   rebuilt.
//! - `blobs/`: downloads, whole or partial.
//! - `tmp/`: work in progress; emptied when the store is opened.
//!
//! One process at a time writes ([`ImageStore`], under a lock on `lock`).
//! Importing blocks its thread. [`Puller`] runs a task for each image being
//! pulled, connected to its callers by a watch channel. [`ImageKeeper`] runs blocking work on
//! separate threads, and an upload reaches its thread through a bounded channel. Imports, pulls
//! and collections run concurrently: imports lease the layers that they need, and collections do
//! not remove leased layers, or images that an [`ImageGuard`] holds.
//!
//! Archives are hostile and unpacking runs as root: files are written only below a descriptor of
//! the new layer's directory, no symbolic link is followed there, everything is bounded by
//! [`ImageLimits`], and a refused archive leaves nothing behind.
//!
//! The crate does not depend on sessions or containers.
#![forbid(unsafe_code)]

mod archive;
mod beneath;
mod blobs;
mod compression;
mod digest;
mod docker_save;
mod image;
mod image_config;
mod import;
mod index;
mod keeper;
mod layers;
mod limits;
mod merged;
mod meter;
mod name;
mod oci_layout;
mod owners;
mod pull;
mod records;
mod store;
mod unpack;
mod user;

pub use digest::{Digest, DigestError, ImageId, LayerId};
pub use image::{Image, ImageGuard, ImageLayer, ImageSummary};
pub use image_config::{ConfigError, ImageConfig, NoCommand};
pub use import::ImportError;
pub use keeper::{ImageKeeper, KeeperError};
pub use layers::{LayerError, LayerLease};
pub use limits::ImageLimits;
pub use meter::Limit;
pub use name::{ImageName, ImageNameError};
pub use pull::{
    LayerProgress, Login, PullConfig, PullError, PullPhase, PullProgress, Puller, name_of_reference,
};
pub use store::{GcReport, ImageStore, StoreError};
pub use unpack::{EntryName, Refusal, UnpackError};
pub use user::{ResolvedUser, UserError, resolve_user};
