//! The image store, on files, archives and a registry.

mod hostile_archives;
mod import;
mod layered_images;
mod mounts;
mod mutated_archives;
mod pull;
mod support;
