//! The state of the screen, what keys do to it, and how it is drawn.

use std::collections::HashMap;

use conman_proto::{SessionId, SessionStats};
use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize as _};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Row, Sparkline, Table, TableState};

use super::super::nodes::shown_state;
use super::super::stats::{FleetStats, HEADER, cells, cpu_percent};
use crate::human::{bytes, printable};

/// Readings of the followed session that are drawn, one each second.
const MAX_HISTORY: usize = 512;

/// Most lines of the table of nodes; further nodes are not shown.
const MAX_NODE_LINES: u16 = 12;

/// Sessions that PgUp and PgDn skip.
const PAGE: isize = 20;

const NODE_HEADER: [&str; 7] = [
    "NODE", "STATE", "SESSIONS", "CONNS", "CPU", "MEMORY", "PRESSURE",
];
const NODE_WIDTHS: [u16; 7] = [16, 11, 16, 8, 10, 12, 10];
/// Of the session, its node, and the figures of `conman stats`.
const WIDTHS: [u16; 11] = [16, 12, 9, 10, 10, 10, 9, 11, 10, 10, 24];

const HELP: &str =
    " ? keys  q quit  / filter  Enter follow  Esc back  sort: c CPU  m memory  p pids  n name";

const KEYS: &str = " Up, Down, PageUp, PageDown   select a session
 Enter                        follow it: its figures over time
 /                            filter by a part of the session's or node's name; Enter ends it
 c, m, p, n                   sort by CPU, memory, processes, name
 Esc                          back: from a followed session, then from the filter
 ?                            these keys, and back
 q, Ctrl-C                    quit";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sort {
    Cpu,
    Memory,
    Pids,
    Name,
}

/// What a session uses.
#[derive(Debug)]
struct Usage {
    node: String,
    stats: SessionStats,
    /// In percent of one processor; `None` before the second reading.
    cpu: Option<f64>,
}

#[derive(Debug)]
pub(super) struct Screen {
    fleet: FleetStats,
    sessions: Vec<Usage>,
    error: Option<String>,
    sort: Sort,
    filter: String,
    /// Whether letters go to the filter.
    typing: bool,
    /// Whether the keys are explained instead of the sessions being listed.
    explains: bool,
    selected: Option<SessionId>,
    followed: Option<SessionId>,
    /// CPU in tenths of a percent and memory in bytes of the followed session, the newest first.
    history: [Vec<Option<u64>>; 2],
}

impl Screen {
    pub(super) fn new(fleet: FleetStats) -> Self {
        let mut screen = Self {
            fleet: FleetStats::default(),
            sessions: Vec::new(),
            error: None,
            sort: Sort::Cpu,
            filter: String::new(),
            typing: false,
            explains: false,
            selected: None,
            followed: None,
            history: [Vec::new(), Vec::new()],
        };
        screen.update(fleet);
        screen
    }

