//! Judges what witnesses wrote: the lives of a session must be apart, and later ones have greater
//! generations.
//!
//! A life is one process. It is held to run from its first line to its last, frozen or not: whoever
//! writes after a later life began ran beside it.

use std::collections::BTreeMap;
use std::fmt;

use super::Line;

/// How each line begins.
const BEGIN: &[u8] = br#"{"session":"#;

/// Reads lines as they come and keeps what they say of each life.
#[derive(Debug, Clone, Default)]
pub struct Checker {
    sessions: BTreeMap<String, BTreeMap<String, Life>>,
    lines: u64,
    violations: Vec<Violation>,
    /// The beginning of a line whose end is not there yet.
    partial: Vec<u8>,
}

/// One process of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Life {
    pub generation: u64,
    pub host: String,
    pub first_ns: u64,
    pub last_ns: u64,
    /// Longest time without a line.
    pub longest_gap_ns: u64,
    /// When that was over.
    pub gap_end_ns: u64,
    pub lines: u64,
}

/// What must not be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Violation {
    /// The later one began before the earlier one ended.
    Overlap {
        session: String,
        earlier: Life,
        later: Life,
    },
    /// The later one does not have the greater generation.
    Generation {
        session: String,
        earlier: Life,
        later: Life,
    },
    /// One life had two generations, or two hosts.
    Changed { line: Line },
    /// A life's clock went back: the file is no record of what happened.
    Backwards { line: Line },
    /// Not a line at all.
    Unreadable { text: String },
}

/// The judgement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    pub lines: u64,
    pub sessions: usize,
    pub lives: usize,
    /// Lives on another host than the one before.
    pub handovers: usize,
    pub violations: Vec<Violation>,
}

impl Checker {
    /// Takes up what was appended to the file; a line may come in pieces.
    pub fn read(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            self.partial.extend_from_slice(&rest[..end]);
            let line = std::mem::take(&mut self.partial);
            self.line(&line);
            rest = &rest[end + 1..];
        }
        self.partial.extend_from_slice(rest);
    }

    fn line(&mut self, bytes: &[u8]) {
        self.lines += 1;
        let Ok(line) = serde_json::from_slice::<Line>(complete(bytes)) else {
            let text = String::from_utf8_lossy(bytes).into_owned();
            self.violations.push(Violation::Unreadable { text });
            return;
        };
        let lives = self.sessions.entry(line.session.clone()).or_default();
        let life = lives.entry(line.life.clone()).or_insert_with(|| Life {
            generation: line.generation,
            host: line.host.clone(),
            first_ns: line.monotonic_ns,
            last_ns: line.monotonic_ns,
            longest_gap_ns: 0,
            gap_end_ns: line.monotonic_ns,
            lines: 0,
        });
        life.lines += 1;
        if life.generation != line.generation || life.host != line.host {
            self.violations.push(Violation::Changed { line });
        } else if line.monotonic_ns < life.last_ns {
            self.violations.push(Violation::Backwards { line });
        } else {
            let gap = line.monotonic_ns - life.last_ns;
            if gap > life.longest_gap_ns {
                life.longest_gap_ns = gap;
                life.gap_end_ns = line.monotonic_ns;
            }
            life.last_ns = line.monotonic_ns;
        }
    }

    /// The lives of a session, in the order in which they began.
    #[must_use]
    pub fn lives(&self, session: &str) -> Vec<Life> {
        let lives = self.sessions.get(session).into_iter().flatten();
        let mut lives: Vec<Life> = lives.map(|(_, life)| life.clone()).collect();
        lives.sort_by_key(|life| (life.first_ns, life.generation));
        lives
    }

    /// How often a session's life was on another host than the one before.
    #[must_use]
    pub fn handovers(&self, session: &str) -> usize {
        let moved = |pair: &&[Life]| pair[0].host != pair[1].host;
        self.lives(session).windows(2).filter(moved).count()
    }

    /// Judges what was read so far.
    #[must_use]
    pub fn report(&self) -> Report {
        let mut report = Report {
            lines: self.lines,
            sessions: self.sessions.len(),
            lives: 0,
            handovers: 0,
            violations: self.violations.clone(),
        };
        for session in self.sessions.keys() {
            let lives = self.lives(session);
            report.lives += lives.len();
            report.handovers += self.handovers(session);
            judge(session, &lives, &mut report.violations);
        }
        report
    }
}

