//! A tree is packed and unpacked, and compared.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, XattrFlags, getxattr, mknodat, setxattr};
use tar::{Builder, EntryType, Header};
use tempfile::{TempDir, tempdir};

use crate::{SpecialBits, UnpackError, Unpacked, pack, unpack};

/// More than a disk that this runs on has.
const HUGE: u64 = 1 << 40;

fn packed(directory: &Path) -> Vec<u8> {
    let mut archive = Vec::new();
    let directory = File::open(directory).expect("a directory").into();
    pack(&directory, &mut archive).expect("packed");
    archive
}

fn unpacked(archive: &[u8], bits: SpecialBits) -> (TempDir, Result<Unpacked, UnpackError>) {
    let to = tempdir().expect("a directory");
    let directory = File::open(to.path()).expect("a directory").into();
    let outcome = unpack(directory, archive, bits);
    (to, outcome)
}

fn mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).expect("allowed");
}

#[test]
fn a_tree_arrives_as_it_was() {
    let from = tempdir().expect("a directory");
    let from = from.path();
    fs::create_dir(from.join("closed")).expect("made");
    fs::write(from.join("closed/file"), "content").expect("written");
    fs::hard_link(from.join("closed/file"), from.join("hard")).expect("linked");
    symlink("../../etc/passwd", from.join("soft")).expect("linked");
    let name = "user.note";
    let has_attributes = setxattr(from.join("hard"), name, b"a=b", XattrFlags::empty()).is_ok();
    mode(&from.join("hard"), 0o4711);
    mode(&from.join("closed"), 0o1555);
    let time = fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH);
    File::open(from.join("closed"))
        .expect("open")
        .set_times(time)
        .expect("set");

    for (bits, permissions) in [(SpecialBits::Keep, 0o4711), (SpecialBits::Drop, 0o711)] {
        let (to, outcome) = unpacked(&packed(from), bits);
        let whole = Unpacked {
            written: 4,
            ..Unpacked::default()
        };
        assert_eq!(outcome.expect("unpacked"), whole);
        let to = to.path();
        let of = |path: &str| fs::symlink_metadata(to.join(path)).expect(path);
        assert_eq!(fs::read(to.join("hard")).expect("read"), b"content");
        assert_eq!(
            (of("hard").ino(), of("hard").nlink()),
            (of("closed/file").ino(), 2)
        );
        assert_eq!(of("hard").mode() & 0o7777, permissions);
        assert_eq!(
            (of("closed").mode() & 0o7777, of("closed").mtime()),
            (0o1555, 0)
        );
        assert_eq!(
            fs::read_link(to.join("soft")).expect("a link"),
            Path::new("../../etc/passwd")
        );
        let mut value = [0_u8; 8];
        if has_attributes {
            let length = getxattr(to.join("hard"), name, &mut value[..]).expect("kept");
            assert_eq!(&value[..length], b"a=b");
        }
        // So that it can be removed by others than root, too.
        mode(&to.join("closed"), 0o755);
    }
    mode(&from.join("closed"), 0o755);
}

#[test]
fn holes_stay_holes() {
    let from = tempdir().expect("a directory");
    let long = "n".repeat(150);
    for name in ["sparse", &long] {
        let file = File::create(from.path().join(name)).expect("made");
        // More parts than a header has slots.
        for part in 0..60 {
            file.write_all_at(b"data", part << 20).expect("written");
        }
        file.set_len(256 << 20).expect("extended");
    }
    let empty = File::create(from.path().join("empty")).expect("made");
    empty.set_len(8 << 20).expect("extended");

    let archive = packed(from.path());
    assert!(archive.len() < 8 << 20, "{} bytes", archive.len());
    let (to, outcome) = unpacked(&archive, SpecialBits::Keep);
    assert_eq!(outcome.expect("unpacked").written, 3);
    for name in ["sparse", "empty", &long] {
        let (there, here) = (to.path().join(name), from.path().join(name));
        let metadata = fs::metadata(&there).expect("there");
        assert!(
            metadata.blocks() * 512 < 32 << 20,
            "{name}: {} blocks",
            metadata.blocks()
        );
        let same = fs::read(there).expect("read") == fs::read(here).expect("read");
        assert!(same, "{name} differs");
    }
}

#[test]
fn gnu_tar_reads_what_is_packed() {
    let from = tempdir().expect("a directory");
    let file = File::create(from.path().join("sparse")).expect("made");
    file.write_all_at(b"data", 1 << 20).expect("written");
    file.set_len(4 << 20).expect("extended");
    fs::hard_link(from.path().join("sparse"), from.path().join("link")).expect("linked");
    let _socket = UnixListener::bind(from.path().join("socket")).expect("bound");
    let to = tempdir().expect("a directory");
    let archive = to.path().join("archive.tar");
    fs::write(&archive, packed(from.path())).expect("written");
    let mut tar = std::process::Command::new("tar");
    let output = tar
        .args(["-xf", "archive.tar"])
        .current_dir(to.path())
        .output();
    let output = output.expect("tar is installed");
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
    for name in ["sparse", "link"] {
        let metadata = fs::metadata(to.path().join(name)).expect("there");
        assert_eq!((metadata.len(), metadata.nlink()), (4 << 20, 2));
    }
    let same = fs::read(to.path().join("link")).expect("read")
        == fs::read(from.path().join("link")).expect("read");
    assert!(same, "it differs");
}

