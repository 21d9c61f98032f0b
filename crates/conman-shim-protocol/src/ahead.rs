//! Containers made ahead, for starts that are not known yet.
//!
//! One is made like any other up to the point where a session is needed: it has its ids, namespaces, cgroups with
//! limits, and root. There its first process waits. A start of the same *kind* takes it and brings the rest: names,
//! files, binds, logs, the link, the program. Until then nothing of a session is in it.
//!
//! It ends with the connection of the client that ordered it, with its launcher and with its shim, and is in no list.
//! [`crate::Request::Kill`] ends it earlier.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::root_spec::RootKind;
use crate::spec::{LaunchSpec, SpecError, check_name};

/// What a start has to do with containers made ahead.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ahead {
    /// Nothing.
    #[default]
    No,
    /// It makes one. The answer comes when it waits.
    Make,
    /// It takes this one, if that waits and is of its kind. The client has moved that one's directory to the
    /// start's place. Otherwise, and if that one ends meanwhile, the container is made from the beginning, and its
    /// directory first emptied. So only for the first start with this directory.
    Take { name: String },
}

impl LaunchSpec {
    /// What a container made ahead must have in common with a start that takes it, in the form of an order to make
    /// one, without names and places.
    #[must_use]
    pub fn kind(&self) -> Self {
        let mut kind = self.clone();
        for name in [&mut kind.name, &mut kind.cgroup, &mut kind.hostname] {
            name.clear();
        }
        for place in [&mut kind.root.scratch, &mut kind.log] {
            *place = PathBuf::new();
        }
        (kind.log_stderr, kind.log_bytes, kind.terminal) = (None, None, None);
        kind.files.clear();
        kind.binds.clear();
        // Without a command a shim that knows nothing of this refuses it.
        kind.program.argv.clear();
        kind.program.env.clear();
        kind.program.workdir = "/".to_owned();
        kind.ahead = Ahead::Make;
        kind
    }

    /// The cgroup of the container made ahead that it takes, next to its own.
    #[must_use]
    pub fn cgroup_of_taken(&self) -> Option<String> {
        let Ahead::Take { name } = &self.ahead else {
            return None;
        };
        let (above, _) = self.cgroup.rsplit_once('/')?;
        Some(format!("{above}/{name}"))
    }

    pub(crate) fn check_ahead(&self) -> Result<(), SpecError> {
        match &self.ahead {
            Ahead::No => Ok(()),
            Ahead::Make | Ahead::Take { .. } if self.root.kind == RootKind::Snapshot => Err(
                SpecError::new("ahead", "a snapshot, which its start brings"),
            ),
            Ahead::Take { name } => check_name(name),
            // Its root is made with files of the client.
            Ahead::Make if self.hardening.has_runtime() => Err(SpecError::new(
                "ahead",
                "an order to make an OCI runtime's container ahead",
            )),
            Ahead::Make if *self != self.as_ordered() => Err(SpecError::new(
                "ahead",
                "an order to make a container ahead with something of a session",
            )),
            Ahead::Make => Ok(()),
        }
    }

    /// Its kind with its own names and places.
    fn as_ordered(&self) -> Self {
        let mut kind = self.kind();
        kind.name.clone_from(&self.name);
        kind.cgroup.clone_from(&self.cgroup);
        kind.root.scratch.clone_from(&self.root.scratch);
        kind.log.clone_from(&self.log);
        kind
    }
}
