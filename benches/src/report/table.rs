//! Tables.

use std::fmt;

use comfy_table::{Cell, CellAlignment, presets};

/// A table of text. Columns of numbers are aligned to the right.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new<T: Into<String>>(header: impl IntoIterator<Item = T>) -> Self {
        Self {
            header: header.into_iter().map(Into::into).collect(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn row<T: Into<String>>(&mut self, cells: impl IntoIterator<Item = T>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// Whether a column has nothing but numbers with their units. The first one has names.
    pub(super) fn is_numeric(&self, column: usize) -> bool {
        let is_number = |cell: &String| {
            let begins =
                cell.starts_with(|first: char| first.is_ascii_digit() || "–-".contains(first));
            begins && !cell.contains(',')
        };
        let mut cells = self.rows.iter().filter_map(|row| row.get(column));
        column > 0 && cells.all(is_number)
    }

    pub(super) fn header(&self) -> &[String] {
        &self.header
    }

    pub(super) fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }
}

impl fmt::Display for Table {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header(&self.header);
        for row in &self.rows {
            let cells = row.iter().enumerate().map(|(column, cell)| {
                let alignment = match self.is_numeric(column) {
                    true => CellAlignment::Right,
                    false => CellAlignment::Left,
                };
                Cell::new(cell).set_alignment(alignment)
            });
            table.add_row(cells);
        }
        table.fmt(formatter)
    }
}
