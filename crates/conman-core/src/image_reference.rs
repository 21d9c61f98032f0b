//! The grammar of image references.

/// Maximum length of an image reference in bytes, including its digest.
pub(crate) const MAX_IMAGE_BYTES: usize = 512;

/// Maximum length of the name in a reference, in bytes (distribution's `NameTotalLengthMax`).
const MAX_NAME_BYTES: usize = 255;

/// Maximum length of a tag in bytes.
const MAX_TAG_BYTES: usize = 128;

/// Why a text is not an image reference; `None` if it is one.
///
/// The grammar is that of github.com/distribution/reference, in the form that Docker accepts from
/// users: `[registry[:port]/]name[/name…][:tag][@digest]`.
pub(crate) fn fault(text: &str) -> Option<&'static str> {
    if text.is_empty() {
        return Some("it is empty");
    }
    if text.len() > MAX_IMAGE_BYTES {
        return Some("it is longer than 512 bytes");
    }
    let (rest, digest) = match text.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest)),
        None => (text, None),
    };
    let (name, tag) = match rest.rsplit_once(':') {
        // A colon before a slash belongs to a registry's port.
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (rest, None),
    };
    if name.len() > MAX_NAME_BYTES {
        return Some("its name is longer than 255 bytes");
    }
    name_fault(name)
        .or_else(|| tag.and_then(tag_fault))
        .or_else(|| digest.and_then(digest_fault))
}

fn name_fault(name: &str) -> Option<&'static str> {
    let path = match name.split_once('/') {
        Some((first, path)) if looks_like_registry(first) => {
            if !is_registry(first) {
                return Some("the part before the first `/` is not a registry's host[:port]");
            }
            path
        }
        _ => name,
    };
    if path.split('/').all(is_path_component) {
        None
    } else {
        Some(
            "a name is made of a-z and 0-9, joined by single `.`, `_`, `__` or dashes, with `/` \
             between parts",
        )
    }
}

fn looks_like_registry(first: &str) -> bool {
    first == "localhost"
        || first.contains(['.', ':'])
        || first.bytes().any(|byte| byte.is_ascii_uppercase())
}

fn is_registry(text: &str) -> bool {
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
        _ => (text, None),
    };
    let port_fits = port.is_none_or(|port| {
        port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok()
    });
    let address = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let host_fits = match address {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => host.split('.').all(|label| {
            !label.is_empty()
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        }),
    };
    port_fits && host_fits
}

fn is_path_component(text: &str) -> bool {
    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let Some(last) = text.bytes().next_back() else {
        return false;
    };
    if !text.bytes().next().is_some_and(alphanumeric) || !alphanumeric(last) {
        return false;
    }
    text.split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        .all(|separator| {
            matches!(separator, "" | "." | "_" | "__") || separator.bytes().all(|byte| byte == b'-')
        })
}

fn tag_fault(tag: &str) -> Option<&'static str> {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let valid = (1..=MAX_TAG_BYTES).contains(&tag.len())
        && tag.bytes().next().is_some_and(word)
        && tag
            .bytes()
            .all(|byte| word(byte) || byte == b'.' || byte == b'-');
    (!valid).then_some(
        "a tag is 1 to 128 characters of A-Z, a-z, 0-9, `_`, `.` and `-`, and does not begin \
         with `.` or `-`",
    )
}

fn digest_fault(digest: &str) -> Option<&'static str> {
    let valid = digest.split_once(':').is_some_and(|(algorithm, hex)| {
        algorithm
            .bytes()
            .next()
            .is_some_and(|byte| byte.is_ascii_alphabetic())
            && algorithm.bytes().all(|byte| {
                byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'+' | b'.')
            })
            && hex.len() >= 32
            && hex.bytes().all(|byte| byte.is_ascii_hexdigit())
    });
    (!valid).then_some("a digest is `sha256:` and 64 hexadecimal digits")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_docker_takes_is_taken() {
        let digest = format!("a@sha256:{}", "0".repeat(64));
        let id = format!("sha256:{}", "f".repeat(64));
        for text in [
            "busybox",
            "python:demo",
            "conman-test:busybox",
            "library/python:3.13-slim",
            "ghcr.io/owner/some_name/x__y:1.0_A",
            "localhost/a",
            "localhost:5000/a:b",
            "[::1]:5000/a",
            "REGISTRY/a",
            "a--b/c.d:_",
            &digest,
            &id,
        ] {
            assert_eq!(fault(text), None, "{text}");
        }
    }

    #[test]
    fn what_docker_refuses_is_refused() {
        let long = "a".repeat(256);
        for text in [
            "",
            " ",
            "A",
            "a b",
            "a:",
            ":a",
            "a:b:c",
            "a/",
            "/a",
            "a//b",
            "-a",
            "a-",
            "a..b",
            "a___b",
            "a:-b",
            "a@sha256:12",
            "a@",
            "a:99999/b",
            "-x.y/a",
            "a\n",
            "a;rm",
            "../a",
            &long,
            "ä",
        ] {
            assert!(fault(text).is_some(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn an_accepted_reference_holds_no_character_that_needs_escaping(text in "[ -~]{0,30}") {
            if fault(&text).is_none() {
                prop_assert!(text.bytes().all(
                    |byte| byte.is_ascii_alphanumeric() || b"._-/:@+[]".contains(&byte)
                ));
            }
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,40}") {
            let _ = fault(&text);
        }
    }
}
