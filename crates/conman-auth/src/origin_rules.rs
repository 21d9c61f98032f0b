//! Determines which page a browser's request comes from, by headers that pages cannot forge.

use std::fmt;

use http::HeaderMap;
use http::header::{HeaderName, ORIGIN};

use crate::host_rules::{HostPort, quoted};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// The other origins whose pages may send requests.
#[derive(Debug, Clone, Default)]
pub struct OriginRules {
    allowed: Vec<Origin>,
}

/// A configured origin that is not valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OriginMistake {
    /// Position in the list.
    pub index: usize,
    pub message: String,
}

/// Scheme, host and port of a page (RFC 6454), in lower case and with an explicit port.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Origin {
    scheme: String,
    host: String,
    port: Option<u16>,
}

/// The page that sends the request, by its `Origin`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Asker {
    /// No `Origin`: not a browser, or a plain GET.
    Unnamed,
    /// A page from the requested host.
    Own,
    /// A page from an allowed origin.
    Allowed,
    /// Any other page; the value, safe to print.
    Foreign(String),
}

/// The site of the page that sends the request, by its `Sec-Fetch-*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Site {
    /// The same origin, the user, or a client that does not send it.
    HereOrUnknown,
    /// Another origin, which navigates the user here: a link, a frame, a form.
    Navigating { cross_site: bool },
    /// Another origin, for a subresource: an image, a script, a fetch.
    Elsewhere,
}

impl OriginRules {
    /// Creates rules with further origins, each `scheme://host` or `scheme://host:port`.
    ///
    /// # Errors
    /// Every entry that is not an origin.
    pub fn new(allowed: &[String]) -> Result<Self, Vec<OriginMistake>> {
        let mut origins = Vec::with_capacity(allowed.len());
        let mut mistakes = Vec::new();
        for (index, text) in allowed.iter().enumerate() {
            match Origin::parse(text.as_bytes()) {
                Some(origin) => origins.push(origin),
                None => mistakes.push(OriginMistake {
                    index,
                    message: format!(
                        "`{}` is not an origin: write scheme://host or scheme://host:port, \
                         without a path or wildcard",
                        quoted(text.as_bytes())
                    ),
                }),
            }
        }
        if mistakes.is_empty() {
            Ok(Self { allowed: origins })
        } else {
            Err(mistakes)
        }
    }

    /// Whether no origin is configured.
    pub(crate) fn is_empty(&self) -> bool {
        self.allowed.is_empty()
    }

    /// Classifies the `Origin` of a request that is addressed to `host`.
    ///
    /// It is unknown whether TLS ends before conman, so the scheme of the page's origin gives the
    /// default port.
    pub(crate) fn asker(&self, headers: &HeaderMap, host: Option<&HostPort>) -> Asker {
        let mut values = headers.get_all(ORIGIN).iter();
        let Some(value) = values.next() else {
            return Asker::Unnamed;
        };
        let foreign = || Asker::Foreign(quoted(value.as_bytes()));
        if values.next().is_some() {
            return foreign();
        }
        match Origin::parse(value.as_bytes()) {
            Some(origin) if host.is_some_and(|host| origin.is_at(host)) => Asker::Own,
            Some(origin) if self.allowed.contains(&origin) => Asker::Allowed,
            Some(_) | None => foreign(),
        }
    }
}

impl Site {
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let is = |name, text: &str| headers.get_all(name).iter().any(|value| value == text);
        let cross_site = is(SEC_FETCH_SITE, "cross-site");
        if !cross_site && !is(SEC_FETCH_SITE, "same-site") {
            Self::HereOrUnknown
        } else if is(SEC_FETCH_MODE, "navigate") {
            Self::Navigating { cross_site }
        } else {
            Self::Elsewhere
        }
    }
}

impl Origin {
    fn parse(value: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(value).ok()?;
        let (scheme, authority) = text.split_once("://")?;
        let scheme_is_valid = scheme.starts_with(|first: char| first.is_ascii_alphabetic())
            && scheme
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.'));
        if !scheme_is_valid {
            return None;
        }
        let scheme = scheme.to_ascii_lowercase();
        let HostPort { host, port } = HostPort::parse(authority.as_bytes())?;
        let port = port.or_else(|| default_port(&scheme));
        Some(Self { scheme, host, port })
    }

    fn is_at(&self, host: &HostPort) -> bool {
        matches!(self.scheme.as_str(), "http" | "https")
            && self.host == host.host
            && self.port == host.port.or_else(|| default_port(&self.scheme))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}://{}", self.scheme, self.host)?;
        self.port
            .map_or(Ok(()), |port| write!(formatter, ":{port}"))
    }
}

