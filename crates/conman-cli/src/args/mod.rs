//! The command line: subcommands, options, and their help.

mod daemon;
pub(crate) mod detach_keys;
mod files;
mod habits;
mod help_groups;
mod image;
mod net;
mod node;
pub(crate) mod quantity;
mod run;
mod session;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

pub use daemon::{
    AuthArgs, AuthCommand, BenchArgs, ConfigArgs, ConfigCommand, DoctorArgs, DoctorRuntime,
    NewTokenArgs, NoticeArgs, NoticeCommand, ServeArgs, ShimArgs, TokenScope,
};
pub use detach_keys::DetachKeys;
pub use files::{CopyEnd, CpArgs, DirectoryAddress, LsArgs, WatchArgs};
pub(crate) use habits::{answer, drop_value_tip};
pub(crate) use help_groups::command;
pub use image::{
    ImageArgs, ImageCommand, ImageImportArgs, ImageInspectArgs, ImageLsArgs, ImagePullArgs,
    ImageRmArgs,
};
pub use net::{NetArgs, NetAttachArgs, NetCommand};
pub use node::{DrainArgs, NodeArgs, NodesArgs, NodesCommand, PreemptArgs, RebalanceArgs};
pub use run::{CpuCount, PortChoice, RunArgs};
pub use session::{
    AttachArgs, ClientCommand, CompletionsArgs, EventsArgs, ExecArgs, ForwardArgs, InspectArgs,
    KillArgs, LogsArgs, ManArgs, PortArgs, PsArgs, RmArgs, SessionArgs, StatsArgs, StatsOrder,
    TokenArgs, UpdateArgs, WhyArgs,
};

/// Admin socket of a daemon with the default configuration.
pub const DEFAULT_SOCKET: &str = "/run/conman/conman.sock";

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  it failed
  2  wrong usage
  3  no such session or image
  4  refused: wrong input, not allowed, in conflict
  5  the daemon cannot be reached or is unavailable at present
  6  a process could not be killed yet: the session is stuck
`conman exec` and `attach` exit with the command's code, with 0 when they detach; with 125 when
conman could not run it or be attached, 126 when the command is not executable, 127 when there is no such command, 128 + N after signal N.";

/// The command line of `conman`.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "conman",
    version,
    about = "Sessions in containers on machines that can vanish at any moment",
    after_help = EXIT_CODES,
    max_term_width = 100
)]
pub struct Cli {
    #[command(flatten)]
    pub globals: Globals,
    /// Print the version, as -V does
    #[arg(short = 'v', hide = true, action = clap::ArgAction::Version)]
    version_too: Option<bool>,
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands of `conman`.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Run the daemon
    Serve(ServeArgs),
    /// Run the parent of native containers, which outlives the daemon; `serve` starts one itself
    Shim(ShimArgs),
    #[command(flatten)]
    Client(ClientCommand),
    /// Make tokens for the API
    Auth(AuthArgs),
    /// Check a configuration file
    Config(ConfigArgs),
    /// Show which limits of this host apply to so many sessions
    Doctor(DoctorArgs),
    /// Look for notices that this machine is about to stop
    Notice(NoticeArgs),
    /// Run benchmarks, with the program `conman-bench`
    #[command(disable_help_flag = true)]
    Bench(BenchArgs),
}

/// Options of every subcommand.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Global options")]
pub struct Globals {
    /// Admin socket of the daemon [env: CONMAN_SOCKET] [default: `listen.admin` of
    /// /etc/conman/conman.toml, else /run/conman/conman.sock]
    #[arg(long, global = true, value_name = "PATH", conflicts_with = "url")]
    pub socket: Option<PathBuf>,
    /// Talk HTTP to this address instead, for example http://127.0.0.1:7700 [env: CONMAN_URL]
    #[arg(long, global = true, value_name = "URL")]
    pub url: Option<String>,
    /// File with a bearer token [env: CONMAN_TOKEN_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Print JSON: one value, or one per line for streams; errors as problem JSON on stderr
    #[arg(long, global = true)]
    pub json: bool,
    /// Print tables in full, also beyond the width of the terminal
    #[arg(long, global = true)]
    pub wide: bool,
    /// Print without colours [env: NO_COLOR]
    #[arg(long, global = true)]
    pub no_color: bool,
}

/// The address of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    Socket(PathBuf),
    Url(String),
}

