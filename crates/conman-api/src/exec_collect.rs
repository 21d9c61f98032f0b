//! Runs a command to its end and keeps a bounded part of its output, or sends it on as it comes.

use std::time::Duration;

use bytes::Bytes;
use conman_proto::{ExecOutput, ExecResult, ExecStatus};
use conman_runtime::{ExecIo, ExecKill, LogChunk, OutputStream};
use tokio::sync::mpsc;

use crate::log_lines::{LogLines, text_and_base64, to_ndjson};
use crate::problem::{ApiError, IntoApiError as _, Kind};

/// Kept of each output stream. The rest is read, so that the command continues, and dropped.
const MAX_OUTPUT_BYTES: usize = 1024 * 1024;

/// Bytes of standard input that are queued for the command at a time.
const STDIN_CHUNK_BYTES: usize = 64 * 1024;

/// Bound on a kill: longer than the runtime's, whose error is more precise.
const KILL_PATIENCE: Duration = Duration::from_secs(15);

/// Feeds `stdin` to the command and collects its output until it ends or `patience` is over; a
/// command that takes longer is killed.
pub(crate) async fn run_to_end(
    io: ExecIo,
    stdin: Option<Bytes>,
    patience: Duration,
) -> Result<ExecResult, ApiError> {
    let mut collected = Collected::default();
    let kept = &mut collected;
    let ended = run(io, stdin, patience, move |output| kept.read(output)).await;
    let status = match ended {
        Ok(status) => status,
        Err(late) => {
            let error = Kind::EXEC_TIMED_OUT.because(format!(
                "{late}; raise timeout_ms or use the WebSocket form"
            ));
            return Err(error.output(collected.into_output()));
        }
    };
    match (status.exit_code, status.error) {
        (Some(exit_code), None) => {
            let output = collected.into_output();
            Ok(ExecResult {
                exit_code,
                stdout: output.stdout,
                stderr: output.stderr,
                stdout_base64: output.stdout_base64,
                stderr_base64: output.stderr_base64,
                truncated: output.truncated,
                out_of_memory: status.out_of_memory,
            })
        }
        (_, reason) if let Some(lack) = status.not_run => {
            Err(lack.kind().because(reason.unwrap_or_default()))
        }
        (_, reason) => {
            let unknown = || "how the command ended is unknown".to_owned();
            Err(Kind::EXEC_FAILED.because(reason.unwrap_or_else(unknown)))
        }
    }
}

/// Likewise, but sends the output as lines of JSON while the command runs, and how it ended as the last one. A
/// slow client slows the command; one that leaves ends it.
pub(crate) async fn run_with_lines(
    io: ExecIo,
    stdin: Option<Bytes>,
    patience: Duration,
    to: mpsc::Sender<Bytes>,
) {
    let run = run(io, stdin, patience, |output| send_lines(output, &to));
    let ended = tokio::select! {
        ended = run => ended,
        // Dropping the command ends it.
        () = to.closed() => return,
    };
    let status = ended.unwrap_or_else(|late| ExecStatus {
        exit_code: None,
        error: Some(late),
        ..ExecStatus::default()
    });
    let mut line = serde_json::to_vec(&status).unwrap_or_default();
    line.push(b'\n');
    // The client may have gone.
    let _ = to.send(line.into()).await;
}

type Output = mpsc::Receiver<(OutputStream, Bytes)>;

async fn send_lines(mut output: Output, to: &mpsc::Sender<Bytes>) {
    let mut lines = LogLines::new(false);
    while let Some((stream, bytes)) = output.recv().await {
        let found = lines.push(&LogChunk::new(stream, bytes));
        if !found.is_empty() && to.send(to_ndjson(&found)).await.is_err() {
            return;
        }
    }
    let last = lines.finish();
    if !last.is_empty() {
        let _ = to.send(to_ndjson(&last)).await;
    }
}

