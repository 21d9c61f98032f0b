//! Archives of images for tests of programs in sessions.

use std::path::PathBuf;

/// The newest archive of an image that the set-up makes for tests of programs in sessions. `None`, with
/// a line that says why, when there is none.
pub fn programs_archive(image: &str) -> Option<PathBuf> {
    let archive = find(image);
    if archive.is_none() {
        crate::lacks(&format!("target/images has no image `{image}`"));
    }
    archive
}

fn find(image: &str) -> Option<PathBuf> {
    let test = std::env::current_exe().ok()?;
    // target/PROFILE/deps/TEST
    let images = test.ancestors().nth(3)?.join("images");
    let images = std::fs::read_dir(images).ok()?;
    let paths = images.filter_map(|entry| Some(entry.ok()?.path()));
    let prefix = format!("{image}-");
    let of_image = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(&prefix) && name.ends_with(".tar")
    };
    paths.filter(of_image).max()
}
