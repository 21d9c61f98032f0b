//! A lasting error: reported when it begins, changes and ends.

/// The last check's error of one subject.
#[derive(Debug, Default)]
pub(super) struct Trouble(Option<String>);

/// What to report after a check.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum News {
    /// An error that is new or has changed.
    Wrong(String),
    /// The error is over.
    Over,
}

impl Trouble {
    /// Takes a check's error, if any. `asked`: an operator ordered the check, so an error is
    /// reported again.
    pub(super) fn look(&mut self, wrong: Option<String>, asked: bool) -> Option<News> {
        let news = match (&self.0, &wrong) {
            (Some(before), Some(now)) if before == now && !asked => None,
            (_, Some(now)) => Some(News::Wrong(now.clone())),
            (Some(_), None) => Some(News::Over),
            (None, None) => None,
        };
        self.0 = wrong;
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_wrong_is_told_once_and_that_it_is_over() {
        let mut trouble = Trouble::default();
        let mut look = |wrong: Option<&str>, asked| trouble.look(wrong.map(str::to_owned), asked);
        let wrong = |why: &str| Some(News::Wrong(why.to_owned()));
        assert_eq!(look(None, false), None);
        assert_eq!(look(Some("short"), false), wrong("short"));
        assert_eq!(look(Some("short"), false), None);
        assert_eq!(look(Some("gone"), false), wrong("gone"));
        assert_eq!(look(Some("gone"), false), None);
        assert_eq!(look(Some("gone"), true), wrong("gone"));
        assert_eq!(look(None, true), Some(News::Over));
        assert_eq!(look(None, true), None);
        assert_eq!(look(Some("gone"), false), wrong("gone"));
    }
}
