//! What the cgroup of all of an instance's sessions weighs when processors are short.

use std::path::PathBuf;

use conman_core::naming::{CgroupDriver, instance_cgroup};

use super::Stage;

/// The files with the weights, in a cgroup that is there whether or not sessions are; `None`, and
/// said, where the host has none.
#[expect(clippy::print_stdout, reason = "a test that is skipped says so")]
pub(crate) fn weights_of(stage: &Stage) -> Option<Vec<PathBuf>> {
    let path = instance_cgroup(&stage.instance, CgroupDriver::Cgroupfs);
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let of_cpu = mounts.lines().filter(|line| {
        let v1 = line.split([' ', ',']).any(|option| option == "cpu");
        line.contains(" - cgroup2 ") || (line.contains(" - cgroup ") && v1)
    });
    let directories = of_cpu
        .filter_map(|line| line.split(' ').nth(4))
        .map(|mount| PathBuf::from(mount).join(path.trim_start_matches('/')));
    let files = directories.flat_map(|directory| {
        std::fs::create_dir_all(&directory).expect("this test makes cgroups, as root");
        ["cpu.weight", "cpu.shares"].map(|name| directory.join(name))
    });
    let files: Vec<_> = files.filter(|file| file.exists()).collect();
    if files.is_empty() {
        println!("skipped: no cgroup of this host has a weight");
        return None;
    }
    Some(files)
}

pub(crate) fn read(files: &[PathBuf]) -> Vec<String> {
    let texts = files.iter().map(std::fs::read_to_string);
    texts.map(|text| text.expect("readable")).collect()
}
