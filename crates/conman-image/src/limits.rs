//! Limits of an image's size and content.

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Limits of an image. Everything beyond is refused before it is written.
///
/// The defaults allow the largest images that are run as sessions (scientific Python with CUDA
/// unpacks to some 20 GB and 300,000 entries) and stop only bombs.
#[derive(Clone, Debug)]
pub struct ImageLimits {
    /// Bytes of all files of one import, counting holes in sparse files in full.
    pub max_unpacked_bytes: u64,
    /// Bytes of one file, counting holes in full.
    pub max_file_bytes: u64,
    /// Entries of all layers of one import, including whiteouts.
    pub max_entries: u64,
    /// Bytes of one path inside a layer.
    pub max_path_bytes: usize,
    /// Names in one path inside a layer.
    pub max_depth: usize,
    /// Bytes of the headers (long names, PAX records) before one entry.
    pub max_header_bytes: u64,
    /// Unpacked bytes per compressed byte, once `ratio_floor_bytes` have been unpacked.
    pub max_ratio: u64,
    /// Unpacked bytes below which the ratio does not matter: small archives of zeros are harmless.
    pub ratio_floor_bytes: u64,
    /// Bytes of one compressed blob or archive.
    pub max_blob_bytes: u64,
    /// Bytes of one JSON document: a manifest, an index, a configuration.
    pub max_json_bytes: u64,
    /// Layers of one image. Overlayfs supports 500.
    pub max_layers: usize,
}

impl Default for ImageLimits {
    fn default() -> Self {
        Self {
            max_unpacked_bytes: 64 * GIB,
            max_file_bytes: 16 * GIB,
            max_entries: 2_000_000,
            // PATH_MAX with its terminator.
            max_path_bytes: 4095,
            max_depth: 128,
            max_header_bytes: MIB,
            // gzip ends at 1,032; real layers stay below 30.
            max_ratio: 400,
            ratio_floor_bytes: 256 * MIB,
            max_blob_bytes: 32 * GIB,
            max_json_bytes: 4096 * KIB,
            max_layers: 128,
        }
    }
}

/// The rest of an import's limits; shared by its layers.
#[derive(Debug)]
pub(crate) struct Allowance {
    pub(crate) limits: ImageLimits,
    pub(crate) bytes_left: u64,
    pub(crate) entries_left: u64,
}

impl Allowance {
    pub(crate) fn new(limits: &ImageLimits) -> Self {
        Self {
            bytes_left: limits.max_unpacked_bytes,
            entries_left: limits.max_entries,
            limits: limits.clone(),
        }
    }
}
