//! A container's log, as dockerd keeps it.

use std::sync::Arc;

use bollard::container::LogOutput;
use bollard::query_parameters::LogsOptionsBuilder;
use conman_proto::RuntimeKind;
use futures_util::stream::{BoxStream, StreamExt};

use super::Shared;
use super::daemon::Lane;
use super::failure::Failure;
use crate::{ContainerKey, LogChunk, LogOptions, OutputStream, RuntimeError};

const ACTION: &str = "read the log of";

pub(super) async fn logs(
    shared: &Arc<Shared>,
    key: &ContainerKey,
    options: LogOptions,
) -> Result<BoxStream<'static, Result<LogChunk, RuntimeError>>, RuntimeError> {
    let subject = key.to_string();
    let Some(place) = shared.daemon.stream_place() else {
        return Err(RuntimeError::Refused {
            runtime: RuntimeKind::Docker,
            action: ACTION,
            subject,
            reason: "too many commands and logs are open at a time; close some".to_owned(),
        });
    };
    let found = shared.look(key).await;
    let found = found.map_err(|failure| failure.about(ACTION, &subject))?;
    let Some(container) = found else {
        return Err(RuntimeError::NoSuchContainer { subject });
    };
    let tail = options
        .tail
        .map_or_else(|| "all".to_owned(), |lines| lines.to_string());
    let query = LogsOptionsBuilder::default()
        .stdout(true)
        .stderr(true)
        .follow(options.follow)
        .timestamps(options.timestamps)
        .tail(&tail)
        .build();
    let stream = shared
        .daemon
        .call(Lane::Calls, shared.timeouts.inspect, |facts| async move {
            Ok(facts.client.logs(&container.container_id, Some(query)))
        })
        .await
        .map_err(|failure| failure.about(ACTION, &subject))?;
    let socket = shared.daemon.socket().to_owned();
    let chunks = stream.map(move |item| {
        // Held as long as the stream is.
        let _place = &place;
        item.map(chunk)
            .map_err(|error| Failure::of(error, &socket).about(ACTION, &subject))
    });
    Ok(chunks.boxed())
}

fn chunk(output: LogOutput) -> LogChunk {
    let stream = match output {
        LogOutput::StdErr { .. } => OutputStream::Stderr,
        LogOutput::StdOut { .. } | LogOutput::StdIn { .. } | LogOutput::Console { .. } => {
            OutputStream::Stdout
        }
    };
    LogChunk {
        stream,
        bytes: output.into_bytes(),
    }
}
