//! Checks a command before it runs: all bounds, and all mistakes at once.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use conman_proto::ExecRequest;
use conman_runtime::{ExecPlan, TERMINAL_SIZE};

use crate::body_mistakes::BodyMistakes;
use crate::problem::ApiError;

const MAX_COMMAND_ITEMS: usize = 256;
const MAX_COMMAND_BYTES: usize = 64 * 1024;
const MAX_ENV_ENTRIES: usize = 256;
const MAX_ENV_BYTES: usize = 64 * 1024;
const MAX_WORKDIR_CHARS: usize = 4_096;
const MAX_USER_CHARS: usize = 256;
const MAX_STDIN_BYTES: usize = 1024 * 1024;
const MAX_TIMEOUT_MS: u32 = 3_600_000;
const MAX_KEPT_TIMEOUT_MS: u32 = 7 * 24 * 3_600_000;
const DEFAULT_TIMEOUT_MS: u32 = 60_000;

/// The route of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// `POST`: input and output in JSON.
    Json,
    /// The WebSocket.
    Interactive,
    /// It is kept, for clients that attach.
    Kept,
}

/// A command that may run.
#[derive(Debug)]
pub(crate) struct CheckedExec {
    pub(crate) plan: ExecPlan,
    /// The whole standard input; only with [`Form::Json`].
    pub(crate) stdin: Option<Bytes>,
    /// Bound on the run time with [`Form::Json`]; with [`Form::Interactive`] only if the request has one, in
    /// `plan`.
    pub(crate) timeout: Duration,
}

/// Refuses values that are out of bounds or belong to another form.
pub(crate) fn check(request: ExecRequest, form: Form) -> Result<CheckedExec, ApiError> {
    let mut mistakes = BodyMistakes::default();
    check_command(&request.command, &mut mistakes);
    check_env(&request, &mut mistakes);
    check_process(&request, &mut mistakes);
    check_form(&request, form, &mut mistakes);
    let stdin = whole_stdin(&request, &mut mistakes);
    let (most_ms, rule) = match form {
        Form::Json => (MAX_TIMEOUT_MS, "must be from 1 to 3600000"),
        Form::Interactive | Form::Kept => (MAX_KEPT_TIMEOUT_MS, "must be from 1 to 604800000"),
    };
    let timeout_ms = request.timeout_ms.unwrap_or(DEFAULT_TIMEOUT_MS);
    mistakes.unless((1..=most_ms).contains(&timeout_ms), "timeout_ms", rule);
    let may_be_open = form == Form::Kept || !request.open_stdin;
    mistakes.unless(may_be_open, "open_stdin", "needs POST …/execs");
    mistakes.into_result()?;
    let timeout = Duration::from_millis(timeout_ms.into());
    let plan = ExecPlan {
        command: request.command,
        env: request.env.into_iter().collect(),
        workdir: request.workdir,
        user: request.user,
        tty: request
            .tty
            .then(|| request.terminal_size.unwrap_or(TERMINAL_SIZE)),
        stdin: match form {
            Form::Json => stdin.is_some(),
            Form::Interactive => true,
            Form::Kept => request.open_stdin,
        },
        timeout: request.timeout_ms.map(|_| timeout),
    };
    Ok(CheckedExec {
        plan,
        stdin,
        timeout,
    })
}

/// The standard input of a request that has all of it.
fn whole_stdin(request: &ExecRequest, mistakes: &mut BodyMistakes) -> Option<Bytes> {
    let (field, bytes) = match (&request.stdin, &request.stdin_base64) {
        (None, None) => return None,
        (Some(text), None) => ("stdin", Some(text.clone().into_bytes())),
        (None, Some(text)) => ("stdin_base64", BASE64.decode(text).ok()),
        (Some(_), Some(_)) => {
            mistakes.add("stdin_base64", "cannot be given with stdin");
            return None;
        }
    };
    let Some(bytes) = bytes else {
        mistakes.add(
            field,
            "must be base64 with its padding (RFC 4648, section 4)",
        );
        return None;
    };
    let within = bytes.len() <= MAX_STDIN_BYTES;
    mistakes.unless(within, field, "must be at most 1048576 bytes");
    Some(bytes.into())
}

fn check_command(command: &[String], mistakes: &mut BodyMistakes) {
    let bytes: usize = command.iter().map(String::len).sum();
    mistakes.unless(
        (1..=MAX_COMMAND_ITEMS).contains(&command.len()) && bytes <= MAX_COMMAND_BYTES,
        "command",
        "must have 1 to 256 items of at most 65536 bytes in all",
    );
    if command.first().is_some_and(String::is_empty) {
        mistakes.add("command[0]", "must name a program");
    }
    for (index, item) in command.iter().enumerate().take(MAX_COMMAND_ITEMS) {
        let field = format!("command[{index}]");
        mistakes.unless(
            !item.contains('\0'),
            &field,
            "must not contain a NUL character",
        );
    }
}

fn check_env(request: &ExecRequest, mistakes: &mut BodyMistakes) {
    let bytes: usize = request
        .env
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum();
    mistakes.unless(
        request.env.len() <= MAX_ENV_ENTRIES && bytes <= MAX_ENV_BYTES,
        "env",
        "must have at most 256 entries of at most 65536 bytes in all",
    );
    for (name, value) in request.env.iter().take(MAX_ENV_ENTRIES) {
        let valid = !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0');
        let field = format!("env.{}", crate::field_errors::cut(name));
        mistakes.unless(
            valid,
            &field,
            "a name must not be empty nor contain '=', and neither it nor its value a NUL character",
        );
    }
}

