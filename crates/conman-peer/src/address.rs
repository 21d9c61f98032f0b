//! The address of a node's listener for other nodes.

use std::fmt;

use http::Uri;
use thiserror::Error;

/// Address of a node's peer listener.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PeerAddress {
    /// The node's name.
    pub node: String,
    /// Name or address, as it must be in the node's TLS certificate.
    host: String,
    port: u16,
    tls: bool,
}

/// An announced URL that is not usable.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "node `{node}` announces the peer URL `{url}`, which must be like `https://10.0.0.1:7702`: see \
     `listen.peers` and `fleet.peer_url` in its configuration"
)]
pub struct BadPeerUrl {
    pub node: String,
    pub url: String,
}

impl PeerAddress {
    /// Parses the announced URL: `http://HOST:PORT` or `https://HOST:PORT`.
    ///
    /// # Errors
    /// Anything else.
    pub fn new(node: &str, url: &str) -> Result<Self, BadPeerUrl> {
        let bad = || BadPeerUrl {
            node: node.to_owned(),
            url: url.chars().take(200).collect(),
        };
        let uri: Uri = url.parse().map_err(|_| bad())?;
        let tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(bad()),
        };
        let plain = uri.path() == "/" && uri.query().is_none();
        let authority = uri.authority().filter(|_| plain).ok_or_else(bad)?;
        if authority.as_str().contains('@') {
            return Err(bad());
        }
        let host = authority.host();
        let host = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'))
            .unwrap_or(host);
        let port = authority.port_u16().ok_or_else(bad)?;
        if host.is_empty() || port == 0 {
            return Err(bad());
        }
        Ok(Self {
            node: node.to_owned(),
            host: host.to_owned(),
            port,
            tls,
        })
    }

    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether the node has announced that it uses TLS.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        self.tls
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (open, close) = if self.host.contains(':') {
            ("[", "]")
        } else {
            ("", "")
        };
        write!(formatter, "{open}{}{close}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announced_url_is_read_and_shown() {
        for (url, host, shown, tls) in [
            ("http://10.0.0.1:7702", "10.0.0.1", "10.0.0.1:7702", false),
            (
                "https://n1.example:7702/",
                "n1.example",
                "n1.example:7702",
                true,
            ),
            ("https://[fd00::1]:7702", "fd00::1", "[fd00::1]:7702", true),
        ] {
            let address = PeerAddress::new("n1", url).expect(url);
            assert_eq!((address.host(), address.is_tls()), (host, tls));
            assert_eq!(address.to_string(), shown);
        }
    }

    #[test]
    fn urls_that_lead_nowhere_are_refused_with_the_nodes_name() {
        for url in [
            "",
            "10.0.0.1:7702",
            "http://10.0.0.1",
            "ftp://10.0.0.1:7702",
            "http://:7702",
            "http://a@10.0.0.1:7702",
            "http://10.0.0.1:7702/x",
            "http://10.0.0.1:0",
            "unix:/x",
        ] {
            let error = PeerAddress::new("n1", url).expect_err(url);
            assert!(error.to_string().contains("`n1`"), "{error}");
        }
    }
}
