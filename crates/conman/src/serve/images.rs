//! This daemon's image store: its registries, and the collection of unused images.

use std::collections::HashMap;

use anyhow::{Context as _, Result};
use conman_auth::read_private_file;
use conman_image::{ImageKeeper, ImageStore, Login, PullConfig};

use crate::config::Images;

/// Longest password file: registries' tokens have a few kilobytes.
const MAX_PASSWORD_BYTES: u64 = 64 << 10;

/// The store with its registries.
pub(super) fn keeper(store: &ImageStore, config: &Images) -> Result<ImageKeeper> {
    let mut credentials = HashMap::new();
    for (registry, login) in &config.logins {
        let password = read_private_file(&login.password_file, MAX_PASSWORD_BYTES)
            .with_context(|| format!("`images.logins.{registry}.password_file`"))?;
        let password = password.trim_end_matches(['\r', '\n']).to_owned();
        let user = login.user.clone();
        credentials.insert(registry.clone(), Login { user, password });
    }
    let pulls = PullConfig {
        default_registry: config.default_registry.clone(),
        allowed_registries: config.registries.clone(),
        insecure_registries: config.insecure_registries.clone(),
        credentials,
    };
    Ok(ImageKeeper::new(store.clone(), pulls))
}

/// Collects in the background for as long as the daemon runs. Call it only after everything that
/// outlived an earlier daemon was adopted and thus holds its image.
pub(super) fn collect(keeper: &ImageKeeper, config: &Images) {
    let (keeper, every) = (keeper.clone(), config.collect_every);
    tokio::spawn(async move { keeper.collect_from_time_to_time(every).await });
}
