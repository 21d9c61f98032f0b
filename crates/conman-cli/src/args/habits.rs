//! Answers to what users of other tools type: the line that does it here.

use clap::error::{ContextKind, ContextValue, Error, ErrorKind};

use crate::failure::Failure;

/// Commands of other tools.
const COMMANDS: &[(&[&str], &str)] = &[
    (
        &["login", "logout"],
        "a registry's login is in the node's configuration: `user` and `password_file` in \
         [images.logins.\"REGISTRY\"]",
    ),
    (
        &["build", "buildx"],
        "conman builds no images: docker build -t app:1 . && docker save app:1 | conman image \
         import - app:1",
    ),
    (
        &["push", "tag", "save", "load", "commit"],
        "conman keeps images for its sessions only: `conman image import FILE NAME:TAG` and \
         `conman image pull IMAGE --name NAME:TAG` bring them",
    ),
    (
        &["create"],
        "`conman run NAME --template TEMPLATE` starts a session; there is none that never ran",
    ),
    (
        &["wait"],
        "`conman logs -f NAME` returns when the session ends; `conman run --rm` exits with its \
         program's code",
    ),
    (
        &["rename"],
        "a session keeps its name: `conman rm NAME`, then `conman run OTHER`",
    ),
    (
        &["diff", "export"],
        "`conman cp NAME:/ - > files.tar` writes a session's files",
    ),
    (
        &["volume", "volumes"],
        "directories of the node are bound with `conman run --bind SOURCE:TARGET`, below `binds.allow` \
         of its configuration",
    ),
    (
        &["network", "networks"],
        "a session's network is `network` and `egress` of its template; `conman net` attaches \
         interfaces to a running one",
    ),
    (
        &["system", "prune", "df"],
        "`conman image gc` removes images that nothing uses, `conman stats` shows what sessions use",
    ),
    (
        &["get", "list"],
        "`conman ps` lists sessions, `conman nodes` nodes, `conman image ls` images",
    ),
    (
        &["describe", "show", "status"],
        "`conman why NAME` explains a session, `conman inspect NAME` shows all of it",
    ),
    (
        &["apply", "compose", "deploy", "job"],
        "what sessions have in common is a template in the node's configuration; `conman run NAME \
         --template TEMPLATE` starts one",
    ),
    (&["delete", "destroy"], "`conman rm NAME` ends a session"),
    (
        &["ssh", "shell", "sh"],
        "`conman exec -it NAME -- sh` opens a shell in a session",
    ),
    (
        &["port-forward", "proxy"],
        "`conman forward NAME 8080:80` leads port 8080 of this machine to port 80 of a session",
    ),
    (
        &["daemon", "agent", "server"],
        "`conman serve` runs the daemon",
    ),
];

/// Options of other tools, by conman's command.
const OPTIONS: &[(&str, &[&str], &str)] = &[
    (
        "run",
        &["-p", "-P", "--publish", "--publish-all", "--expose"],
        "no port is published: `--port 80`, or `--ports 80,443`, makes it reachable at \
         http://80-NAME.localhost:7701/, and `conman forward NAME 8080:80` at this machine's port 8080",
    ),
    (
        "run",
        &["-w", "--workdir"],
        "write `-- sh -c 'cd DIR && exec PROGRAM'`",
    ),
    (
        "run",
        &["-u", "--user"],
        "a session's program runs as its image's USER; `conman exec --user USER NAME -- COMMAND` runs \
         a command as another one",
    ),
    (
        "run",
        &["-h", "--hostname"],
        "a session's host name is its name: conman run HOSTNAME",
    ),
    (
        "run",
        &["--entrypoint"],
        "write the whole command: conman run NAME --image IMAGE -- PROGRAM ARGUMENTS",
    ),
    (
        "run",
        &["--restart"],
        "`--on-node-loss restart` starts it elsewhere when its node is lost; `start_on_connect` in a \
         template lets a connection start it",
    ),
    (
        "run",
        &["--pull"],
        "a start never fetches an image: conman image pull IMAGE",
    ),
    (
        "run",
        &[
            "--gpus",
            "--device",
            "--privileged",
            "--cap-add",
            "--security-opt",
        ],
        "sessions get no devices and no further privileges; deploy/security.md says what they have",
    ),
    (
        "run",
        &["--net"],
        "write --network loopback, routed, host or another network of the template",
    ),
    (
        "rm",
        &["-t", "--time", "--timeout", "--signal"],
        "`conman kill --signal TERM NAME` lets its program end, `conman rm NAME` kills it at once",
    ),
    (
        "rm",
        &["-v", "--volumes", "--link"],
        "`conman rm --forget NAME` removes all that is left",
    ),
    (
        "inspect",
        &["-f", "--format"],
        "the output is JSON: conman inspect NAME | jq -r .state",
    ),
    (
        "ps",
        &["-f", "--filter", "--format", "-n", "--last"],
        "filters are --label, --state and --node; fields are chosen by `conman ps --json | jq -r \
         .sessions[].url`",
    ),
    (
        "logs",
        &["--until", "--details"],
        "`--since`, `--tail` and `--timestamps` choose lines",
    ),
    (
        "image",
        &["-a", "--all", "--filter", "--format"],
        "conman image ls --json | jq",
    ),
];