impl Globals {
    /// The daemon's address: a flag takes precedence over the environment, and `CONMAN_URL` over
    /// `CONMAN_SOCKET`.
    ///
    /// clap's `env` is not used: with it, a `--socket` on the command line would conflict with an
    /// exported `CONMAN_URL`.
    pub fn endpoint(&self, env: impl Fn(&str) -> Option<OsString>) -> Endpoint {
        self.named_endpoint(env)
            .unwrap_or_else(|| Endpoint::Socket(DEFAULT_SOCKET.into()))
    }

    /// Likewise; `None` if neither a flag nor the environment has it.
    pub fn named_endpoint(&self, env: impl Fn(&str) -> Option<OsString>) -> Option<Endpoint> {
        let set = |name| env(name).filter(|value| !value.is_empty());
        let url = |url: OsString| Endpoint::Url(url.to_string_lossy().into_owned());
        if let Some(url) = &self.url {
            Some(Endpoint::Url(url.clone()))
        } else if let Some(path) = &self.socket {
            Some(Endpoint::Socket(path.clone()))
        } else {
            let socket = || set("CONMAN_SOCKET").map(|path| Endpoint::Socket(path.into()));
            set("CONMAN_URL").map(url).or_else(socket)
        }
    }

    /// The file with the bearer token, if one is named.
    pub fn token_file(&self, env: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
        let from_env = || env("CONMAN_TOKEN_FILE").filter(|value| !value.is_empty());
        self.token_file
            .clone()
            .or_else(|| from_env().map(PathBuf::from))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parse(words: &[&str]) -> Cli {
        Cli::try_parse_from(["conman"].iter().chain(words))
            .unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_run_request_holds_only_what_was_given() {
        let Command::Client(ClientCommand::Run(args)) = parse(&["run", "alice"]).command else {
            panic!("not parsed as run");
        };
        assert_eq!(args.request(), conman_proto::SessionRequest::default());
    }

    #[test]
    fn every_option_of_run_reaches_the_request() {
        let words = "run alice --template t --image i --port 80 -e A=b=c --label k=v --node-label pool=gpu --memory 256M --disk 1G \
             --cpus 0.5 --pids 7 --bind /a:/b:ro --network bridge --idle-timeout 10m \
             --max-lifetime 2h --ready-path /up --ready-timeout 30s --preempt-signal SIGTERM \
             --preempt-grace 500ms --bandwidth-in 100mbit --bandwidth-out 20mbit -t --no-wait -- prog -x";
        let words: Vec<_> = words.split_whitespace().collect();
        let Command::Client(ClientCommand::Run(args)) = parse(&words).command else {
            panic!("not parsed as run");
        };
        assert!(args.no_wait);
        let json = serde_json::to_value(args.request()).expect("a request is JSON");
        let expected = serde_json::json!({
            "template": "t", "image": "i", "command": ["prog", "-x"], "args": [],
            "env": {"A": "b=c"}, "port": 80, "ready_path": "/up", "ready_timeout_s": 30,
            "network": "bridge", "memory_bytes": 268_435_456, "disk_bytes": 1_073_741_824, "cpus": 0.5, "pids": 7,
            "labels": {"k": "v"}, "binds": ["/a:/b:ro"], "idle_timeout_s": 600,
            "max_lifetime_s": 7200, "preempt_signal": "SIGTERM", "preempt_grace_ms": 500,
            "tty": true, "node_labels": {"pool": "gpu"}, "bandwidth": {"in": "100mbit", "out": "20mbit"},
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn update_sets_removes_and_needs_something_to_do() {
        let update = |words: &[&str]| match parse(words).command {
            Command::Client(ClientCommand::Update(args)) => {
                let now = "2030-01-31T18:00:00Z".parse().expect("a time");
                serde_json::to_value(args.request(now)).expect("JSON")
            }
            other => panic!("parsed as {other:?}"),
        };
        let words =
            "update alice -l a=b --label-rm c --idle-timeout 5m --ports 80,90-91 --expires 2h";
        let words: Vec<_> = words.split_whitespace().collect();
        let expected = serde_json::json!({
            "labels": {"a": "b", "c": null}, "idle_timeout_s": 300,
            "ports": [80, "90-91"], "expires_at": "2030-01-31T20:00:00Z",
        });
        assert_eq!(update(&words), expected);
        let none = serde_json::json!({ "expires_at": null });
        assert_eq!(update(&["update", "alice", "--expires", "none"]), none);
        let none = serde_json::json!({ "ports": [] });
        assert_eq!(update(&["update", "alice", "--ports", "none"]), none);
        let time = "2030-02-01T00:00:00Z";
        let at = serde_json::json!({ "expires_at": time });
        assert_eq!(update(&["update", "alice", "--expires", time]), at);
        for wrong in [
            &["update", "alice"][..],
            &["update", "alice", "--expires", "x"],
            &["update", "alice", "--ports", "80,x"],
        ] {
            assert!(Cli::try_parse_from(["conman"].iter().chain(wrong)).is_err());
        }
    }

    #[test]
    fn port_none_asks_for_no_port_instead_of_the_templates() {
        let Command::Client(ClientCommand::Run(args)) =
            parse(&["run", "alice", "--port", "none"]).command
        else {
            panic!("not parsed as run");
        };
        assert_eq!(args.request().port, Some(None));
    }

    #[test]
    fn the_options_of_an_executed_command_are_its_own() {
        for words in [
            &["exec", "-it", "alice", "--", "ls", "--json", "-t"][..],
            &["exec", "-it", "alice", "ls", "--json", "-t"][..],
        ] {
            let cli = parse(words);
            let Command::Client(ClientCommand::Exec(args)) = cli.command else {
                panic!("not parsed as exec");
            };
            assert_eq!(args.command, ["ls", "--json", "-t"]);
            assert!(args.interactive && args.tty && !cli.globals.json);
        }
    }

    #[test]
    fn a_terminal_is_attached_to_by_session_or_by_command() {
        let attach = |words: &[&str]| match parse(words).command {
            Command::Client(ClientCommand::Attach(args)) => args,
            other => panic!("parsed as {other:?}"),
        };
        let args = attach(&["attach", "alice"]);
        assert!(args.exec.is_none() && !args.no_scrollback);
        let args = attach(&[
            "attach",
            "--exec",
            "0123456789ab",
            "--no-scrollback",
            "alice",
        ]);
        assert_eq!(
            args.exec.map(|id| id.to_string()).as_deref(),
            Some("0123456789ab")
        );
        for wrong in [
            &["attach", "--exec", "1", "alice"][..],
            &["attach", "-i", "alice"],
            &["attach", "--detach-keys", "ctrl-1", "alice"],
            &["exec", "-t", "--keep", "alice", "sh"],
        ] {
            assert!(
                Cli::try_parse_from(["conman"].iter().chain(wrong)).is_err(),
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn global_options_may_stand_on_either_side_of_the_subcommand() {
        assert!(parse(&["--json", "ps"]).globals.json);
        assert!(parse(&["ps", "--json"]).globals.json);
    }

    #[test]
    fn a_flag_beats_the_environment_and_the_default_comes_last() {
        let env = |name: &str| (name == "CONMAN_URL").then(|| OsString::from("http://from.env"));
        let none = |_: &str| None;
        assert_eq!(
            parse(&["--socket", "/s", "ps"]).globals.endpoint(env),
            Endpoint::Socket("/s".into())
        );
        assert_eq!(
            parse(&["ps"]).globals.endpoint(env),
            Endpoint::Url("http://from.env".to_owned())
        );
        assert_eq!(
            parse(&["ps"]).globals.endpoint(none),
            Endpoint::Socket(DEFAULT_SOCKET.into())
        );
        let socket = |name: &str| (name == "CONMAN_SOCKET").then(|| OsString::from("/e"));
        assert_eq!(
            parse(&["ps"]).globals.named_endpoint(socket),
            Some(Endpoint::Socket("/e".into()))
        );
        let empty = |_: &str| Some(OsString::new());
        for nothing in [none, empty] {
            assert_eq!(parse(&["ps"]).globals.named_endpoint(nothing), None);
        }
    }

    #[test]
    fn an_archive_may_come_by_standard_input() {
        let Command::Client(ClientCommand::Image(args)) =
            parse(&["image", "import", "-", "busybox:1"]).command
        else {
            panic!("not parsed as image");
        };
        let ImageCommand::Import(args) = args.command else {
            panic!("not parsed as import");
        };
        assert_eq!((args.file, &*args.name), (PathBuf::from("-"), "busybox:1"));
    }

    #[test]
    fn rm_takes_names_or_all_but_not_both_and_not_nothing() {
        for words in [&["rm"][..], &["rm", "--all", "alice"][..]] {
            assert!(
                Cli::try_parse_from(["conman"].iter().chain(words)).is_err(),
                "{words:?}"
            );
        }
        parse(&["rm", "--all", "--yes"]);
        parse(&["rm", "alice", "bob"]);
    }
}