/// Runs a command to its end, or describes how it did not end in time.
async fn run<F: Future<Output = ()>>(
    io: ExecIo,
    stdin: Option<Bytes>,
    patience: Duration,
    read: impl FnOnce(Output) -> F,
) -> Result<ExecStatus, String> {
    let ExecIo {
        stdin: input,
        output,
        resize: _,
        status,
        kill,
    } = io;
    let feed = async move {
        let mut text = stdin.unwrap_or_default();
        while !text.is_empty() {
            let chunk = text.split_to(text.len().min(STDIN_CHUNK_BYTES));
            // The command has closed its input.
            if input.send(chunk).await.is_err() {
                break;
            }
        }
    };
    let reading = read(output);
    let collect = async {
        reading.await;
        status.await.unwrap_or(ExecStatus {
            exit_code: None,
            error: Some("the connection to the command was lost".to_owned()),
            ..ExecStatus::default()
        })
    };
    // The command's end counts, not whether it read all of its input.
    let run = async {
        let mut feed = std::pin::pin!(feed);
        let mut collect = std::pin::pin!(collect);
        tokio::select! {
            // All input was sent; the output continues below.
            () = &mut feed => collect.await,
            // The command ended; the rest of the input has no reader.
            done = &mut collect => done,
        }
    };
    let mut run = std::pin::pin!(run);
    if let Ok(status) = tokio::time::timeout(patience, &mut run).await {
        return Ok(status);
    }
    Err(kill_late(kill, patience, &mut run).await)
}

/// Kills a command whose time is over, and says so; `run` ends with the command.
pub(crate) async fn kill_late(kill: ExecKill, patience: Duration, run: impl Future) -> String {
    let fate = tokio::select! {
        killed = tokio::time::timeout(KILL_PATIENCE, kill.kill()) => match killed {
            Ok(Ok(())) => "was killed".to_owned(),
            Ok(Err(error)) => format!("may still run ({error})"),
            Err(_) => "may still run (the kill was not answered)".to_owned(),
        },
        // Its end was reported before the answer to the kill.
        _ = run => "was killed".to_owned(),
    };
    let patience_ms = patience.as_millis();
    format!("the command did not end within {patience_ms} ms and {fate}")
}

/// The output so far.
#[derive(Debug, Default)]
struct Collected {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    truncated: bool,
}

impl Collected {
    async fn read(&mut self, mut output: Output) {
        while let Some((stream, bytes)) = output.recv().await {
            let kept = match stream {
                OutputStream::Stdout => &mut self.stdout,
                OutputStream::Stderr => &mut self.stderr,
            };
            let room = MAX_OUTPUT_BYTES - kept.len();
            kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
            self.truncated |= bytes.len() > room;
        }
    }

    fn into_output(self) -> ExecOutput {
        let (stdout, stdout_base64) = text_and_base64(&self.stdout);
        let (stderr, stderr_base64) = text_and_base64(&self.stderr);
        ExecOutput {
            stdout,
            stderr,
            stdout_base64,
            stderr_base64,
            truncated: self.truncated,
        }
    }
}

#[cfg(test)]
mod tests {
    use conman_runtime::{ExecKill, KillReply};
    use tokio::sync::oneshot;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// A command simulated by `script`.
    fn command<F, Fut>(script: F) -> ExecIo
    where
        F: FnOnce(
            mpsc::Receiver<Bytes>,
            mpsc::Sender<(OutputStream, Bytes)>,
            oneshot::Sender<ExecStatus>,
        ) -> Fut,
        Fut: Future<Output = ()> + Send + 'static,
    {
        mortal_command(script).0
    }

