//! Honest images of every form, and what the store makes of them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;

use crate::support::{Stage, Tar, gzip, is_root, lacks, name, snapshot, unpack_error, zstd};
use conman_image::{
    Digest, ImageLimits, ImageStore, ImportError, StoreError, UnpackError, resolve_user,
};
use tar::EntryType;

fn opaque(path: &Path) -> bool {
    let mut value = [0; 4];
    rustix::fs::getxattr(path, "trusted.overlay.opaque", &mut value[..])
        .is_ok_and(|length| &value[..length] == b"y")
}

fn is_whiteout(path: &Path) -> bool {
    let metadata = fs::symlink_metadata(path).expect("metadata");
    metadata.file_type().is_char_device() && metadata.rdev() == 0
}

fn layouts(stage: &Stage, directory: &str, layers: &[Vec<u8>]) -> std::path::PathBuf {
    let root = stage.path().join(directory);
    let blobs = root.join("blobs/sha256");
    fs::create_dir_all(&blobs).expect("directories");
    let put = |bytes: &[u8]| {
        let digest = Digest::of(bytes);
        fs::write(blobs.join(digest.hex()), bytes).expect("blob");
        serde_json::json!({"digest": digest.to_string(), "size": bytes.len()})
    };
    let mut described = Vec::new();
    let mut diff_ids = Vec::new();
    for layer in layers {
        diff_ids.push(Digest::of(layer).to_string());
        let mut descriptor = put(&gzip(layer));
        descriptor["mediaType"] = "application/vnd.oci.image.layer.v1.tar+gzip".into();
        described.push(descriptor);
    }
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux",
        "config": {"Entrypoint": ["/bin/serve"], "Cmd": ["--all"], "Env": ["A=b"], "User": "app", "WorkingDir": "/srv"},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    let mut config = put(config.to_string().as_bytes());
    config["mediaType"] = "application/vnd.oci.image.config.v1+json".into();
    let manifest = serde_json::json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": config, "layers": described,
    });
    let mut manifest = put(manifest.to_string().as_bytes());
    manifest["mediaType"] = "application/vnd.oci.image.manifest.v1+json".into();
    let index = serde_json::json!({"schemaVersion": 2, "manifests": [manifest]});
    fs::write(root.join("index.json"), index.to_string()).expect("index");
    fs::write(root.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).expect("layout");
    root
}

/// An archive of a directory, as `tar -C directory .` would make it.
fn tar_of(directory: &Path) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    builder.append_dir_all(".", directory).expect("archive");
    builder.into_inner().expect("archive")
}

fn two_layers() -> [Vec<u8>; 2] {
    let lower = Tar::new()
        .directory("etc")
        .file(
            "etc/passwd",
            b"root:x:0:0::/root:/bin/sh\napp:x:1000:100::/home/app:/bin/sh\n",
        )
        .file(
            "etc/group",
            b"root:x:0:\nusers:x:100:\nvideo:x:44:other,app\naudio:x:29:app\n",
        )
        .file("gone", b"x")
        .directory("dir")
        .file("dir/old", b"x")
        .bytes();
    let upper = Tar::new()
        .file(".wh.gone", b"")
        .directory("dir")
        .file("dir/.wh..wh..opq", b"")
        .file("dir/new", b"y")
        .bytes();
    [lower, upper]
}