#[test]
fn a_huge_hole_takes_no_room_in_the_archive() {
    let from = tempdir().expect("a directory");
    let file = File::create(from.path().join("sparse")).expect("made");
    if let Err(error) = file.set_len(HUGE) {
        #[expect(clippy::print_stderr, reason = "tests report there what they skip")]
        {
            eprintln!("skipped: no file of 1 TiB on this file system: {error}");
        }
        return;
    }
    let archive = packed(from.path());
    assert!(archive.len() < 1 << 20, "{} bytes", archive.len());
}

#[test]
fn what_is_no_file_is_skipped_and_counted() {
    let from = tempdir().expect("a directory");
    let _socket = UnixListener::bind(from.path().join("socket")).expect("bound");
    let fifo = from.path().join("fifo");
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR, 0).expect("made");
    fs::write(from.path().join("file"), "x").expect("written");
    let (to, outcome) = unpacked(&packed(from.path()), SpecialBits::Keep);
    let counted = Unpacked {
        written: 1,
        skipped: 0,
        not_packed: 2,
    };
    assert_eq!(outcome.expect("unpacked"), counted);
    assert_eq!(fs::read_dir(to.path()).expect("a directory").count(), 1);
}

#[test]
fn nothing_is_written_outside_of_the_directory() {
    let entry = |kind, path: &str, link: &str| {
        let mut header = Header::new_gnu();
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_size(0);
        header.set_cksum();
        header
    };
    let archive = |headers: &[Header]| {
        let mut archive = Builder::new(Vec::new());
        for header in headers {
            archive.append(header, io::empty()).expect("in memory");
        }
        archive.into_inner().expect("in memory")
    };
    let up = archive(&[entry(EntryType::Regular, "../escaped", "")]);
    let (_to, outcome) = unpacked(&up, SpecialBits::Keep);
    assert!(matches!(outcome, Err(UnpackError::Outside(_))));
    // A link out of the directory leads to what is inside.
    let through = archive(&[
        entry(EntryType::Symlink, "way", "../../../../../../tmp"),
        entry(EntryType::Regular, "way/conman-archive-escaped", ""),
    ]);
    let (to, outcome) = unpacked(&through, SpecialBits::Keep);
    assert!(!Path::new("/tmp/conman-archive-escaped").exists());
    if outcome.is_ok() {
        assert!(to.path().join("tmp/conman-archive-escaped").exists());
    }
    let mut cut = packed(to.path());
    cut.truncate(700);
    cut.write_all(&[1; 10]).expect("in memory");
    let (_to, outcome) = unpacked(&cut, SpecialBits::Keep);
    assert!(outcome.is_err());
}

/// An archive with one entry behind these PAX records.
fn with_records(records: &[(&str, &[u8])], header: &Header) -> Vec<u8> {
    let mut archive = Builder::new(Vec::new());
    let records = records.iter().copied();
    archive.append_pax_extensions(records).expect("in memory");
    archive.append(header, io::empty()).expect("in memory");
    archive.into_inner().expect("in memory")
}

#[test]
fn sparse_files_that_would_be_written_wrongly_or_for_ever_are_refused() {
    let mut header = Header::new_gnu();
    header.set_path("file").expect("short");
    header.set_mode(0o644);
    header.set_size(0);
    header.set_cksum();
    let pax = with_records(&[("GNU.sparse.major", b"1")], &header);
    let (_to, outcome) = unpacked(&pax, SpecialBits::Keep);
    let error = outcome.expect_err("PAX form").to_string();
    assert!(error.contains("--format=gnu"), "{error}");

    header.set_entry_type(EntryType::GNUSparse);
    let gnu = header.as_gnu_mut().expect("GNU's form");
    gnu.set_real_size(1 << 50);
    gnu.sparse[0].set_offset(1 << 50);
    gnu.sparse[0].set_length(0);
    header.set_cksum();
    let (_to, outcome) = unpacked(&with_records(&[], &header), SpecialBits::Keep);
    let error = outcome.expect_err("too large").to_string();
    assert!(error.contains("2 TiB"), "{error}");
}

#[test]
fn attributes_that_no_record_can_hold_end_no_copy() {
    let from = tempdir().expect("a directory");
    let path = from.path().join("file");
    fs::write(&path, "content").expect("written");
    let odd = b"x\n18 path=elsewhere\n";
    for (name, value) in [("user.odd", &odd[..]), ("user.plain", b"1")] {
        if setxattr(&path, name, value, XattrFlags::empty()).is_err() {
            return;
        }
    }
    let (to, outcome) = unpacked(&packed(from.path()), SpecialBits::Keep);
    assert_eq!(outcome.expect("unpacked").written, 1);
    let mut value = [0_u8; 64];
    let path = to.path().join("file");
    assert_eq!(getxattr(&path, "user.plain", &mut value[..]), Ok(1));
    assert!(getxattr(&path, "user.odd", &mut value[..]).is_err());
}

#[test]
fn directories_that_were_there_keep_their_modes_on_the_way_out_of_a_session() {
    let from = tempdir().expect("a directory");
    for name in ["there", "new"] {
        fs::create_dir(from.path().join(name)).expect("made");
        mode(&from.path().join(name), 0o777);
    }
    let archive = packed(from.path());
    for (bits, there) in [(SpecialBits::Drop, 0o700), (SpecialBits::Keep, 0o777)] {
        let to = tempdir().expect("a directory");
        fs::create_dir(to.path().join("there")).expect("made");
        mode(&to.path().join("there"), 0o700);
        let directory = File::open(to.path()).expect("a directory").into();
        unpack(directory, &archive[..], bits).expect("unpacked");
        let of = |name| fs::metadata(to.path().join(name)).expect(name).mode() & 0o7777;
        assert_eq!((of("there"), of("new")), (there, 0o777));
    }
}