    pub(super) fn update(&mut self, mut fleet: FleetStats) {
        let earlier = std::mem::take(&mut self.sessions).into_iter();
        let earlier: HashMap<_, _> = earlier.map(|it| (it.stats.id.clone(), it.stats)).collect();
        let sessions = std::mem::take(&mut fleet.sessions).into_iter();
        self.sessions = sessions
            .map(|(node, stats)| Usage {
                node,
                cpu: cpu_percent(earlier.get(&stats.id), &stats),
                stats,
            })
            .collect();
        self.error = fleet.errors.pop();
        self.fleet = fleet;
        if let Some(usage) = self.followed_usage() {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "percent"
            )]
            let cpu = usage.cpu.map(|cpu| (cpu * 10.0) as u64);
            let figures = [cpu, usage.stats.memory_bytes];
            for (history, figure) in self.history.iter_mut().zip(figures) {
                history.insert(0, figure);
                history.truncate(MAX_HISTORY);
            }
        }
    }

    /// Keeps showing the last reading.
    pub(super) fn fail(&mut self, error: String) {
        self.error = Some(error);
    }

    /// Returns whether the user quits.
    pub(super) fn key(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return false;
        }
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char(letter) if self.typing => self.filter.push(letter),
            KeyCode::Backspace if self.typing => {
                self.filter.pop();
            }
            KeyCode::Enter if self.typing => self.typing = false,
            KeyCode::Esc if self.explains => self.explains = false,
            KeyCode::Esc if self.followed.is_some() => self.followed = None,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Enter => {
                self.history = [Vec::new(), Vec::new()];
                self.followed = self.selection(&self.shown()).map(|(_, id)| id);
            }
            KeyCode::Down => self.select(1),
            KeyCode::Up => self.select(-1),
            KeyCode::PageDown => self.select(PAGE),
            KeyCode::PageUp => self.select(-PAGE),
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char('q') => return true,
            KeyCode::Char('?') => self.explains = !self.explains,
            KeyCode::Char('c') => self.sort = Sort::Cpu,
            KeyCode::Char('m') => self.sort = Sort::Memory,
            KeyCode::Char('p') => self.sort = Sort::Pids,
            KeyCode::Char('n') => self.sort = Sort::Name,
            _ => {}
        }
        false
    }

    /// The sessions that the filter admits: those that use most first, equal ones by name.
    fn shown(&self) -> Vec<&Usage> {
        let admits = |it: &&Usage| {
            it.stats.id.as_str().contains(&self.filter) || it.node.contains(&self.filter)
        };
        let mut shown: Vec<&Usage> = self.sessions.iter().filter(admits).collect();
        #[expect(clippy::cast_precision_loss, reason = "only compared")]
        let figure = |it: &Usage| match self.sort {
            Sort::Cpu => it.cpu.unwrap_or(0.0),
            Sort::Memory => it.stats.memory_bytes.unwrap_or(0) as f64,
            Sort::Pids => it.stats.pids.unwrap_or(0) as f64,
            Sort::Name => 0.0,
        };
        shown.sort_by(|one, other| {
            let by_figure = figure(other).total_cmp(&figure(one));
            by_figure.then_with(|| one.stats.id.cmp(&other.stats.id))
        });
        shown
    }

    /// The first session unless another one was selected and is still shown.
    fn selection(&self, shown: &[&Usage]) -> Option<(usize, SessionId)> {
        let selected = |it: &&Usage| Some(&it.stats.id) == self.selected.as_ref();
        let at = shown.iter().position(selected).unwrap_or(0);
        shown.get(at).map(|it| (at, it.stats.id.clone()))
    }

    fn select(&mut self, by: isize) {
        let shown = self.shown();
        let at = self.selection(&shown).map_or(0, |(at, _)| at);
        let chosen = shown.get(at.saturating_add_signed(by)).or(shown.last());
        self.selected = chosen.map(|it| it.stats.id.clone());
    }

    fn followed_usage(&self) -> Option<&Usage> {
        let id = self.followed.as_ref()?;
        self.sessions.iter().find(|it| it.stats.id == *id)
    }

    pub(super) fn draw(&self, frame: &mut Frame<'_>) {
        let nodes = u16::try_from(self.fleet.nodes.len()).unwrap_or(u16::MAX);
        let [top, middle, bottom] = Layout::vertical([
            Constraint::Length(nodes.saturating_add(2).min(MAX_NODE_LINES)),
            Constraint::Min(3),
            Constraint::Length(1),
        ])
        .areas(frame.area());
        self.draw_nodes(frame, top);
        match &self.followed {
            _ if self.explains => frame.render_widget(Paragraph::new(KEYS), middle),
            Some(id) => self.draw_followed(frame, middle, id),
            None => self.draw_sessions(frame, middle),
        }
        let line = match &self.error {
            _ if self.typing => Line::from(format!(" filter: {}_", self.filter)),
            Some(error) => Line::from(format!(" {}", printable(error))).fg(Color::Red),
            None => Line::from(HELP).dim(),
        };
        frame.render_widget(line, bottom);
    }

    fn draw_nodes(&self, frame: &mut Frame<'_>, area: Rect) {
        let rows = self.fleet.nodes.iter().map(|node| {
            let (mut cpu, mut memory) = (0.0, 0);
            for usage in self.sessions.iter().filter(|it| it.node == node.name) {
                cpu += usage.cpu.unwrap_or(0.0);
                memory += usage.stats.memory_bytes.unwrap_or(0);
            }
            let load = node.fleet.as_ref().and_then(|fleet| fleet.load);
            let pressure = load.map(|load| format!("{:.0} %", load.cpu_pressure_percent));
            Row::new([
                node.name.clone(),
                shown_state(node).0.to_owned(),
                format!("{} of {}", node.sessions_running, node.max_sessions),
                node.connections.to_string(),
                format!("{cpu:.1} %"),
                bytes(memory),
                pressure.unwrap_or_else(|| "-".to_owned()),
            ])
        });
        let table = Table::new(rows, NODE_WIDTHS).header(Row::new(NODE_HEADER).bold());
        frame.render_widget(table, area);
    }

    fn draw_sessions(&self, frame: &mut Frame<'_>, area: Rect) {
        let shown = self.shown();
        let (count, all) = (shown.len(), self.sessions.len());
        let title = match &*self.filter {
            "" => format!(" {count} sessions "),
            filter => format!(" {count} of {all} sessions: {filter} "),
        };
        // Only a screen around the selection becomes text: there may be thousands.
        let lines = usize::from(area.height);
        let selected = self.selection(&shown).map_or(0, |(at, _)| at);
        let first = selected.saturating_sub(lines / 2);
        let rows = shown.iter().skip(first).take(lines).map(|it| it.row());
        let [name, figures @ ..] = HEADER;
        let header = [name, "NODE"].into_iter().chain(figures);
        let table = Table::new(rows, WIDTHS)
            .header(Row::new(header).bold())
            .row_highlight_style(Style::new().reversed())
            .block(Block::bordered().title(title));
        let mut state = TableState::default().with_selected(selected - first);
        frame.render_stateful_widget(table, area, &mut state);
    }

    fn draw_followed(&self, frame: &mut Frame<'_>, area: Rect, id: &SessionId) {
        let block = Block::bordered().title(format!(" {id} "));
        let inner = block.inner(area);
        frame.render_widget(block, area);
        let Some(usage) = self.followed_usage() else {
            let ended = format!("not running: `conman why {id}` explains");
            return frame.render_widget(Paragraph::new(ended), inner);
        };
        let figures = cells(usage.cpu, &usage.stats);
        let lines = HEADER.iter().zip(&figures).skip(1);
        let lines: Vec<Line<'_>> = std::iter::once(("NODE", &*usage.node))
            .chain(lines.map(|(name, figure)| (*name, &**figure)))
            .map(|(name, figure)| Line::from(format!("{name:<12}{figure}")))
            .collect();
        let height = u16::try_from(lines.len() + 1).unwrap_or(u16::MAX);
        let [top, cpu, memory] = Layout::vertical([
            Constraint::Length(height),
            Constraint::Fill(1),
            Constraint::Fill(1),
        ])
        .areas(inner);
        frame.render_widget(Paragraph::new(lines), top);
        let graphs = [("CPU", cpu), ("MEMORY", memory)];
        for ((title, area), history) in graphs.into_iter().zip(&self.history) {
            let graph = Sparkline::default().data(history.iter().copied());
            let graph = graph.block(Block::new().title(title)).fg(Color::Cyan);
            frame.render_widget(graph, area);
        }
    }
}

