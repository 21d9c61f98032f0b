//! Configures a conman for a test.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::conman::Conman;
use crate::docker::{BUSYBOX, Docker, PYTHON};
use crate::id_range::IdRange;
use crate::native::{NATIVE_TEMPLATES, Native, ROOT};
use crate::port::Port;

/// What a [`Conman`] is to be like. Without a word it has Docker, `auth.loopback = "open"`, and the templates
/// - `tiny`: busybox that sleeps, without a port,
/// - `python`: `http.server` on port 8080, started by a connection.
///
/// With the native runtime, see [`NATIVE_TEMPLATES`].
#[derive(Debug)]
#[must_use]
pub struct Builder {
    sections: Vec<(String, String)>,
    toml: String,
    tokens: Vec<(String, String)>,
    runtime: Runtime,
    state_disk: Option<&'static str>,
}

/// What the daemon runs sessions on unless a template says otherwise, and what else it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Runtime {
    Docker,
    Native,
    /// Native, and Docker for the templates that name it.
    Both,
}

impl Builder {
    pub(crate) fn new() -> Self {
        Self {
            sections: Vec::new(),
            toml: String::new(),
            tokens: Vec::new(),
            runtime: Runtime::Docker,
            state_disk: None,
        }
    }

    /// Adds a line to one of the tables `node`, `listen`, `limits`, `auth`, `preempt`, `docker`,
    /// `binds`, which the harness writes itself.
    pub fn set(mut self, table: &str, line: &str) -> Self {
        self.sections.push((table.to_owned(), line.to_owned()));
        self
    }

    /// Adds whole tables, for example templates.
    pub fn toml(mut self, text: &str) -> Self {
        self.toml.push_str(text);
        self.toml.push('\n');
        self
    }

    /// Puts the daemon's state on a tmpfs with these options.
    pub fn state_on_tmpfs(mut self, options: &'static str) -> Self {
        self.state_disk = Some(options);
        self
    }

    /// Makes a bearer token of this scope; [`Conman::token`] tells it by its name. Once there is
    /// one, nobody is admitted without.
    pub fn token(mut self, name: &str, scope: &str) -> Self {
        self.tokens.push((name.to_owned(), scope.to_owned()));
        self
    }

    /// Starts the daemon and waits until it is ready.
    ///
    /// # Panics
    /// When it does not become ready; its log says why.
    pub async fn start(self, docker: &Docker) -> Conman {
        let mut conman = self.prepare(docker);
        conman.launch().await;
        conman
    }

    /// The same on the native runtime, with the image [`ROOT`] in the store.
    ///
    /// # Panics
    /// When it does not become ready, or the image cannot be imported.
    pub async fn start_native(mut self, native: &Native) -> Conman {
        self.runtime = Runtime::Native;
        self.launch_native(native).await
    }

    /// The same with Docker beside it: `tiny` and `python` are Docker's then, too.
    ///
    /// # Panics
    /// As [`Self::start_native`].
    pub async fn start_both(mut self, native: &Native, _docker: &Docker) -> Conman {
        self.runtime = Runtime::Both;
        self.launch_native(native).await
    }

    async fn launch_native(self, native: &Native) -> Conman {
        let mut conman = self.build();
        conman.launch().await;
        let archive = native.archive(conman.directory());
        let archive = archive.to_string_lossy();
        let imported = conman.cli(&["image", "import", &*archive, ROOT]).await;
        imported.success();
        conman
    }

    /// Everything but the start.
    pub fn prepare(self, _docker: &Docker) -> Conman {
        self.build()
    }

    /// The same for the native runtime.
    pub fn prepare_native(mut self, _native: &Native) -> Conman {
        self.runtime = Runtime::Native;
        self.build()
    }

