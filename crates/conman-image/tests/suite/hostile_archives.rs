//! Archives that try to leave the store, to plant what they may not, or to fill the disk.

use crate::support::{Stage, Tar, gzip, is_root, refusal, unpack_error, zstd_stored};
use conman_image::{ImageLimits, ImportError, Limit, Refusal, UnpackError};
use tar::EntryType;

/// Refuses the archive in a fresh store.
fn refused(archive: Tar) -> Refusal {
    let stage = Stage::new();
    refusal(stage.refused(&stage.store(), &archive.bytes()))
}

#[test]
fn paths_out_of_the_layer_are_refused() {
    if !is_root() {
        return;
    }
    for path in ["../canary/file", "a/../../canary/file", "..", "a/.."] {
        assert_eq!(
            refused(Tar::new().file(path, b"owned")),
            Refusal::ParentReference,
            "{path}"
        );
    }
}

#[test]
fn an_absolute_name_is_below_the_root() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let canary = stage.canary().join("file");
    let canary = canary.to_str().expect("UTF-8");
    let archive = Tar::new()
        .file(canary, b"mine")
        .link("/link", canary)
        .directory("/dir")
        .symlink("//dir/way", "/link");
    let path = stage.file("image.tar", &archive.bytes());
    let name = crate::support::name("image:1");
    let image = stage.store().import(&path, &name).expect("imported");
    let root = &image.layers[0].root;
    for inside in [canary.trim_start_matches('/'), "link"] {
        assert_eq!(std::fs::read(root.join(inside)).expect(inside), b"mine");
    }
    let target = std::fs::read_link(root.join("dir/way")).expect("a link");
    assert_eq!(target.to_str(), Some("/link"));
    stage.assert_canary_untouched();
}

#[test]
fn nothing_is_written_through_a_symbolic_link() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let canary = stage.canary();
    let canary = canary.to_str().expect("UTF-8");
    for target in [canary, "../../../../canary", "/", ".", "real"] {
        let start = || {
            Tar::new()
                .directory("real")
                .directory("in")
                .symlink("in/way", target)
        };
        for archive in [
            start().file("in/way/file", b"owned"),
            start().directory("in/way/dir"),
            start().symlink("in/way/new", "x"),
            start().file("plain", b"x").link("in/way/new", "plain"),
            start().file("in/way/.wh.file", b""),
            start().file("in/way/.wh..wh..opq", b""),
            start().entry(EntryType::Fifo, "in/way/fifo", "", b"", |_| {}),
            start().file("in/way/deep/er/file", b"owned"),
        ] {
            let error = stage.refused(&stage.store(), &archive.bytes());
            assert_eq!(refusal(error), Refusal::ThroughSymlink, "{target}");
        }
    }
}

#[test]
fn a_file_in_the_place_of_a_link_replaces_the_link_and_not_its_target() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let file = stage.canary().join("file");
    let dir = stage.canary().join("dir");
    let archive = Tar::new()
        .symlink("a", file.to_str().expect("UTF-8"))
        .file("a", b"mine")
        .symlink("b", dir.to_str().expect("UTF-8"))
        .directory("b")
        .file("b/file", b"mine")
        .file("c", b"first")
        .link("d", "c")
        .file("d", b"second");
    let store = stage.store();
    let path = stage.file("image.tar", &archive.bytes());
    let image = store
        .import(&path, &crate::support::name("image:1"))
        .expect("imported");
    let root = &image.layers[0].root;
    assert_eq!(std::fs::read(root.join("a")).expect("a"), b"mine");
    assert_eq!(std::fs::read(root.join("b/file")).expect("b/file"), b"mine");
    assert_eq!(std::fs::read(root.join("c")).expect("c"), b"first");
    assert_eq!(std::fs::read(root.join("d")).expect("d"), b"second");
    stage.assert_canary_untouched();
}