/// The complete line at the end of these bytes: a process that is killed while it writes leaves the beginning of one
/// before it.
fn complete(bytes: &[u8]) -> &[u8] {
    let begin = bytes
        .windows(BEGIN.len())
        .rposition(|window| window == BEGIN);
    &bytes[begin.unwrap_or(0)..]
}

/// Each life against that of all before it which ended last, and that which had the greatest
/// generation.
fn judge(session: &str, lives: &[Life], violations: &mut Vec<Violation>) {
    let mut lives = lives.iter();
    let Some(first) = lives.next() else { return };
    let (mut latest, mut greatest) = (first, first);
    for life in lives {
        let found = |earlier: &Life| (session.to_owned(), earlier.clone(), life.clone());
        if life.first_ns <= latest.last_ns {
            let (session, earlier, later) = found(latest);
            violations.push(Violation::Overlap {
                session,
                earlier,
                later,
            });
        }
        if life.generation <= greatest.generation {
            let (session, earlier, later) = found(greatest);
            violations.push(Violation::Generation {
                session,
                earlier,
                later,
            });
        }
        if life.last_ns > latest.last_ns {
            latest = life;
        }
        if life.generation > greatest.generation {
            greatest = life;
        }
    }
}

impl fmt::Display for Life {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |ns: u64| ns / 1_000_000;
        write!(
            formatter,
            "generation {} on {} from {} to {} ms",
            self.generation,
            self.host,
            ms(self.first_ns),
            ms(self.last_ns)
        )
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overlap {
                session,
                earlier,
                later,
            } => write!(formatter, "two of {session} ran: {earlier}, and {later}"),
            Self::Generation {
                session,
                earlier,
                later,
            } => write!(
                formatter,
                "the generation of {session} did not grow: {earlier}, then {later}"
            ),
            Self::Changed { line } => write!(formatter, "one life changed what it is: {line:?}"),
            Self::Backwards { line } => write!(formatter, "a life's clock went back: {line:?}"),
            Self::Unreadable { text } => write!(formatter, "not a witness's line: {text}"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} lines of {} lives of {} sessions, {} handovers, {} violations",
            self.lines,
            self.lives,
            self.sessions,
            self.handovers,
            self.violations.len()
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn line(life: &str, generation: u64, monotonic_ns: u64) -> Line {
        Line {
            session: "s".to_owned(),
            generation,
            host: format!("n{generation}"),
            life: life.to_owned(),
            monotonic_ns,
        }
    }

    fn written(lines: &[Line]) -> Vec<u8> {
        let texts = lines
            .iter()
            .map(|line| serde_json::to_string(line).expect("plain"));
        texts
            .map(|text| text + "\n")
            .collect::<String>()
            .into_bytes()
    }

    fn judged(lines: &[Line]) -> Report {
        let mut checker = Checker::default();
        checker.read(&written(lines));
        checker.report()
    }

    #[test]
    fn lives_one_after_the_other_with_growing_generations_are_well() {
        let report = judged(&[
            line("a", 1, 10),
            line("a", 1, 30),
            line("b", 2, 31),
            line("b", 2, 90),
            line("c", 5, 91),
        ]);
        assert_eq!(report.violations, []);
        assert_eq!((report.lines, report.lives, report.handovers), (5, 3, 2));
    }

