//! The description of the API, held against the file that clients are generated from and against
//! what the server enforces.

use serde_json::Value;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../proto/openapi.json");

fn generated() -> Value {
    serde_json::to_value(conman_api::openapi()).expect("a description is JSON")
}

/// Every operation with its path and method.
fn operations(api: &Value) -> Vec<(String, &Value)> {
    let paths = api["paths"].as_object().expect("paths");
    paths
        .iter()
        .flat_map(|(path, item)| {
            item.as_object()
                .expect("a path item")
                .iter()
                .map(move |(method, operation)| (format!("{method} {path}"), operation))
        })
        .collect()
}

#[test]
fn the_file_in_proto_is_what_the_code_describes() {
    if std::env::var_os("UPDATE_OPENAPI").is_some() {
        let mut json = conman_api::openapi()
            .to_pretty_json()
            .expect("a description is JSON");
        json.push('\n');
        std::fs::write(FILE, json).expect("proto/openapi.json can be written");
    }
    let file = std::fs::read_to_string(FILE).expect("proto/openapi.json can be read");
    let file: Value = serde_json::from_str(&file).expect("proto/openapi.json is JSON");
    assert!(
        file == generated(),
        "proto/openapi.json is not what the code describes; regenerate it with\n    \
         UPDATE_OPENAPI=1 cargo test -p conman-api openapi\nand review the difference"
    );
}

#[test]
fn every_operation_has_an_id_of_its_own_a_summary_and_a_statement_on_security() {
    let api = generated();
    let operations = operations(&api);
    let mut ids: Vec<_> = operations
        .iter()
        .map(|(name, operation)| operation["operationId"].as_str().expect(name))
        .collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), operations.len());
    for (name, operation) in &operations {
        assert!(operation["summary"].is_string(), "{name}");
        assert!(operation["security"].is_array(), "{name}");
        let open = operation["security"] == serde_json::json!([{}]);
        assert_eq!(open, operation["x-conman-scope"].is_null(), "{name}");
    }
}

#[test]
fn only_probes_are_open_to_everybody() {
    let api = generated();
    let open: Vec<_> = operations(&api)
        .into_iter()
        .filter(|(_, operation)| operation["x-conman-scope"].is_null())
        .map(|(name, _)| name)
        .collect();
    assert_eq!(open, ["get /healthz", "get /readyz"]);
}

#[test]
fn every_error_response_is_described_as_a_problem() {
    let api = generated();
    for (name, operation) in operations(&api) {
        for (status, response) in operation["responses"].as_object().expect("responses") {
            // 431 comes from below the router, before there is a request to describe.
            if status.starts_with(['4', '5']) && status != "431" {
                let schema = &response["content"]["application/problem+json"]["schema"]["$ref"];
                assert_eq!(schema, "#/components/schemas/Problem", "{name} {status}");
            }
        }
    }
}

#[test]
fn requests_are_closed_to_unknown_fields_and_every_reference_resolves() {
    let api = generated();
    for name in [
        "SessionRequest",
        "ExecRequest",
        "TerminalSize",
        "PreemptRequest",
        "ConnectTokenRequest",
        "PullRequest",
    ] {
        let schema = &api["components"]["schemas"][name];
        assert_eq!(schema["additionalProperties"], false, "{name}");
    }
    let mut references = Vec::new();
    collect_references(&api, &mut references);
    assert!(!references.is_empty());
    for reference in references {
        let pointer = reference.strip_prefix('#').expect("a local reference");
        assert!(api.pointer(pointer).is_some(), "{reference}");
    }
}

fn collect_references(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            if let Some(Value::String(reference)) = fields.get("$ref") {
                found.push(reference.clone());
            }
            fields
                .values()
                .for_each(|field| collect_references(field, found));
        }
        Value::Array(items) => items
            .iter()
            .for_each(|item| collect_references(item, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
