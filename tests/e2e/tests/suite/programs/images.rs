//! Images as other tools write them.

use std::path::Path;

use conman_e2e::{BUSYBOX, Conman, docker_shared, native};
use tokio::process::Command;

use super::{preempt, run};
use crate::first_hour::{README, block, succeeded, typed};

/// Runs a shell's command line in this directory.
async fn shell(directory: &Path, line: &str) {
    run(Command::new("sh")
        .args(["-ec", line])
        .current_dir(directory))
    .await;
}

/// Imports what is there under this name, and runs a session of it, also after a preemption.
async fn runs(conman: &Conman, path: &Path, name: &str, command: &[&str]) {
    let path = path.to_string_lossy();
    let import = ["image", "import", &*path, &*format!("{name}:1")];
    conman.cli(&import).await.success();
    is_entered(conman, name, command).await;
    preempt(conman).await;
    is_entered(conman, name, command).await;
}

async fn is_entered(conman: &Conman, name: &str, command: &[&str]) {
    let image = format!("{name}:1");
    let words = [&["run", name, "--image", &*image][..], command].concat();
    conman.cli(&words).await.success();
    let print = ["exec", name, "--", "/bin/sh", "-c", "echo inside"];
    assert_eq!(conman.cli(&print).await.success(), "inside\n", "{name}");
}

#[tokio::test]
#[ignore = "`cargo xtask acceptance programs`"]
async fn images_of_docker_skopeo_buildah_and_debootstrap_are_imported_and_run() {
    let Some(native) = native() else { return };
    let Some(_docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder().start_native(&native).await;
    let directory = tempfile::tempdir().expect("a directory can be made");
    let directory = directory.path();
    let sleep = ["--", "/bin/sh", "-c", "sleep 1000"];

    let docker = "docker save $1 -o save.tar; id=$(docker create $1 true); \
        docker export $id -o export.tar; docker rm $id";
    shell(directory, &docker.replace("$1", BUSYBOX)).await;
    for (file, name) in [("save.tar", "saved"), ("export.tar", "exported")] {
        runs(&conman, &directory.join(file), name, &sleep).await;
    }

    let skopeo = "skopeo copy -q docker-archive:save.tar oci:layout:app; \
        skopeo copy -q docker-archive:save.tar oci-archive:packed.tar:app; \
        skopeo copy -q --dest-compress --dest-compress-format zstd docker-archive:save.tar oci:zstd:app";
    shell(directory, skopeo).await;
    for (file, name) in [
        ("layout", "layout"),
        ("packed.tar", "packed"),
        ("zstd", "zstd"),
    ] {
        runs(&conman, &directory.join(file), name, &sleep).await;
    }

    // Its command comes from the image.
    let buildah = "export STORAGE_DRIVER=vfs; b='buildah --root storage --runroot run'; \
        c=$($b from scratch); $b copy -q $c /usr/bin/busybox /bin/busybox; \
        $b copy -q $c /usr/bin/busybox /bin/sh; \
        $b config --cmd '[\"/bin/busybox\", \"sleep\", \"1000\"]' $c; $b commit -q $c built:1; \
        $b push -q built:1 oci-archive:built.tar:1; $b push -q built:1 docker-archive:built2.tar:built:1";
    shell(directory, buildah).await;
    for (file, name) in [("built.tar", "built"), ("built2.tar", "built2")] {
        runs(&conman, &directory.join(file), name, &[]).await;
    }

    // As the README has it.
    let lines = block(README, "Without a registry", "The same over HTTP");
    let (_, debootstrap) = lines.split_once('\n').expect("two commands");
    assert!(debootstrap.starts_with("debootstrap "), "{debootstrap}");
    let line = format!("mkdir typed; cd typed\n{debootstrap}");
    succeeded(&typed(&conman, &line));
    let run = [
        "run",
        "--rm",
        "--image",
        "python:3.12-slim",
        "--",
        "python3",
        "-c",
    ];
    let printed = conman.cli(&[&run[..], &["print(1)"]].concat()).await;
    assert_eq!(printed.success(), "1\n");
    let shown = conman.cli(&["image", "inspect", "python:3.12-slim"]).await;
    assert!(
        !shown.success().contains(r#""skipped_devices":0"#),
        "{shown:?}"
    );
    assert!(
        shown.success().contains(r#""skipped_devices""#),
        "{shown:?}"
    );
}
