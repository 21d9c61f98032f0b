//! A lasting error of files that are reloaded: reported when it begins, changes and ends.

/// The last error of some files.
#[derive(Debug)]
pub(super) struct Trouble {
    files: &'static str,
    last: Option<String>,
}

/// What to report after a check.
#[derive(Debug, PartialEq, Eq)]
enum News {
    /// An error that is new or has changed.
    Wrong(String),
    /// The error is over.
    Over,
}

impl Trouble {
    /// `files` names them in messages.
    pub(super) fn of(files: &'static str) -> Self {
        Self { files, last: None }
    }

    /// Logs the result of a check: whether the content has changed, or why it cannot be used.
    /// `asked`: an operator ordered the check, so an error is reported again.
    pub(super) fn report(&mut self, read: Result<bool, String>, asked: bool) {
        let files = self.files;
        if read == Ok(true) {
            tracing::info!("reloaded {files}");
        }
        match self.look(read.err(), asked) {
            Some(News::Wrong(why)) => {
                tracing::error!(%why, "cannot reload {files}; keeping the former content");
            }
            Some(News::Over) => tracing::info!("{files} can be read again"),
            None => {}
        }
    }

    fn look(&mut self, wrong: Option<String>, asked: bool) -> Option<News> {
        let news = match (&self.last, &wrong) {
            (Some(before), Some(now)) if before == now && !asked => None,
            (_, Some(now)) => Some(News::Wrong(now.clone())),
            (Some(_), None) => Some(News::Over),
            (None, None) => None,
        };
        self.last = wrong;
        news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stays_wrong_is_told_once_and_that_it_is_over() {
        let mut trouble = Trouble::of("a file");
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
