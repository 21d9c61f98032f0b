use std::collections::BTreeMap;
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use conman_auth::{HostRules, OriginRules};
use conman_cli::DEFAULT_SOCKET;
use conman_core::{DEFAULT_BIND_FIRST_ID, HIGHEST_MAX_CPUS, HIGHEST_MAX_DISK, SpecPolicy};
use conman_node::{NOTICE_SOURCES, NodeLimits, NoticeSourceOptions, UrlScheme};
use conman_proto::RuntimeKind;
use conman_proxy::is_domain;
use conman_runtime::KeptLogLimits;
use conman_shim::{IdPool, RANGE_SIZE};
use toml::de::DeTable;

use super::reader::{Mistake, Reader, Section};
use super::{
    Config, Limits, Listen, LogFormat, OnSigterm, Preempt, fleet, images, net, registry, templates,
};

/// The configuration file when none is named.
pub(crate) const DEFAULT_PATH: &str = "/etc/conman/conman.toml";
/// Names the configuration file if no option does.
const CONFIG_VARIABLE: &str = "CONMAN_CONFIG";
/// Memory of a session if neither its spec nor the configuration limits it: 512 MiB.
const DEFAULT_MEMORY_BYTES: u64 = 512 << 20;
/// Placeholder in `listen.url`.
const ID: &str = "{id}";

/// Time for load balancers of a fleet to notice that a node leaves, if not configured: two probes, one
/// second apart, and a margin.
const SHUTDOWN_DELAY_S: u64 = 5;

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("cannot read the configuration file {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("the configuration has {}; nothing was started\n{}", count(mistakes.len()),
        listed(path.as_deref(), mistakes))]
    Wrong {
        path: Option<PathBuf>,
        mistakes: Vec<Mistake>,
    },
}

fn count(mistakes: usize) -> String {
    if mistakes == 1 {
        "a mistake".to_owned()
    } else {
        format!("{mistakes} mistakes")
    }
}

fn listed(path: Option<&Path>, mistakes: &[Mistake]) -> String {
    let place = path.map_or_else(
        || "(defaults)".to_owned(),
        |path| path.display().to_string(),
    );
    let lines = mistakes
        .iter()
        .map(|mistake| format!("  {place}:{}: {}", mistake.line, mistake.text));
    lines.collect::<Vec<_>>().join("\n")
}

/// Reads the configuration: the named file, or that of [`CONFIG_VARIABLE`], or [`DEFAULT_PATH`], or, if that does not exist, the
/// documented defaults.
pub(crate) fn load(named: Option<&Path>) -> Result<Config, ConfigError> {
    let from_env = || std::env::var_os(CONFIG_VARIABLE).filter(|path| !path.is_empty());
    let named = named
        .map(Path::to_owned)
        .or_else(|| from_env().map(PathBuf::from));
    let path = named.as_deref().unwrap_or(Path::new(DEFAULT_PATH));
    match read(path) {
        Ok(text) => Ok(Config {
            file: named.clone(),
            sections: text.parse().unwrap_or_default(),
            ..parse(&text, Some(path))?
        }),
        Err(ConfigError::Read { source, .. })
            if named.is_none() && source.kind() == std::io::ErrorKind::NotFound =>
        {
            parse("", None)
        }
        Err(error) => Err(error),
    }
}

pub(super) fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
        path: path.to_path_buf(),
        source,
    })
}

pub(super) fn parse(text: &str, path: Option<&Path>) -> Result<Config, ConfigError> {
    let (table, errors) = DeTable::parse_recoverable(text);
    let reader = Reader::new(text, table.get_ref());
    for error in errors {
        let offset = error.span().map_or(0, |span| span.start);
        reader.report(offset, error.message().to_owned());
    }
    let root = Section::new(&reader, String::new(), Some(table.get_ref()));
    let config = config(&reader, &root);
    let mistakes = reader.into_mistakes();
    if mistakes.is_empty() {
        Ok(config)
    } else {
        Err(ConfigError::Wrong {
            path: path.map(Path::to_path_buf),
            mistakes,
        })
    }
}

