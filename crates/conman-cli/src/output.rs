//! The only place that writes to standard output and standard error.
//!
//! Everything uses `io::Write`, never `println!`: a reader that has gone is a normal end, not a
//! panic.

use std::io::{self, IsTerminal as _, Write as _};

use comfy_table::{Cell, Color, ColumnConstraint, ContentArrangement, Row, Table, Width};
use conman_proto::{LogStream, Problem, SessionState};
use serde::Serialize;

use crate::args::Globals;
use crate::failure::Failure;
use crate::human::{printable, printable_line};

/// Header of a column whose text may be long.
pub(crate) const PROSE: &str = "REASON";

/// A column with longer text is cut where the terminal is too narrow: to the first of these at least, or to the
/// second if the table fits then. Columns that still do not fit are left out, from the right.
const CUTS: [u16; 2] = [12, 8];
/// Blanks after a column.
const GAP: u16 = 2;

/// A longer line is shown in pieces.
const MAX_SHOWN_LINE_BYTES: usize = 64 * 1024;

/// How to print.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    /// Machine output: JSON on stdout, problem JSON on stderr, nothing else.
    pub(crate) json: bool,
    color: bool,
    /// Tables are not cut.
    wide: bool,
    stdout_terminal: bool,
    stderr_terminal: bool,
}

impl Output {
    pub(crate) fn new(globals: &Globals) -> Self {
        let stdout_terminal = io::stdout().is_terminal();
        // https://no-color.org: set to anything but the empty string.
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self {
            json: globals.json,
            wide: globals.wide,
            color: stdout_terminal && !globals.no_color && !no_color,
            stdout_terminal,
            stderr_terminal: io::stderr().is_terminal(),
        }
    }

    /// Whether a user watches while the command waits.
    pub(crate) fn shows_progress(&self) -> bool {
        self.stderr_terminal && !self.json
    }

    /// Text with a line end.
    pub(crate) fn line(&self, text: &str) -> Result<(), Failure> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        stdout.write_all(b"\n")?;
        Ok(stdout.flush()?)
    }

    /// The one JSON value of a command; on several lines for a user at a terminal.
    pub(crate) fn value(&self, value: &impl Serialize) -> Result<(), Failure> {
        if !self.stdout_terminal {
            return self.item(value);
        }
        let json = serde_json::to_string_pretty(value).map_err(io::Error::from)?;
        json.lines()
            .try_for_each(|line| self.line(&printable(line)))
    }

    /// One line of a stream of JSON values.
    pub(crate) fn item(&self, value: &impl Serialize) -> Result<(), Failure> {
        self.line(&serde_json::to_string(value).map_err(io::Error::from)?)
    }

    /// Writes a line that a session's program wrote earlier. On a terminal its control sequences are shown and
    /// not obeyed, unless `raw`: the program may be hostile to the reader of its log.
    pub(crate) fn program_line(&self, stream: LogStream, text: &str, raw: bool) -> io::Result<()> {
        let terminal = match stream {
            LogStream::Stdout => self.stdout_terminal,
            LogStream::Stderr => self.stderr_terminal,
        };
        let text = match terminal && !raw {
            true => printable_line(text),
            false => text.into(),
        };
        let line = format!("{text}\n");
        match stream {
            LogStream::Stdout => Self::raw_stdout(line.as_bytes()),
            LogStream::Stderr => Self::raw_stderr(line.as_bytes()),
        }
    }

    /// Writes output of a session's program unchanged, at once.
    pub(crate) fn raw_stdout(bytes: &[u8]) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(bytes)?;
        stdout.flush()
    }

    /// Writes output of a session's program unchanged, at once.
    pub(crate) fn raw_stderr(bytes: &[u8]) -> io::Result<()> {
        io::stderr().lock().write_all(bytes)
    }

    /// A table without borders, one line a row; its columns are cut to a terminal's width.
    pub(crate) fn table(&self, header: &[&str], rows: Vec<Vec<Cell>>) -> Result<(), Failure> {
        let mut table = Table::new();
        table
            .load_style(comfy_table::presets::NOTHING)
            .force_no_tty();
        let mut titles = Row::from(header);
        titles.max_height(1);
        table.set_header(titles).add_rows(rows);
        if self.color {
            table.enforce_styling();
        }
        let is_cut = self.stdout_terminal && !self.wide;
        let columns = is_cut.then(terminal_columns).flatten();
        if let Some(columns) = columns {
            table
                .set_content_arrangement(ContentArrangement::Dynamic)
                .set_width(columns);
            for row in table.row_iter_mut() {
                row.max_height(1);
            }
        }
        let widths = table.column_max_content_widths();
        let (cut, shown) = match columns {
            Some(columns) => fitting(&widths, columns),
            None => (CUTS[0], widths.len()),
        };
        for (index, width) in widths.into_iter().enumerate() {
            let Some(column) = table.column_mut(index) else {
                continue;
            };
            column.set_padding((0, GAP));
            // States and numbers are short, and of no use if they are cut.
            column.set_constraint(match width > cut {
                _ if index >= shown => ColumnConstraint::Hidden,
                true => ColumnConstraint::LowerBoundary(Width::Fixed(cut)),
                false => ColumnConstraint::ContentWidth,
            });
        }
        self.line(&table.trim_fmt())?;
        if shown < header.len() {
            self.note(&format!("--wide shows also {}", header[shown..].join(", ")));
        }
        Ok(())
    }

    /// A session's state in its colour.
    pub(crate) fn state_cell(state: SessionState) -> Cell {
        let cell = Cell::new(state.as_str());
        match state {
            SessionState::Running => cell.fg(Color::Green),
            SessionState::Starting
            | SessionState::Stopping
            | SessionState::Frozen
            | SessionState::Paused => cell.fg(Color::Yellow),
            SessionState::Stuck | SessionState::Failed => cell.fg(Color::Red),
            SessionState::Stopped => cell.fg(Color::DarkGrey),
        }
    }

    /// A hint, only for a user at a terminal.
    pub(crate) fn note(&self, text: &str) {
        if self.shows_progress() {
            self.stderr_line(text);
        }
    }

    /// Something that a person should see even in a script's log.
    pub(crate) fn warning(&self, text: &str) {
        if !self.json {
            self.stderr_line(&format!("warning: {text}"));
        }
    }

    /// Prints a failure.
    pub(crate) fn failure(&self, failure: &Failure) {
        let Failure::Reported { problem, next, .. } = failure else {
            return;
        };
        if self.json {
            self.stderr_line(&problem_json(problem, next.as_deref()));
            return;
        }
        let mut text = format!("error: {}", printable(&problem.title));
        // The API's detail repeats the field errors, each of which has a separate line here.
        if problem.errors.is_empty() {
            text.push_str(": ");
            text.push_str(&printable(&problem.detail));
        }
        for error in &problem.errors {
            text.push_str(&format!(
                "\n  {}: {}",
                printable(&error.field),
                printable(&error.message)
            ));
        }
        if let Some(next) = next {
            text.push_str("\nnext: ");
            text.push_str(&printable(next));
        }
        self.stderr_line(&text);
    }

    /// Whether a user at a terminal can be asked.
    pub(crate) fn can_ask(&self) -> bool {
        !self.json && self.stderr_terminal && io::stdin().is_terminal()
    }

    /// Asks for confirmation; possible only at a terminal.
    pub(crate) fn confirm(&self, question: &str) -> Result<bool, Failure> {
        if !self.can_ask() {
            return Err(Failure::usage(format!(
                "{question} There is no terminal to ask at: pass --yes to continue"
            )));
        }
        let mut stderr = io::stderr().lock();
        write!(stderr, "{question} [y/N] ")?;
        stderr.flush()?;
        let mut answer = String::new();
        io::stdin().read_line(&mut answer)?;
        Ok(matches!(
            answer.trim().to_ascii_lowercase().as_str(),
            "y" | "yes"
        ))
    }

    fn stderr_line(&self, text: &str) {
        // An error of standard error cannot be reported.
        let _ = writeln!(io::stderr().lock(), "{text}");
    }
}

