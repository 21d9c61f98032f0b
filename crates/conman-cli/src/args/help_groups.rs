//! The list of subcommands in `conman --help`, in groups.

use std::fmt::Write as _;

use clap::{Command, CommandFactory as _};

use super::Cli;

/// Commands that are in none are listed last.
const GROUPS: [(&str, &[&str]); 5] = [
    (
        "Sessions",
        &[
            "run", "ps", "inspect", "update", "restart", "pause", "resume", "kill", "rm",
        ],
    ),
    (
        "Inside a session",
        &[
            "exec", "execs", "attach", "cp", "ls", "watch", "port", "net", "forward", "token",
        ],
    ),
    (
        "What happened",
        &["logs", "why", "events", "stats", "processes", "top"],
    ),
    (
        "Images and nodes",
        &[
            "image",
            "nodes",
            "drain",
            "undrain",
            "rebalance",
            "cordon",
            "uncordon",
            "preempt",
            "readmit",
        ],
    ),
    (
        "The node itself",
        &[
            "serve", "shim", "config", "doctor", "notice", "auth", "bench",
        ],
    ),
];

const OTHERS: &str = "Other commands";

/// The command line, with its subcommands in groups.
pub(crate) fn command() -> Command {
    let mut command = Cli::command();
    // What clap adds to it belongs to the list.
    command.build();
    let shown = |command: &&Command| !command.is_hide_set();
    let named = |name: &&str| command.find_subcommand(name).filter(shown);
    let is_grouped = |one: &&Command| {
        let mut groups = GROUPS.iter();
        groups.any(|(_, names)| names.contains(&one.get_name()))
    };
    let listed = command.get_subcommands().filter(shown);
    let others: Vec<&Command> = listed.filter(|one| !is_grouped(one)).collect();
    let mut text = String::new();
    let groups = GROUPS.map(|(title, names)| (title, names.iter().filter_map(named).collect()));
    for (title, commands) in groups.into_iter().chain([(OTHERS, others)]) {
        let commands: Vec<&Command> = commands;
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{title}:");
        for one in commands {
            let about = one.get_about().map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(text, "  {:<12} {about}", one.get_name());
        }
        text.push('\n');
    }
    Cli::command().help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{text}{{options}}{{after-help}}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_listed_once_under_its_group() {
        let help = command().render_help().to_string();
        for one in Cli::command().get_subcommands() {
            let begins = format!("\n  {:<12} ", one.get_name());
            let count = help.matches(&begins).count();
            assert_eq!(count, usize::from(!one.is_hide_set()), "{}", one.get_name());
        }
        let at = |part: &str| help.find(part).unwrap_or_else(|| panic!("{part}: {help}"));
        let sessions = at("\nSessions:\n")..at("\nInside a session:\n");
        assert!(sessions.contains(&at("\n  run ")), "{help}");
        assert!(at("\n  completions ") > at(OTHERS), "{help}");
        assert!(at("--socket") > at(OTHERS), "{help}");
    }
}
