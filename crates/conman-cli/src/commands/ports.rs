//! `conman port`: lists a session's ports.

use comfy_table::Cell;
use conman_proto::Session;
use serde_json::json;

use super::Context;
use crate::args::PortArgs;
use crate::failure::{Exit, Failure};

pub(super) async fn run(context: &Context, args: &PortArgs) -> Result<Exit, Failure> {
    let session: Session = context
        .client
        .get(&format!("/v1/sessions/{}", args.id))
        .await?;
    let mut rows = Vec::new();
    if let Some(port) = session.port {
        rows.push((port.to_string(), session.browser_url.clone(), "default"));
    }
    for ports in &session.spec.ports {
        let note = if ports.public { "public" } else { "" };
        for port in ports.first..=ports.last {
            let text = port.to_string();
            let url = session.port_url.as_ref();
            let url = url.map(|url| url.replace("{port}", &text));
            rows.push((text, url, note));
        }
    }
    let output = &context.output;
    if output.json {
        let ports: Vec<_> = rows
            .iter()
            .map(|(port, url, note)| json!({"port": port, "url": url, "note": note}))
            .collect();
        output.value(&json!({ "ports": ports }))?;
        return Ok(Exit::Done);
    }
    if rows.is_empty() {
        output.note(&format!("{} has no ports", session.id));
    }
    let rows = rows
        .into_iter()
        .map(|(port, url, note)| [port, url.unwrap_or_default(), note.to_owned()].map(Cell::new));
    output.table(&["PORT", "URL", "NOTE"], rows.map(Vec::from).collect())?;
    Ok(Exit::Done)
}
