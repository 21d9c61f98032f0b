//! What stays wrong: told when it begins, when it changes and when it is over.

/// What was wrong with one thing when it was last looked at.
#[derive(Debug, Default)]
pub(super) struct Trouble(Option<String>);

/// What is to be told of a look.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum News {
    /// It is wrong, for another reason than before or for the first time.
    Wrong(String),
    /// What was wrong is not any more.
    Over,
}

impl Trouble {
    /// Takes what is wrong now, if anything is; where somebody has asked for the look, what is known
    /// is told once more.
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
