//! Shows a diagnosis as a table.

use comfy_table::{Table, presets};

use crate::diagnosis::{Check, Diagnosis, Remedy, Verdict};
use crate::on_docker::ON_DOCKER;

impl Diagnosis {
    /// For people: what binds, where, and what to do about it.
    pub fn to_text(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header([
            "LIMIT",
            "VALUE",
            "USED",
            "PER SESSION",
            "BINDS AT",
            "VERDICT",
        ]);
        for check in &self.checks {
            table.add_row([
                check.name.to_owned(),
                or_dash(check.value),
                or_dash(check.used),
                each(check.per_session),
                or_dash(check.binds_at),
                verdict(check.verdict).to_owned(),
            ]);
        }
        let mut text = format!("{}\n\n{}\n", table.trim_fmt(), self.conclusion());
        for check in &self.checks {
            if let Some(remedy) = &check.remedy {
                text.push_str(&format!("  {}: {}\n", check.name, advice(check, remedy)));
            }
        }
        if self.runtime == "docker" {
            text.push_str(
                "What a hostile session reaches on Docker, and not on the native runtime:\n",
            );
            for (probe, consequence) in ON_DOCKER {
                text.push_str(&format!("  {probe}: {consequence}\n"));
            }
        }
        if self.has_sysctls() {
            text.push_str(
                "`conman doctor --fix` sets the kernel settings, now and for every boot.\n",
            );
        }
        text
    }

    fn has_sysctls(&self) -> bool {
        self.checks
            .iter()
            .any(|check| matches!(check.remedy, Some(Remedy::Sysctl { .. })))
    }

    fn conclusion(&self) -> String {
        let Self {
            target, runtime, ..
        } = self;
        match (self.is_fit(), self.holds, self.first_limit) {
            (true, Some(holds), Some(name)) => format!(
                "This host is fit for {target} {runtime} sessions; at {holds} {name} would bind."
            ),
            (true, _, _) => format!("This host is fit for {target} {runtime} sessions."),
            (false, Some(holds), Some(name)) => format!(
                "This host holds {holds} {runtime} sessions, not {target}: {name} binds first."
            ),
            (false, _, _) => format!("This host does not hold {target} {runtime} sessions."),
        }
    }
}

fn or_dash(number: Option<u64>) -> String {
    number.map_or_else(|| "-".to_owned(), |number| number.to_string())
}

fn each(number: f64) -> String {
    if number == 0.0 {
        "-".to_owned()
    } else {
        number.to_string()
    }
}

const fn verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Enough => "enough",
        Verdict::Binds => "BINDS",
        Verdict::Advice => "see below",
        Verdict::Unknown => "unknown",
    }
}

impl Remedy {
    /// As a command or instruction for the operator.
    pub fn to_text(&self) -> String {
        match self {
            Self::Sysctl { key, value } => format!("sysctl -w {key}={value}"),
            Self::Manual { what } => what.clone(),
        }
    }
}

fn advice(check: &Check, remedy: &Remedy) -> String {
    let what = remedy.to_text();
    match &check.note {
        Some(note) => format!("{what} ({note})"),
        None => what,
    }
}
