//! How an image is to be run, and the bounds on that.

use std::collections::BTreeMap;

use oci_spec::image::ImageConfiguration;
use serde::{Deserialize, Serialize};

/// Maximum number of items of the command line, of the environment, and of the exposed ports; as many as a
/// session's spec may have.
const MAX_ITEMS: usize = 256;
/// Maximum bytes of the command line, of the environment, and of the exposed ports, with a NUL each.
const MAX_BYTES: usize = 64 << 10;
/// Maximum bytes of a path or name.
const MAX_NAME_BYTES: usize = 4_096;

/// How an image is to be run, as data; all of it may be overridden.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// The program, followed by `cmd`.
    pub entrypoint: Vec<String>,
    /// Arguments to the entrypoint, or the program if there is none.
    pub cmd: Vec<String>,
    /// `NAME=VALUE` each.
    pub env: Vec<String>,
    /// `name[:group]` or `uid[:gid]`; root if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// An absolute path; `/` if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_signal: Option<String>,
    /// As written by the image: `8080/tcp`.
    pub exposed_ports: Vec<String>,
    pub labels: BTreeMap<String, String>,
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("the image's {field} contains a NUL byte")]
    NulByte { field: &'static str },
    #[error("the image's working directory {0:?} is not an absolute path")]
    Workdir(String),
    #[error(
        "the image's {field} has {items} items of {bytes} bytes; at most {MAX_ITEMS} items of \
         {MAX_BYTES} bytes in all are allowed"
    )]
    TooLarge {
        field: &'static str,
        items: usize,
        bytes: usize,
    },
    #[error("the image's {field} has {bytes} bytes; at most {MAX_NAME_BYTES} are allowed")]
    NameTooLong { field: &'static str, bytes: usize },
    #[error("the image is for {os}, and this machine runs linux")]
    OperatingSystem { os: String },
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the image names no program (neither entrypoint nor cmd): give a command")]
pub struct NoCommand;

impl ImageConfig {
    /// Converts a parsed configuration, if it is valid.
    pub(crate) fn from_oci(parsed: &ImageConfiguration) -> Result<Self, ConfigError> {
        let os = parsed.os().to_string();
        if os != "linux" {
            return Err(ConfigError::OperatingSystem { os });
        }
        let Some(config) = parsed.config() else {
            return Ok(Self::default());
        };
        let text = |value: &Option<String>| value.clone().filter(|text| !text.is_empty());
        let mut exposed_ports = config.exposed_ports().clone().unwrap_or_default();
        exposed_ports.sort();
        let this = Self {
            entrypoint: config.entrypoint().clone().unwrap_or_default(),
            cmd: config.cmd().clone().unwrap_or_default(),
            env: variables(config.env().as_deref().unwrap_or_default()),
            user: text(config.user()),
            workdir: text(config.working_dir()),
            stop_signal: text(config.stop_signal()),
            exposed_ports,
            labels: config
                .labels()
                .clone()
                .unwrap_or_default()
                .into_iter()
                .collect(),
        };
        this.check()?;
        Ok(this)
    }

    /// Every session of the image gets all of this: sizes are bounded as in a session's spec.
    fn check_sizes(&self) -> Result<(), ConfigError> {
        let command: [&[String]; 2] = [&self.entrypoint, &self.cmd];
        let groups: [(_, &[&[String]]); 3] = [
            ("command line (entrypoint and cmd)", &command),
            ("environment", &[&self.env]),
            ("list of exposed ports", &[&self.exposed_ports]),
        ];
        for (field, lists) in groups {
            let items = lists.iter().map(|list| list.len()).sum();
            let bytes = lists.concat().iter().map(|item| item.len() + 1).sum();
            if items > MAX_ITEMS || bytes > MAX_BYTES {
                return Err(ConfigError::TooLarge {
                    field,
                    items,
                    bytes,
                });
            }
        }
        for (field, value) in [
            ("user", &self.user),
            ("working directory", &self.workdir),
            ("stop signal", &self.stop_signal),
        ] {
            let bytes = value.as_ref().map_or(0, String::len);
            if bytes > MAX_NAME_BYTES {
                return Err(ConfigError::NameTooLong { field, bytes });
            }
        }
        Ok(())
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.check_sizes()?;
        let lists = [
            ("entrypoint", &self.entrypoint),
            ("cmd", &self.cmd),
            ("environment", &self.env),
        ];
        for (field, list) in lists {
            if list.iter().any(|item| item.contains('\0')) {
                return Err(ConfigError::NulByte { field });
            }
        }
        for (field, value) in [("user", &self.user), ("working directory", &self.workdir)] {
            if value.as_ref().is_some_and(|text| text.contains('\0')) {
                return Err(ConfigError::NulByte { field });
            }
        }
        if let Some(workdir) = self.workdir.as_ref().filter(|path| !path.starts_with('/')) {
            return Err(ConfigError::Workdir(workdir.chars().take(100).collect()));
        }
        Ok(())
    }

    /// The command line: `command` replaces the entrypoint and the image's arguments, `args` only the
    /// arguments; empty means not given.
    pub fn argv(&self, command: &[String], args: &[String]) -> Result<Vec<String>, NoCommand> {
        let program = match command {
            [] => &self.entrypoint[..],
            given => given,
        };
        let arguments = match (command, args) {
            ([], []) => &self.cmd[..],
            (_, given) => given,
        };
        let argv: Vec<String> = program.iter().chain(arguments).cloned().collect();
        if argv.is_empty() {
            return Err(NoCommand);
        }
        Ok(argv)
    }
}

/// The items that are `NAME=VALUE`. Builders write others by mistake, and no program could see them.
fn variables(env: &[String]) -> Vec<String> {
    let is_variable = |item: &&String| item.find('=').is_some_and(|at| at > 0);
    let variables: Vec<String> = env.iter().filter(is_variable).cloned().collect();
    if variables.len() < env.len() {
        let skipped = env.len() - variables.len();
        tracing::warn!(
            skipped,
            "items of an image's environment are not NAME=VALUE"
        );
    }
    variables
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(config: &str) -> Result<ImageConfig, ConfigError> {
        let json = format!(
            r#"{{"architecture":"amd64","os":"linux","config":{config},
                "rootfs":{{"type":"layers","diff_ids":[]}}}}"#
        );
        let parsed: ImageConfiguration = serde_json::from_str(&json).expect("OCI's form");
        ImageConfig::from_oci(&parsed)
    }

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn a_given_command_drops_the_images_arguments_and_given_args_replace_them() {
        let config = parse(r#"{"Entrypoint":["serve"],"Cmd":["--all"]}"#).expect("plain");
        for (command, args, argv) in [
            ("", "", "serve --all"),
            ("", "--one", "serve --one"),
            ("sh", "", "sh"),
            ("sh", "-c x", "sh -c x"),
        ] {
            assert_eq!(
                config
                    .argv(&words(command), &words(args))
                    .expect("a program"),
                words(argv)
            );
        }
        assert_eq!(ImageConfig::default().argv(&[], &[]), Err(NoCommand));
    }

    #[test]
    fn absent_null_and_empty_fields_mean_the_same() {
        let empty = parse("{}").expect("empty");
        assert_eq!(empty, ImageConfig::default());
        let nulls = r#"{"Entrypoint":null,"Cmd":null,"Env":null,"User":"","WorkingDir":"","Labels":null,"Volumes":null,"OnBuild":null}"#;
        assert_eq!(parse(nulls).expect("nulls"), empty);
    }

    #[test]
    fn a_command_line_or_environment_beyond_a_specs_bounds_is_refused() {
        let items = |count: usize, item: &str| vec![format!("\"{item}\""); count].join(",");
        for (fields, field) in [
            (
                format!(r#""Env":["A={}"]"#, "x".repeat(1_500_000)),
                "environment",
            ),
            (format!(r#""Env":[{}]"#, items(257, "A=b")), "environment"),
            (
                format!(r#""Entrypoint":["a"],"Cmd":[{}]"#, items(100_000, "x")),
                "command line (entrypoint and cmd)",
            ),
        ] {
            let refused = parse(&format!("{{{fields}}}"));
            let Err(ConfigError::TooLarge { field: found, .. }) = refused else {
                panic!("{field}: {refused:?}");
            };
            assert_eq!(found, field);
        }
        let most = format!(r#"{{"Env":[{}],"Cmd":[{0}]}}"#, items(256, "A=b"));
        assert!(parse(&most).is_ok());
        let user = format!(r#"{{"User":"{}"}}"#, "u".repeat(4_097));
        assert!(matches!(
            parse(&user),
            Err(ConfigError::NameTooLong { field: "user", .. })
        ));
    }

    #[test]
    fn what_is_no_variable_is_left_out() {
        let config = parse(r#"{"Env":["A","B=","=x","","C=D=E"]}"#).expect("usable");
        assert_eq!(config.env, words("B= C=D=E"));
    }

    #[test]
    fn what_execve_could_not_take_is_refused() {
        assert!(matches!(
            parse(r#"{"Cmd":["a\u0000b"]}"#),
            Err(ConfigError::NulByte { field: "cmd" })
        ));
        assert!(matches!(
            parse(r#"{"WorkingDir":"a"}"#),
            Err(ConfigError::Workdir(_))
        ));
    }
}