#[test]
fn a_root_file_system_is_imported_from_every_packing_as_the_same_image() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = stage.store();
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    // CAP_DAC_OVERRIDE and CAP_FOWNER are a newline together.
    let mut with_newline = capability;
    with_newline[4..6].copy_from_slice(&[10, 0]);
    let plain = Tar::new()
        .entry(EntryType::Directory, "./", "", b"", |header| {
            header.set_mode(0o711)
        })
        .entry(EntryType::Regular, "bin/su", "", b"#!", |header| {
            header.set_mode(0o4755);
            header.set_uid(7);
            header.set_gid(8);
        })
        .pax(&[
            ("SCHILY.xattr.security.capability", &capability),
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            ("SCHILY.xattr.user.note", b"dropped"),
            ("mtime", b"1600000000.5"),
        ])
        .file("bin/ping", b"ELF")
        .link("bin/ping6", "./bin/ping")
        .pax(&[
            ("SCHILY.xattr.security.capability", &with_newline),
            ("SCHILY.xattr.user.note", b"a\nb\n"),
        ])
        .file("bin/odd", b"ELF")
        .symlink("bin/outside", "/../../etc/shadow")
        .entry(EntryType::Fifo, "run/fifo", "", b"", |header| {
            header.set_mode(0o620)
        })
        .bytes();
    let mut images = Vec::new();
    for (number, packed) in [plain.clone(), gzip(&plain), zstd(&plain)]
        .iter()
        .enumerate()
    {
        // The name says nothing.
        let path = stage.file("image.dat", packed);
        let image = store
            .import(&path, &name(&format!("root:{number}")))
            .expect("imported");
        assert_eq!(image.layers[0].id, Digest::of(&plain));
        images.push(image.id);
    }
    images.dedup();
    assert_eq!(images.len(), 1);

    let root = &store.get(&name("root:1")).expect("there").layers[0].root;
    let metadata = |path: &str| fs::symlink_metadata(root.join(path)).expect("metadata");
    assert_eq!(fs::metadata(root).expect("root").mode() & 0o7777, 0o711);
    assert_eq!(fs::metadata(root).expect("root").mtime(), 1_700_000_000);
    let su = metadata("bin/su");
    assert_eq!((su.mode() & 0o7777, su.uid(), su.gid()), (0o4755, 7, 8));
    assert_eq!(su.mtime(), 1_700_000_000);
    let ping = metadata("bin/ping");
    assert_eq!(
        (ping.mtime(), ping.mtime_nsec()),
        (1_600_000_000, 500_000_000)
    );
    assert_eq!(ping.ino(), metadata("bin/ping6").ino());
    let mut names = Vec::with_capacity(256);
    rustix::fs::listxattr(
        root.join("bin/ping"),
        rustix::buffer::spare_capacity(&mut names),
    )
    .expect("attributes");
    assert_eq!(names, b"security.capability\0");
    assert_eq!(
        fs::read_link(root.join("bin/outside")).expect("link"),
        Path::new("/../../etc/shadow")
    );
    assert!(metadata("run/fifo").file_type().is_fifo());
    assert_eq!(metadata("run/fifo").mode() & 0o7777, 0o620);
    assert_eq!(metadata("run").mode() & 0o7777, 0o755);
}

#[test]
fn an_oci_layout_is_imported_as_a_directory_and_as_an_archive() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = stage.store();
    let layers = two_layers();
    let root = layouts(&stage, "layout", &layers);
    let image = store.import(&root, &name("app:1")).expect("directory");
    assert_eq!(
        image.config.argv(&[], &[]).expect("a program"),
        ["/bin/serve", "--all"]
    );
    assert_eq!(image.config.env, ["A=b"]);
    assert_eq!(image.config.workdir.as_deref(), Some("/srv"));
    let ids: Vec<Digest> = image.layers.iter().map(|layer| layer.id).collect();
    assert_eq!(ids, [Digest::of(&layers[0]), Digest::of(&layers[1])]);

    let upper = &image.layers[1].root;
    assert!(is_whiteout(&upper.join("gone")));
    assert!(opaque(&upper.join("dir")));
    assert_eq!(
        image.lower_directories(),
        [upper.as_path(), &image.layers[0].root]
    );

    let user = image.config.user.as_deref().expect("a user");
    let user = resolve_user(&image.lower_directories(), user).expect("app");
    assert_eq!((user.uid, user.gid, user.groups), (1000, 100, vec![29, 44]));
    assert_eq!(user.home.as_deref(), Some("/home/app"));

    let archive = tar_of(&root);
    for packed in [archive.clone(), gzip(&archive), zstd(&archive)] {
        let path = stage.file("layout.bin", &packed);
        let again = store.import(&path, &name("app:2")).expect("archive");
        assert_eq!(again.id, image.id);
        let streamed = store
            .import_stream(&packed[..], &name("app:3"))
            .expect("stream");
        assert_eq!(streamed.id, image.id);
    }
    let listed = store.list();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].names.len(), 3);
}

