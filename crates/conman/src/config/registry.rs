//! `[registry]`, and the time-outs of `[fleet]`: where ownership is recorded, and the bounds that
//! make a takeover safe.

use std::fmt;
use std::path::PathBuf;

use conman_core::ownership::{KILLS_PER_MS, Timing};

use super::Config;
use super::reader::{Reader, Section};

const DEFAULT_PREFIX: &str = "/conman/";

/// More than any of the protocol's times: an hour.
const MAX_MS: u64 = 3_600_000;

/// A registry that other nodes share.
#[derive(Debug, Clone)]
pub(crate) struct SharedRegistry {
    /// `registry.endpoints`
    pub(crate) endpoints: Vec<String>,
    /// `registry.prefix`
    pub(crate) prefix: String,
    /// `registry.user` and `registry.password_file`
    pub(crate) login: Option<(String, PathBuf)>,
    /// `registry.ca_file`
    pub(crate) ca_file: Option<PathBuf>,
    /// `registry.cert_file` and `registry.key_file`
    pub(crate) identity_files: Option<(PathBuf, PathBuf)>,
    /// `registry.compact`
    pub(crate) compact: bool,
    pub(crate) timing: Timing,
    /// Whether `fleet.takeover_ms` is absent, so that the takeover time follows from the others and from
    /// the host's stalls.
    pub(crate) derives_takeover: bool,
    /// `fleet.unsafe_timing`: for tests that show the effects.
    pub(crate) unsafe_timing: bool,
}

/// `fleet` has more fields than are read here.
pub(super) fn registry(
    registry: &Section<'_, '_>,
    fleet: &Section<'_, '_>,
    max_sessions: u64,
) -> Option<SharedRegistry> {
    let shared = registry
        .parsed("kind", |kind| match kind {
            "embedded" => Ok(false),
            "etcd" => Ok(true),
            _ => Err("must be \"embedded\" or \"etcd\"".to_owned()),
        })
        .unwrap_or(false);
    let endpoints = registry.strings("endpoints");
    let prefix = registry.parsed("prefix", |text| {
        let plain = text.starts_with('/') && text.ends_with('/') && text.len() <= 256;
        plain
            .then(|| text.to_owned())
            .ok_or_else(|| "must begin and end with `/`, such as \"/conman/\"".to_owned())
    });
    let login = pair(
        registry,
        ("user", registry.string("user")),
        ("password_file", registry.path("password_file")),
    );
    let ca_file = registry.path("ca_file");
    let identity_files = pair(
        registry,
        ("cert_file", registry.path("cert_file")),
        ("key_file", registry.path("key_file")),
    );
    let compact = registry.boolean("compact").unwrap_or(true);
    registry.finish();
    if shared && endpoints.as_ref().is_none_or(Vec::is_empty) {
        registry.mistake(
            "endpoints",
            "must name at least one endpoint of etcd, such as [\"http://10.0.0.1:2379\"]",
        );
    }
    let schemes = ["http://", "https://"];
    let has_scheme = |endpoint: &&String| schemes.iter().any(|scheme| endpoint.starts_with(scheme));
    let listed = endpoints.iter().flatten();
    for endpoint in listed.filter(|endpoint| !has_scheme(endpoint)) {
        registry.mistake(
            "endpoints",
            format_args!(
                "holds `{endpoint}`; write it as `http://HOST:PORT` or `https://HOST:PORT`"
            ),
        );
    }
    let (timing, derives_takeover) = timing(fleet, max_sessions);
    let unsafe_timing = fleet.boolean("unsafe_timing").unwrap_or(false);
    let config = SharedRegistry {
        endpoints: endpoints.unwrap_or_default(),
        prefix: prefix.unwrap_or_else(|| DEFAULT_PREFIX.to_owned()),
        login,
        ca_file,
        identity_files,
        compact,
        timing,
        derives_takeover,
        unsafe_timing,
    };
    if let Err(error) = timing.slack_ms()
        && !unsafe_timing
    {
        fleet.mistake("takeover_ms", format_args!("is too short: {error}"));
    }
    shared.then_some(config)
}

