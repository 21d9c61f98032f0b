//! A cgroup's share of the processors.

use std::fs;
use std::path::PathBuf;

use crate::cgroup_mounts::CgroupLayout;
use crate::cgroups::is_plain;

/// `cpu.weight` of v2 ranges from 1 to 10,000 (cgroup-v2.rst), `cpu.shares` of v1 from 2 to 262,144
/// (`MAX_SHARES` in kernel/sched/sched.h). Ten times the default: other cgroups on the same processor keep
/// an eleventh. One more, to distinguish a value set here from an operator's.
const UNIFIED: Scale = Scale {
    file: "cpu.weight",
    usual: "100",
    raised: "1001",
};
const V1: Scale = Scale {
    file: "cpu.shares",
    usual: "1024",
    raised: "10241",
};

#[derive(Debug, Clone, Copy)]
struct Scale {
    file: &'static str,
    /// The value of a new cgroup.
    usual: &'static str,
    raised: &'static str,
}

/// A cgroup's share of the processors compared with its neighbours when they are short, in every
/// hierarchy that distributes them.
#[derive(Debug, Clone, Default)]
pub struct CgroupWeight {
    /// Files that may exist, and their values before they were raised.
    files: Vec<(PathBuf, Scale, Option<String>)>,
}

impl CgroupWeight {
    /// For these cgroups, some of which may not exist. Nothing is written yet.
    ///
    /// `paths` as `/proc/PID/cgroup` shows them; those that are not plain are left out.
    #[must_use]
    pub fn of(layout: &CgroupLayout, paths: &[String]) -> Self {
        let hierarchies = layout.hierarchies().iter();
        let files = hierarchies
            .filter_map(|hierarchy| match hierarchy.unified {
                true => Some((hierarchy, UNIFIED)),
                false => hierarchy.controls("cpu").then_some((hierarchy, V1)),
            })
            .flat_map(|(hierarchy, scale)| {
                let plain = paths.iter().filter(|path| is_plain(path));
                let directories = plain.filter_map(|path| hierarchy.directory(path));
                directories.map(move |directory| (directory.join(scale.file), scale, None))
            })
            .collect();
        Self { files }
    }

    /// Raises the weight above the neighbours'. Returns whether that worked anywhere.
    pub fn raise(&mut self) -> bool {
        let mut raised = false;
        for (file, scale, before) in &mut self.files {
            // A file that is missing, not writable, or higher already stays as it is.
            let Ok(present) = fs::read_to_string(&*file) else {
                continue;
            };
            if weight(&present) > weight(scale.raised) {
                continue;
            }
            if fs::write(&*file, scale.raised).is_ok() {
                before.get_or_insert(present);
                raised = true;
            }
        }
        raised
    }

    /// Restores the earlier values; the default, if a process that has ended raised them.
    pub fn restore(&mut self) {
        for (file, scale, before) in &mut self.files {
            let is_raised = |present: &String| present.trim() == scale.raised;
            let value = match before.take().filter(|before| !is_raised(before)) {
                Some(before) => before,
                None if fs::read_to_string(&*file).is_ok_and(|present| is_raised(&present)) => {
                    scale.usual.to_owned()
                }
                None => continue,
            };
            // It may have been removed.
            let _ = fs::write(file, value.trim());
        }
    }
}

/// A value that cannot be parsed counts as the lowest.
fn weight(text: &str) -> u32 {
    text.trim().parse().unwrap_or_default()
}