#[test]
fn a_layer_that_is_there_twice_is_mounted_once() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let [lower, upper] = two_layers();
    let root = layouts(&stage, "layout", &[lower.clone(), upper, lower]);
    let image = stage
        .store()
        .import(&root, &name("app:1"))
        .expect("imported");
    let [below, upper, top] = &image.layers[..] else {
        panic!("{:?}", image.layers);
    };
    assert_eq!((&below.root, below.owners_out_of_range), (&top.root, 0));
    assert_eq!(image.lower_directories(), [top.root.as_path(), &upper.root]);
}

#[test]
fn owners_that_no_session_has_are_counted() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let id = |id: u64| move |header: &mut tar::Header| header.set_uid(id);
    let archive = Tar::new()
        .entry(tar::EntryType::Regular, "mine", "", b"", id(65_535))
        .entry(tar::EntryType::Regular, "theirs", "", b"", id(65_536))
        .bytes();
    let path = stage.file("image.tar", &archive);
    let image = stage
        .store()
        .import(&path, &name("app:1"))
        .expect("imported");
    assert_eq!(image.layers[0].owners_out_of_range, 1);
}

#[test]
fn damage_in_an_oci_layout_is_named_and_leaves_nothing() {
    if !is_root() {
        return;
    }
    type Damage = fn(&Path, &[Vec<u8>]);
    let cases: [(&str, Damage); 5] = [
        ("missing", |root, layers| {
            fs::remove_file(blob_path(root, &layers[0])).expect("remove");
        }),
        ("other", |root, layers| {
            let other = Tar::new().file("evil", b"x").bytes();
            fs::write(blob_path(root, &layers[0]), gzip(&other)).expect("write");
        }),
        ("cut", |root, layers| {
            let path = blob_path(root, &layers[0]);
            let bytes = fs::read(&path).expect("read");
            fs::write(&path, &bytes[..bytes.len() - 9]).expect("write");
        }),
        ("type", |root, _| {
            let path = root.join("index.json");
            let text = fs::read_to_string(&path).expect("read");
            fs::write(&path, text.replace("image.manifest.v1", "image.secret.v1")).expect("write");
        }),
        ("link", |root, layers| {
            let path = blob_path(root, &layers[0]);
            fs::remove_file(&path).expect("remove");
            std::os::unix::fs::symlink("/etc/hostname", &path).expect("link");
        }),
    ];
    for (what, damage) in cases {
        let stage = Stage::new();
        let store = stage.store();
        let layers = two_layers();
        let root = layouts(&stage, "layout", &layers);
        damage(&root, &layers);
        let before = snapshot(store.directory());
        let error = store.import(&root, &name("app:1")).expect_err(what);
        match what {
            "missing" => assert!(matches!(error, ImportError::Missing { .. }), "{error:?}"),
            "other" => assert!(
                matches!(unpack_error(error), UnpackError::DigestMismatch { .. }),
                "{what}"
            ),
            "cut" => assert!(
                matches!(unpack_error(error), UnpackError::Truncated { .. }),
                "{what}"
            ),
            "type" => assert!(matches!(error, ImportError::MediaType { .. }), "{error:?}"),
            _ => assert!(matches!(error, ImportError::ReadPart { .. }), "{error:?}"),
        }
        assert_eq!(snapshot(store.directory()), before, "{what}");
    }
}

