use std::io;
use std::path::PathBuf;

use serde::Serialize;
use thiserror::Error;

use crate::diagnosis::{Diagnosis, Remedy};
use crate::host::{Host, sysctl_path};

/// The file with the settings for the next boot.
const FILE: &str = "/etc/sysctl.d/90-conman.conf";

/// The kernel settings that a diagnosis asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fix {
    target: u64,
    settings: Vec<Setting>,
}

/// One kernel setting.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Setting {
    key: &'static str,
    before: Option<u64>,
    value: u64,
}

/// What was changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Applied {
    /// The new values, as `key = value`.
    pub set: Vec<String>,
    /// The file that sets them at the next boot.
    pub file: Option<PathBuf>,
    /// What failed; everything else was done.
    #[serde(serialize_with = "as_texts")]
    pub failed: Vec<FixError>,
}

/// Why a setting could not be changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FixError {
    #[error("{key} could not be set to {value} ({reason}); run as root, outside containers")]
    Set {
        key: &'static str,
        value: u64,
        reason: io::ErrorKind,
    },
    #[error("{} could not be written ({reason}); run as root", path.display())]
    Write {
        path: PathBuf,
        reason: io::ErrorKind,
    },
}

fn as_texts<S: serde::Serializer>(errors: &[FixError], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(errors.iter().map(ToString::to_string))
}

impl Fix {
    /// Collects every kernel setting that the diagnosis asks to change. A limit is never lowered; a setting
    /// that should be off is set to 0.
    pub fn plan(diagnosis: &Diagnosis) -> Self {
        let settings = diagnosis
            .checks
            .iter()
            .filter_map(|check| match check.remedy {
                Some(Remedy::Sysctl { key, value })
                    if check
                        .value
                        .is_none_or(|now| now < value || (value == 0 && now > 0)) =>
                {
                    Some(Setting {
                        key,
                        before: check.value,
                        value,
                    })
                }
                _ => None,
            });
        Self {
            target: diagnosis.target,
            settings: settings.collect(),
        }
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.settings.is_empty()
    }

    /// The file for `/etc/sysctl.d`.
    pub fn file_text(&self) -> String {
        let mut text = format!(
            "# Written by `conman doctor --target {} --fix`.\n",
            self.target
        );
        for Setting { key, before, value } in &self.settings {
            let before = before.map_or_else(|| "unknown".to_owned(), |before| before.to_string());
            text.push_str(&format!("# before: {before}\n{key} = {value}\n"));
        }
        text
    }

    /// Sets what can be set, and writes the file; continues after an error.
    pub fn apply(&self, host: &Host) -> Applied {
        let mut applied = Applied {
            set: Vec::new(),
            file: None,
            failed: Vec::new(),
        };
        if self.is_empty() {
            return applied;
        }
        for Setting { key, value, .. } in &self.settings {
            match std::fs::write(host.path(&sysctl_path(key)), value.to_string()) {
                Ok(()) => applied.set.push(format!("{key} = {value}")),
                Err(error) => applied.failed.push(FixError::Set {
                    key,
                    value: *value,
                    reason: error.kind(),
                }),
            }
        }
        let path = host.path(FILE);
        match write_whole(&path, &self.merged(host)) {
            Ok(()) => applied.file = Some(path),
            Err(error) => applied.failed.push(FixError::Write {
                path,
                reason: error.kind(),
            }),
        }
        applied
    }

    /// This fix, and the settings of an earlier one that this one does not change.
    fn merged(&self, host: &Host) -> String {
        let earlier = host.text(FILE).unwrap_or_default();
        let kept = earlier.lines().filter(|line| {
            line.split_once('=').is_some_and(|(key, _)| {
                let key = key.trim();
                !key.starts_with('#') && self.settings.iter().all(|setting| setting.key != key)
            })
        });
        let mut text = self.file_text();
        for line in kept {
            text.push_str(line);
            text.push('\n');
        }
        text
    }
}

/// Writes a file atomically: a crash leaves the old one or the new one.
fn write_whole(path: &std::path::Path, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let draft = path.with_extension("conf.new");
    std::fs::write(&draft, text)?;
    std::fs::File::open(&draft)?.sync_all()?;
    std::fs::rename(&draft, path)
}
