//! Addresses and tokens as given on the command line.

use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use http::{HeaderValue, Uri};

use super::ClientError;
use crate::args::Endpoint;

/// Bound on a token file: it contains one line.
const MAX_TOKEN_BYTES: u64 = 8 * 1024;

/// A checked address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Target {
    Unix(PathBuf),
    Tcp { host: String, port: u16 },
}

impl Target {
    pub(super) fn new(endpoint: Endpoint) -> Result<Self, ClientError> {
        match endpoint {
            Endpoint::Socket(path) => Ok(Self::Unix(path)),
            Endpoint::Url(url) => Self::from_url(&url),
        }
    }

    fn from_url(url: &str) -> Result<Self, ClientError> {
        let refused = |reason: &str| ClientError::BadUrl {
            given: without_user(url),
            reason: reason.to_owned(),
        };
        let uri: Uri = url.trim().parse().map_err(|_| refused("it is not a URL"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(refused(
                    "https is not supported; reach a remote node through an SSH tunnel or a \
                     TLS gateway",
                ));
            }
            _ => return Err(refused("it must begin with http://")),
        }
        let authority = uri.authority().ok_or_else(|| refused("it names no host"))?;
        if authority.as_str().contains('@') {
            return Err(refused("it must not have a user name; use --token-file"));
        }
        if uri.path() != "/" || uri.query().is_some() {
            return Err(refused("it must end after the host and port"));
        }
        let host = authority.host();
        if host.is_empty() {
            return Err(refused("it names no host"));
        }
        // `http://host:` and a port out of range parse as an authority without a port.
        if authority.port().is_none() && authority.as_str().len() != host.len() {
            return Err(refused("its port is not a number from 1 to 65535"));
        }
        Ok(Self::Tcp {
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(80),
        })
    }

    /// Value of the `Host` header.
    pub(super) fn host(&self) -> Result<HeaderValue, ClientError> {
        match self {
            Self::Unix(_) => Ok(HeaderValue::from_static("localhost")),
            Self::Tcp { host, port } => {
                HeaderValue::try_from(format!("{host}:{port}")).map_err(|_| ClientError::BadUrl {
                    given: self.to_string(),
                    reason: "its host is not valid".to_owned(),
                })
            }
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(formatter, "{}", path.display()),
            Self::Tcp { host, port } => write!(formatter, "http://{host}:{port}"),
        }
    }
}

/// The token in a file, as the value of the `Authorization` header.
pub(super) fn read_token(path: &Path) -> Result<HeaderValue, ClientError> {
    let unreadable = |source| ClientError::TokenFile {
        path: path.to_owned(),
        source,
    };
    let refused = |reason| ClientError::BadToken {
        path: path.to_owned(),
        reason,
    };
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mut text = Vec::new();
    file.take(MAX_TOKEN_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(unreadable)?;
    if text.len() as u64 > MAX_TOKEN_BYTES {
        return Err(refused("it is larger than 8 KiB"));
    }
    let token = text.trim_ascii();
    if token.is_empty() {
        return Err(refused("it is empty"));
    }
    if !token.iter().all(u8::is_ascii_graphic) {
        return Err(refused("it contains more than one word"));
    }
    let mut value = HeaderValue::from_bytes(&[b"Bearer ", token].concat())
        .map_err(|_| refused("it contains characters that no token has"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// The URL as an error may show it: the text before an `@` may be a password.
fn without_user(url: &str) -> String {
    match (url.split_once("://"), url.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, rest))) => format!("{scheme}://…@{rest}"),
        _ => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(url: &str) -> Result<Target, String> {
        Target::new(Endpoint::Url(url.to_owned())).map_err(|error| error.to_string())
    }

    #[test]
    fn a_url_is_a_host_and_perhaps_a_port() {
        for (url, shown) in [
            ("http://127.0.0.1:7700", "http://127.0.0.1:7700"),
            ("http://node.example/", "http://node.example:80"),
            ("http://[::1]:7700", "http://[::1]:7700"),
        ] {
            assert_eq!(
                target(url).map(|target| target.to_string()),
                Ok(shown.to_owned())
            );
        }
    }

    #[test]
    fn every_other_url_is_refused_with_its_reason() {
        for (url, reason) in [
            ("127.0.0.1:7700", "begin with http://"),
            ("node", "begin with http://"),
            ("https://node", "SSH tunnel"),
            ("ftp://node", "begin with http://"),
            ("http://node/v1", "end after the host"),
            ("http://node?x=1", "end after the host"),
            ("http://node:99999", "65535"),
            ("http://", "not a URL"),
            ("http:// node", "not a URL"),
        ] {
            let error = target(url).expect_err(url);
            assert!(error.contains(reason), "{url}: {error}");
        }
    }

    #[test]
    fn a_password_in_a_url_is_not_repeated() {
        let error = target("http://user:secret@node").expect_err("refused");
        assert!(
            !error.contains("secret") && error.contains("--token-file"),
            "{error}"
        );
    }

    #[test]
    fn a_token_file_holds_one_word_and_its_value_is_hidden_from_debug_output() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("token");
        std::fs::write(&path, "  cm_abc\n").expect("written");
        let value = read_token(&path).expect("a token");
        assert_eq!(value.as_bytes(), b"Bearer cm_abc");
        assert!(!format!("{value:?}").contains("cm_abc"));
        for text in ["", "\n", "two words", "a\nb", "ä", &"x".repeat(9_000)] {
            std::fs::write(&path, text).expect("written");
            assert!(read_token(&path).is_err(), "{text}");
        }
    }
}
