//! The host's etcd, for a machine whose node is part of a fleet.

use std::path::Path;

use crate::Medium;

/// As the distribution's packages have them; the machine runs the same distribution.
const PROGRAMS: [&str; 2] = ["etcd", "etcdctl"];

/// The host's etcd, for a machine whose node is of a fleet.
#[derive(Debug)]
pub struct Etcd(());

/// `None` says on standard error that there is none.
#[must_use]
pub fn etcd() -> Option<Etcd> {
    for name in PROGRAMS {
        if !path(name).exists() {
            crate::lacks(&format!("no {}", path(name).display()));
            return None;
        }
    }
    Some(Etcd(()))
}

impl Etcd {
    /// Puts it on a medium, with `etcdctl`.
    ///
    /// # Panics
    /// When there is no room for it.
    #[must_use]
    pub fn on(&self, medium: Medium) -> Medium {
        PROGRAMS.into_iter().fold(medium, |medium, name| {
            medium.with_program(name, &path(name))
        })
    }
}

fn path(name: &str) -> std::path::PathBuf {
    Path::new("/usr/bin").join(name)
}