    fn build(self) -> Conman {
        let directory = tempfile::Builder::new()
            .prefix("conman-e2e-")
            .tempdir()
            .expect("a temporary directory can be made");
        let ports = [Port::claim(), Port::claim()];
        let tokens = self
            .tokens
            .iter()
            .map(|(name, scope)| make_token(name, scope))
            .collect::<Vec<_>>();
        if !tokens.is_empty() {
            let entries: Vec<&str> = tokens.iter().map(|token| token.entry.as_str()).collect();
            write_private(&directory.path().join("tokens.toml"), &entries.join("\n"));
        }
        let ids = IdRange::claim();
        let config = self.config(directory.path(), &ports, &ids);
        fs::write(directory.path().join("conman.toml"), config).expect("the config is written");
        let tokens = tokens
            .into_iter()
            .map(|token| (token.name, token.text))
            .collect();
        let uses_docker = self.runtime != Runtime::Native;
        let mut conman = Conman::new(directory, (ports, ids), tokens, uses_docker);
        if let Some(options) = self.state_disk {
            conman.mount_state(options);
        }
        conman
    }

    fn config(&self, directory: &Path, ports: &[Port; 2], ids: &IdRange) -> String {
        let directory = directory.display();
        let mut text = String::new();
        for table in [
            "node", "listen", "limits", "auth", "preempt", "docker", "binds",
        ] {
            let _ = writeln!(text, "[{table}]");
            let own = self.sections.iter().filter(|(of, _)| of == table);
            let lines: Vec<&str> = own.map(|(_, line)| line.as_str()).collect();
            let mut default = |key: &str, value: String| {
                let given = lines
                    .iter()
                    .any(|line| line.split('=').next().is_some_and(|own| own.trim() == key));
                if !given {
                    let _ = writeln!(text, "{key} = {value}");
                }
            };
            match table {
                "node" => {
                    default("state_dir", format!("\"{directory}/state\""));
                    let runtime = match self.runtime {
                        Runtime::Docker => "\"docker\"",
                        Runtime::Native | Runtime::Both => "\"native\"",
                    };
                    default("runtime", runtime.to_owned());
                    default("id_range", ids.value());
                }
                "listen" => {
                    default("api", format!("\"127.0.0.1:{}\"", ports[0].number));
                    default("sessions", format!("\"127.0.0.1:{}\"", ports[1].number));
                    default("admin", format!("\"{directory}/conman.sock\""));
                }
                "auth" if !self.tokens.is_empty() => {
                    default("tokens_file", format!("\"{directory}/tokens.toml\""));
                }
                "auth" => default("loopback", "\"open\"".to_owned()),
                _ => {}
            }
            for line in lines {
                let _ = writeln!(text, "{line}");
            }
        }
        if self.runtime != Runtime::Docker {
            text.push_str(NATIVE_TEMPLATES);
        }
        if self.runtime != Runtime::Native {
            let _ = write!(
                text,
                "[templates.tiny]\nimage = \"{BUSYBOX}\"\nruntime = \"docker\"\n\
                 command = [\"sleep\", \"1000000\"]\n\
                 [templates.python]\nimage = \"{PYTHON}\"\nruntime = \"docker\"\n\
                 command = [\"python3\", \"-m\", \"http.server\", \"8080\"]\nport = 8080\n\
                 start_on_connect = true\n",
            );
        }
        text.push_str(&self.toml);
        text
    }
}

struct Token {
    name: String,
    text: String,
    entry: String,
}

fn make_token(name: &str, scope: &str) -> Token {
    let output = Command::new(crate::binary())
        .args([
            "auth",
            "new-token",
            "--json",
            "--name",
            name,
            "--scope",
            scope,
        ])
        .output()
        .expect("conman can be run");
    assert!(output.status.success(), "no token was made: {output:?}");
    let made: Value = serde_json::from_slice(&output.stdout).expect("a token is told as JSON");
    let field = |field: &str| made[field].as_str().expect("it is a text").to_owned();
    Token {
        name: name.to_owned(),
        text: field("token"),
        entry: field("entry"),
    }
}

fn write_private(path: &Path, text: &str) {
    fs::write(path, text).expect("the file is written");
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("its mode can be set");
}
