//! A problem as a page that a person can read, for browsers.
//!
//! A browser that navigates accepts `text/html` by name; programs do not, and get the problem as JSON.
//! While the session moves, or the node has no room for a moment, the page loads itself again.

use bytes::Bytes;
use conman_proto::Problem;
use http::header::{ACCEPT, HeaderMap};
use http::{HeaderValue, Method, Request};

/// Nothing is loaded and nothing runs: the page shares its origin with the session.
pub(crate) const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'",
);

pub(crate) const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("text/html; charset=utf-8");

/// Whether a browser navigates with this request, so that a person reads the answer.
pub(crate) fn is_wanted<B>(request: &Request<B>) -> bool {
    request.method() == Method::GET && accepts_html(request.headers())
}

fn accepts_html(headers: &HeaderMap) -> bool {
    headers
        .get_all(ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|range| {
            let mut parts = range.split(';').map(str::trim);
            let is_html = parts
                .next()
                .is_some_and(|kind| kind.eq_ignore_ascii_case("text/html"));
            is_html && !parts.any(|part| part.replace(' ', "") == "q=0")
        })
}

/// The page. It loads itself again after `retry_after_s`, if that is set.
pub(crate) fn render(problem: &Problem, retry_after_s: Option<u32>) -> Bytes {
    let title = escaped(&problem.title);
    let detail = escaped(&problem.detail);
    let (refresh, note) = match retry_after_s {
        Some(seconds) => {
            let seconds = seconds.max(1);
            (
                format!("<meta http-equiv=\"refresh\" content=\"{seconds}\">\n"),
                "<p class=\"note\">This page tries again automatically.</p>\n",
            )
        }
        None => (String::new(), ""),
    };
    Bytes::from(format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n{refresh}<title>{title}</title>\n\
         <style>:root{{color-scheme:light dark}}\
         body{{font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:15vh auto;padding:0 1em}}\
         h1{{font-size:1.4em}}.note{{opacity:.7}}</style>\n</head>\n<body>\n<h1>{title}</h1>\n\
         <p>{detail}.</p>\n{note}<p class=\"note\">{} {}</p>\n</body>\n</html>\n",
        problem.status,
        escaped(problem.slug()),
    ))
}

fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_browser_that_navigates_accepts_html_by_name() {
        for (accept, wanted) in [
            ("text/html,application/xhtml+xml,*/*;q=0.8", true),
            ("Text/HTML; q=0.5", true),
            ("text/html; q=0", false),
            ("*/*", false),
            ("application/json", false),
            ("text/htmlx", false),
        ] {
            let request = http::Request::get("/").header(ACCEPT, accept).body(());
            assert_eq!(is_wanted(&request.expect("a request")), wanted, "{accept}");
        }
        let request = http::Request::post("/")
            .header(ACCEPT, "text/html")
            .body(());
        assert!(!is_wanted(&request.expect("a request")));
    }

    #[test]
    fn what_a_problem_says_is_text_and_no_markup() {
        let problem = Problem::new("x", "<b>", 503, "a \"b\" & 'c' <script>");
        let page = String::from_utf8(render(&problem, Some(0)).to_vec()).expect("text");
        assert!(page.contains("<h1>&lt;b&gt;</h1>"), "{page}");
        assert!(
            page.contains("a &quot;b&quot; &amp; &#39;c&#39; &lt;script&gt;"),
            "{page}"
        );
        assert!(
            page.contains("http-equiv=\"refresh\" content=\"1\""),
            "{page}"
        );
        let lasting = render(&problem, None);
        assert!(!String::from_utf8_lossy(&lasting).contains("refresh"));
    }
}