/// One output of a session's program, which wrote it earlier. On a terminal its control sequences are shown and
/// not obeyed, unless it is raw; everything else gets the bytes unchanged.
#[derive(Debug)]
pub(crate) struct ProgramOutput {
    output: Output,
    stream: LogStream,
    is_raw: bool,
    /// A line that has not ended yet.
    partial: Vec<u8>,
}

impl ProgramOutput {
    pub(crate) fn new(output: Output, stream: LogStream, raw: bool) -> Self {
        let terminal = match stream {
            LogStream::Stdout => output.stdout_terminal,
            LogStream::Stderr => output.stderr_terminal,
        };
        Self {
            output,
            stream,
            is_raw: raw || !terminal,
            partial: Vec::new(),
        }
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.is_raw {
            return self.pass(bytes);
        }
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.partial.extend_from_slice(piece);
            if self.partial.ends_with(b"\n") || self.partial.len() > MAX_SHOWN_LINE_BYTES {
                self.show_line()?;
            }
        }
        Ok(())
    }

    /// Shows the rest of a last line without an end.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        match self.partial.is_empty() {
            true => Ok(()),
            false => self.show_line(),
        }
    }

    fn show_line(&mut self) -> io::Result<()> {
        let line = std::mem::take(&mut self.partial);
        let line = line.strip_suffix(b"\n").unwrap_or(&line);
        self.output
            .program_line(self.stream, &String::from_utf8_lossy(line), false)
    }

    fn pass(&self, bytes: &[u8]) -> io::Result<()> {
        match self.stream {
            LogStream::Stdout => Output::raw_stdout(bytes),
            LogStream::Stderr => Output::raw_stderr(bytes),
        }
    }
}

/// The problem as the API would write it, with the next step as an extension member (RFC 9457,
/// section 3.2).
fn problem_json(problem: &Problem, next: Option<&str>) -> String {
    #[derive(Serialize)]
    struct WithNext<'a> {
        #[serde(flatten)]
        problem: &'a Problem,
        #[serde(skip_serializing_if = "Option::is_none")]
        next: Option<&'a str>,
    }
    serde_json::to_string(&WithNext { problem, next }).unwrap_or_default()
}

/// To how much long columns are cut at least in a terminal of so many columns, and how many of them fit.
fn fitting(widths: &[u16], columns: u16) -> (u16, usize) {
    let needed = |cut: u16, count: usize| {
        let shown = widths.iter().take(count);
        shown
            .map(|width| u32::from(*width.min(&cut)) + u32::from(GAP))
            .sum::<u32>()
    };
    let fits = |cut: u16, count: usize| needed(cut, count) <= u32::from(columns);
    let all = widths.len();
    let cut = CUTS
        .into_iter()
        .find(|cut| fits(*cut, all))
        .unwrap_or(CUTS[1]);
    let shown = (1..=all).rev().find(|count| fits(cut, *count));
    (cut, shown.unwrap_or(1))
}

fn terminal_columns() -> Option<u16> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0).then_some(size.ws_col)
}
