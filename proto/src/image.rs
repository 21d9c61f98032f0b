//! Images in the node's store.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An image in the node's store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Image {
    /// What it is, whatever it is called: `sha256:` and 64 hexadecimal digits.
    pub id: String,
    /// `NAME:TAG` each; without any it goes with the next collection, unless it is in use.
    pub names: Vec<String>,
    /// As the image's maker wrote it: `amd64`, `arm64`.
    pub architecture: String,
    /// Bytes of its files, those of layers that other images share included.
    pub size_bytes: u64,
    #[schema(value_type = String, format = DateTime)]
    pub imported_at: Timestamp,
    /// Whether a session uses it, which keeps it and its layers.
    pub in_use: bool,
    /// The lowest first.
    pub layers: Vec<ImageLayer>,
    pub config: ImageConfig,
}

/// A layer of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageLayer {
    /// The digest of its uncompressed archive.
    pub id: String,
    /// Bytes of its files; null when the layer is missing from the store.
    pub size_bytes: Option<u64>,
    /// Device nodes in the archive, which were skipped: sessions have their own /dev.
    #[serde(default)]
    pub skipped_devices: u64,
    /// Entries of the archive whose owner or group is above 65535, which no native session has: they belong to
    /// nobody (65534) there.
    #[serde(default)]
    pub owners_out_of_range: u64,
}

/// How an image wants to be run; a session's spec overrides it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct ImageConfig {
    /// What runs, with `cmd` behind it.
    pub entrypoint: Vec<String>,
    /// Arguments to the entrypoint, or what runs where there is none.
    pub cmd: Vec<String>,
    /// `NAME=VALUE` each.
    pub env: Vec<String>,
    /// `name[:group]` or `uid[:gid]`; root when null.
    pub user: Option<String>,
    /// `/` when null.
    pub workdir: Option<String>,
    pub stop_signal: Option<String>,
    /// As the image has them: `8080/tcp`.
    pub exposed_ports: Vec<String>,
    pub labels: BTreeMap<String, String>,
}

/// All images of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageList {
    pub images: Vec<Image>,
}

/// Body of `POST /v1/images` that asks for a pull.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PullRequest {
    /// The image and its registry: `HOST[:PORT]/NAME[:TAG][@DIGEST]`.
    #[schema(max_length = 512, example = "registry.example.org/team/app:1")]
    pub pull: String,
}

/// What a pull works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PullPhase {
    /// Other pulls are before it.
    Waiting,
    /// Reads what the image consists of.
    Resolving,
    Downloading,
    Unpacking,
}

/// How far a pull is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PullProgress {
    pub phase: PullPhase,
    /// The layers that are downloaded; those that the store has are not listed.
    pub layers: Vec<LayerProgress>,
}

/// How far the download of a layer is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LayerProgress {
    /// The digest of its compressed archive.
    pub blob: String,
    pub total_bytes: u64,
    pub done_bytes: u64,
}

/// What became of an image whose name was removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageRemoval {
    /// The name that is gone.
    pub name: String,
    pub id: String,
    /// Names that the image still has, and is kept for.
    pub names: Vec<String>,
    /// Whether a session uses the image, which keeps it until that ends.
    pub in_use: bool,
}

/// What a collection removed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
pub struct GcReport {
    pub images: Vec<String>,
    pub layers: Vec<String>,
    pub freed_bytes: u64,
}