/// Removes clap's advice to pass an unknown option as a value, which is never what was meant.
pub(crate) fn drop_value_tip(error: &mut Error) {
    let Some(ContextValue::StyledStrs(mut tips)) = error.remove(ContextKind::Suggested) else {
        return;
    };
    tips.retain(|tip| !tip.to_string().contains("as a value"));
    if !tips.is_empty() {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    }
}

/// The answer to a command line that conman does not understand, if it is somebody's habit.
pub(crate) fn answer(words: &[String], error: &Error) -> Option<Failure> {
    let unknown = match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let name = text(error, ContextKind::InvalidSubcommand)?;
            let known = COMMANDS.iter().find(|(names, _)| names.contains(&name))?;
            return Some(usage(format!("there is no command `{name}`"), known.1));
        }
        ErrorKind::UnknownArgument => text(error, ContextKind::InvalidArg)?,
        _ => return None,
    };
    let command = canonical(words.iter().find(|word| is_command(word))?);
    let option = unknown.split(['=', ' ']).next().unwrap_or(unknown);
    if command == "run" && !option.starts_with('-') {
        let name = words.iter().rev().find(|word| word.as_str() == option)?;
        let is_image = |word: &&String| word.contains(':') && !word.starts_with(['-', '/']);
        let program = match words.iter().find(is_image) {
            Some(image) => format!("conman run NAME --image {image} -- PROGRAM ARGUMENTS"),
            None => "conman run NAME --template TEMPLATE -- PROGRAM ARGUMENTS".to_owned(),
        };
        return Some(usage(
            format!("`{name}` is neither an option nor the session's name"),
            &format!("the program comes after `--`: {program}"),
        ));
    }
    let known = OPTIONS
        .iter()
        .find(|(of, options, _)| *of == command && options.contains(&option));
    known.map(|(_, _, answer)| {
        usage(
            format!("`conman {command}` has no option `{option}`"),
            answer,
        )
    })
}

fn usage(detail: String, next: &str) -> Failure {
    Failure::usage(detail).next(next)
}

fn text(error: &Error, kind: ContextKind) -> Option<&str> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text),
        _ => None,
    }
}

fn is_command(word: &str) -> bool {
    OPTIONS
        .iter()
        .any(|(command, _, _)| *command == canonical(word))
}