/// Reads every section. A field with a mistake gets its default, so that reading continues; the
/// result is used only if there was no mistake.
fn config(reader: &Reader<'_>, root: &Section<'_, '_>) -> Config {
    let node = root.section("node");
    let name = node.parsed("name", |name| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let valid = (1..=253).contains(&name.len()) && name.bytes().all(plain) && name != "self";
        valid.then(|| name.to_owned()).ok_or_else(|| {
            "must be 1 to 253 letters, digits, '-', '_' and '.', and not `self`".to_owned()
        })
    });
    let state_dir = node
        .path("state_dir")
        .unwrap_or_else(|| "/var/lib/conman".into());
    let runtime = node
        .parsed("runtime", runtime_kind)
        .unwrap_or(RuntimeKind::Native);
    let id_range = node
        .parsed("id_range", str::parse::<IdPool>)
        .unwrap_or_default();
    let shutdown_delay_s = node.integer("shutdown_delay_s", 0..=600);
    node.finish();

    let listen = listen(&root.section("listen"));
    let fleet_section = root.section("fleet");
    let limits_section = root.section("limits");
    let limits = limits(&limits_section);
    let max_sessions = limits.node.max_sessions as u64;
    let shared = registry::registry(&root.section("registry"), &fleet_section, max_sessions);
    let fleet = fleet::fleet(&fleet_section, listen.peers);
    let mut policy = SpecPolicy {
        default_runtime: runtime,
        ..SpecPolicy::default()
    };
    spec_limits(&limits_section, &mut policy);
    limits_section.finish();

    let auth = root.section("auth");
    let tokens_file = auth.string("tokens_file").map(PathBuf::from);
    let cookie_ttl_s = auth
        .integer("cookie_ttl_s", 60..=31_536_000)
        .unwrap_or(43_200);
    auth.finish();
    for (field, address) in [
        ("listen.api", listen.api),
        ("listen.sessions", listen.sessions),
    ] {
        if tokens_file.is_none() && !address.ip().is_loopback() {
            reader.mistake(
                field,
                format_args!(
                    "is {address}, which is not loopback: anyone who reaches it could run \
                     programs here. Make tokens with `conman auth new-token` and name their file \
                     in `auth.tokens_file`, or listen on 127.0.0.1"
                ),
            );
        }
    }
    let preempt = preempt(&root.section("preempt"));
    let docker = root.section("docker");
    let docker_socket = docker
        .path("socket")
        .unwrap_or_else(|| "/var/run/docker.sock".into());
    docker.finish();
    let images = images::images(&root.section("images"));
    let net = net::net(&root.section("net"), shared.as_ref());
    let log = root.section("log");
    let log_format = log
        .get("format", "\"text\" or \"json\"")
        .unwrap_or(LogFormat::Text);
    log.finish();
    let binds = root.section("binds");
    policy.bind_roots = binds
        .strings("allow")
        .unwrap_or_default()
        .into_iter()
        .map(PathBuf::from)
        .collect();
    let bind_first_id = bind_first_id(&binds, id_range);
    binds.finish();
    for (name, template) in root.section("templates").sections() {
        policy.templates.insert(name, templates::template(template));
    }
    net::template_mistakes(reader, &net, &policy, tokens_file.is_some());
    policy_mistakes(reader, &policy);
    root.finish();
    let config = Config {
        name: name.unwrap_or_else(host_name),
        state_dir,
        id_range,
        shutdown_delay: Duration::from_secs(shutdown_delay_s.unwrap_or(match shared {
            Some(_) => SHUTDOWN_DELAY_S,
            None => 0,
        })),
        runtime,
        listen,
        fleet,
        shared,
        limits,
        tokens_file,
        cookie_ttl: Duration::from_secs(cookie_ttl_s),
        preempt,
        images,
        docker_socket,
        log_format,
        bind_first_id,
        net,
        policy,
        file: None,
        sections: toml::Table::new(),
    };
    if let Some(shared) = &config.shared {
        registry::kill_mistakes(reader, &config, shared);
    }
    config
}