#[test]
fn a_layer_of_the_same_size_with_other_content_is_refused_by_its_digest() {
    if !is_root() {
        return;
    }
    let honest = Tar::new().file("a", b"honest").bytes();
    let forged = Tar::new().file("a", b"forged").bytes();
    assert_eq!(honest.len(), forged.len());

    let stage = Stage::new();
    let store = stage.store();
    let root = layouts(&stage, "layout", std::slice::from_ref(&honest));
    let before = snapshot(store.directory());
    let blobs = root.join("blobs/sha256");
    let (stored, forged_gzip) = (gzip(&honest), gzip(&forged));
    assert_eq!(stored.len(), forged_gzip.len(), "choose other contents");
    fs::write(blobs.join(Digest::of(&stored).hex()), &forged_gzip).expect("forge");
    let error = unpack_error(store.import(&root, &name("a:1")).expect_err("forged"));
    assert!(
        matches!(error, UnpackError::DigestMismatch { expected, .. }
                if expected == Digest::of(&honest)),
        "{error:?}"
    );
    assert_eq!(snapshot(store.directory()), before);

    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [Digest::of(&honest).to_string()]},
    })
    .to_string();
    let manifest = serde_json::json!([{"Config": "config.json", "Layers": ["layer.tar"]}]);
    let saved = Tar::new()
        .file("layer.tar", &forged)
        .file("config.json", config.as_bytes())
        .file("manifest.json", manifest.to_string().as_bytes())
        .bytes();
    let error = unpack_error(stage.refused(&store, &saved));
    assert!(
        matches!(error, UnpackError::DigestMismatch { actual, .. }
            if actual == Digest::of(&forged)),
        "{error:?}"
    );
}

fn blob_path(root: &Path, layer: &[u8]) -> std::path::PathBuf {
    root.join("blobs/sha256")
        .join(Digest::of(&gzip(layer)).hex())
}

#[test]
fn a_saved_docker_image_is_imported_with_shared_layers_and_its_configuration() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = stage.store();
    let layer = Tar::new()
        .directory("etc")
        .file("etc/motd", b"hello")
        .bytes();
    let diff = Digest::of(&layer).to_string();
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux", "config": {"Cmd": ["sh"], "Entrypoint": null},
        "rootfs": {"type": "layers", "diff_ids": [diff, diff]},
    })
    .to_string();
    let id = Digest::of(config.as_bytes());
    let manifest = |config: &str| {
        serde_json::json!([{"Config": config, "RepoTags": ["x:1"], "Layers": ["b/layer.tar", "a/layer.tar"]}])
            .to_string()
    };
    let config_name = format!("{}.json", id.hex());
    let saved = |manifest: &str, config: &str, link: &str| {
        Tar::new()
            .file("a/layer.tar", &layer)
            .symlink("b/layer.tar", link)
            .file(&config_name, config.as_bytes())
            .file("manifest.json", manifest.as_bytes())
            .bytes()
    };
    let good = saved(&manifest(&config_name), &config, "../a/layer.tar");
    for packed in [good.clone(), gzip(&good)] {
        let path = stage.file("saved", &packed);
        let image = store.import(&path, &name("saved:1")).expect("imported");
        assert_eq!(image.id, id);
        assert_eq!(image.config.argv(&[], &[]).expect("a program"), ["sh"]);
        assert_eq!(image.layers.len(), 2);
    }
    // Names outside the archive are names of nothing.
    for (archive, what) in [
        (
            saved(&manifest(&config_name), &config, "/etc/passwd"),
            "layer",
        ),
        (
            saved(&manifest(&config_name), &config, "../../a/layer.tar"),
            "layer",
        ),
        (
            saved(&manifest("/etc/passwd"), &config, "../a/layer.tar"),
            "config",
        ),
    ] {
        let fresh = Stage::new();
        let error = fresh
            .store()
            .import(&fresh.file("saved", &archive), &name("saved:2"))
            .expect_err(what);
        assert!(
            matches!(error, ImportError::Missing { .. }),
            "{what}: {error:?}"
        );
    }
    let forged = saved(
        &manifest(&config_name),
        &config.replace("sh", "ls"),
        "../a/layer.tar",
    );
    let error = stage.refused(&store, &forged);
    assert!(
        matches!(error, ImportError::DigestMismatch { .. }),
        "{error:?}"
    );
}