/// A command by the name under which its options are listed.
fn canonical(word: &str) -> &str {
    match word {
        "start" => "run",
        "stop" => "rm",
        "images" => "image",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<(), (Error, Vec<String>)> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let all = std::iter::once("conman".to_owned()).chain(words.iter().cloned());
        let parsed = crate::args::command().try_get_matches_from(all);
        parsed.map(drop).map_err(|error| (error, words))
    }

    #[test]
    fn habits_that_mean_the_same_here_are_accepted() {
        for line in [
            "run -d --name web --image nginx:1",
            "run -it alice --template python",
            "run -itd alice --image a:1",
            "run --rm -it alice --image a:1 -- sh",
            "run -e A=1 -v /srv/a:/a -m 256M --cpus 0.5 alice --image a:1",
            "start alice",
            "stop alice bob",
            "rm -f alice",
            "images",
            "images -q",
            "pull python:3.12-slim",
            "rmi -f python:3.12-slim",
            "info",
            "ps -a -q",
            "ps -aq",
            "stats --no-stream",
            "stats --no-stream alice",
            "cp -r ./dir alice:/tmp",
            "cp -a alice:/tmp .",
            "logs -f --tail 10 -t alice",
            "exec -it alice sh",
            "exec -u 1000 -w /tmp alice id",
            "attach alice",
            "kill -s TERM alice",
            "restart alice",
            "pause alice",
            "top",
            "version",
            "config check",
            "config check /etc/conman/conman.toml",
            "serve --check",
            "ps --wide",
        ] {
            if let Err((error, _)) = parse(line) {
                panic!("conman {line}: {error}");
            }
        }
    }

    #[test]
    fn help_and_version_are_found_under_their_usual_names() {
        for (line, kind) in [
            ("help", ErrorKind::DisplayHelp),
            ("help run", ErrorKind::DisplayHelp),
            ("run --help", ErrorKind::DisplayHelp),
            ("-h", ErrorKind::DisplayHelp),
            ("-v", ErrorKind::DisplayVersion),
            ("--version", ErrorKind::DisplayVersion),
        ] {
            let (error, _) = parse(line).expect_err(line);
            assert_eq!(error.kind(), kind, "{line}");
        }
    }

    /// Each with what the answer has to name.
    const ANSWERED: &[(&str, &str)] = &[
        ("run -p 8080:80 alice --image a:1", "conman forward"),
        ("run --publish=80:80 alice", "--port 80"),
        ("run -P alice", "no port is published"),
        ("run -w /srv alice", "cd DIR"),
        ("run --workdir /srv alice", "cd DIR"),
        ("run -u 1000 alice", "conman exec --user"),
        ("run --hostname web alice", "conman run HOSTNAME"),
        ("run --entrypoint sh alice", "-- PROGRAM"),
        ("run --restart always alice", "--on-node-loss"),
        ("run --gpus all alice", "no devices"),
        ("run --privileged alice", "security.md"),
        ("run --net host alice", "--network"),
        ("run --pull always alice", "conman image pull"),
        ("run alice python3", "after `--`"),
        ("rm -v alice", "--forget"),
        ("stop -t 10 alice", "conman kill --signal TERM"),
        ("inspect --format {{.State}} alice", "jq"),
        ("inspect -f x alice", "jq"),
        ("ps --filter name=x", "--label"),
        ("ps --format json", "--json"),
        ("login registry.example.org", "[images.logins"),
        ("build .", "docker save"),
        ("push app:1", "conman image import"),
        ("tag a b", "--name NAME:TAG"),
        ("create alice", "conman run NAME"),
        ("rename a b", "conman rm"),
        ("wait alice", "conman logs -f"),
        ("export alice", "conman cp"),
        ("volume ls", "--bind"),
        ("network ls", "egress"),
        ("system prune", "conman image gc"),
        ("get pods", "conman ps"),
        ("describe pod alice", "conman why"),
        ("apply -f x.yaml", "template"),
        ("delete pod alice", "conman rm"),
        ("ssh alice", "conman exec -it"),
        ("port-forward alice 80", "conman forward"),
        ("compose up", "template"),
        ("daemon", "conman serve"),
    ];

    #[test]
    fn habits_that_conman_lacks_are_answered_with_the_line_that_does_it_here() {
        for (line, part) in ANSWERED {
            let (error, words) = parse(line).expect_err(line);
            let failure = answer(&words, &error);
            let failure = failure.unwrap_or_else(|| panic!("conman {line}: {error}"));
            let Failure::Reported { next, problem, .. } = failure else {
                panic!("conman {line}: it is reported");
            };
            let next = next.unwrap_or_default();
            assert!(
                next.contains(part),
                "conman {line}: {}: {next}",
                problem.detail
            );
        }
    }

    #[test]
    fn no_mistake_is_answered_with_an_advice_to_pass_it_as_a_value() {
        for line in [
            "run --no-such alice",
            "ps --no-such",
            "rm -z alice",
            "exec --no-such alice",
        ] {
            let (mut error, words) = parse(line).expect_err(line);
            assert!(answer(&words, &error).is_none(), "{line}");
            drop_value_tip(&mut error);
            let text = error.render().to_string();
            assert!(!text.contains("as a value"), "{text}");
        }
        let (error, words) = parse("run -it python:3.12 bash").expect_err("an image is no name");
        let Some(Failure::Reported { next, .. }) = answer(&words, &error) else {
            panic!("{error}");
        };
        let next = next.unwrap_or_default();
        assert!(
            next.contains("conman run NAME --image python:3.12"),
            "{next}"
        );
    }
}