    /// Likewise; also returns the receiver of the kill order.
    fn mortal_command<F, Fut>(script: F) -> (ExecIo, oneshot::Receiver<KillReply>)
    where
        F: FnOnce(
            mpsc::Receiver<Bytes>,
            mpsc::Sender<(OutputStream, Bytes)>,
            oneshot::Sender<ExecStatus>,
        ) -> Fut,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let (kill, order) = ExecKill::new();
        let (stdin, input) = mpsc::channel(1);
        let (printed, output) = mpsc::channel(1);
        let (ended, status) = oneshot::channel();
        let (resize, _) = mpsc::channel(1);
        tokio::spawn(script(input, printed, ended));
        let io = ExecIo {
            stdin,
            output,
            resize,
            status,
            kill,
        };
        (io, order)
    }

    fn exited(exit_code: i32) -> ExecStatus {
        ExecStatus {
            exit_code: Some(exit_code),
            error: None,
            ..ExecStatus::default()
        }
    }

    #[tokio::test]
    async fn a_command_that_prints_while_it_reads_does_not_deadlock() {
        let io = command(|mut input, printed, ended| async move {
            while let Some(chunk) = input.recv().await {
                printed
                    .send((OutputStream::Stdout, chunk))
                    .await
                    .expect("there is a reader");
            }
            ended.send(exited(3)).expect("there is a receiver");
        });
        let text = "x".repeat(STDIN_CHUNK_BYTES * 5 + 1);
        let result = run_to_end(io, Some(text.clone().into()), PATIENCE)
            .await
            .expect("ended");
        assert_eq!((result.exit_code, result.stdout), (3, text));
    }

    #[tokio::test]
    async fn output_beyond_the_bound_is_dropped_and_said_so() {
        let io = command(|_, printed, ended| async move {
            for _ in 0..3 {
                let chunk = Bytes::from(vec![b'y'; MAX_OUTPUT_BYTES / 2 + 1]);
                printed
                    .send((OutputStream::Stderr, chunk))
                    .await
                    .expect("there is a reader");
            }
            ended.send(exited(0)).expect("there is a receiver");
        });
        let result = run_to_end(io, None, PATIENCE).await.expect("ended");
        assert_eq!(result.stderr.len(), MAX_OUTPUT_BYTES);
        assert!(result.truncated);
    }

    #[tokio::test]
    async fn lines_come_as_they_are_printed_and_the_end_last() {
        let (go, told) = oneshot::channel();
        let io = command(|_, printed, ended| async move {
            for (stream, text) in [
                (OutputStream::Stdout, "one\ntw"),
                (OutputStream::Stderr, "oops\n"),
                (OutputStream::Stdout, "o"),
            ] {
                let bytes = Bytes::from_static(text.as_bytes());
                printed.send((stream, bytes)).await.expect("a reader");
            }
            told.await.expect("the first line is there");
            ended.send(exited(3)).expect("there is a receiver");
        });
        let (to, mut lines) = mpsc::channel(1);
        tokio::spawn(run_with_lines(io, None, PATIENCE, to));
        let first = lines.recv().await.expect("a line");
        assert_eq!(first, "{\"stream\":\"stdout\",\"text\":\"one\"}\n");
        go.send(()).expect("it waits");
        let mut rest = Vec::new();
        while let Some(bytes) = lines.recv().await {
            rest.extend_from_slice(&bytes);
        }
        let expected = "{\"stream\":\"stderr\",\"text\":\"oops\"}\n\
            {\"stream\":\"stdout\",\"text\":\"two\",\"end\":\"\"}\n{\"exit_code\":3}\n";
        assert_eq!(String::from_utf8_lossy(&rest), expected);
    }

    #[tokio::test]
    async fn a_command_that_ignores_its_input_ends_all_the_same() {
        let io = command(|input, printed, ended| async move {
            drop(printed);
            ended.send(exited(0)).expect("there is a receiver");
            std::future::pending::<()>().await;
            drop(input);
        });
        let text = "x".repeat(STDIN_CHUNK_BYTES * 5);
        assert_eq!(
            run_to_end(io, Some(text.into()), PATIENCE)
                .await
                .expect("ended")
                .exit_code,
            0
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_command_that_does_not_end_is_killed_and_its_fate_is_told() {
        for (answers, word) in [(true, "was killed"), (false, "may still run")] {
            let (io, order) = mortal_command(|input, printed, ended| async move {
                std::future::pending::<()>().await;
                drop((input, printed, ended));
            });
            let killing = tokio::spawn(async move {
                let reply = order.await.expect("it is to be killed");
                if !answers {
                    std::future::pending::<()>().await;
                }
                reply.send(Ok(())).expect("there is a receiver");
            });
            let error = run_to_end(io, None, PATIENCE)
                .await
                .expect_err("never ends");
            assert_eq!(error.problem().slug(), "exec-timed-out");
            let detail = &error.problem().detail;
            assert!(detail.contains(word), "{detail}");
            killing.abort();
        }
    }

    #[tokio::test]
    async fn a_command_whose_end_is_unknown_is_an_error() {
        let io = command(|_, _, ended| async move { drop(ended) });
        let error = run_to_end(io, None, PATIENCE).await.expect_err("lost");
        assert_eq!(error.problem().slug(), "exec-failed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_command_that_is_killed_has_its_output_so_far_in_the_problem() {
        let (io, order) = mortal_command(|input, printed, ended| async move {
            let line = Bytes::from_static(b"a line\n");
            printed
                .send((OutputStream::Stdout, line))
                .await
                .expect("there is a reader");
            std::future::pending::<()>().await;
            drop((input, printed, ended));
        });
        tokio::spawn(async move {
            let reply = order.await.expect("it is to be killed");
            reply.send(Ok(())).expect("there is a receiver");
        });
        let error = run_to_end(io, None, PATIENCE)
            .await
            .expect_err("never ends");
        let output = error.problem().output.as_ref().expect("its output");
        assert_eq!(
            (output.stdout.as_str(), output.truncated),
            ("a line\n", false)
        );
    }
}
