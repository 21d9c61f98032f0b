//! The tables of deploy/security.md are those of the code.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

const ALLOWED: &str = include_str!("../seccomp_profile.rs");
const REFUSED: &str = include_str!("../../../conman-shim-protocol/src/system_calls.rs");
const SPEC: &str = include_str!("../../../conman-shim-protocol/src/spec.rs");

/// Where a generated part begins and ends in the page.
const BEGIN: &str = "<!-- generated: cargo test -p conman-shim security_page -->\n";
const END: &str = "<!-- end of what is generated -->\n";

/// Set to write the page in place of comparing it.
const UPDATE: &str = "UPDATE_SECURITY_PAGE";

/// The words behind `prefix` in the item that begins with `item`, in the order of the code.
fn words(source: &str, item: &str, prefix: &str) -> Vec<String> {
    let (_, rest) = source.split_once(item).expect("the item is in the code");
    let ends = [rest.find(';'), rest.find("\n}")];
    let body = &rest[..ends.into_iter().flatten().min().expect("it ends")];
    let found = body.split(prefix).skip(1).map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        rest[..end.unwrap_or(rest.len())].to_owned()
    });
    found.collect()
}

fn calls(source: &str, item: &str) -> String {
    let mut names = words(source, item, "SYS_");
    names.sort_unstable();
    names.join(", ")
}

fn tables() -> String {
    let capabilities = words(SPEC, "const SHORT_LIST", "Capabilities::");
    let mut text = String::new();
    let _ = writeln!(text, "\n| capabilities | |\n|---|---|");
    let _ = writeln!(
        text,
        "| root in a session has | {} |",
        capabilities.join(", ")
    );
    let _ = writeln!(text, "| any other user has | none |");
    let _ = writeln!(text, "\n| system calls | |\n|---|---|");
    let _ = writeln!(text, "| allowed | {} |", calls(ALLOWED, "const ALLOWED"));
    let _ = writeln!(
        text,
        "| allowed unless the template has `ipc = false` | {} |",
        calls(ALLOWED, "const IPC:")
    );
    let _ = writeln!(
        text,
        "| allowed with some arguments | {} |",
        calls(REFUSED, "const BY_ARGUMENTS")
    );
    let _ = writeln!(
        text,
        "| refused with EPERM | {} |",
        calls(REFUSED, "const REFUSED:")
    );
    let _ = writeln!(text, "| refused with ENOSYS | clone3 and all others |");
    let _ = writeln!(text, "| kill the process | those of i386 |\n");
    text
}

#[test]
fn the_security_page_has_the_tables_of_the_code() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/security.md");
    let page = fs::read_to_string(&path).expect("the page is there");
    let (before, rest) = page.split_once(BEGIN).expect("a generated part begins");
    let (_, after) = rest.split_once(END).expect("it ends");
    let current = format!("{before}{BEGIN}{}{END}{after}", tables());
    if std::env::var_os(UPDATE).is_some() {
        fs::write(&path, current).expect("written");
        return;
    }
    assert!(
        page == current,
        "deploy/security.md has other tables than the code; run\n\
         {UPDATE}=1 cargo test -p conman-shim --lib security_page"
    );
}