#[test]
fn hard_links_end_inside_the_layer() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let file = stage.canary().join("file");
    let file = file.to_str().expect("UTF-8");
    let dir = stage.canary().join("dir");
    let dir = dir.to_str().expect("UTF-8");
    let inner = |why| Refusal::LinkTarget(Box::new(why));
    for (archive, why) in [
        (Tar::new().link("a", file), Refusal::LinkTargetMissing),
        (
            Tar::new().link("a", "../../../../canary/file"),
            inner(Refusal::ParentReference),
        ),
        (
            Tar::new().symlink("s", dir).link("a", "s/file"),
            inner(Refusal::ThroughSymlink),
        ),
        (
            Tar::new().link("a", "canary/file"),
            Refusal::LinkTargetMissing,
        ),
        (Tar::new().link("a", "gone"), Refusal::LinkTargetMissing),
        (
            Tar::new().directory("d").link("a", "d"),
            Refusal::LinkToDirectory,
        ),
        (Tar::new().link("a", "."), Refusal::LinkToDirectory),
        (Tar::new().file("a", b"").link("a", "a"), Refusal::BadLink),
        (
            Tar::new().file(".wh.w", b"").link("a", "w"),
            Refusal::LinkToWhiteout,
        ),
        (
            Tar::new().file("f", b"").link("a", "f/x"),
            inner(Refusal::ThroughFile),
        ),
    ] {
        assert_eq!(
            refusal(stage.refused(&stage.store(), &archive.bytes())),
            why
        );
    }
}

#[test]
fn device_nodes_are_skipped_and_counted_even_where_they_would_be_whiteouts() {
    if !is_root() {
        return;
    }
    let mut archive = Tar::new().file("dev/file", b"");
    for (kind, major, minor) in [
        (EntryType::Char, 1, 3),
        (EntryType::Block, 8, 0),
        (EntryType::Char, 0, 0),
    ] {
        archive = archive.entry(kind, format!("dev/{major}"), "", b"", |header| {
            header.set_device_major(major).expect("fits");
            header.set_device_minor(minor).expect("fits");
        });
    }
    let stage = Stage::new();
    let path = stage.file("image.tar", &archive.bytes());
    let image = stage
        .store()
        .import(&path, &crate::support::name("image:1"))
        .expect("imported");
    let layer = &image.layers[0];
    assert_eq!(layer.skipped_devices, 3);
    let names = std::fs::read_dir(layer.root.join("dev")).expect("there");
    let names: Vec<_> = names
        .map(|entry| entry.expect("readable").file_name())
        .collect();
    assert_eq!(names, ["file"]);
}

#[test]
fn whiteouts_of_nothing_and_inside_whiteouts_are_refused() {
    if !is_root() {
        return;
    }
    for path in [
        ".wh.",
        "a/.wh.",
        ".wh..",
        ".wh...",
        "a/.wh...",
        ".wh.a/file",
        ".wh..wh..opq/x",
    ] {
        assert_eq!(
            refused(Tar::new().file(path, b"")),
            Refusal::WhiteoutName,
            "{path}"
        );
    }
}

#[test]
fn an_entry_below_a_file_or_in_the_place_of_a_directory_is_refused() {
    if !is_root() {
        return;
    }
    let through = Tar::new().file("a", b"").file("a/b", b"");
    assert_eq!(refused(through), Refusal::ThroughFile);
    let replaces = Tar::new().directory("a").symlink("a", "/");
    assert_eq!(refused(replaces), Refusal::ReplacesDirectory);
    let root = Tar::new().symlink(".", "/");
    assert_eq!(refused(root), Refusal::RootNotDirectory);
    let root = Tar::new().file("a", b"").link("./", "a");
    assert_eq!(refused(root), Refusal::RootNotDirectory);
}

#[test]
fn long_names_are_bounded_wherever_they_stand() {
    if !is_root() {
        return;
    }
    let name = "n".repeat(256);
    let deep = "d/".repeat(129);
    let long = format!("{}/", "n".repeat(250)).repeat(17);
    for (path, why) in [
        (&name, Refusal::NameTooLong),
        (&deep, Refusal::TooDeep(128)),
        (&long, Refusal::PathTooLong(4095)),
    ] {
        let gnu = Tar::new()
            .entry(EntryType::GNULongName, "l", "", path.as_bytes(), |_| {})
            .file("short", b"");
        assert_eq!(refused(gnu), why);
        let pax = Tar::new()
            .pax(&[("path", path.as_bytes())])
            .file("short", b"");
        assert_eq!(refused(pax), why);
    }
    let nul = Tar::new()
        .entry(EntryType::GNULongName, "l", "", b"a\0b\0", |_| {})
        .file("short", b"");
    assert_eq!(refused(nul), Refusal::NulByte);
    let escape = Tar::new()
        .pax(&[("path", b"../canary/file")])
        .file("short", b"");
    assert_eq!(refused(escape), Refusal::ParentReference);
    // A record inside a value is none, though readers by line take it for one.
    let smuggled = Tar::new()
        .pax(&[("SCHILY.xattr.user.x", b"\n14 path=other\n")])
        .file("short", b"");
    assert_eq!(refused(smuggled), Refusal::PaxRecord);
    let link = Tar::new()
        .pax(&[("linkpath", &b"t".repeat(4096))])
        .symlink("short", "t");
    assert_eq!(refused(link), Refusal::BadLink);
}