/// Checks the working directory, the user and the terminal.
fn check_process(request: &ExecRequest, mistakes: &mut BodyMistakes) {
    if let Some(workdir) = &request.workdir {
        mistakes.unless(
            workdir.starts_with('/')
                && is_clean(workdir)
                && workdir.chars().count() <= MAX_WORKDIR_CHARS,
            "workdir",
            "must be an absolute path without control characters, at most 4096 characters",
        );
    }
    if let Some(user) = &request.user {
        mistakes.unless(
            !user.is_empty() && is_clean(user) && user.chars().count() <= MAX_USER_CHARS,
            "user",
            "must be a user name or uid, `user:group` allowed, at most 256 characters",
        );
    }
    if let Some(size) = &request.terminal_size {
        mistakes.unless(request.tty, "terminal_size", "needs tty");
        mistakes.unless(
            size.columns > 0 && size.rows > 0,
            "terminal_size",
            "must have at least one column and one row",
        );
    }
}

/// Refuses what only another form takes, and too much input.
fn check_form(request: &ExecRequest, form: Form, mistakes: &mut BodyMistakes) {
    match form {
        Form::Json => {
            mistakes.unless(
                !request.tty,
                "tty",
                "needs the WebSocket form: GET with an upgrade, or POST …/execs",
            );
        }
        Form::Kept => {
            let absent = request.stdin.is_none() && request.stdin_base64.is_none();
            let remedy = "cannot be given; set open_stdin, attach and send it";
            mistakes.unless(absent, "stdin", remedy);
        }
        Form::Interactive => {
            let absent = request.stdin.is_none() && request.stdin_base64.is_none();
            mistakes.unless(absent, "stdin", "needs POST; here send `stdin` messages");
        }
    }
}

fn is_clean(text: &str) -> bool {
    !text.chars().any(char::is_control)
}

#[cfg(test)]
mod tests {
    use conman_proto::TerminalSize;

    use super::*;

    fn request(change: impl FnOnce(&mut ExecRequest)) -> ExecRequest {
        let mut request = ExecRequest {
            command: vec!["true".to_owned()],
            ..ExecRequest::default()
        };
        change(&mut request);
        request
    }

    #[test]
    fn what_is_out_of_bounds_is_refused_by_field() {
        let cases = [
            (request(|it| it.command.clear()), "command"),
            (request(|it| it.command[0].clear()), "command[0]"),
            (
                request(|it| it.command = vec!["x".to_owned(); 257]),
                "command",
            ),
            (
                request(|it| it.command.push("a\0b".to_owned())),
                "command[1]",
            ),
            (
                request(|it| it.env = [("A=B".to_owned(), String::new())].into()),
                "env.A=B",
            ),
            (request(|it| it.workdir = Some("tmp".to_owned())), "workdir"),
            (request(|it| it.user = Some("a\n".to_owned())), "user"),
            (request(|it| it.tty = true), "tty"),
            (
                request(|it| it.terminal_size = Some(TERMINAL_SIZE)),
                "terminal_size",
            ),
            (
                request(|it| it.stdin_base64 = Some("=x".to_owned())),
                "stdin_base64",
            ),
            (
                request(|it| it.stdin = Some("x".repeat(MAX_STDIN_BYTES + 1))),
                "stdin",
            ),
            (request(|it| it.timeout_ms = Some(0)), "timeout_ms"),
            (request(|it| it.timeout_ms = Some(3_600_001)), "timeout_ms"),
        ];
        for (request, field) in cases {
            let error = check(request, Form::Json).expect_err(field);
            let fields: Vec<_> = error.problem().errors.iter().map(|it| &it.field).collect();
            assert_eq!(fields, [field]);
        }
    }

    #[test]
    fn each_form_refuses_what_only_the_other_can_do() {
        let with_input = request(|it| {
            it.stdin = Some("x".to_owned());
            it.timeout_ms = Some(5);
        });
        let error = check(with_input.clone(), Form::Interactive).expect_err("input by query");
        assert_eq!(error.problem().errors.len(), 1);
        assert!(check(with_input, Form::Json).expect("valid").plan.stdin);
        let bytes = request(|it| it.stdin_base64 = Some("/wA=".to_owned()));
        let checked = check(bytes, Form::Json).expect("valid");
        assert_eq!(checked.stdin.as_deref(), Some(&b"\xff\0"[..]));
    }

    #[test]
    fn a_kept_command_has_no_input_in_its_request_and_may_run_long() {
        let kept = request(|it| {
            it.open_stdin = true;
            it.timeout_ms = Some(MAX_KEPT_TIMEOUT_MS);
        });
        let error = check(kept.clone(), Form::Json).expect_err("two mistakes");
        assert_eq!(error.problem().errors.len(), 2);
        let plan = check(kept, Form::Kept).expect("valid").plan;
        assert!(plan.stdin && plan.tty.is_none() && plan.timeout.is_some());
        let other = request(|it| it.stdin = Some("x".to_owned()));
        let error = check(other, Form::Kept).expect_err("a mistake");
        assert_eq!(error.problem().errors[0].field, "stdin");
    }

    #[test]
    fn a_terminal_has_the_size_that_was_asked_and_a_usual_one_otherwise() {
        let plan = |terminal_size| {
            let request = request(|it| {
                it.tty = true;
                it.terminal_size = terminal_size;
            });
            check(request, Form::Interactive).map(|checked| checked.plan.tty)
        };
        let size = |columns, rows| TerminalSize { columns, rows };
        assert_eq!(plan(None).expect("valid"), Some(size(80, 24)));
        assert_eq!(
            plan(Some(size(132, 43))).expect("valid"),
            Some(size(132, 43))
        );
        for empty in [size(0, 43), size(132, 0)] {
            let error = plan(Some(empty)).expect_err("nothing to write on");
            assert_eq!(error.problem().errors[0].field, "terminal_size");
        }
    }
}
