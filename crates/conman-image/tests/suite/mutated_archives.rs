//! Archives with bytes changed at random: an image or an error, and nothing outside either way.

use crate::support::{Stage, Tar, gzip, is_root, name, zstd_stored};
use proptest::prelude::*;
use tar::EntryType;

/// Cases: each opens a store of its own.
const CASES: u32 = 96;

fn archive() -> Vec<u8> {
    Tar::new()
        .directory("./")
        .directory("etc")
        .pax(&[("path", b"etc/long-name"), ("mtime", b"1.5"), ("uid", b"7")])
        .file("short", b"content")
        .entry(
            EntryType::GNULongName,
            "l",
            "",
            b"etc/another-long-name",
            |_| {},
        )
        .file("short", b"content")
        .symlink("etc/link", "../../canary/file")
        .link("etc/hard", "etc/long-name")
        .file("etc/.wh.gone", b"")
        .file("etc/.wh..wh..opq", b"")
        .bytes()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: CASES,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn whatever_changes_in_an_archive_nothing_outside_the_store_does(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..12),
        packing in 0..3_u8,
        sums in any::<bool>(),
    ) {
        if !is_root() {
            return Ok(());
        }
        let mut bytes = archive();
        for (index, byte) in &changes {
            let at = index.index(bytes.len());
            bytes[at] = *byte;
        }
        if sums {
            // Or the checksum would stop most changes before anything reads them.
            for block in bytes.chunks_exact_mut(512) {
                let mut header = tar::Header::new_old();
                header.as_mut_bytes().copy_from_slice(block);
                if header.as_ustar().is_some() || header.as_gnu().is_some() {
                    header.set_cksum();
                    block.copy_from_slice(header.as_bytes());
                }
            }
        }
        let packed = match packing {
            0 => bytes,
            1 => gzip(&bytes),
            _ => zstd_stored(&bytes),
        };
        let stage = Stage::new();
        let store = stage.store();
        let path = stage.file("mutated.tar", &packed);
        let outcome = store.import(&path, &name("mutated:1"));
        stage.assert_canary_untouched();
        let count = |part: &str| {
            std::fs::read_dir(store.directory().join(part)).expect("directory").count()
        };
        prop_assert_eq!(count("tmp"), 0);
        prop_assert_eq!(count("layers"), usize::from(outcome.is_ok()));
    }
}
