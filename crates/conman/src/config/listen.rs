//! The section `[listen]`.

use std::net::{Ipv4Addr, SocketAddr};

use conman_auth::{HostRules, OriginRules};
use conman_cli::DEFAULT_SOCKET;
use conman_node::UrlScheme;
use conman_proxy::{is_domain, is_server_order};
use http::HeaderName;

use super::Listen;
use super::reader::Section;

/// Placeholder in `listen.url`.
const ID: &str = "{id}";

/// Reads `[listen]`.
pub(super) fn listen(section: &Section<'_, '_>) -> Listen {
    let address = |field: &str| {
        section.parsed(field, |text| {
            text.parse::<SocketAddr>()
                .map_err(|_| "must be ADDRESS:PORT, for example \"127.0.0.1:7700\"".to_owned())
        })
    };
    let loopback = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let api = address("api").unwrap_or(loopback(7700));
    let sessions = address("sessions").unwrap_or(loopback(7701));
    let peers = address("peers");
    let agent = address("agent");
    if api == sessions && api.port() != 0 {
        section.mistake(
            "sessions",
            "is the API's own address; sessions must have another origin than the API, because \
             their content is hostile to it",
        );
    }
    let admin = section
        .path("admin")
        .unwrap_or_else(|| DEFAULT_SOCKET.into());
    let domain = section
        .string("domain")
        .unwrap_or_else(|| "localhost".to_owned());
    let hosts = section.strings("hosts").unwrap_or_default();
    let origins = section.strings("allowed_origins").unwrap_or_default();
    if let Err(mistakes) = HostRules::new(sessions, &hosts, Some(&domain)) {
        for mistake in mistakes {
            section.mistake(&format!("hosts[{}]", mistake.index), mistake.message);
        }
    }
    let origins = OriginRules::new(&origins).unwrap_or_else(|mistakes| {
        for mistake in mistakes {
            let field = format!("allowed_origins[{}]", mistake.index);
            section.mistake(&field, mistake.message);
        }
        OriginRules::default()
    });
    let url = section.parsed("url", url_scheme);
    let (urls, secure_urls) = url.unzip();
    if !is_domain(&domain) {
        section.mistake("domain", "must be a host name of at most 189 bytes");
    }
    let listen = Listen {
        api,
        sessions,
        peers,
        agent,
        admin,
        domain,
        hosts,
        origins,
        urls,
        secure_urls: secure_urls.unwrap_or(false),
        trust_forwarded: section.boolean("trust_forwarded").unwrap_or(false),
        browser_paths: section.boolean("browser_paths").unwrap_or(false),
        trusted_headers: trusted_headers(section),
    };
    section.finish();
    listen
}

fn trusted_headers(section: &Section<'_, '_>) -> Vec<HeaderName> {
    let field = "trusted_headers";
    let names = section.strings(field).unwrap_or_default();
    let mut trusted = Vec::new();
    for (index, text) in names.iter().enumerate() {
        match text.parse() {
            Ok(name) if is_server_order(&name) => trusted.push(name),
            _ => section.mistake(
                &format!("{field}[{index}]"),
                format_args!(
                    "is `{text}`, which is not removed from sessions' answers; name one that is, for \
                     example \"X-Accel-Buffering\""
                ),
            ),
        }
    }
    trusted
}

/// `https://{id}.example.org/` or `https://example.org/s/{id}/`.
fn url_scheme(pattern: &str) -> Result<(UrlScheme, bool), String> {
    let rule = "must be like \"https://{id}.example.org/\" or \"https://example.org/s/{id}/\"";
    let (scheme, rest) = pattern.split_once("://").ok_or(rule)?;
    if !matches!(scheme, "http" | "https") || rest.matches(ID).count() != 1 {
        return Err(rule.to_owned());
    }
    let rest = rest.trim_end_matches('/');
    let plain = |text: &&str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-.:[]".contains(&byte);
        !text.is_empty() && text.bytes().all(plain)
    };
    let urls = if let Some(authority) = rest.strip_prefix("{id}.").filter(plain) {
        UrlScheme::host(scheme, authority)
    } else if let Some(authority) = rest.strip_suffix("/s/{id}").filter(plain) {
        UrlScheme::path(&format!("{scheme}://{authority}"))
    } else {
        return Err(rule.to_owned());
    };
    Ok((urls, scheme == "https"))
}
