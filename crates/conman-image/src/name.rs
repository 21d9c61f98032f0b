//! Local names of images.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A local name of an image, `NAME:TAG`; the default tag is `latest`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ImageName {
    name: String,
    tag: String,
}

#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is not an image name: expected NAME:TAG, where NAME has lower-case letters, digits and \
     single . _ - / between them, optionally behind HOST:PORT/, and TAG letters, digits, . _ -"
)]
pub struct ImageNameError(String);

const MAX_NAME_BYTES: usize = 255;
const MAX_TAG_BYTES: usize = 128;
const DEFAULT_TAG: &str = "latest";

impl ImageName {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn tag(&self) -> &str {
        &self.tag
    }
}

impl FromStr for ImageName {
    type Err = ImageNameError;

    fn from_str(text: &str) -> Result<Self, ImageNameError> {
        let last_slash = text.rfind('/').map_or(0, |at| at + 1);
        let (name, tag) = match text[last_slash..].rfind(':') {
            Some(colon) => (&text[..last_slash + colon], &text[last_slash + colon + 1..]),
            None => (text, DEFAULT_TAG),
        };
        if !is_name(name) || !is_tag(tag) {
            return Err(ImageNameError(text.chars().take(100).collect()));
        }
        Ok(Self {
            name: name.to_owned(),
            tag: tag.to_owned(),
        })
    }
}

fn is_tag(tag: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    !tag.is_empty()
        && tag.len() <= MAX_TAG_BYTES
        && plain(tag.as_bytes()[0])
        && tag
            .bytes()
            .all(|byte| plain(byte) || matches!(byte, b'.' | b'-'))
}

fn is_name(name: &str) -> bool {
    if name.len() > MAX_NAME_BYTES {
        return false;
    }
    let mut parts: Vec<&str> = name.split('/').collect();
    if parts.len() > 1
        && let Some((host, port)) = parts[0].split_once(':')
    {
        // `parse` also accepts a plus sign.
        if !port.bytes().all(|byte| byte.is_ascii_digit()) || port.parse::<u16>().is_err() {
            return false;
        }
        parts[0] = host;
    }
    let plain = |byte: Option<u8>| {
        byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
    };
    parts.iter().all(|part| {
        plain(part.bytes().next())
            && plain(part.bytes().last())
            && !part.contains("..")
            && part
                .bytes()
                .all(|byte| plain(Some(byte)) || matches!(byte, b'.' | b'_' | b'-'))
    })
}

impl TryFrom<String> for ImageName {
    type Error = ImageNameError;

    fn try_from(text: String) -> Result<Self, ImageNameError> {
        text.parse()
    }
}

impl From<ImageName> for String {
    fn from(name: ImageName) -> Self {
        name.to_string()
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.name, self.tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_a_tag_means_latest() {
        for (text, full) in [
            ("python", "python:latest"),
            ("python:3.12-slim", "python:3.12-slim"),
            ("127.0.0.1:5000/team/app", "127.0.0.1:5000/team/app:latest"),
            ("registry.example/a__b:V1", "registry.example/a__b:V1"),
        ] {
            let name: ImageName = text.parse().expect(text);
            assert_eq!(name.to_string(), full);
            assert_eq!(full.parse::<ImageName>().expect(full), name);
        }
    }

    #[test]
    fn what_could_be_mistaken_for_a_path_or_an_option_is_no_name() {
        for bad in [
            "",
            ":tag",
            "name:",
            "-x",
            "../x",
            "a/../b",
            "a//b",
            "/a",
            "a/",
            "A",
            "a b",
            "a\n",
            "a:b:c",
            "a@sha256:00",
            "a:-x",
            "host:x/a",
            "host:+5/a",
            "ä",
        ] {
            assert!(bad.parse::<ImageName>().is_err(), "{bad:?}");
        }
    }
}
