use std::fs;
use std::path::PathBuf;

use crate::cgroup_mounts::CgroupLayout;
use crate::cgroups::is_plain;

/// `cpu.weight` of v2 goes from 1 to 10,000 (cgroup-v2.rst), `cpu.shares` of v1 from 2 to 262,144
/// (`MAX_SHARES` in kernel/sched/sched.h). Ten times the usual: what shares a processor with it keeps
/// an eleventh. One more, to tell what was raised here from what an operator has set.
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
    /// What a new cgroup has.
    usual: &'static str,
    raised: &'static str,
}

/// What a cgroup gets of the processors beside its neighbours when they are short, in every
/// hierarchy that gives them out.
#[derive(Debug, Clone, Default)]
pub struct CgroupWeight {
    /// Where it may stand, and what stood there before it was raised.
    files: Vec<(PathBuf, Scale, Option<String>)>,
}

impl CgroupWeight {
    /// Of these cgroups, some of which may not exist. Nothing is written yet.
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

    /// Puts it before its neighbours, wherever it has a weight; whether that is anywhere.
    pub fn raise(&mut self) -> bool {
        let mut raised = false;
        for (file, scale, before) in &mut self.files {
            // What is not there, is not ours to change, or has more already, goes on as it is.
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

    /// Puts back what stood there before; the usual, where a process that has ended raised it.
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
            // It may be gone meanwhile.
            let _ = fs::write(file, value.trim());
        }
    }
}

/// What cannot be understood is taken for the least.
fn weight(text: &str) -> u32 {
    text.trim().parse().unwrap_or_default()
}
