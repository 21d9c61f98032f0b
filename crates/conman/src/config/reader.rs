//! Reads a TOML table field by field, so that one pass finds every mistake, with its line, and
//! every unknown field, with the nearest known name.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use conman_core::nearest;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// One mistake in a configuration file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Mistake {
    pub(crate) line: usize,
    pub(crate) text: String,
}

/// Collects mistakes. Remembers each field's place for mistakes that are found later.
#[derive(Debug)]
pub(crate) struct Reader<'s> {
    source: &'s str,
    mistakes: RefCell<Vec<Mistake>>,
    lines: RefCell<BTreeMap<String, usize>>,
}

impl<'s> Reader<'s> {
    pub(crate) fn new(source: &'s str) -> Self {
        Self {
            source,
            mistakes: RefCell::default(),
            lines: RefCell::default(),
        }
    }

    /// Reports a mistake in the field at `path`, or in the nearest enclosing table that exists in
    /// the file.
    pub(crate) fn mistake(&self, path: &str, text: impl fmt::Display) {
        let lines = self.lines.borrow();
        let mut known = path;
        let line = loop {
            if let Some(line) = lines.get(known) {
                break *line;
            }
            match known.rfind(['.', '[']) {
                Some(end) => known = &known[..end],
                None => break 1,
            }
        };
        drop(lines);
        self.report(line, format!("`{path}` {text}"));
    }

    pub(crate) fn into_mistakes(self) -> Vec<Mistake> {
        let mut mistakes = self.mistakes.into_inner();
        mistakes.sort();
        mistakes
    }

    pub(crate) fn report(&self, line: usize, text: String) {
        self.mistakes.borrow_mut().push(Mistake { line, text });
    }

    pub(crate) fn line_of(&self, offset: usize) -> usize {
        let before = self.source.get(..offset).unwrap_or(self.source);
        before.bytes().filter(|byte| *byte == b'\n').count() + 1
    }
}

/// A table that is being read. [`Section::finish`] reports the fields that were not read.
pub(crate) struct Section<'r, 's> {
    reader: &'r Reader<'s>,
    path: String,
    fields: BTreeMap<&'r str, &'r Spanned<DeValue<'s>>>,
    known: RefCell<Vec<String>>,
}

impl<'r, 's> Section<'r, 's> {
    pub(crate) fn new(reader: &'r Reader<'s>, path: &str, table: &'r DeTable<'s>) -> Self {
        let mut lines = reader.lines.borrow_mut();
        let fields = table
            .iter()
            .map(|(key, value)| {
                let name: &str = key.get_ref();
                lines.insert(join(path, name), reader.line_of(key.span().start));
                (name, value)
            })
            .collect();
        drop(lines);
        Self {
            reader,
            path: path.to_owned(),
            fields,
            known: RefCell::default(),
        }
    }

    /// A table that does not exist in the file.
    pub(crate) fn absent(reader: &'r Reader<'s>, path: &str) -> Self {
        Self {
            reader,
            path: path.to_owned(),
            fields: BTreeMap::new(),
            known: RefCell::default(),
        }
    }

    /// The field's full name.
    pub(crate) fn path(&self, field: &str) -> String {
        join(&self.path, field)
    }

    pub(crate) fn mistake(&self, field: &str, text: impl fmt::Display) {
        self.reader.mistake(&self.path(field), text);
    }

    pub(crate) fn string(&self, field: &str) -> Option<String> {
        match self.take(field)? {
            DeValue::String(text) => Some(text.clone().into_owned()),
            other => self.wrong(field, "a string", other),
        }
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

    pub(crate) fn boolean(&self, field: &str) -> Option<bool> {
        match self.take(field)? {
            DeValue::Boolean(value) => Some(*value),
            other => self.wrong(field, "true or false", other),
        }
    }

    pub(crate) fn integer<T: TryFrom<u64>>(
        &self,
        field: &str,
        range: RangeInclusive<u64>,
    ) -> Option<T> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        match self.take(field)? {
            DeValue::Integer(digits) => {
                let value = u64::from_str_radix(digits.as_str(), digits.radix()).ok();
                let value = value.filter(|value| range.contains(value));
                let value = value.and_then(|value| T::try_from(value).ok());
                if value.is_none() {
                    self.mistake(field, format_args!("is {digits}, but must be {expected}"));
                }
                value
            }
            other => self.wrong(field, &expected, other),
        }
    }

