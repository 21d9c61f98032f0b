//! Messages that nobody meant, and those that an older or a newer peer writes.

use std::path::PathBuf;

use conman_shim::{
    Ahead, Call, DecodeError, Hardening, LaunchSpec, MAX_MESSAGE_BYTES, Message, NetworkSpec,
    ProgramSpec, Request, RootKind, RootSpec, decode, encode,
};
use proptest::prelude::*;

fn spec(name: String, argv: Vec<String>, layers: Vec<PathBuf>) -> LaunchSpec {
    LaunchSpec {
        terminal: None,
        log_bytes: None,
        ptys: 0,
        ptys_when_asked: false,
        sys: false,
        init: false,
        name,
        cgroup: "/conman-x/a.1".to_owned(),
        limits: conman_linux::CgroupLimits::default(),
        root: RootSpec {
            kind: RootKind::Overlay,
            store: "/store".into(),
            layers,
            scratch: "/scratch/a".into(),
            read_only: false,
            durable: false,
            shared_ids: false,
        },
        hostname: "a".to_owned(),
        program: ProgramSpec {
            argv,
            env: Vec::new(),
            workdir: "/".to_owned(),
            uid: 0,
            gid: 0,
            groups: Vec::new(),
            nofile: None,
        },
        log: "/logs/a".into(),
        log_stderr: None,
        files: Vec::new(),
        binds: Vec::new(),
        network: NetworkSpec::Loopback,
        hardening: Hardening::default(),
        ahead: Ahead::No,
    }
}

proptest! {
    #[test]
    fn no_bytes_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2_000)) {
        let _ = decode::<Call>(&bytes);
        let _ = decode::<Message>(&bytes);
    }

    #[test]
    fn no_change_of_a_message_panics(
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let launch = spec("a.1".to_owned(), vec!["sh".to_owned()], vec!["base".into()]);
        let call = Call { id: 7, request: Request::Launch(Box::new(launch)) };
        let mut bytes = encode(&call).expect("short");
        let index = at.index(bytes.len());
        bytes[index] = byte;
        bytes.truncate(cut.index(bytes.len()) + 1);
        if let Ok(Call { request: Request::Launch(spec), .. }) = decode(&bytes) {
            let _ = spec.check();
        }
    }

    #[test]
    fn what_was_written_is_read(
        name in "\\PC{0,40}",
        argv in proptest::collection::vec("\\PC{0,20}", 0..10),
        layers in proptest::collection::vec("\\PC{0,20}", 0..5),
    ) {
        let layers = layers.into_iter().map(PathBuf::from).collect();
        let call = Call { id: 1, request: Request::Launch(Box::new(spec(name, argv, layers))) };
        prop_assert_eq!(decode::<Call>(&encode(&call).expect("short")).expect("read"), call);
    }

    #[test]
    fn a_spec_that_passes_names_plain_paths_only(
        name in "[a-z./]{0,8}",
        layer in "[a-z./]{0,8}",
        command in "[a-z/\\x00]{0,4}",
    ) {
        let spec = spec(name.clone(), vec![command.clone()], vec![PathBuf::from(&layer)]);
        if spec.check().is_ok() {
            prop_assert!(!name.contains('/'));
            prop_assert!(!layer.starts_with('/') && !layer.split('/').any(|part| part == ".."));
            prop_assert!(!command.is_empty() && !command.contains('\0'));
        }
    }
}

#[test]
fn a_message_that_is_too_long_is_neither_written_nor_read() {
    let long = "x".repeat(MAX_MESSAGE_BYTES);
    let launch = spec("a.1".to_owned(), vec![long], vec!["base".into()]);
    let call = Call {
        id: 1,
        request: Request::Launch(Box::new(launch)),
    };
    assert!(matches!(encode(&call), Err(DecodeError::TooLong { .. })));
    let bytes = vec![b' '; MAX_MESSAGE_BYTES + 1];
    assert!(matches!(
        decode::<Call>(&bytes),
        Err(DecodeError::TooLong { .. })
    ));
}

#[test]
fn fields_of_a_later_version_are_ignored() {
    let expected = spec("a.1".to_owned(), vec!["sh".to_owned()], vec!["base".into()]);
    let request = Request::Launch(Box::new(expected.clone()));
    let text = String::from_utf8(encode(&Call { id: 3, request }).expect("written"));
    let text = text.expect("text");
    let later = text
        .replacen("{\"id\":3,", "{\"id\":3,\"from\":\"the future\",", 1)
        .replacen("\"log\":", "\"colour\":\"blue\",\"log\":", 1);
    assert_eq!(later.len(), text.len() + 20 + 16, "{later}");
    let call: Call = decode(later.as_bytes()).expect("read");
    assert_eq!(call.request, Request::Launch(Box::new(expected)));
}
