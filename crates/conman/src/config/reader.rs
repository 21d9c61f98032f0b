//! Reads a TOML table field by field, so that one pass finds every mistake, with its line, and
//! every unknown field, with the nearest known name.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::Component::ParentDir;
use std::path::PathBuf;

use conman_core::nearest;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

/// One mistake in a configuration file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Mistake {
    pub(crate) line: usize,
    pub(crate) text: String,
}

/// Collects mistakes. Knows each field's place, also for mistakes that are found later.
#[derive(Debug)]
pub(crate) struct Reader<'s> {
    source: &'s str,
    mistakes: RefCell<Vec<Mistake>>,
    /// Offsets in the source, by the fields' full names.
    offsets: BTreeMap<String, usize>,
}

impl<'s> Reader<'s> {
    pub(crate) fn new(source: &'s str, root: &DeTable<'s>) -> Self {
        let mut offsets = BTreeMap::new();
        find_fields("", root, &mut offsets);
        Self {
            source,
            mistakes: RefCell::default(),
            offsets,
        }
    }

    /// Reports a mistake in the field at `path`, or in the nearest enclosing table that exists in
    /// the file.
    pub(crate) fn mistake(&self, path: &str, text: impl fmt::Display) {
        let mut known = path;
        let offset = loop {
            if let Some(offset) = self.offsets.get(known) {
                break *offset;
            }
            match known.rfind(['.', '[']) {
                Some(end) => known = &known[..end],
                None => break 0,
            }
        };
        self.report(offset, format!("`{path}` {text}"));
    }

    pub(crate) fn report(&self, offset: usize, text: String) {
        let before = self.source.get(..offset).unwrap_or(self.source);
        let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
        self.mistakes.borrow_mut().push(Mistake { line, text });
    }

    pub(crate) fn into_mistakes(self) -> Vec<Mistake> {
        let mut mistakes = self.mistakes.into_inner();
        mistakes.sort();
        mistakes
    }
}

fn find_fields(path: &str, table: &DeTable<'_>, offsets: &mut BTreeMap<String, usize>) {
    for (key, value) in table {
        let path = join(path, key.get_ref());
        if let DeValue::Table(table) = value.get_ref() {
            find_fields(&path, table, offsets);
        }
        offsets.insert(path, key.span().start);
    }
}

/// A table that is being read. [`Section::finish`] reports the fields that were not read.
pub(crate) struct Section<'r, 's> {
    reader: &'r Reader<'s>,
    path: String,
    /// `None` if the file does not hold it.
    table: Option<&'r DeTable<'s>>,
    known: RefCell<Vec<String>>,
}

impl<'r, 's> Section<'r, 's> {
    pub(crate) fn new(
        reader: &'r Reader<'s>,
        path: String,
        table: Option<&'r DeTable<'s>>,
    ) -> Self {
        Self {
            reader,
            path,
            table,
            known: RefCell::default(),
        }
    }

    pub(crate) fn mistake(&self, field: &str, text: impl fmt::Display) {
        self.reader.mistake(&join(&self.path, field), text);
    }

    /// The field's value; `expected` describes the values that `T` can have.
    pub(crate) fn get<T: DeserializeOwned>(&self, field: &str, expected: &str) -> Option<T> {
        let value = self.take(field)?;
        let read = T::deserialize(ValueDeserializer::from(value.clone())).ok();
        if read.is_none() {
            let found = match value.get_ref() {
                DeValue::String(text) => format!("{text:?}"),
                DeValue::Integer(digits) => digits.to_string(),
                other => format!("of type {}", other.type_str()),
            };
            self.mistake(field, format_args!("is {found}, but must be {expected}"));
        }
        read
    }

    pub(crate) fn string(&self, field: &str) -> Option<String> {
        self.get(field, "a string")
    }

    /// A string that `parse` converts; its error text says what is allowed.
    pub(crate) fn parsed<T>(
        &self,
        field: &str,
        parse: impl FnOnce(&str) -> Result<T, String>,
    ) -> Option<T> {
        let text = self.string(field)?;
        parse(&text).map_err(|rule| self.mistake(field, rule)).ok()
    }

    /// An absolute path without `..`.
    pub(crate) fn path(&self, field: &str) -> Option<PathBuf> {
        self.parsed(field, |text| {
            let path = PathBuf::from(text);
            let plain = path.is_absolute() && !path.components().any(|part| part == ParentDir);
            plain
                .then_some(path)
                .ok_or_else(|| "must be an absolute path without `..`".to_owned())
        })
    }

    pub(crate) fn boolean(&self, field: &str) -> Option<bool> {
        self.get(field, "true or false")
    }

    pub(crate) fn integer<T: TryFrom<u64>>(
        &self,
        field: &str,
        range: RangeInclusive<u64>,
    ) -> Option<T> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        let value = self.get::<u64>(field, &expected)?;
        let fitting = T::try_from(value).ok().filter(|_| range.contains(&value));
        if fitting.is_none() {
            self.mistake(field, format_args!("is {value}, but must be {expected}"));
        }
        fitting
    }

    pub(crate) fn number(&self, field: &str) -> Option<f64> {
        self.get(field, "a number")
    }

    pub(crate) fn strings(&self, field: &str) -> Option<Vec<String>> {
        self.get(field, "a list that holds only strings")
    }

    pub(crate) fn string_map(&self, field: &str) -> Option<BTreeMap<String, String>> {
        self.take(field)?;
        let entries = self.section(field);
        entries
            .names()
            .map(|name| Some((name.to_owned(), entries.string(name)?)))
            .collect()
    }

    pub(crate) fn has(&self, field: &str) -> bool {
        self.table.is_some_and(|table| table.get(field).is_some())
    }

    /// The table of this name; an empty one if it is absent or not a table.
    pub(crate) fn section(&self, field: &str) -> Section<'r, 's> {
        let value = self.take(field).map(Spanned::get_ref);
        let table = value.and_then(DeValue::as_table);
        if let (Some(other), None) = (value, table) {
            let found = other.type_str();
            self.mistake(
                field,
                format_args!("is of type {found}, but must be a table"),
            );
        }
        Section::new(self.reader, join(&self.path, field), table)
    }

    /// Every table below this one, by name.
    pub(crate) fn sections(&self) -> Vec<(String, Section<'r, 's>)> {
        self.names()
            .map(|name| (name.to_owned(), self.section(name)))
            .collect()
    }

    /// Reports every field that was not read.
    pub(crate) fn finish(&self) {
        let known = self.known.borrow();
        for name in self.names() {
            if known.iter().any(|known| known == name) {
                continue;
            }
            let place = match self.path.as_str() {
                "" => "this file".to_owned(),
                path => format!("[{path}]"),
            };
            let hint = match nearest(name, known.iter().map(String::as_str)) {
                Some(nearest) => format!("did you mean `{nearest}`?"),
                None => format!("{place} may hold {}", known.join(", ")),
            };
            self.mistake(name, format_args!("is not known; {hint}"));
        }
    }

    fn names(&self) -> impl Iterator<Item = &'r str> + use<'r, 's> {
        let keys = self.table.into_iter().flat_map(|table| table.keys());
        keys.map(|key| &**key.get_ref())
    }

    fn take(&self, field: &str) -> Option<&'r Spanned<DeValue<'s>>> {
        let mut known = self.known.borrow_mut();
        if !known.iter().any(|name| name == field) {
            known.push(field.to_owned());
        }
        self.table?.get(field)
    }
}

fn join(path: &str, field: &str) -> String {
    match path {
        "" => field.to_owned(),
        path => format!("{path}.{field}"),
    }
}
