//! Arguments of `conman image`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Arguments of `conman image`.
#[derive(Debug, Clone, Args)]
pub struct ImageArgs {
    #[command(subcommand)]
    pub command: ImageCommand,
}

/// Commands about the node's images.
#[derive(Debug, Clone, Subcommand)]
pub enum ImageCommand {
    /// Import an archive: an OCI layout, what `docker save` writes, or a root file system
    Import(ImageImportArgs),
    /// Pull an image from a registry
    Pull(ImagePullArgs),
    /// List images
    #[command(visible_alias = "list")]
    Ls(ImageLsArgs),
    /// Show everything about an image, as JSON
    Inspect(ImageInspectArgs),
    /// Remove names of images: an image is removed once it has none and no session uses it
    Rm(ImageRmArgs),
    /// Remove unused images, layers and downloads at once
    Gc,
}

/// Arguments of `conman image import`.
#[derive(Debug, Clone, Args)]
pub struct ImageImportArgs {
    /// The archive, plain or with gzip or zstd, or an OCI layout's directory; - for standard input
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    pub file: PathBuf,
    /// Name of the image; another image loses the name
    #[arg(value_name = "NAME:TAG")]
    pub name: String,
}

/// Arguments of `conman image pull`.
#[derive(Debug, Clone, Args)]
pub struct ImagePullArgs {
    /// The image with its registry
    #[arg(value_name = "HOST[:PORT]/NAME[:TAG][@DIGEST]")]
    pub reference: String,
    /// What the image is to be called here, instead of the reference
    #[arg(long, value_name = "NAME:TAG")]
    pub name: Option<String>,
}

/// Arguments of `conman image ls`.
#[derive(Debug, Clone, Args)]
pub struct ImageLsArgs {
    /// Print names only
    #[arg(short, long)]
    pub quiet: bool,
}

/// Arguments of `conman image inspect`.
#[derive(Debug, Clone, Args)]
pub struct ImageInspectArgs {
    #[arg(value_name = "NAME:TAG")]
    pub name: String,
}

/// Arguments of `conman image rm`.
#[derive(Debug, Clone, Args)]
pub struct ImageRmArgs {
    /// Also if a template or a session uses the name
    #[arg(short, long)]
    pub force: bool,
    #[arg(required = true, value_name = "NAME:TAG")]
    pub name: Vec<String>,
}
