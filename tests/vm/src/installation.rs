//! Installs conman on a machine.

use std::path::Path;

use conman_e2e::{Native, binary};

use crate::Medium;

const UNITS: [&str; 3] = [
    "conman.service",
    "conman-shim.service",
    "conman-power-off.service",
];

/// Puts the medium in its place.
pub const MOUNT: &str = "mkdir -p /media && mount -o ro LABEL=conman /media";

/// A daemon that has little of a processor does not hang: the emulated machine takes what other tests
/// leave of its host's.
const PATIENT: &str = "[Service]\nWatchdogSec=5min\nTimeoutStartSec=15min\n";

/// What an administrator types, with the medium in its place; the console shows what the preemption
/// says at the very end.
pub const INSTALL: &str = "set -e
mkdir -p /etc/conman /etc/systemd/system/conman-power-off.service.d
install -m 644 -D -t /etc/systemd/system/conman.service.d /media/patient.conf
install /media/conman /usr/bin/conman
install -m 600 /media/conman.toml /etc/conman/
install -m 644 /media/*.service /etc/systemd/system/
printf '[Service]\\nStandardOutput=journal+console\\n' \
    > /etc/systemd/system/conman-power-off.service.d/console.conf
systemctl daemon-reload
systemctl enable --now /etc/systemd/system/conman*.service";

/// A medium to install conman from, with an image (`root.tar`).
///
/// # Panics
/// When there is no room for it.
#[must_use]
pub fn installation(native: &Native, config: &str) -> Medium {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let medium = Medium::new()
        .with_program("conman", binary())
        .with_file("root.tar", &native.archive(folder.path()))
        .with_text("conman.toml", config)
        .with_text("patient.conf", PATIENT);
    let deployed = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/systemd"));
    UNITS.into_iter().fold(medium, |medium, name| {
        medium.with_file(name, &deployed.join(name))
    })
}
