//! Applies the kernel settings that a diagnosis asks for.

use std::path::PathBuf;

use conman_linux::replace_file;
use serde::Serialize;

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
    pub failed: Vec<String>,
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
                Err(error) => applied.failed.push(format!(
                    "{key} could not be set to {value} ({error}); run as root, outside containers"
                )),
            }
        }
        let path = host.path(FILE);
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        match folder.and_then(|()| replace_file(&path, self.merged(host).as_bytes())) {
            Ok(()) => applied.file = Some(path),
            Err(error) => applied.failed.push(format!(
                "{} could not be written ({error}); run as root",
                path.display()
            )),
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