/// Also returns whether the takeover time is derived.
fn timing(section: &Section<'_, '_>, max_sessions: u64) -> (Timing, bool) {
    let defaults = Timing::default();
    let ms = |field: &str, least: u64, default: u64| {
        section.integer(field, least..=MAX_MS).unwrap_or(default)
    };
    let timing = Timing {
        renew_ms: ms("renew_ms", 50, defaults.renew_ms),
        fence_ms: ms("fence_ms", 500, defaults.fence_ms),
        shim_restart_ms: ms("shim_restart_ms", 0, defaults.shim_restart_ms),
        freeze_ms: ms("freeze_ms", 100, defaults.freeze_ms),
        kill_ms: ms("kill_ms", 0, Timing::kill_ms(max_sessions)),
        drift_ppm: section
            .integer("drift_ppm", 0..=500_000)
            .unwrap_or(defaults.drift_ppm),
        ..defaults
    };
    // Otherwise a single lost or late answer stops everything.
    if timing.fence_ms < 3 * timing.renew_ms {
        section.mistake(
            "fence_ms",
            format_args!(
                "is {}, but must be at least three times `renew_ms`, which is {}",
                timing.fence_ms, timing.renew_ms
            ),
        );
    }
    match section.integer("takeover_ms", 1_000..=MAX_MS) {
        Some(takeover_ms) => {
            let timing = Timing {
                takeover_ms,
                ..timing
            };
            (timing, false)
        }
        None => (timing.derive_takeover(0), true),
    }
}

/// The configured number of sessions must be killable within the time that takeovers assume.
pub(super) fn kill_mistakes(reader: &Reader<'_>, config: &Config, shared: &SharedRegistry) {
    let sessions = u64::try_from(config.limits.node.max_sessions).unwrap_or(u64::MAX);
    let timing = &shared.timing;
    if sessions <= timing.killed_in_time() || shared.unsafe_timing {
        return;
    }
    reader.mistake(
        "limits.max_sessions",
        format_args!(
            "is {sessions}, but within `fleet.kill_ms`, which is {}, no more than {} are sure to be \
             killed that do not freeze: lower it, or raise `fleet.kill_ms` to {}",
            timing.kill_ms,
            timing.killed_in_time(),
            sessions.div_ceil(KILLS_PER_MS),
        ),
    );
}

/// Both fields or none.
fn pair<A, B>(
    section: &Section<'_, '_>,
    (first_field, first): (&str, Option<A>),
    (second_field, second): (&str, Option<B>),
) -> Option<(A, B)> {
    match (first, second) {
        (Some(first), Some(second)) => Some((first, second)),
        (Some(_), None) => {
            section.mistake(first_field, format_args!("needs `{second_field}` as well"));
            None
        }
        (None, Some(_)) => {
            section.mistake(second_field, format_args!("needs `{first_field}` as well"));
            None
        }
        (None, None) => None,
    }
}

/// Includes the numbers that its safety depends on.
impl fmt::Display for SharedRegistry {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let timing = &self.timing;
        write!(
            formatter,
            "etcd at {}; ownership is renewed every {} ms and lapses after {} ms, everything is \
             frozen or dead {} ms after the last renewal, and a silent node is taken over after \
             {} ms: ",
            self.endpoints.join(", "),
            timing.renew_ms,
            timing.fence_ms,
            timing.bound_ms(),
            timing.takeover_ms,
        )?;
        match timing.slack_ms() {
            Ok(slack) => {
                let drift = timing.drift_ppm as f64 / 1e6;
                write!(
                    formatter,
                    "safe, since B (1 + ρ) < T (1 - ρ): ({} + {} + {} + {}) (1 + {drift}) = {} < \
                     {} (1 - {drift}) = {}; a machine may stand still unnoticed for {slack} ms",
                    timing.fence_ms,
                    timing.shim_restart_ms,
                    timing.freeze_ms,
                    timing.kill_ms,
                    timing.stretched_ms(),
                    timing.takeover_ms,
                    timing.silence_ms(),
                )
            }
            Err(error) => write!(
                formatter,
                "NOT SAFE, as `fleet.unsafe_timing` allows: {error}"
            ),
        }
    }
}
