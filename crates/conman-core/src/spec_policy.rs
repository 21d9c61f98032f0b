//! What a node allows in specs, and its defaults.

use std::collections::BTreeMap;
use std::path::PathBuf;

use conman_proto::{FieldError, RuntimeKind, SessionRequest};

use crate::bind::is_plain;
use crate::resolve::resolve_template;

/// Maximum of a template's containers made ahead: as many starts as come before the next ones are made.
pub(crate) const MAX_POOL: u32 = 64;
/// Minimum memory limit in bytes: Docker refuses a lower one.
pub const MIN_MEMORY_BYTES: u64 = 6 << 20;
/// Minimum limit of disk space in bytes: four logs of the native runtime, which count towards it.
pub const MIN_DISK_BYTES: u64 = 64 << 20;
/// Minimum limit of inodes.
pub const MIN_DISK_INODES: u64 = 1_024;
/// Disk space per inode if only the space is limited: ext4's default ratio.
pub(crate) const DISK_BYTES_PER_INODE: u64 = 16 << 10;
/// Maximum limits of disk space and inodes: the range of quotas.
pub const HIGHEST_MAX_DISK: u64 = i64::MAX as u64;
/// Minimum CPU limit in cores: the kernel's minimum quota, 1 ms in each period of 100 ms.
pub const MIN_CPUS: f64 = 0.01;
/// Maximum CPU limit that a node may allow.
pub const HIGHEST_MAX_CPUS: f64 = 4_096.0;
/// Maximum number of processes that a node may allow (the kernel's `PID_MAX_LIMIT`).
pub const HIGHEST_MAX_PIDS: u32 = 4_194_304;

/// A named base for specs, from the node's configuration.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Template {
    /// Default values for requests that name the template; its `template` field stays empty.
    pub request: SessionRequest,
    /// The node's default if absent.
    pub runtime: Option<RuntimeKind>,
    /// Whether a connection to a session that does not run may start it.
    pub start_on_connect: bool,
    /// Whether a connection, command or attached client resumes a session that an order has paused.
    pub resume_on_connect: bool,
    /// Whether programs of its native sessions may install system call filters. No request may choose it: the
    /// filters of one session can take all memory that the kernel has for them.
    pub own_filters: bool,
    /// Whether native sessions see their own limits at /sys/fs/cgroup; `None` for yes.
    pub sys: Option<bool>,
    /// Whether `fsync` on a native session's root waits for the disk. No request may choose it: what one
    /// session writes back delays the others.
    pub durable: Option<bool>,
    /// `false`: programs of native sessions may gain privileges in the session through setuid programs. No
    /// request may choose it.
    pub no_new_privs: Option<bool>,
    /// `false`: native sessions have neither System V IPC nor POSIX message queues, and each is a superblock less.
    pub ipc: Option<bool>,
    /// Containers of native sessions that are made ahead; `None` for none. Each costs the memory of an idle session.
    pub pool: Option<u32>,
}

/// The directories that a node makes for binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BindCreation {
    /// Permission bits.
    pub mode: u32,
    /// User and group in the session.
    pub owner: u32,
    /// Host id of user 0 in files of native sessions' binds.
    pub first_id: u32,
}

impl BindCreation {
    /// The directory's user and group on the host.
    #[must_use]
    pub fn host_owner(&self, runtime: RuntimeKind) -> u32 {
        match runtime {
            RuntimeKind::Native | RuntimeKind::Gvisor | RuntimeKind::Oci(_) => {
                self.first_id + self.owner
            }
            RuntimeKind::Docker | RuntimeKind::Process => self.owner,
        }
    }
}

/// The defaults and limits of a node for specs.
#[derive(Debug, Clone, PartialEq)]
pub struct SpecPolicy {
    pub default_runtime: RuntimeKind,
    pub templates: BTreeMap<String, Template>,
    /// Host directories that binds may be or lie below; empty to allow no binds.
    pub bind_roots: Vec<PathBuf>,
    /// How a bind's missing source that is named like its session is made; it must exist if absent.
    pub bind_creation: Option<BindCreation>,
    /// Memory limit of a spec without one; `max_memory_bytes` if absent.
    pub default_memory_bytes: Option<u64>,
    /// Maximum memory limit; specs may have none only if this is absent.
    pub max_memory_bytes: Option<u64>,
    /// Limit of disk space of a spec without one; `max_disk_bytes` if absent. Only for sessions of
    /// the native runtime, like the next one.
    pub default_disk_bytes: Option<u64>,
    /// Maximum limit of disk space; specs may have none only if this is absent.
    pub max_disk_bytes: Option<u64>,
    /// CPU limit of a spec without one; `max_cpus` if absent.
    pub default_cpus: Option<f64>,
    /// Maximum CPU limit; specs may have none only if this is absent.
    pub max_cpus: Option<f64>,
    /// Limited to `max_pids`.
    pub default_pids: u32,
    pub max_pids: u32,
    pub default_ready_timeout_s: u32,
    /// 0 for never.
    pub default_idle_timeout_s: u32,
    /// 0 for never.
    pub default_max_lifetime_s: u32,
}

