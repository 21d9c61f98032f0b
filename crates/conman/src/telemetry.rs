//! Log output, including panics.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

/// The default filter if `RUST_LOG` is not set.
const DEFAULT_FILTER: &str = "info";
/// Below this level the Docker client logs whole requests, including sessions' environments.
const DOCKER_CLIENT: &str = "bollard=info";

/// Installs the logger for the rest of the process.
pub(crate) fn init(format: LogFormat) {
    let mut filter =
        EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    if let Ok(directive) = DOCKER_CLIENT.parse() {
        filter = filter.add_directive(directive);
    }
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    // An earlier logger, such as a test's, is kept.
    let _ = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let place = panic
            .location()
            .map(ToString::to_string)
            .unwrap_or_default();
        let text = panic.payload_as_str().unwrap_or("(no text)");
        tracing::error!(place, "a task panicked: {text}");
        default(panic);
    }));
}