#[test]
fn an_archive_as_apko_writes_it_is_imported() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = stage.store();
    let layer = Tar::new().file("bin/app", b"hello").bytes();
    let config = serde_json::json!({
        "architecture": "amd64", "os": "linux", "config": {"Entrypoint": ["/bin/app"]},
        "rootfs": {"type": "layers", "diff_ids": [Digest::of(&layer).to_string()]},
    })
    .to_string();
    let id = Digest::of(config.as_bytes());
    let packed = gzip(&layer);
    let layer_name = format!("{}.tar.gz", Digest::of(&packed).hex());
    let archive = |config: &str| {
        let config_name = format!("sha256:{}", id.hex());
        let manifest = serde_json::json!([{"Config": config_name,
            "RepoTags": ["index.docker.io/library/app:1-amd64"], "Layers": [layer_name]}]);
        // It has the index of an OCI layout, but is none.
        Tar::new()
            .file(&config_name, config.as_bytes())
            .file(&layer_name, &packed)
            .file("manifest.json", manifest.to_string().as_bytes())
            .file("index.json", b"{}")
            .bytes()
    };
    let path = stage.file("app.tar", &archive(&config));
    let image = store.import(&path, &name("app:1")).expect("imported");
    assert_eq!(image.id, id);
    assert_eq!(
        image.config.argv(&[], &[]).expect("a program"),
        ["/bin/app"]
    );
    let error = stage.refused(&store, &archive(&config.replace("app", "ls")));
    assert!(
        matches!(error, ImportError::DigestMismatch { .. }),
        "{error:?}"
    );
}

#[test]
fn real_docker_images_are_imported() {
    if !is_root() {
        return;
    }
    for (source, program) in [
        ("conman-test:busybox", "bin/busybox"),
        ("conman-test:python", "usr/bin/python3"),
    ] {
        let stage = Stage::new();
        let path = stage.path().join("saved.tar");
        let saved = std::process::Command::new("docker")
            .args(["save", source, "--output"])
            .arg(&path)
            .output();
        if !saved.is_ok_and(|output| output.status.success()) {
            lacks(&format!("docker has no image {source}"));
            continue;
        }
        let image = stage
            .store()
            .import(&path, &name("real:1"))
            .expect("imported");
        let found = image
            .lower_directories()
            .iter()
            .any(|root| fs::symlink_metadata(root.join(program)).is_ok());
        assert!(found, "{image:?}");
    }
}

#[test]
fn whiteouts_speak_of_the_layers_below_whichever_comes_first() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let archive = Tar::new()
        .file("kept", b"x")
        .file(".wh.kept", b"")
        .file(".wh.later", b"")
        .file("later", b"x")
        .directory("before")
        .file(".wh.before", b"")
        .file(".wh.after", b"")
        .directory("after")
        .file(".wh.implied", b"")
        .file("implied/file", b"x")
        .file(".wh..wh.aufs", b"")
        .file(".wh..wh..opq", b"")
        .bytes();
    let image = stage
        .store()
        .import(&stage.file("a.tar", &archive), &name("a:1"))
        .expect("imported");
    let root = &image.layers[0].root;
    assert_eq!(fs::read(root.join("kept")).expect("kept"), b"x");
    assert_eq!(fs::read(root.join("later")).expect("later"), b"x");
    for directory in ["before", "after", "implied"] {
        assert!(opaque(&root.join(directory)), "{directory}");
    }
    assert_eq!(fs::read_dir(root).expect("root").count(), 5);
    assert!(image.layers[0].hides_all_below);
}

