//! Images as the API shows them.

use conman_image::ImageSummary;
use conman_proto::{
    GcReport, Image, ImageConfig, ImageLayer, ImageRemoval, LayerProgress, PullPhase, PullProgress,
};
use jiff::Timestamp;

pub(crate) fn image(summary: ImageSummary) -> Image {
    let names = names(&summary);
    let image = summary.image;
    let layers = image.layers.iter().map(|layer| ImageLayer {
        id: layer.id.to_string(),
        size_bytes: layer.file_bytes,
        skipped_devices: layer.skipped_devices,
        owners_out_of_range: layer.owners_out_of_range,
    });
    let config = image.config;
    Image {
        id: image.id.to_string(),
        names,
        architecture: image.architecture,
        size_bytes: summary.file_bytes,
        imported_at: i64::try_from(summary.imported_at_s)
            .ok()
            .and_then(|seconds| Timestamp::from_second(seconds).ok())
            .unwrap_or(Timestamp::UNIX_EPOCH),
        in_use: summary.in_use,
        layers: layers.collect(),
        config: ImageConfig {
            entrypoint: config.entrypoint,
            cmd: config.cmd,
            env: config.env,
            user: config.user,
            workdir: config.workdir,
            stop_signal: config.stop_signal,
            exposed_ports: config.exposed_ports,
            labels: config.labels,
        },
    }
}

pub(crate) fn removal(name: &conman_image::ImageName, summary: &ImageSummary) -> ImageRemoval {
    ImageRemoval {
        name: name.to_string(),
        id: summary.image.id.to_string(),
        names: names(summary),
        in_use: summary.in_use,
    }
}

pub(crate) fn report(report: &conman_image::GcReport) -> GcReport {
    let texts =
        |digests: &[conman_image::Digest]| digests.iter().map(ToString::to_string).collect();
    GcReport {
        images: texts(&report.images),
        layers: texts(&report.layers),
        freed_bytes: report.freed_bytes,
    }
}

pub(crate) fn progress(progress: &conman_image::PullProgress) -> PullProgress {
    PullProgress {
        phase: match progress.phase {
            conman_image::PullPhase::Waiting => PullPhase::Waiting,
            conman_image::PullPhase::Resolving => PullPhase::Resolving,
            conman_image::PullPhase::Downloading => PullPhase::Downloading,
            conman_image::PullPhase::Unpacking => PullPhase::Unpacking,
        },
        layers: progress
            .layers
            .iter()
            .map(|layer| LayerProgress {
                blob: layer.blob.to_string(),
                total_bytes: layer.total_bytes,
                done_bytes: layer.done_bytes,
            })
            .collect(),
    }
}

fn names(summary: &ImageSummary) -> Vec<String> {
    summary.names.iter().map(ToString::to_string).collect()
}