/// The first of the 65,536 host ids that own the files of binds. Lower ids are the host's.
fn bind_first_id(binds: &Section<'_, '_>, sessions: IdPool) -> u32 {
    let highest = u64::from(u32::MAX - RANGE_SIZE);
    let first = binds
        .integer("first_id", u64::from(RANGE_SIZE)..=highest)
        .unwrap_or(DEFAULT_BIND_FIRST_ID);
    if sessions.overlaps(first) {
        binds.mistake(
            "first_id",
            format_args!("is {first}; that and the {RANGE_SIZE} ids from it overlap `node.id_range`, {sessions}"),
        );
    }
    first
}

/// The policy checks itself and uses its field names; here they get the names in the file.
fn policy_mistakes(reader: &Reader<'_>, policy: &SpecPolicy) {
    for mistake in policy.mistakes() {
        let field = match mistake.field.split_once('[') {
            Some(("bind_roots", index)) => format!("binds.allow[{index}"),
            _ if mistake.field.starts_with("templates.") => mistake.field,
            _ => format!("limits.{}", mistake.field),
        };
        reader.mistake(&field, mistake.message);
    }
}

fn listen(section: &Section<'_, '_>) -> Listen {
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
    };
    section.finish();
    listen
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

fn limits(section: &Section<'_, '_>) -> Limits {
    let defaults = NodeLimits::default();
    let count = |field: &str, default: usize, most: u64| {
        section.integer(field, 1..=most).unwrap_or(default)
    };
    Limits {
        node: NodeLimits {
            max_sessions: count("max_sessions", defaults.max_sessions, 1_000_000),
            max_starting: count("max_starting", defaults.max_starting, 1_024),
            max_stopped_kept: count("max_stopped_kept", defaults.max_stopped_kept, 1_000_000),
            max_held_per_session: count(
                "max_held_per_session",
                defaults.max_held_per_session,
                100_000,
            ),
            max_held: count("max_held", defaults.max_held, 1_000_000),
            disk_reserve_bytes: section
                .integer("disk_reserve_bytes", 0..=HIGHEST_MAX_DISK)
                .unwrap_or(defaults.disk_reserve_bytes),
        },
        max_connections: count("max_connections", 16_384, 10_000_000),
        max_api_connections: count("max_api_connections", 1_024, 1_000_000),
        total_cpus: total_cpus(section),
        max_events: section
            .integer("max_events", 100..=10_000_000)
            .unwrap_or(100_000),
        kept_logs: kept_logs(section),
        check_host_every: match section.integer("check_host_s", 0..=86_400).unwrap_or(10) {
            0 => None,
            seconds => Some(Duration::from_secs(seconds)),
        },
    }
}

fn kept_logs(section: &Section<'_, '_>) -> KeptLogLimits {
    let defaults = KeptLogLimits::default();
    let bytes = section.integer("kept_log_bytes", 0..=1 << 30);
    let total = section.integer("kept_log_total_bytes", 0..=1 << 50);
    let age = section.integer("kept_log_s", 0..=366 * 86_400);
    KeptLogLimits {
        bytes: bytes.unwrap_or(defaults.bytes),
        total_bytes: total.unwrap_or(defaults.total_bytes),
        age: age.map_or(defaults.age, Duration::from_secs),
    }
}

/// A twentieth of the host's processors, and at least a tenth of one, is left to the host.
#[expect(clippy::cast_precision_loss, reason = "no host has 2^52 processors")]
fn total_cpus(section: &Section<'_, '_>) -> f64 {
    let field = "total_cpus";
    let cpus = std::thread::available_parallelism().map_or(1.0, |cpus| cpus.get() as f64);
    let default = cpus - (cpus / 20.0).max(0.1);
    let total = section.number(field).unwrap_or(default);
    if (0.1..=HIGHEST_MAX_CPUS).contains(&total) {
        return total;
    }
    section.mistake(
        field,
        format_args!("is {total}; must be 0.1 to {HIGHEST_MAX_CPUS}"),
    );
    default
}

