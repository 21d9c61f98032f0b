//! Micro-benchmarks of the decisions that every request pays for.

use std::hint::black_box;
use std::time::Instant;

use conman_core::{SpecPolicy, Template, resolve};
use conman_proto::{SessionId, SessionRequest};

const CALLS: u32 = 100_000;

#[expect(clippy::print_stdout, reason = "a benchmark prints its figure")]
fn main() {
    let template = Template {
        request: SessionRequest {
            image: Some("python:demo".to_owned()),
            command: Some(vec![
                "python3".to_owned(),
                "-m".to_owned(),
                "http.server".to_owned(),
            ]),
            port: Some(Some(8080)),
            ..SessionRequest::default()
        },
        ..Template::default()
    };
    let policy = SpecPolicy {
        templates: [("python".to_owned(), template)].into(),
        ..SpecPolicy::default()
    };
    let id: SessionId = "alice".parse().expect("a session id");
    let request = SessionRequest {
        template: Some("python".to_owned()),
        env: Some(
            (0..32)
                .map(|n| (format!("NAME_{n}"), "value".to_owned()))
                .collect(),
        ),
        ..SessionRequest::default()
    };
    let started = Instant::now();
    for _ in 0..CALLS {
        let resolved = resolve(black_box(&policy), &id, black_box(&request));
        assert!(black_box(resolved).is_ok());
    }
    let each = started.elapsed() / CALLS;
    println!("resolve a spec with a template and 32 variables: {each:?}");
}