#[test]
fn unreadable_forms_are_named() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = stage.store();
    let import = |content: &[u8]| store.import(&stage.file("x", content), &name("x:1"));
    assert!(matches!(import(b""), Err(ImportError::Empty)));
    assert!(matches!(
        import(b"\xfd7zXZ\x00rest"),
        Err(ImportError::ForeignFormat { format: "xz" })
    ));
    let noise = import(&[0x41; 2048]);
    assert!(matches!(noise, Err(ImportError::NoArchive)));
    let directory = store.import(&stage.canary(), &name("x:1"));
    assert!(matches!(
        directory,
        Err(ImportError::NoLayout {
            missing: "oci-layout",
            ..
        })
    ));
    let absent = store.import(&stage.path().join("absent"), &name("x:1"));
    assert!(matches!(absent, Err(ImportError::Open { .. })));
    assert!(store.list().is_empty());
}

#[test]
fn a_collection_removes_what_nothing_names_pins_or_uses() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = stage.store();
    let import = |tag: &str| {
        let archive = Tar::new().file(tag, tag.as_bytes()).bytes();
        store
            .import(&stage.file("a.tar", &archive), &name(&format!("a:{tag}")))
            .expect("imported")
    };
    let (named, pinned, used, loose) = (
        import("named"),
        import("pinned"),
        import("used"),
        import("loose"),
    );
    let guard = store.pin(&name("a:pinned")).expect("pinned");
    for tag in ["pinned", "used", "loose"] {
        store.remove(&name(&format!("a:{tag}"))).expect("removed");
    }
    assert!(matches!(
        store.remove(&name("a:loose")),
        Err(StoreError::NoSuchImage { .. })
    ));
    let in_use = BTreeSet::from([used.layers[0].id]);
    let report = store.collect(&in_use).expect("collected");
    assert_eq!(report.layers, [loose.layers[0].id]);
    assert_eq!(report.freed_bytes, "loose".len() as u64);
    assert!(!loose.layers[0].root.exists());
    for image in [&named, &pinned, &used] {
        assert!(image.layers[0].root.exists());
    }
    drop(guard);
    let report = store.collect(&BTreeSet::new()).expect("collected");
    assert_eq!(
        BTreeSet::from_iter(report.layers),
        BTreeSet::from([pinned.layers[0].id, used.layers[0].id])
    );
    assert!(named.layers[0].root.exists());
    assert_eq!(store.list().len(), 1);
}

#[test]
fn one_process_writes_others_read_and_leftovers_are_swept() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = stage.store();
    let directory = store.directory().to_owned();
    let archive = Tar::new().file("a", b"a").bytes();
    let image = store
        .import(&stage.file("a.tar", &archive), &name("a:1"))
        .expect("imported");
    let second = ImageStore::open(&directory, ImageLimits::default());
    assert!(matches!(second, Err(StoreError::InUse { .. })));
    drop(store);

    fs::create_dir_all(directory.join("tmp/layer-cut/root/deep")).expect("leftover");
    fs::write(directory.join("tmp/gone"), "x").expect("leftover");
    let store = ImageStore::open(&directory, ImageLimits::default()).expect("opened again");
    assert_eq!(fs::read_dir(directory.join("tmp")).expect("tmp").count(), 0);
    assert_eq!(store.get(&name("a:1")).expect("there").id, image.id);
    assert_eq!(
        fs::metadata(&directory).expect("store").mode() & 0o777,
        0o700
    );

    fs::remove_dir_all(image.layers[0].root.parent().expect("layer")).expect("lost");
    assert!(matches!(
        store.pin(&name("a:1")),
        Err(StoreError::MissingLayer { .. })
    ));
}