fn default_port(scheme: &str) -> Option<u16> {
    match scheme {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn rules() -> OriginRules {
        let allowed = [
            "https://App.example",
            "http://localhost:3000",
            "tauri://localhost",
        ];
        OriginRules::new(&allowed.map(str::to_owned)).expect("valid")
    }

    fn asker(origins: &[&str], host: &str) -> Asker {
        let mut headers = HeaderMap::new();
        for origin in origins {
            headers.append(ORIGIN, HeaderValue::from_str(origin).expect("a value"));
        }
        rules().asker(&headers, HostPort::parse(host.as_bytes()).as_ref())
    }

    fn is_foreign(asker: &Asker) -> bool {
        matches!(asker, Asker::Foreign(_))
    }

    #[test]
    fn a_page_from_the_asked_place_is_its_own() {
        for (origin, host) in [
            ("http://localhost:7700", "localhost:7700"),
            ("http://LocalHost:7700", "LOCALHOST:7700"),
            ("https://a.example", "a.example"),
            ("https://a.example", "a.example:443"),
            ("http://a.example:80", "a.example"),
            ("http://[::1]:7700", "[::1]:7700"),
        ] {
            assert_eq!(asker(&[origin], host), Asker::Own, "{origin} {host}");
        }
    }

    #[test]
    fn any_other_page_is_foreign_unless_allowed() {
        for (origin, host) in [
            ("http://localhost:7701", "localhost:7700"),
            ("http://localhost", "localhost:7700"),
            ("http://alice.localhost:7700", "localhost:7700"),
            ("http://localhost:7700", "alice.localhost:7700"),
            ("http://127.0.0.1:7700", "localhost:7700"),
            ("ftp://localhost:7700", "localhost:7700"),
            ("null", "localhost:7700"),
            ("", "localhost:7700"),
            ("http://localhost:7700/", "localhost:7700"),
            ("http://localhost:7700 http://evil", "localhost:7700"),
            ("http://user@localhost:7700", "localhost:7700"),
            ("https://app.example:444", "localhost:7700"),
            ("http://app.example", "localhost:7700"),
            ("https://app.example.evil", "localhost:7700"),
        ] {
            assert!(is_foreign(&asker(&[origin], host)), "{origin} {host}");
        }
        for origin in [
            "https://app.example",
            "https://app.example:443",
            "http://localhost:3000",
            "tauri://localhost",
        ] {
            assert_eq!(
                asker(&[origin], "localhost:7700"),
                Asker::Allowed,
                "{origin}"
            );
        }
    }

    #[test]
    fn without_an_origin_the_page_is_unnamed_and_with_two_it_is_foreign() {
        assert_eq!(asker(&[], "localhost"), Asker::Unnamed);
        assert!(is_foreign(&asker(
            &["http://localhost", "http://localhost"],
            "localhost"
        )));
    }

    #[test]
    fn entries_that_are_no_origins_are_mistakes() {
        let entries = [
            "https://ok.example",
            "ok.example",
            "https://x/",
            "*",
            "https://*.x",
            "null",
            "://x",
        ];
        let mistakes = OriginRules::new(&entries.map(str::to_owned)).expect_err("mistakes");
        let places: Vec<usize> = mistakes.iter().map(|mistake| mistake.index).collect();
        assert_eq!(places, [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn fetch_metadata_tells_a_link_from_a_page_that_reads() {
        let site = |pairs: &[(HeaderName, &'static str)]| {
            let pairs = pairs
                .iter()
                .map(|(n, v)| (n.clone(), HeaderValue::from_static(v)));
            Site::of(&pairs.collect())
        };
        let navigate = (SEC_FETCH_MODE, "navigate");
        assert_eq!(site(&[]), Site::HereOrUnknown);
        assert_eq!(
            site(&[(SEC_FETCH_SITE, "same-origin")]),
            Site::HereOrUnknown
        );
        assert_eq!(
            site(&[(SEC_FETCH_SITE, "none"), navigate.clone()]),
            Site::HereOrUnknown
        );
        assert_eq!(site(&[(SEC_FETCH_SITE, "same-site")]), Site::Elsewhere);
        assert_eq!(site(&[(SEC_FETCH_SITE, "cross-site")]), Site::Elsewhere);
        for (value, cross_site) in [("cross-site", true), ("same-site", false)] {
            let link = site(&[(SEC_FETCH_SITE, value), navigate.clone()]);
            assert_eq!(link, Site::Navigating { cross_site });
        }
    }

    proptest! {
        #[test]
        fn what_is_parsed_comes_back_when_printed(text in "[a-z]{1,5}://[a-z0-9.]{1,12}(:[0-9]{1,5})?") {
            if let Some(origin) = Origin::parse(text.as_bytes()) {
                prop_assert_eq!(Origin::parse(origin.to_string().as_bytes()), Some(origin));
            }
        }

        #[test]
        fn no_value_makes_the_parser_panic(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = Origin::parse(&bytes);
            let _ = HostPort::parse(&bytes);
        }
    }
}