impl Default for SpecPolicy {
    fn default() -> Self {
        Self {
            default_runtime: RuntimeKind::Docker,
            templates: BTreeMap::new(),
            bind_roots: Vec::new(),
            bind_creation: None,
            default_memory_bytes: None,
            max_memory_bytes: None,
            default_disk_bytes: Some(10 << 30),
            max_disk_bytes: None,
            default_cpus: None,
            max_cpus: None,
            default_pids: 256,
            max_pids: 32_768,
            default_ready_timeout_s: 60,
            default_idle_timeout_s: 0,
            default_max_lifetime_s: 0,
        }
    }
}

impl SpecPolicy {
    /// Every mistake of the policy, including its templates, so that a wrong configuration is
    /// refused at start and not by the first session. Fields are named as here, those of templates
    /// `templates.<name>.<field>`.
    #[must_use]
    pub fn mistakes(&self) -> Vec<FieldError> {
        let mut mistakes = Vec::new();
        let mut add = |field: &str, message: String| {
            mistakes.push(FieldError {
                field: field.to_owned(),
                message,
            });
        };
        for (index, root) in self.bind_roots.iter().enumerate() {
            let plain = root
                .to_str()
                .map(|text| text.strip_suffix('/').unwrap_or(text));
            if !plain.is_some_and(is_plain) {
                add(
                    &format!("bind_roots[{index}]"),
                    "must be an absolute path other than `/`, without `.`, `..` or `//`".to_owned(),
                );
            }
        }
        if let Some(max) = self.max_memory_bytes.filter(|max| *max < MIN_MEMORY_BYTES) {
            add(
                "max_memory_bytes",
                format!("is {max}; must be at least {MIN_MEMORY_BYTES}"),
            );
        }
        if let Some(max) = self.max_disk_bytes.filter(|max| *max < MIN_DISK_BYTES) {
            add(
                "max_disk_bytes",
                format!("is {max}; must be at least {MIN_DISK_BYTES}"),
            );
        }
        if let Some(max) = self
            .max_cpus
            .filter(|max| !(MIN_CPUS..=HIGHEST_MAX_CPUS).contains(max))
        {
            add(
                "max_cpus",
                format!("is {max}; must be {MIN_CPUS} to {HIGHEST_MAX_CPUS}"),
            );
        }
        if !(1..=HIGHEST_MAX_PIDS).contains(&self.max_pids) {
            add(
                "max_pids",
                format!("is {}; must be 1 to {HIGHEST_MAX_PIDS}", self.max_pids),
            );
        }
        if !mistakes.is_empty() {
            // Do not check templates against wrong limits.
            return mistakes;
        }
        self.default_mistakes(&mut mistakes);
        // A wrong default is one mistake, not one for each template that uses it.
        let plain = Self {
            default_memory_bytes: None,
            default_disk_bytes: None,
            default_cpus: None,
            default_ready_timeout_s: Self::default().default_ready_timeout_s,
            ..self.clone()
        };
        for (name, template) in &self.templates {
            mistakes.extend(resolve_template(&plain, name, template));
        }
        mistakes
    }

    /// The defaults must be valid in a request.
    fn default_mistakes(&self, mistakes: &mut Vec<FieldError>) {
        let defaults = SessionRequest {
            memory_bytes: self.default_memory_bytes,
            disk_bytes: self.default_disk_bytes,
            cpus: self.default_cpus,
            ready_timeout_s: Some(self.default_ready_timeout_s),
            ..SessionRequest::default()
        };
        let template = Template {
            request: defaults,
            // Only it has disk limits.
            runtime: Some(RuntimeKind::Native),
            ..Template::default()
        };
        mistakes.extend(
            resolve_template(self, "", &template)
                .into_iter()
                .map(|mistake| {
                    let field = mistake.field.rsplit('.').next().unwrap_or_default();
                    FieldError {
                        field: format!("default_{field}"),
                        message: mistake.message,
                    }
                }),
        );
    }
}