#[test]
fn a_store_that_other_ids_are_to_own_keeps_its_images() {
    const SHARED: u32 = 0x3FFF_0000;
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let directory = stage.path().join("store");
    let owner = |store: &ImageStore, image: &str, file: &str| {
        let layers = store.pin(&name(image)).expect("held");
        let root = layers.image().layers[0].root.clone();
        fs::metadata(root.join(file)).expect("unpacked").uid()
    };
    let mut first = Some(("a:1", "a"));
    for first_id in [0, SHARED, 0, SHARED] {
        let store = ImageStore::open_for(&directory, ImageLimits::default(), first_id);
        let store = store.expect("opened");
        assert_eq!(store.first_id(), first_id);
        if let Some((image, file)) = first.take() {
            let archive = Tar::new().file(file, b"x").bytes();
            let imported = store.import(&stage.file("a.tar", &archive), &name(image));
            imported.expect("imported");
        }
        assert_eq!(owner(&store, "a:1", "a"), first_id);
        let fresh = format!("b:{first_id}");
        let content = fresh.clone().into_bytes();
        let archive = Tar::new().file("b", &content).bytes();
        let imported = store.import(&stage.file("b.tar", &archive), &name(&fresh));
        imported.expect("imported");
        assert_eq!(owner(&store, &fresh, "b"), first_id);
    }
}

#[test]
fn imports_and_collections_side_by_side_leave_whole_images() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let store = stage.store();
    let shared = Tar::new().file("shared", &vec![7; 1 << 20]).bytes();
    let root = layouts(&stage, "layout", &[shared]);
    std::thread::scope(|scope| {
        for number in 0..4 {
            let (store, root) = (&store, &root);
            scope.spawn(move || {
                let name = name(&format!("shared:{number}"));
                let image = store.import(root, &name).expect("imported");
                assert!(image.layers[0].root.join("shared").exists());
                store.collect(&BTreeSet::new()).expect("collected");
                assert!(image.layers[0].root.join("shared").exists());
            });
        }
    });
    assert_eq!(
        fs::read_dir(store.directory().join("layers"))
            .expect("layers")
            .count(),
        1
    );
    assert_eq!(store.list()[0].names.len(), 4);
}

#[test]
fn users_are_looked_up_in_the_image_and_nowhere_else() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let tree = |name: &str| {
        let path = stage.path().join(name);
        fs::create_dir_all(path.join("etc")).expect("etc");
        path
    };
    let lower = tree("lower");
    fs::write(
        lower.join("etc/passwd"),
        "junk\nweb:x:33:33:,:/var/www:/bin/sh\n+::::::\n",
    )
    .expect("passwd");
    fs::write(lower.join("etc/group"), "www:x:33:web\nlog:x:4:web,a\n").expect("group");
    let ids = |user: &str| {
        let user = resolve_user(&[&lower], user).expect("resolved");
        (user.uid, user.gid, user.groups)
    };
    assert_eq!(ids("web"), (33, 33, vec![4]));
    assert_eq!(ids("33"), (33, 33, vec![4]));
    assert_eq!(ids("web:log"), (33, 4, vec![]));
    assert_eq!(ids("web:1234"), (33, 1234, vec![]));
    assert_eq!(ids("77"), (77, 0, vec![]));
    assert_eq!(ids(""), (0, 0, vec![]));
    for bad in ["nobody-here", "web:nogroup", "4294967295", "-1"] {
        assert!(resolve_user(&[&lower], bad).is_err(), "{bad}");
    }
    let upper = tree("upper");
    // A link of the image leads to a file of the image.
    std::os::unix::fs::symlink("/run/users", upper.join("etc/passwd")).expect("link");
    assert!(resolve_user(&[&upper, &lower], "web").is_err());
    fs::create_dir(lower.join("run")).expect("made");
    fs::write(lower.join("run/users"), "web:x:7:8::/:\n").expect("written");
    let user = resolve_user(&[&upper, &lower], "web").expect("resolved");
    assert_eq!((user.uid, user.gid), (7, 8));
    // A number needs no file.
    fs::remove_file(lower.join("run/users")).expect("removed");
    fs::create_dir(lower.join("run/users")).expect("made");
    assert!(resolve_user(&[&upper, &lower], "web").is_err());
    let user = resolve_user(&[&upper, &lower], "33:4").expect("resolved");
    assert_eq!((user.uid, user.gid), (33, 4));
    fs::remove_file(upper.join("etc/passwd")).expect("remove");
    fs::write(upper.join("etc/passwd"), "web:x:5:6::/:\n").expect("passwd");
    let user = resolve_user(&[&upper, &lower], "web").expect("resolved");
    assert_eq!((user.uid, user.gid, user.groups), (5, 6, vec![4, 33]));
}

