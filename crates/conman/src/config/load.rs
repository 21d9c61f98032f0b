//! Finds, reads and checks the configuration file.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use conman_core::{BindCreation, DEFAULT_BIND_FIRST_ID, SpecPolicy};
use conman_node::{NOTICE_SOURCES, NoticeSetting, NoticeSourceKind, NoticeSourceOptions};
use conman_proto::RuntimeKind;
use conman_shim::{IdPool, RANGE_SIZE};
use toml::de::DeTable;

use super::reader::{Mistake, Reader, Section};
use super::{
    Config, Listen, LogFormat, OnSigterm, Preempt, fleet, images, limits, listen, net, registry,
    runtimes, templates,
};

/// The configuration file when none is named.
pub(crate) const DEFAULT_PATH: &str = "/etc/conman/conman.toml";
/// Names the configuration file if no option does.
const CONFIG_VARIABLE: &str = "CONMAN_CONFIG";

/// Time for load balancers of a fleet to notice that a node leaves, if not configured: two probes, one
/// second apart, and a margin.
const SHUTDOWN_DELAY: Duration = Duration::from_secs(5);

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
    // What follows a mistake of syntax is misread, so that only the first one means anything.
    if let Some(error) = errors.first() {
        let offset = error.span().map_or(0, |span| span.start);
        reader.report(offset, error.message().to_owned());
        return Err(ConfigError::Wrong {
            path: path.map(Path::to_path_buf),
            mistakes: reader.into_mistakes(),
        });
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
    let node = node(&root.section("node"));
    let listen = listen::listen(&root.section("listen"));
    let fleet_section = root.section("fleet");
    let limits_section = root.section("limits");
    let limits = limits::limits(&limits_section);
    let max_sessions = limits.node.max_sessions as u64;
    let shared = registry::registry(&root.section("registry"), &fleet_section, max_sessions);
    let fleet = fleet::fleet(&fleet_section, listen.peers);
    let mut policy = SpecPolicy {
        default_runtime: node.runtime,
        ..SpecPolicy::default()
    };
    limits::spec_limits(&limits_section, &mut policy);
    limits_section.finish();
    let auth = auth(&root.section("auth"));
    if auth.tokens_file.is_none() {
        loopback_mistakes(reader, &listen);
    }
    let preempt = preempt(&root.section("preempt"));
    let docker_socket = docker_socket(&root.section("docker"));
    let oci = runtimes::runtimes(&root.section("runtimes"));
    let images = images::images(&root.section("images"));
    let net = net::net(
        &root.section("net"),
        shared.as_ref(),
        limits.proxy_buffer_bytes,
    );
    let log_format = log_format(&root.section("log"));
    let bind_first_id = binds(&root.section("binds"), node.id_range, &mut policy);
    for (name, template) in root.section("templates").sections() {
        policy.templates.insert(name, templates::template(template));
    }
    net::template_mistakes(reader, &net, &policy, auth.tokens_file.is_some());
    policy_mistakes(reader, &policy);
    runtimes::mistakes(reader, &policy, &oci);
    root.finish();
    let default_delay = match shared {
        Some(_) => SHUTDOWN_DELAY,
        None => Duration::ZERO,
    };
    let config = Config {
        name: node.name,
        state_dir: node.state_dir,
        id_range: node.id_range,
        shutdown_delay: node.shutdown_delay.unwrap_or(default_delay),
        runtime: node.runtime,
        listen,
        fleet,
        shared,
        limits,
        tokens_file: auth.tokens_file,
        open_loopback: auth.open_loopback,
        cookie_ttl: auth.cookie_ttl,
        preempt,
        images,
        docker_socket,
        oci,
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

/// `[node]`
struct NodeSection {
    name: String,
    state_dir: PathBuf,
    runtime: RuntimeKind,
    id_range: IdPool,
    shutdown_delay: Option<Duration>,
}

fn node(section: &Section<'_, '_>) -> NodeSection {
    let name = section.parsed("name", |name| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let valid = (1..=253).contains(&name.len()) && name.bytes().all(plain) && name != "self";
        valid.then(|| name.to_owned()).ok_or_else(|| {
            "must be 1 to 253 letters, digits, '-', '_' and '.', and not `self`".to_owned()
        })
    });
    let node = NodeSection {
        name: name.unwrap_or_else(host_name),
        state_dir: section
            .path("state_dir")
            .unwrap_or_else(|| "/var/lib/conman".into()),
        runtime: section
            .parsed("runtime", runtimes::kind)
            .unwrap_or(RuntimeKind::Native),
        id_range: section
            .parsed("id_range", str::parse::<IdPool>)
            .unwrap_or_default(),
        shutdown_delay: section
            .integer("shutdown_delay_s", 0..=600)
            .map(Duration::from_secs),
    };
    section.finish();
    node
}

/// `[auth]`
struct AuthSection {
    tokens_file: Option<PathBuf>,
    open_loopback: bool,
    cookie_ttl: Duration,
}

fn auth(section: &Section<'_, '_>) -> AuthSection {
    let tokens_file = section.string("tokens_file").map(PathBuf::from);
    let cookie_ttl_s = section
        .integer("cookie_ttl_s", 60..=31_536_000)
        .unwrap_or(43_200);
    let open_loopback = section
        .parsed("loopback", |text| match text {
            "token" => Ok(false),
            "open" => Ok(true),
            _ => Err(
                "must be \"token\" (every client of the API needs one) or \"open\" (every user \
                 of this machine is an administrator)"
                    .to_owned(),
            ),
        })
        .unwrap_or(false);
    if open_loopback && tokens_file.is_some() {
        section.mistake(
            "loopback",
            "is \"open\" although `auth.tokens_file` is set: a proxy on this machine would make \
             every client an administrator. Remove one of them",
        );
    }
    section.finish();
    AuthSection {
        tokens_file,
        open_loopback,
        cookie_ttl: Duration::from_secs(cookie_ttl_s),
    }
}

/// Without tokens, only programs on this machine may reach a listener.
fn loopback_mistakes(reader: &Reader<'_>, listen: &Listen) {
    for (field, address) in [
        ("listen.api", listen.api),
        ("listen.sessions", listen.sessions),
    ] {
        if !address.ip().is_loopback() {
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
}

fn docker_socket(section: &Section<'_, '_>) -> PathBuf {
    let socket = section.path("socket");
    section.finish();
    socket.unwrap_or_else(|| "/var/run/docker.sock".into())
}

fn log_format(section: &Section<'_, '_>) -> LogFormat {
    let format = section.get("format", "\"text\" or \"json\"");
    section.finish();
    format.unwrap_or(LogFormat::Text)
}

/// Reads `[binds]`: the directories that specs may bind, into the policy. Returns `first_id`.
fn binds(section: &Section<'_, '_>, sessions: IdPool, policy: &mut SpecPolicy) -> u32 {
    policy.bind_roots = section
        .strings("allow")
        .unwrap_or_default()
        .into_iter()
        .map(PathBuf::from)
        .collect();
    let first_id = bind_first_id(section, sessions);
    if section.has("create") {
        policy.bind_creation = Some(bind_creation(&section.section("create"), first_id));
    }
    section.finish();
    first_id
}

/// Reads `binds.create`: how the directory of a session is made.
fn bind_creation(section: &Section<'_, '_>, first_id: u32) -> BindCreation {
    let mode = section.parsed("mode", |text| {
        let mode = u32::from_str_radix(text, 8)
            .ok()
            .filter(|mode| *mode <= 0o777);
        mode.ok_or_else(|| {
            "must be permission bits as chmod takes them, such as \"0700\"".to_owned()
        })
    });
    let owner = section.integer::<u32>("owner", 0..=u64::from(RANGE_SIZE - 1));
    section.finish();
    BindCreation {
        mode: mode.unwrap_or(0o700),
        owner: owner.unwrap_or(0),
        first_id,
    }
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

fn preempt(section: &Section<'_, '_>) -> Preempt {
    let meanings = "\"preempt\" (SIGTERM means that the machine stops) or \"leave\" (only the \
                    daemon stops)";
    let on_sigterm = section
        .get("on_sigterm", meanings)
        .unwrap_or(OnSigterm::Leave);
    let budget_ms = section
        .integer("budget_ms", 0..=3_600_000)
        .unwrap_or(25_000);
    let notice_sources = NOTICE_SOURCES
        .iter()
        .filter_map(|kind| notice_source(section, *kind))
        .collect();
    section.finish();
    Preempt {
        on_sigterm,
        budget_ms,
        notice_sources,
    }
}

/// The source, if it is known where it is.
fn notice_source(section: &Section<'_, '_>, kind: NoticeSourceKind) -> Option<NoticeSourceOptions> {
    let checked = |field: &str, setting: Vec<String>| match kind.check(&setting) {
        Ok(()) => Some(setting),
        Err(rule) => {
            section.mistake(field, rule);
            None
        }
    };
    let (is_on, setting) = match kind.setting {
        NoticeSetting::Endpoint(default) => {
            let field = format!("{}_endpoint", kind.name);
            let endpoint = section.string(&field);
            let endpoint = checked(&field, vec![endpoint.unwrap_or_else(|| default.to_owned())]);
            (section.boolean(kind.name).unwrap_or(false), endpoint)
        }
        NoticeSetting::Path => (true, checked(kind.name, vec![section.string(kind.name)?])),
        NoticeSetting::Command => (true, checked(kind.name, section.strings(kind.name)?)),
    };
    Some(NoticeSourceOptions {
        kind,
        is_on,
        setting: setting?,
    })
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