fn spec_limits(section: &Section<'_, '_>, policy: &mut SpecPolicy) {
    let bytes = |field| section.integer(field, 1..=u64::from(u32::MAX) << 20);
    policy.max_memory_bytes = bytes("max_memory_bytes");
    policy.max_disk_bytes = section.integer("max_disk_bytes", 1..=HIGHEST_MAX_DISK);
    policy.default_disk_bytes = match section.integer("default_disk_bytes", 0..=HIGHEST_MAX_DISK) {
        Some(0) => None,
        None => policy
            .default_disk_bytes
            .min(policy.max_disk_bytes.or(policy.default_disk_bytes)),
        given => given,
    };
    policy.default_memory_bytes = bytes("default_memory_bytes")
        .or(policy.max_memory_bytes)
        .or(Some(DEFAULT_MEMORY_BYTES));
    policy.default_cpus = section.number("default_cpus");
    policy.max_cpus = section.number("max_cpus");
    let number = |field, default| {
        section
            .integer(field, 0..=u64::from(u32::MAX))
            .unwrap_or(default)
    };
    policy.default_pids = number("default_pids", policy.default_pids);
    policy.max_pids = number("max_pids", policy.max_pids);
    policy.default_ready_timeout_s =
        number("default_ready_timeout_s", policy.default_ready_timeout_s);
    policy.default_idle_timeout_s = number("default_idle_timeout_s", policy.default_idle_timeout_s);
    policy.default_max_lifetime_s = number("default_max_lifetime_s", policy.default_max_lifetime_s);
}

fn preempt(section: &Section<'_, '_>) -> Preempt {
    let meanings = "\"preempt\" (SIGTERM means that the machine stops) or \"leave\" (only the \
                    daemon stops)";
    let on_sigterm = section
        .get("on_sigterm", meanings)
        .unwrap_or(OnSigterm::Leave);
    let budget_ms = section
        .integer("budget_ms", 0..=3_600_000)
        .unwrap_or(25_000);
    let notice_sources = NOTICE_SOURCES.iter().filter_map(|kind| {
        let watched = section.boolean(kind.name).unwrap_or(false);
        let endpoint = section.parsed(&format!("{}_endpoint", kind.name), |text| {
            kind.check(text).map(|()| text.to_owned())
        });
        watched.then(|| NoticeSourceOptions {
            kind: *kind,
            endpoint: endpoint.unwrap_or_else(|| kind.default_endpoint.to_owned()),
        })
    });
    let notice_sources = notice_sources.collect();
    section.finish();
    Preempt {
        on_sigterm,
        budget_ms,
        notice_sources,
    }
}

pub(super) fn runtime_kind(text: &str) -> Result<RuntimeKind, String> {
    match text {
        "native" => Ok(RuntimeKind::Native),
        "docker" => Ok(RuntimeKind::Docker),
        _ => Err("must be \"native\" or \"docker\"".to_owned()),
    }
}

/// The kernel's name for this machine, cut to the characters that a node's name may have.
fn host_name() -> String {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    let plain = |c: &char| c.is_ascii_alphanumeric() || "-_.".contains(*c);
    let name: String = name.chars().filter(plain).take(253).collect();
    if name.is_empty() || name == "self" {
        "node".to_owned()
    } else {
        name
    }
}

impl fmt::Display for Config {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by_runtime = self.policy.templates.values().fold(
            BTreeMap::<String, usize>::new(),
            |mut counts, template| {
                let runtime = template.runtime.unwrap_or(self.runtime);
                *counts.entry(runtime.to_string()).or_default() += 1;
                counts
            },
        );
        write!(
            formatter,
            "node {} ({}), state in {}, templates {by_runtime:?}",
            self.name,
            self.runtime,
            self.state_dir.display()
        )?;
        match &self.shared {
            Some(shared) => write!(formatter, ", {shared}"),
            None => Ok(()),
        }
    }
}