/// Whether an image can be used as it was.
fn is_whole(store: &ImageStore, image: &str) -> bool {
    store.pin(&name(image)).is_ok_and(|guard| {
        let image = guard.image();
        image.config.entrypoint == ["/bin/serve"]
            && image
                .layers
                .iter()
                .all(|layer| layer.root.join("a").exists())
    })
}

#[test]
fn a_damaged_list_of_images_is_made_anew_of_what_is_recorded_of_each() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let first = layouts(&stage, "first", &[Tar::new().file("a", b"1").bytes()]);
    let second = layouts(&stage, "second", &[Tar::new().file("a", b"2").bytes()]);
    let store = stage.store();
    let old = store.import(&first, &name("app:1")).expect("imported");
    store.import(&first, &name("app:old")).expect("named again");
    // Later, by the clock that tells which of two came last.
    let new = store.import(&second, &name("app:1")).expect("imported");
    store.import(&second, &name("gone:1")).expect("named again");
    store.remove(&name("gone:1")).expect("removed");
    drop(store);
    let list = stage.path().join("store/images.json");
    let whole = fs::read(&list).expect("readable");
    for damage in [
        &b""[..],
        b"{",
        b"\0\0\0\0",
        &whole[..whole.len() / 2],
        b"[2]",
    ] {
        fs::write(&list, damage).expect("written");
        let store = stage.store();
        assert!(is_whole(&store, "app:1") && is_whole(&store, "app:old"));
        let id = |image: &str| store.get(&name(image)).map(|image| image.id);
        assert_eq!((id("app:1"), id("app:old")), (Some(new.id), Some(old.id)));
        assert_eq!(id("gone:1"), None);
        let report = store.collect(&BTreeSet::new()).expect("collected");
        assert_eq!(report.layers, []);
        drop(store);
        let aside = fs::read(stage.path().join("store/images.json.damaged"));
        assert_eq!(aside.expect("kept"), damage);
    }
}

#[test]
fn another_versions_list_of_images_is_left_alone() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    drop(stage.store());
    let list = stage.path().join("store/images.json");
    for version in [1, 3] {
        let other = format!(r#"{{"version": {version}, "names": [], "more": {{}}}}"#);
        fs::write(&list, &other).expect("written");
        let opened = ImageStore::open(&stage.path().join("store"), ImageLimits::default());
        let error = opened.expect_err("not understood");
        let why = std::error::Error::source(&error)
            .expect("a reason")
            .to_string();
        assert!(why.contains(&format!("format {version}")), "{why}");
        assert_eq!(fs::read_to_string(&list).expect("readable"), other);
    }
}

#[test]
fn layers_are_kept_for_what_runs_though_their_image_is_lost() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let layout = layouts(&stage, "first", &[Tar::new().file("a", b"1").bytes()]);
    let store = stage.store();
    let image = store.import(&layout, &name("app:1")).expect("imported");
    let root = image.layers[0].root.strip_prefix(store.directory());
    let root = root.expect("below the store").to_owned();
    store.remove(&name("app:1")).expect("removed");
    let held = store.hold_layers([root.as_path(), Path::new("layers/x/root"), Path::new("/")]);
    assert_eq!(held.len(), 1);
    let none = BTreeSet::new();
    let report = store.collect(&none).expect("collected");
    assert_eq!((report.images.len(), report.layers.len()), (1, 0));
    assert!(image.layers[0].root.join("a").exists());
    drop(held);
    assert_eq!(store.collect(&none).expect("collected").layers.len(), 1);
}
