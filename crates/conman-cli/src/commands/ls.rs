//! `conman ls`: the entries of a directory of a session.

use std::cmp::Ordering;

use comfy_table::Cell;
use conman_proto::{FileEntry, FileList, FileType};
use http::Method;
use jiff::Timestamp;

use super::Context;
use crate::args::LsArgs;
use crate::client::{PROMPT, encode};
use crate::failure::{Exit, Failure};
use crate::human::{ago, bytes, printable};

pub(super) async fn run(context: &Context, args: &LsArgs) -> Result<Exit, Failure> {
    let directory = &args.directory;
    let mut path = format!(
        "/v1/sessions/{}/files/list?path={}",
        directory.id,
        encode(&directory.path)
    );
    if let Some(user) = &args.user {
        path.push_str(&format!("&user={}", encode(user)));
    }
    let answer = context
        .client
        .answer::<FileList>(Method::GET, &path, None::<&()>, PROMPT)
        .await?;
    let output = &context.output;
    if output.json {
        output.value(&answer.raw)?;
        return Ok(Exit::Done);
    }
    let mut entries = answer.value.entries;
    entries.sort_by(by_name);
    if args.quiet {
        for entry in &entries {
            output.line(&printable(&entry.name))?;
        }
    } else if entries.is_empty() {
        output.note("no entries");
    } else {
        let now = Timestamp::now();
        let rows = entries.iter().map(|entry| row(entry, now)).collect();
        output.table(&["MODE", "OWNER", "SIZE", "CHANGED", "NAME"], rows)?;
    }
    Ok(Exit::Done)
}

fn by_name(one: &FileEntry, other: &FileEntry) -> Ordering {
    one.name.cmp(&other.name)
}

fn row(entry: &FileEntry, now: Timestamp) -> Vec<Cell> {
    let kind = match entry.kind {
        FileType::File => '-',
        FileType::Directory => 'd',
        FileType::Link => 'l',
        FileType::Other => 'o',
    };
    let name = match &entry.link_target {
        Some(target) => format!("{} -> {}", printable(&entry.name), printable(target)),
        None => printable(&entry.name).into_owned(),
    };
    vec![
        Cell::new(format!("{kind}{}", entry.mode)),
        Cell::new(format!("{}:{}", entry.uid, entry.gid)),
        Cell::new(bytes(entry.size)),
        Cell::new(ago(now, entry.modified_at)),
        Cell::new(name),
    ]
}