impl Usage {
    fn row(&self) -> Row<'static> {
        let [name, figures @ ..] = cells(self.cpu, &self.stats);
        Row::new([name, self.node.clone()].into_iter().chain(figures))
    }
}

#[cfg(test)]
mod tests {
    use conman_proto::Node;
    use jiff::{SignedDuration, Timestamp};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    /// Each session with its processor time in seconds and its memory in bytes.
    fn fleet(second: i64, sessions: &[(&str, f64, u64)]) -> FleetStats {
        let at = Timestamp::UNIX_EPOCH + SignedDuration::from_secs(second);
        let stats = |(id, cpu_s, memory): &(&str, f64, u64)| SessionStats {
            id: id.parse().expect("an id"),
            at,
            cpu_s: Some(*cpu_s),
            throttled_s: None,
            throttled_count: None,
            memory_bytes: Some(*memory),
            memory_limit_bytes: None,
            oom_kills: None,
            pids: Some(1),
            pids_limit: 8,
            read_bytes: None,
            written_bytes: None,
            received_bytes: None,
            sent_bytes: None,
            proxy_received_bytes: 0,
            proxy_sent_bytes: 0,
            disk_limit_bytes: None,
        };
        FleetStats {
            nodes: vec![Node::unannounced("n1")],
            sessions: sessions
                .iter()
                .map(|it| ("n1".to_owned(), stats(it)))
                .collect(),
            errors: Vec::new(),
        }
    }