#[test]
fn headers_without_end_are_cut_off_in_memory() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let limits = ImageLimits {
        max_header_bytes: 64 << 10,
        ..ImageLimits::default()
    };
    let name = vec![b'n'; 1 << 20];
    for kind in [
        EntryType::GNULongName,
        EntryType::GNULongLink,
        EntryType::XHeader,
    ] {
        let archive = Tar::new()
            .entry(kind, "l", "", &name, |_| {})
            .file("a", b"");
        let error = stage.refused(&stage.store_with(limits.clone()), &archive.bytes());
        assert!(
            matches!(
                unpack_error(error),
                UnpackError::Limit(Limit::HeaderBytes(_))
            ),
            "{kind:?}"
        );
    }
}

#[test]
fn numbers_that_mean_something_else_to_the_kernel_are_refused() {
    if !is_root() {
        return;
    }
    let owner = Tar::new().entry(EntryType::Regular, "a", "", b"", |header| {
        header.set_uid(u64::from(u32::MAX));
    });
    assert_eq!(refused(owner), Refusal::BadHeader("owner"));
    let group = Tar::new().pax(&[("gid", b"4294967296")]).file("a", b"");
    assert_eq!(refused(group), Refusal::BadHeader("group"));
    let kind = Tar::new().entry(EntryType::new(b'V'), "a", "", b"", |_| {});
    assert_eq!(refused(kind), Refusal::UnknownKind(b'V'));
    let sparse = Tar::new().pax(&[("GNU.sparse.major", b"1")]).file("a", b"");
    assert_eq!(refused(sparse), Refusal::PaxSparse);
    let capability = Tar::new()
        .pax(&[("SCHILY.xattr.security.capability", b"short")])
        .file("a", b"");
    assert_eq!(refused(capability), Refusal::BadCapability);
}

#[test]
fn bombs_run_into_the_limit_that_names_them() {
    if !is_root() {
        return;
    }
    let zeros = vec![0; 1 << 20];
    let many = (0..64).fold(Tar::new(), |tar, number| {
        tar.file(format!("f{number}"), b"")
    });
    let total = (0..4).fold(Tar::new(), |tar, number| {
        tar.file(format!("f{number}"), &zeros)
    });
    let hole = |path: &str| {
        Tar::new().entry(EntryType::GNUSparse, path, "", b"", |header| {
            let gnu = header.as_gnu_mut().expect("a GNU header");
            gnu.set_real_size_for_test(1 << 62);
        })
    };
    let limits = ImageLimits {
        max_file_bytes: 2 << 20,
        max_unpacked_bytes: 3 << 20,
        max_entries: 32,
        ratio_floor_bytes: 1 << 18,
        max_ratio: 100,
        ..ImageLimits::default()
    };
    let big = Tar::new().file("big", &vec![0; 9 << 18]);
    let plain = Tar::new().file("zeros", &zeros).bytes();
    for (archive, limit) in [
        (many.bytes(), Limit::Entries(32)),
        (total.bytes(), Limit::UnpackedBytes(3 << 20)),
        (big.bytes(), Limit::FileBytes(2 << 20)),
        (hole("hole").bytes(), Limit::FileBytes(2 << 20)),
        (hole(".wh.hole").bytes(), Limit::FileBytes(2 << 20)),
        (gzip(&plain), Limit::Ratio(100)),
        (zstd_bomb(), Limit::Ratio(100)),
    ] {
        let stage = Stage::new();
        let error = stage.refused(&stage.store_with(limits.clone()), &archive);
        match unpack_error(error) {
            UnpackError::Limit(hit) => assert_eq!(hit, limit),
            other => panic!("{limit:?}: {other}"),
        }
    }
}

