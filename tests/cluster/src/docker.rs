//! What a cluster has in Docker, where its sessions are Docker's: one image, and containers.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::command::run;

/// Containers that are removed by one command.
const AT_A_TIME: usize = 50;

/// Has Docker know the image of the sessions.
pub(crate) fn import(archive: &Path) -> Result<()> {
    // Directories are twice in an archive that was appended to, which Docker refuses.
    let (root, single) = (
        archive.with_extension("docker"),
        archive.with_extension("docker.tar"),
    );
    fs::create_dir(&root).with_context(|| format!("cannot make {}", root.display()))?;
    let mut unpack = Command::new("tar");
    unpack.arg("-xf").arg(archive).arg("-C").arg(&root);
    run(&mut unpack)?;
    let mut pack = Command::new("tar");
    pack.args(["--numeric-owner", "--owner=0", "--group=0", "-cf"]);
    pack.arg(&single).arg("-C").arg(&root).arg(".");
    run(&mut pack)?;
    let mut import = Command::new("docker");
    import.arg("import").arg(&single).arg(conman_e2e::ROOT);
    run(&mut import)
        .map(drop)
        .context("Docker does not take the sessions' image; `cargo xtask setup` starts Docker")
}

/// Removes the containers of these installations, and the image.
pub(crate) fn remove(instances: &[String]) -> Result<()> {
    for instance in instances {
        let filter = format!("label=dev.conman.instance={instance}");
        let mut list = Command::new("docker");
        let listed = run(list.args(["ps", "--all", "--quiet", "--filter", &filter]))?;
        let ids: Vec<&str> = listed.split_whitespace().collect();
        for some in ids.chunks(AT_A_TIME) {
            let mut remove = Command::new("docker");
            run(remove.args(["rm", "--force", "--volumes"]).args(some))?;
        }
    }
    let mut forget = Command::new("docker");
    // Another cluster may have replaced or removed it.
    let _ = run(forget.args(["rmi", conman_e2e::ROOT]));
    Ok(())
}