    pub(crate) fn number(&self, field: &str) -> Option<f64> {
        match self.take(field)? {
            DeValue::Integer(digits) => digits.as_str().parse().ok(),
            DeValue::Float(digits) => digits.as_str().parse().ok(),
            other => self.wrong(field, "a number", other),
        }
    }

    pub(crate) fn strings(&self, field: &str) -> Option<Vec<String>> {
        let DeValue::Array(array) = self.take(field)? else {
            self.mistake(field, "must be a list of strings");
            return None;
        };
        let strings: Option<Vec<String>> = array
            .iter()
            .map(|value| match value.get_ref() {
                DeValue::String(text) => Some(text.clone().into_owned()),
                _ => None,
            })
            .collect();
        if strings.is_none() {
            self.mistake(field, "must be a list of strings");
        }
        strings
    }

    pub(crate) fn string_map(&self, field: &str) -> Option<BTreeMap<String, String>> {
        let DeValue::Table(table) = self.take(field)? else {
            self.mistake(field, "must be a table of strings");
            return None;
        };
        let section = Section::new(self.reader, &self.path(field), table);
        let names: Vec<&str> = section.fields.keys().copied().collect();
        names
            .into_iter()
            .map(|name| section.string(name).map(|value| (name.to_owned(), value)))
            .collect()
    }

    /// The table of this name; an empty one if it is absent or not a table.
    pub(crate) fn section(&self, field: &str) -> Section<'r, 's> {
        match self.take(field) {
            Some(DeValue::Table(table)) => Section::new(self.reader, &self.path(field), table),
            Some(other) => {
                self.wrong::<()>(field, "a table", other);
                Section::absent(self.reader, &self.path(field))
            }
            None => Section::absent(self.reader, &self.path(field)),
        }
    }

    /// Every table below this one, by name.
    pub(crate) fn sections(&self) -> Vec<(String, Section<'r, 's>)> {
        let names: Vec<&str> = self.fields.keys().copied().collect();
        names
            .into_iter()
            .map(|name| (name.to_owned(), self.section(name)))
            .collect()
    }

    /// Reports every field that was not read.
    pub(crate) fn finish(&self) {
        let known = self.known.borrow();
        for name in self.fields.keys() {
            if known.iter().any(|known| known == name) {
                continue;
            }
            let place = if self.path.is_empty() {
                "this file".to_owned()
            } else {
                format!("[{}]", self.path)
            };
            let hint = match nearest(name, known.iter().map(String::as_str)) {
                Some(nearest) => format!("did you mean `{nearest}`?"),
                None => format!("{place} may hold {}", known.join(", ")),
            };
            self.mistake(name, format_args!("is not known; {hint}"));
        }
    }

    fn take(&self, field: &str) -> Option<&'r DeValue<'s>> {
        let mut known = self.known.borrow_mut();
        if !known.iter().any(|name| name == field) {
            known.push(field.to_owned());
        }
        self.fields.get(field).map(|value| value.get_ref())
    }

    fn wrong<T>(&self, field: &str, expected: &str, found: &DeValue<'_>) -> Option<T> {
        self.mistake(
            field,
            format_args!("is {}, but must be {expected}", kind(found)),
        );
        None
    }
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a number with a fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

fn join(path: &str, field: &str) -> String {
    if path.is_empty() {
        field.to_owned()
    } else {
        format!("{path}.{field}")
    }
}
