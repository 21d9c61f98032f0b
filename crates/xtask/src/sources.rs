//! Checks of the sources that neither the compiler nor clippy makes: every file begins with what it is, and tests
//! that documents name exist.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::process::root;

/// The document with the table of promises and their tests, and the heading above that table.
const DOCUMENT: &str = "tests/README.md";
const HEADING: &str = "## Promises and their tests";

/// Where Rust files are.
const FOLDERS: [&str; 4] = ["benches", "crates", "proto", "tests"];

/// The end of a name that is not written out.
const CUT: char = '…';

struct Source {
    /// Relative to the repository's root.
    path: PathBuf,
    text: String,
}

pub(crate) fn check() -> Result<()> {
    let sources = sources()?;
    let silent = sources
        .iter()
        .filter(|source| !source.text.starts_with("//! "));
    let silent: Vec<_> = silent
        .map(|source| source.path.display().to_string())
        .collect();
    if !silent.is_empty() {
        bail!(
            "begin these files with a line `//! …` that says what each is:\n  {}",
            silent.join("\n  ")
        );
    }
    tests_exist(&sources)
}

/// Checks that tests exist that the table of promises names, and the reasons of ignored tests.
fn tests_exist(sources: &[Source]) -> Result<()> {
    let document = root().join(DOCUMENT);
    let document =
        fs::read_to_string(&document).with_context(|| format!("reading {}", document.display()))?;
    let table = document.split_once(HEADING).with_context(|| {
        format!("{DOCUMENT} has no heading `{HEADING}`, below which tests are named")
    })?;
    let table = table.1.lines().filter(|line| line.starts_with('|'));
    let table = table.map(|line| (DOCUMENT.to_owned(), line));
    let reasons = sources.iter().flat_map(|source| {
        let ignored = source.text.lines();
        let ignored = ignored.filter(|line| line.trim_start().starts_with("#[ignore = "));
        ignored.map(|line| (source.path.display().to_string(), line))
    });
    let named = table.chain(reasons);
    let named = named.flat_map(|(place, line)| {
        let names = test_names(line);
        names.map(move |name| (place.clone(), name))
    });
    let mut unknown = Vec::new();
    for (place, name) in named {
        if !sources.iter().any(|source| source.has_test(name)) {
            unknown.push(format!("{place}: `{name}`"));
        }
    }
    if unknown.is_empty() {
        return Ok(());
    }
    bail!("there are no such tests:\n  {}", unknown.join("\n  "))
}

/// The tests that a line names as `module::`, `module::name` or, cut, `name…`.
fn test_names(line: &str) -> impl Iterator<Item = &str> {
    let quoted = line.split('`').skip(1).step_by(2);
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | ':');
    quoted.filter(move |text| {
        (text.contains("::") || text.ends_with(CUT))
            && text.trim_end_matches(CUT).chars().all(is_name)
    })
}

impl Source {
    /// Whether the file is of these modules and has this test, or is in a folder of that name.
    fn has_test(&self, name: &str) -> bool {
        let mut parts: Vec<&str> = name.split("::").collect();
        let test = parts.pop().unwrap_or_default();
        let path = self.path.with_extension("");
        let path: Vec<&str> = path.iter().filter_map(|part| part.to_str()).collect();
        let is_module = parts.is_empty() || path.windows(parts.len()).any(|some| some == parts);
        let has = |start: &str| self.text.contains(&format!("fn {start}"));
        is_module
            && match test.strip_suffix(CUT) {
                Some(start) => has(start),
                None => test.is_empty() || has(&format!("{test}(")),
            }
    }
}

/// Every Rust file.
fn sources() -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    let mut folders: Vec<PathBuf> = FOLDERS.map(|folder| root().join(folder)).into();
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("listing {}", folder.display()))?;
        for entry in entries {
            let path = entry
                .with_context(|| format!("listing {}", folder.display()))?
                .path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path)
                    .with_context(|| format!("reading {}", path.display()))?;
                let path = path
                    .strip_prefix(root())
                    .map_or(path.clone(), Path::to_owned);
                sources.push(Source { path, text });
            }
        }
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_found_by_their_module_and_the_start_of_their_name() {
        let names: Vec<_> =
            test_names("| `trait X` | e2e `a::b_c…`, `d::`; `row_20…`, `T::new` |").collect();
        assert_eq!(names, ["a::b_c…", "d::", "row_20…"]);
        let source = Source {
            path: "tests/e2e/tests/suite/rows/a.rs".into(),
            text: "#[test]\nfn b_c_d() {\n".to_owned(),
        };
        for name in ["a::b_c…", "b_c…", "rows::a::b_c_d", "a::", "rows::"] {
            assert!(source.has_test(name), "{name}");
        }
        for name in ["a::b_c", "b::b_c…", "a::c…"] {
            assert!(!source.has_test(name), "{name}");
        }
    }
}