    #[test]
    fn a_line_of_the_earlier_life_after_the_later_one_began_is_an_overlap() {
        let lines = [line("a", 1, 10), line("b", 2, 20), line("a", 1, 21)];
        let report = judged(&lines);
        assert!(
            matches!(&report.violations[..], [Violation::Overlap { earlier, later, .. }]
                if (earlier.generation, later.generation) == (1, 2)),
            "{report:?}"
        );
    }

    #[test]
    fn an_overlap_with_a_life_before_the_last_one_is_found() {
        let lines = [
            line("a", 1, 10),
            line("b", 2, 20),
            line("b", 2, 30),
            line("c", 3, 50),
            line("a", 1, 60),
        ];
        let overlaps = judged(&lines).violations;
        assert_eq!(overlaps.len(), 2, "{overlaps:?}");
    }

    #[test]
    fn a_generation_that_was_there_before_is_a_violation() {
        for second in [4, 5] {
            let mut later = line("b", second, 20);
            later.host = "elsewhere".to_owned();
            let violations = judged(&[line("a", 5, 10), later]).violations;
            assert!(
                matches!(&violations[..], [Violation::Generation { .. }]),
                "{violations:?}"
            );
        }
    }

    #[test]
    fn the_beginning_of_a_line_of_a_process_that_was_killed_is_left_out() {
        let mut checker = Checker::default();
        checker.read(&written(&[line("a", 1, 10)]));
        checker.read(b"{\"session\":\"s\",\"generation\":1,\"host\":\"n");
        checker.read(&written(&[line("b", 2, 30)]));
        let report = checker.report();
        assert_eq!((report.lives, report.violations), (2, Vec::new()));
    }

    #[test]
    fn a_life_that_changes_or_goes_back_and_a_torn_line_are_violations() {
        let mut checker = Checker::default();
        checker.read(&written(&[
            line("a", 1, 10),
            line("a", 2, 20),
            line("a", 1, 5),
        ]));
        checker.read(b"{\"session\":\"s\"}\n");
        let kinds: Vec<String> = checker
            .report()
            .violations
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(kinds.len(), 3, "{kinds:?}");
        assert!(kinds[0].contains("changed") && kinds[1].contains("back"));
        assert!(kinds[2].contains("not a witness's line"));
    }

    #[test]
    fn the_lives_of_different_sessions_may_overlap() {
        let mut other = line("b", 1, 15);
        other.session = "t".to_owned();
        let report = judged(&[line("a", 1, 10), other, line("a", 1, 20)]);
        assert_eq!((report.violations.len(), report.sessions), (0, 2));
    }

    proptest! {
        #[test]
        fn it_does_not_matter_in_which_pieces_the_file_is_read(cuts in prop::collection::vec(1usize..40, 0..40)) {
            let lines: Vec<Line> = (0..20).map(|n| line("a", 1, 10 * n)).collect();
            let bytes = written(&lines);
            let mut checker = Checker::default();
            let mut rest = &bytes[..];
            for cut in cuts {
                let (piece, more) = rest.split_at(cut.min(rest.len()));
                checker.read(piece);
                rest = more;
            }
            checker.read(rest);
            prop_assert_eq!(checker.report(), judged(&lines));
        }

        #[test]
        fn lives_are_judged_well_exactly_when_no_two_of_them_touch(spans in prop::collection::vec((0u64..200, 0u64..20), 1..8)) {
            let mut spans = spans;
            spans.sort_unstable();
            let mut lines = Vec::new();
            for (number, (from, length)) in spans.iter().enumerate() {
                let number = u64::try_from(number).expect("few");
                let life = number.to_string();
                lines.push(line(&life, number + 1, *from));
                lines.push(line(&life, number + 1, from + length));
            }
            let apart = spans.iter().enumerate().all(|(n, one)| {
                spans[n + 1..].iter().all(|later| one.0 + one.1 < later.0)
            });
            prop_assert_eq!(judged(&lines).violations.is_empty(), apart);
        }
    }
}
