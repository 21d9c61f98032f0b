//! `conman image`: the images of the node.

mod import;
mod layout;
mod pull;
mod show;

use conman_proto::{GcReport, Image, ImageList, ImageRemoval};
use http::Method;
use serde_json::json;

use super::Context;
use crate::args::{ImageArgs, ImageCommand, ImageInspectArgs, ImageLsArgs, ImageRmArgs};
use crate::client::{Answer, PROMPT, START, encode};
use crate::failure::{Exit, Failure};
use crate::human::{bytes, count, printable};
use crate::progress::Progress;

pub(super) async fn run(context: &Context, args: ImageArgs) -> Result<Exit, Failure> {
    match args.command {
        ImageCommand::Import(args) => import::run(context, &args).await,
        ImageCommand::Pull(args) => pull::run(context, &args).await,
        ImageCommand::Ls(args) => list(context, &args).await,
        ImageCommand::Inspect(args) => inspect(context, &args).await,
        ImageCommand::Rm(args) => remove(context, args).await,
        ImageCommand::Gc => collect(context).await,
    }
}

async fn list(context: &Context, args: &ImageLsArgs) -> Result<Exit, Failure> {
    let answer = context
        .client
        .answer::<ImageList>(Method::GET, "/v1/images", None::<&()>, PROMPT)
        .await?;
    let output = &context.output;
    if output.json {
        output.value(&answer.raw)?;
        return Ok(Exit::Done);
    }
    let images = &answer.value.images;
    if args.quiet {
        for name in images.iter().flat_map(|image| &image.names) {
            output.line(&printable(name))?;
        }
    } else {
        show::table(output, images)?;
    }
    Ok(Exit::Done)
}

async fn inspect(context: &Context, args: &ImageInspectArgs) -> Result<Exit, Failure> {
    let answer = context
        .client
        .answer::<Image>(Method::GET, &path(&args.name), None::<&()>, PROMPT)
        .await?;
    context.output.value(&answer.raw)?;
    Ok(Exit::Done)
}

/// Continues after a failure; the exit code is the greatest of all.
async fn remove(context: &Context, args: ImageRmArgs) -> Result<Exit, Failure> {
    let output = &context.output;
    let (mut removed, mut worst) = (Vec::new(), Exit::Done);
    for name in &args.name {
        let answer = context
            .client
            .answer::<ImageRemoval>(
                Method::DELETE,
                &removal_path(name, args.force),
                None::<&()>,
                PROMPT,
            )
            .await;
        match answer {
            Ok(answer) => {
                if !output.json {
                    output.line(&removal(&answer.value))?;
                }
                removed.push(answer.raw);
            }
            Err(error) => {
                let failure = Failure::from(error).about(name);
                output.failure(&failure);
                worst = [worst, failure.exit()]
                    .into_iter()
                    .max_by_key(|exit| exit.code())
                    .unwrap_or(worst);
            }
        }
    }
    if output.json {
        output.value(&json!({ "removed": removed }))?;
    }
    Ok(worst)
}

fn removal(removal: &ImageRemoval) -> String {
    let name = printable(&removal.name);
    let others: Vec<_> = removal.names.iter().map(|name| printable(name)).collect();
    match (others.is_empty(), removal.in_use) {
        (false, _) => format!(
            "{name} is removed; the image is still {}",
            others.join(", ")
        ),
        (true, true) => {
            format!("{name} is removed; the image stays until no session uses it")
        }
        (true, false) => format!("{name} is removed"),
    }
}

async fn collect(context: &Context) -> Result<Exit, Failure> {
    let progress = Progress::start(&context.output, "collecting".to_owned());
    let answer = context
        .client
        .answer::<GcReport>(Method::POST, "/v1/gc", None::<&()>, START)
        .await?;
    drop(progress);
    if context.output.json {
        context.output.value(&answer.raw)?;
    } else {
        let report = &answer.value;
        context.output.line(&format!(
            "removed {} and {}: {} are free again",
            count(report.images.len() as u64, "image"),
            count(report.layers.len() as u64, "layer"),
            bytes(report.freed_bytes)
        ))?;
    }
    Ok(Exit::Done)
}

/// Reports that an image has arrived.
fn arrived(context: &Context, name: &str, answer: &Answer<Image>) -> Result<Exit, Failure> {
    if context.output.json {
        context.output.value(&answer.raw)?;
    } else {
        let image = &answer.value;
        context.output.line(&format!(
            "{} is here: {} in {}",
            printable(name),
            bytes(image.size_bytes),
            count(image.layers.len() as u64, "layer")
        ))?;
        let skipped: u64 = image.layers.iter().map(|layer| layer.skipped_devices).sum();
        if skipped > 0 {
            let nodes = count(skipped, "device node");
            context
                .output
                .note(&format!("{nodes} skipped: sessions have their own /dev"));
        }
        let unmapped = image.layers.iter().map(|layer| layer.owners_out_of_range);
        let unmapped: u64 = unmapped.sum();
        if unmapped > 0 {
            let files = count(unmapped, "file");
            context.output.note(&format!(
                "{files} with an owner or group above 65535: in native sessions they belong to nobody"
            ));
        }
    }
    Ok(Exit::Done)
}

fn removal_path(name: &str, force: bool) -> String {
    let parameters = if force { "?force=true" } else { "" };
    format!("{}{parameters}", path(name))
}

fn path(name: &str) -> String {
    format!("/v1/images/{}", encode(name))
}
