//! The pages: each configuration is accepted, each command and request exists. What they do when they are typed
//! is tested elsewhere; each command that no test types is listed here, with the reason.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use conman_e2e::binary;
use serde_json::Value;

/// Commands besides conman's and cargo's by their beginnings, with the test that types them, or why none does.
const OTHERS: &[(&str, &str)] = &[
    ("curl ", "first_hour"),
    ("AUTH=", "first_hour"),
    ("JSON=", "first_hour"),
    ("tar -c . | curl ", "first_hour"),
    ("docker save ", "first_hour; programs::images in acceptance"),
    ("docker export ", "programs::images in acceptance"),
    ("debootstrap ", "programs::images in acceptance"),
    ("buildah push ", "programs::images in acceptance"),
    ("skopeo copy ", "programs::images in acceptance"),
    (
        "apko ",
        "not packaged by the distribution; it writes the format of `docker save`",
    ),
    (
        "docker build ",
        "BuildKit fetches its front end from a registry; its result is `docker save`'s",
    ),
    (
        "buildah build ",
        "as `docker build`; its result is that of `buildah push`",
    ),
    (
        "install ",
        "vm, which installs the same files under systemd",
    ),
    ("systemctl ", "vm, whose machine runs systemd"),
    (
        "mkdir -p /run/systemd/",
        "needs systemd; the start with the floor is row 47 of the fault matrix",
    ),
    ("printf '[Service]", "as the line before"),
    ("rm /run/systemd/", "as the line before"),
];

/// Lines that are answers, not commands.
const ANSWERS: [&str; 2] = ["{", "→"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every page with its text.
fn pages() -> Vec<(String, String)> {
    let mut pages: Vec<PathBuf> = [
        "README.md",
        "proto/README.md",
        "proto/programs.md",
        "benches/README.md",
        "tests/README.md",
        "crates/README.md",
    ]
    .iter()
    .map(|page| root().join(page))
    .collect();
    let deploy = fs::read_dir(root().join("deploy")).expect("the directory is there");
    let deploy = deploy.map(|entry| entry.expect("an entry").path());
    pages.extend(deploy.filter(|path| path.extension().is_some_and(|it| it == "md")));
    let read = |path: PathBuf| {
        (
            path.display().to_string(),
            fs::read_to_string(&path).expect("a page"),
        )
    };
    pages.into_iter().map(read).collect()
}

/// The blocks of a page in this language.
pub(crate) fn fenced(page: &str, language: &str) -> Vec<String> {
    let begin = format!("```{language}\n");
    let blocks = page.split(&begin).skip(1);
    blocks
        .map(|rest| rest.split("```").next().unwrap_or_default().to_owned())
        .collect()
}

/// The page without its fenced blocks.
fn prose(page: &str) -> String {
    let parts = page.split("\n```").step_by(2);
    parts.collect::<Vec<_>>().join("\n")
}

/// Indented lines with their continuations, and what stands between backquotes.
fn code(page: &str) -> (Vec<String>, Vec<String>) {
    let prose = prose(page);
    let mut lines: Vec<String> = Vec::new();
    for line in prose.lines().filter_map(|line| line.strip_prefix("    ")) {
        match lines.last_mut() {
            Some(last) if last.ends_with('\\') || last.ends_with(" |") || line.starts_with(' ') => {
                last.push_str(line);
            }
            _ => lines.push(line.to_owned()),
        }
    }
    let text: Vec<&str> = prose
        .lines()
        .filter(|line| !line.starts_with("    "))
        .collect();
    let text = text.join("\n");
    let spans = text.split('`').skip(1).step_by(2);
    let spans = spans.map(|span| span.split_whitespace().collect::<Vec<_>>().join(" "));
    (lines, spans.collect())
}

/// The commands of a line that begin with `program`, without comments.
fn commands<'a>(line: &'a str, program: &str) -> Vec<&'a str> {
    let line = line.split(" #").next().unwrap_or_default();
    let parts = line
        .split("&&")
        .flat_map(|part| part.split('|'))
        .map(str::trim);
    parts
        .filter(|part| part.split(' ').next() == Some(program))
        .collect()
}

/// Whether `program` has this subcommand and these options. A word that stands for a value need not be one.
fn is_understood(program: &Path, words: &str) -> Result<(), String> {
    let words = words.split_whitespace().skip(1);
    let words = words.filter(|word| !word.contains(['[', '…', '<']));
    // What is executed in a session is not conman's.
    let words: Vec<&str> = words.take_while(|word| *word != "--").collect();
    let line = format!("{} {} --help", program.display(), words.join(" "));
    let output = Command::new("bash").args(["-fc", &line]).output();
    let text = String::from_utf8_lossy(&output.expect("bash runs").stderr).into_owned();
    let is_wrong = ["unrecognized subcommand", "unexpected argument"]
        .iter()
        .any(|mistake| text.contains(mistake));
    match is_wrong {
        true => Err(text),
        false => Ok(()),
    }
}

