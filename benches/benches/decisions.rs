//! Micro-benchmarks of the decisions that every request pays for.

use std::hint::black_box;

use conman_core::{SpecPolicy, Template, resolve};
use conman_proto::{SessionId, SessionRequest};
use criterion::{Criterion, criterion_group, criterion_main};

fn resolving_a_spec(criterion: &mut Criterion) {
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
    criterion.bench_function(
        "resolve a spec with a template and 32 variables",
        |bencher| {
            bencher.iter(|| resolve(black_box(&policy), &id, black_box(&request)).is_ok());
        },
    );
}

criterion_group!(benches, resolving_a_spec);
criterion_main!(benches);
