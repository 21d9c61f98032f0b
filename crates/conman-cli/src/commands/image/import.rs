//! `conman image import`: an archive from a file or from standard input, or an OCI image layout's
//! directory.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use conman_proto::Image;

use super::super::Context;
use super::layout;
use crate::args::ImageImportArgs;
use crate::client::{IMPORT, encode};
use crate::failure::{Exit, Failure};
use crate::human::printable;
use crate::pieces::{self, Unread};
use crate::progress::Progress;

pub(super) async fn run(context: &Context, args: &ImageImportArgs) -> Result<Exit, Failure> {
    let (source, length) = open(&args.file)?;
    let unread = Unread::default();
    let pieces = pieces::produce(unread.clone(), move |to| match source {
        Source::Archive(mut archive) => pieces::copy(&mut *archive, to),
        Source::Layout(directory) => layout::pack(&directory, pieces::buffered(to)),
    });
    let pieces = pieces.map_err(|error| cannot_read(&args.file, &error))?;
    let progress = Progress::start(&context.output, "sending".to_owned());
    let path = format!("/v1/images?name={}", encode(&args.name));
    let answer = context
        .client
        .upload::<Image>(
            &path,
            pieces::with_progress(pieces, progress, length),
            length,
            IMPORT,
        )
        .await;
    // An error of reading is reported as such, not as the broken connection that it caused.
    if let Some(error) = unread.take() {
        return Err(cannot_read(&args.file, &error));
    }
    super::arrived(context, &args.name, &answer?)
}

enum Source {
    Archive(Box<dyn Read + Send>),
    Layout(PathBuf),
}

/// The data to send, and its length if known.
fn open(path: &Path) -> Result<(Source, Option<u64>), Failure> {
    if path == Path::new("-") {
        return Ok((Source::Archive(Box::new(io::stdin())), None));
    }
    let failed = |error: io::Error| cannot_read(path, &error);
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if metadata.is_dir() && layout::is_layout(path) {
        return Ok((Source::Layout(path.to_owned()), None));
    }
    if metadata.is_dir() {
        let shown = path.display();
        return Err(Failure::usage(format!(
            "{shown} is a directory, but not an OCI image layout"
        ))
        .next(format!(
            "tar -C {shown} -c . | conman image import - NAME:TAG"
        )));
    }
    // Pipes and devices have no length, and kernel files report 0.
    let length = (metadata.is_file() && metadata.len() > 0).then_some(metadata.len());
    Ok((Source::Archive(Box::new(file)), length))
}

fn cannot_read(path: &Path, error: &io::Error) -> Failure {
    let path = path.display().to_string();
    Failure::new(
        Exit::Failed,
        "archive-unreadable",
        "The archive cannot be read",
        format!("{}: {error}", printable(&path)),
    )
}