#[test]
fn an_archive_larger_than_allowed_is_not_read_to_its_end() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let limits = ImageLimits {
        max_blob_bytes: 1 << 20,
        ..ImageLimits::default()
    };
    let store = stage.store_with(limits);
    let archive = Tar::new().file("big", &vec![0; 2 << 20]).bytes();
    let error = unpack_error(stage.refused(&store, &archive));
    assert!(
        matches!(error, UnpackError::Limit(Limit::BlobBytes(limit)) if limit == 1 << 20),
        "{error:?}"
    );
    let streamed = store.import_stream(std::io::repeat(0), &crate::support::name("endless:1"));
    assert!(matches!(streamed, Err(ImportError::TooLarge { .. })));
}

#[test]
fn holes_count_for_the_ratio() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let limits = ImageLimits {
        ratio_floor_bytes: 1 << 18,
        max_ratio: 100,
        ..ImageLimits::default()
    };
    let archive = Tar::new().entry(EntryType::GNUSparse, "hole", "", b"", |header| {
        header
            .as_gnu_mut()
            .expect("a GNU header")
            .set_real_size_for_test(64 << 20);
    });
    let error = stage.refused(&stage.store_with(limits), &archive.bytes());
    assert!(matches!(
        unpack_error(error),
        UnpackError::Limit(Limit::Ratio(100))
    ));
}

#[test]
fn cut_and_damaged_archives_are_told_apart() {
    if !is_root() {
        return;
    }
    // Bytes that do not compress, so that a cut falls into the data.
    let noise: Vec<u8> = (0..200_000_u32)
        .map(|number| (number.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    let plain = Tar::new().file("first", b"x").file("noise", &noise).bytes();
    let stage = Stage::new();
    for packed in [plain.clone(), gzip(&plain), zstd_stored(&plain)] {
        let cut = &packed[..packed.len() / 2];
        let error = unpack_error(stage.refused(&stage.store(), cut));
        assert!(matches!(error, UnpackError::Truncated { .. }), "{error:?}");
    }
    // Between two entries nothing but the missing end mark tells.
    let error = unpack_error(stage.refused(&stage.store(), &plain[..1024]));
    assert!(matches!(error, UnpackError::Truncated { .. }), "{error:?}");
    for packed in [gzip(&plain), zstd_stored(&plain)] {
        let mut damaged = packed.clone();
        let middle = damaged.len() / 2;
        damaged[middle] ^= 0x10;
        let error = unpack_error(stage.refused(&stage.store(), &damaged));
        assert!(matches!(error, UnpackError::Corrupt { .. }), "{error:?}");
    }
    let mut damaged = plain;
    damaged[1024 + 20] ^= 1;
    let error = unpack_error(stage.refused(&stage.store(), &damaged));
    assert!(matches!(error, UnpackError::Corrupt { .. }), "{error:?}");
}

/// A zstd frame of 8 MiB of zeros in 4 bytes for each 128 KiB (RFC 8878, RLE blocks).
fn zstd_bomb() -> Vec<u8> {
    const BLOCKS: u32 = 64;
    // No checksum, no content size, a window of 128 KiB.
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x38];
    for number in 1..=BLOCKS {
        let header = (128 << 10) << 3 | 1 << 1 | u32::from(number == BLOCKS);
        frame.extend_from_slice(&header.to_le_bytes()[..3]);
        frame.push(0);
    }
    frame
}

/// The header of a sparse file that is nothing but a hole.
trait SparseHeader {
    fn set_real_size_for_test(&mut self, bytes: u64);
}

impl SparseHeader for tar::GnuHeader {
    fn set_real_size_for_test(&mut self, bytes: u64) {
        // Octal up to 8 GiB, base 256 beyond.
        let number = |field: &mut [u8; 12], value: u64| {
            field.fill(0);
            field[0] = 0x80;
            field[4..].copy_from_slice(&value.to_be_bytes());
        };
        number(&mut self.realsize, bytes);
        number(&mut self.sparse[0].offset, bytes);
        // A block of no bytes that begins at the end: the tar crate counts the hole by it only
        // if its length is not blank.
        number(&mut self.sparse[0].numbytes, 0);
    }
}
