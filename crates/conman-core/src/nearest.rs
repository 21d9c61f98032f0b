//! The known name that a misspelt one probably means.

/// Minimum similarity (Jaro-Winkler) at which a name counts as a misspelling of another.
const SIMILAR: f64 = 0.8;

/// Longer names are not compared: a typo is unlikely, and the comparison is quadratic.
const MAX_CHARS: usize = 64;

/// The known name that `given` is most likely a misspelling of, for messages.
#[must_use]
pub fn nearest<'a>(given: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if given.chars().count() > MAX_CHARS {
        return None;
    }
    let given = given.to_lowercase();
    known
        .into_iter()
        .map(|name| (strsim::jaro_winkler(&given, &name.to_lowercase()), name))
        .filter(|(similarity, _)| *similarity >= SIMILAR)
        .max_by(|one, other| one.0.total_cmp(&other.0))
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelling_finds_its_name_and_nonsense_finds_none() {
        let known = ["python", "node", "demo"];
        assert_eq!(nearest("pyhton", known), Some("python"));
        assert_eq!(nearest("Python3", known), Some("python"));
        assert_eq!(nearest("xyzzy", known), None);
        assert_eq!(nearest("", known), None);
        assert_eq!(nearest(&"python".repeat(100), known), None);
    }
}
