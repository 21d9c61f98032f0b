//! The store on file systems of its own: as overlayfs reads it, full, and read-only.
//!
//! Each test runs itself once more in a mount namespace of its own, so that the machine's mounts
//! stay as they are whatever happens.
#![allow(clippy::print_stderr, reason = "a skipped test says so")]

use std::collections::BTreeSet;
use std::error::Error;
use std::fs;

use crate::support::private_mounts::{inside, mount};
use crate::support::{Stage, Tar, name, snapshot, unpack_error};
use conman_image::{ImageLimits, ImageStore, StoreError, UnpackError};

#[test]
fn overlayfs_reads_whiteouts_and_opaque_directories_as_they_were_meant() {
    if !inside("mounts::overlayfs_reads_whiteouts_and_opaque_directories_as_they_were_meant") {
        return;
    }
    let stage = Stage::new();
    let store = stage.store();
    let lower = Tar::new()
        .file("gone", b"lower")
        .file("kept", b"lower")
        .directory("opaque")
        .file("opaque/old", b"lower")
        .directory("merged")
        .file("merged/old", b"lower")
        .file("file-then-directory/old", b"lower")
        .bytes();
    let upper = Tar::new()
        .file(".wh.gone", b"")
        .directory("opaque")
        .file("opaque/.wh..wh..opq", b"")
        .file("opaque/new", b"upper")
        .file("merged/new", b"upper")
        .file(".wh.file-then-directory", b"")
        .file("file-then-directory/new", b"upper")
        .bytes();
    let import = |layer: &[u8], tag: &str| {
        let path = stage.file("layer.tar", layer);
        let image = store
            .import(&path, &name(&format!("x:{tag}")))
            .expect("imported");
        image.layers[0].root.display().to_string()
    };
    let layers = format!(
        "lowerdir={}:{}",
        import(&upper, "upper"),
        import(&lower, "lower")
    );
    let merged = stage.path().join("merged");
    fs::create_dir(&merged).expect("mount point");
    mount(&["-t", "overlay", "-o", &layers, "overlay"], &merged);
    let list = |directory: &str| -> BTreeSet<String> {
        fs::read_dir(merged.join(directory))
            .expect("directory")
            .map(|entry| {
                entry
                    .expect("entry")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect()
    };
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(
        list("."),
        set(&["file-then-directory", "kept", "merged", "opaque"])
    );
    assert_eq!(list("opaque"), set(&["new"]));
    assert_eq!(list("merged"), set(&["new", "old"]));
    assert_eq!(list("file-then-directory"), set(&["new"]));
}

#[test]
fn a_full_store_says_so_and_keeps_nothing_of_the_image() {
    if !inside("mounts::a_full_store_says_so_and_keeps_nothing_of_the_image") {
        return;
    }
    let stage = Stage::new();
    let directory = stage.path().join("small");
    fs::create_dir(&directory).expect("mount point");
    mount(&["-t", "tmpfs", "-o", "size=1m", "tmpfs"], &directory);
    let store = ImageStore::open(&directory, ImageLimits::default()).expect("store");
    let small = stage.file("small.tar", &Tar::new().file("a", b"a").bytes());
    let kept = store.import(&small, &name("small:1")).expect("imported");
    let before = snapshot(&directory);
    let large = stage.file(
        "large.tar",
        &Tar::new().file("big", &vec![1; 2 << 20]).bytes(),
    );
    let error = unpack_error(store.import(&large, &name("large:1")).expect_err("no room"));
    let UnpackError::Write { source, .. } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(source.kind(), std::io::ErrorKind::StorageFull);
    assert_eq!(snapshot(&directory), before);
    assert_eq!(
        store.pin(&name("small:1")).expect("whole").image().id,
        kept.id
    );
}

#[test]
fn a_list_of_images_is_never_absent_while_a_damaged_one_is_made_anew() {
    if !inside("mounts::a_list_of_images_is_never_absent_while_a_damaged_one_is_made_anew") {
        return;
    }
    let stage = Stage::new();
    let directory = stage.path().join("small");
    fs::create_dir(&directory).expect("mount point");
    mount(
        &["-t", "tmpfs", "-o", "nr_inodes=1000", "tmpfs"],
        &directory,
    );
    let open = || ImageStore::open(&directory, ImageLimits::default());
    let store = open().expect("store");
    let small = stage.file("small.tar", &Tar::new().file("a", b"a").bytes());
    let kept = store.import(&small, &name("small:1")).expect("imported");
    drop(store);
    let list = directory.join("images.json");
    fs::write(&list, "{").expect("damaged");
    // As many files and links as there can be: it ends after some step, as by a crash there.
    let filler = directory.join("filler");
    fs::create_dir(&filler).expect("made");
    let mut files = Vec::new();
    loop {
        let file = filler.join(files.len().to_string());
        match fs::write(&file, "") {
            Ok(()) => files.push(file),
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
                break;
            }
        }
    }
    let mut failures = 0;
    let store = loop {
        match open() {
            Ok(store) => break store,
            Err(error) => assert!(matches!(error, StoreError::Io { .. }), "{error:?}"),
        }
        assert_eq!(fs::read(&list).expect("it is there"), b"{");
        failures += 1;
        // The next one comes a step further.
        fs::remove_file(files.pop().expect("there is room in the end")).expect("removed");
    };
    assert!(failures >= 2, "it failed at {failures} steps");
    store.collect(&BTreeSet::new()).expect("collected");
    let image = store.pin(&name("small:1")).expect("whole");
    assert_eq!(image.image().id, kept.id);
    assert!(image.image().layers[0].root.join("a").exists());
    let aside = fs::read(directory.join("images.json.damaged"));
    assert_eq!(aside.expect("kept"), b"{");
}

#[test]
fn a_read_only_store_cannot_be_opened_for_writing() {
    if !inside("mounts::a_read_only_store_cannot_be_opened_for_writing") {
        return;
    }
    let stage = Stage::new();
    let directory = stage.path().join("fixed");
    fs::create_dir(&directory).expect("mount point");
    mount(&["-t", "tmpfs", "tmpfs"], &directory);
    let small = stage.file("small.tar", &Tar::new().file("a", b"a").bytes());
    let store = ImageStore::open(&directory, ImageLimits::default()).expect("store");
    store.import(&small, &name("small:1")).expect("imported");
    drop(store);
    mount(&["-o", "remount,ro"], &directory);
    let error = ImageStore::open(&directory, ImageLimits::default()).expect_err("read-only");
    assert!(matches!(error, StoreError::Io { .. }), "{error:?}");
    let source = error
        .source()
        .expect("a cause")
        .downcast_ref::<std::io::Error>();
    assert_eq!(
        source.expect("an I/O error").kind(),
        std::io::ErrorKind::ReadOnlyFilesystem
    );
}