#[test]
fn every_command_of_the_pages_exists_and_is_typed_by_a_test_or_says_why_not() {
    // It is what runs the suite.
    let xtask = binary().with_file_name("xtask");
    let (mut checked, mut wrong) = (BTreeSet::new(), Vec::new());
    let mut unused: BTreeSet<&str> = OTHERS.iter().map(|(begin, _)| *begin).collect();
    for (name, page) in pages() {
        let (lines, spans) = code(&page);
        for line in &lines {
            let known = OTHERS.iter().find(|(begin, _)| line.starts_with(begin));
            if let Some((begin, _)) = known {
                unused.remove(begin);
            }
            let is_other = ["conman ", "cargo ", "#"]
                .iter()
                .any(|begin| line.starts_with(begin))
                || ANSWERS.iter().any(|begin| line.starts_with(begin))
                || is_request(line);
            if known.is_none() && !is_other {
                wrong.push(format!("{name}: no test types `{line}`"));
            }
        }
        for text in lines.iter().chain(&spans) {
            let own = commands(text, "conman")
                .into_iter()
                .map(|it| (binary(), it));
            let cargo = commands(text, "cargo").into_iter();
            let xtask = cargo.filter_map(|it| Some((&*xtask, it.strip_prefix("cargo ")?)));
            for (program, command) in own.chain(xtask.filter(|(_, it)| it.starts_with("xtask "))) {
                if !checked.insert(command.to_owned()) {
                    continue;
                }
                if let Err(why) = is_understood(program, command) {
                    wrong.push(format!("{name}: {command}: {why}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked.len() > 70, "{} commands", checked.len());
    assert!(unused.is_empty(), "on no page: {unused:?}");
}

const METHODS: [&str; 5] = ["GET", "PUT", "POST", "PATCH", "DELETE"];

fn is_request(line: &str) -> bool {
    METHODS
        .iter()
        .any(|method| line.starts_with(&format!("{method} ")))
}

/// Whether the path of a page is one of the description's.
fn is_described(path: &str, described: &str) -> bool {
    let (path, described) = (path.split('/'), described.split('/'));
    path.clone().count() == described.clone().count()
        && path
            .zip(described)
            .all(|(own, one)| own == one || one.starts_with('{'))
}

#[test]
fn every_request_of_the_pages_is_described() {
    let text = fs::read_to_string(root().join("proto/openapi.json")).expect("it is there");
    let description: Value = serde_json::from_str(&text).expect("JSON");
    let described = description["paths"].as_object().expect("paths");
    let (mut checked, mut wrong) = (0, Vec::new());
    for (name, page) in pages() {
        let (lines, spans) = code(&page);
        for text in lines.iter().chain(&spans).filter(|text| is_request(text)) {
            let (method, rest) = text.split_once(' ').expect("a request");
            let method = method.to_lowercase();
            let paths = rest.trim_start().split(", ").map_while(|part| {
                let path = part.split([' ', '?', '&']).next()?;
                path.starts_with("/v1/").then_some(path)
            });
            for path in paths.filter(|path| !path.contains('…')) {
                checked += 1;
                let found = described.iter().any(|(one, operations)| {
                    is_described(path, one) && operations.get(&method).is_some()
                });
                if !found {
                    wrong.push(format!("{name}: {method} {path}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked > 40, "{checked} requests");
}

#[test]
fn every_configuration_of_the_pages_is_accepted() {
    let directory = tempfile::tempdir().expect("a directory");
    let own = directory.path().to_str().expect("text");
    let token = Command::new(binary())
        .args([
            "auth",
            "new-token",
            "--json",
            "--name",
            "page",
            "--scope",
            "admin",
        ])
        .output()
        .expect("conman runs");
    let token: Value = serde_json::from_slice(&token.stdout).expect("JSON");
    let entry = token["entry"].as_str().expect("an entry");
    for (file, text) in [
        ("tokens.toml", entry),
        ("fleet.key", "0123456789abcdef0123456789abcdef"),
        ("registry-password", "secret\n"),
    ] {
        let path = directory.path().join(file);
        fs::write(&path, text).expect("written");
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(&path, private).expect("it is ours");
    }
    let mut configurations = 0;
    let example =
        fs::read_to_string(root().join("deploy/conman.example.toml")).expect("it is there");
    let blocks = pages().into_iter().flat_map(|(name, page)| {
        fenced(&page, "toml")
            .into_iter()
            .map(move |block| (name.clone(), block))
    });
    for (name, block) in blocks.chain([("conman.example.toml".to_owned(), example)]) {
        configurations += 1;
        let file = directory.path().join("conman.toml");
        fs::write(&file, block.replace("/etc/conman", own)).expect("written");
        let output = Command::new(binary())
            .args(["config", "check"])
            .arg(&file)
            .output()
            .expect("conman runs");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {block}\n{text}");
    }
    assert!(configurations >= 10, "{configurations} configurations");
}