    fn press(screen: &mut Screen, code: KeyCode) -> bool {
        screen.key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    fn lines(screen: &Screen) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(150, 30)).expect("a terminal");
        terminal.draw(|frame| screen.draw(frame)).expect("drawn");
        let buffer = terminal.backend().buffer();
        let row = |y| (0..150).map(|x| buffer[(x, y)].symbol()).collect();
        (0..30).map(row).collect()
    }

    /// The names of the sessions from top to bottom.
    fn order(screen: &Screen) -> Vec<String> {
        let lines = lines(screen);
        let rows = lines.iter().filter(|line| line.contains(" of 8 "));
        rows.filter_map(|row| {
            row.trim_start_matches('│')
                .split(' ')
                .next()
                .map(str::to_owned)
        })
        .collect()
    }

    #[test]
    fn sessions_are_sorted_by_what_the_key_names() {
        let mut screen = Screen::new(fleet(0, &[("a", 5.0, 30), ("b", 1.0, 10), ("c", 0.0, 20)]));
        screen.update(fleet(2, &[("a", 5.0, 30), ("b", 3.0, 10), ("c", 1.0, 20)]));
        assert_eq!(order(&screen), ["b", "c", "a"]);
        assert!(
            lines(&screen)
                .iter()
                .any(|line| line.contains("100.0 %") && line.contains("│b "))
        );
        press(&mut screen, KeyCode::Char('m'));
        assert_eq!(order(&screen), ["a", "c", "b"]);
        press(&mut screen, KeyCode::Char('n'));
        assert_eq!(order(&screen), ["a", "b", "c"]);
    }

    #[test]
    fn a_filter_is_typed_kept_and_cleared() {
        let mut screen = Screen::new(fleet(0, &[("cat", 0.0, 0), ("dog", 0.0, 0)]));
        for key in ['/', 'c', 'q', 'n'] {
            assert!(!press(&mut screen, KeyCode::Char(key)));
        }
        assert_eq!(order(&screen), [""; 0]);
        for key in [KeyCode::Backspace, KeyCode::Backspace, KeyCode::Enter] {
            press(&mut screen, key);
        }
        assert_eq!(order(&screen), ["cat"]);
        press(&mut screen, KeyCode::Esc);
        assert_eq!(order(&screen), ["cat", "dog"]);
        assert!(press(&mut screen, KeyCode::Char('q')));
    }

    #[test]
    fn a_followed_session_stays_followed_until_it_ends() {
        let mut screen = Screen::new(fleet(0, &[("a", 0.0, 1 << 20), ("b", 0.0, 0)]));
        press(&mut screen, KeyCode::Down);
        press(&mut screen, KeyCode::Enter);
        // Another order does not change what is followed.
        screen.update(fleet(1, &[("a", 0.0, 1 << 20), ("b", 0.5, 2 << 20)]));
        let text = lines(&screen).join("\n");
        assert!(
            text.contains(" b ") && text.contains("50.0 %") && text.contains("2 MiB"),
            "{text}"
        );
        screen.update(fleet(2, &[("a", 0.0, 1 << 20)]));
        assert!(
            lines(&screen)
                .join("\n")
                .contains("`conman why b` explains")
        );
        press(&mut screen, KeyCode::Esc);
        assert_eq!(order(&screen), ["a"]);
    }

    #[test]
    fn thousands_of_sessions_scroll_with_the_selection() {
        let names: Vec<String> = (0..3000).map(|number| format!("s{number:04}")).collect();
        let sessions: Vec<_> = names.iter().map(|name| (&**name, 0.0, 0)).collect();
        let mut screen = Screen::new(fleet(0, &sessions));
        for _ in 0..100 {
            press(&mut screen, KeyCode::PageDown);
        }
        assert!(order(&screen).contains(&"s2000".to_owned()));
        screen.fail("the daemon does not answer".to_owned());
        assert!(lines(&screen)[29].contains("does not answer"));
    }
}
