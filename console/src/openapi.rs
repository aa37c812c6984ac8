//! OpenAPI description of the API, made of docs/JSON.md: the tables there say what each document has, for `mccsctl` and here alike.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use mccs_control::acts::{ACT_BYTES_MAX, ACTS, ActKind};
use serde_json::{Map, Value, json};

use crate::routes::{API, DOCUMENTS};

/// Tables of all documents, by command.
const TABLES: &str = include_str!("../../docs/JSON.md");

/// A key and what stands below it.
#[derive(Default)]
struct Node {
    /// As the table has it: `string or null`.
    kind: Option<String>,
    meaning: String,
    /// Keys of an object.
    keys: BTreeMap<String, Node>,
    /// Items of a list.
    item: Option<Box<Node>>,
    /// Values of an object whose keys are anything.
    value: Option<Box<Node>>,
}

/// Rows of a command's table: key, type, meaning.
fn rows(command: &str) -> Vec<[String; 3]> {
    let heading = format!("## `{command}`\n");
    let section = TABLES.split_once(&heading).map_or("", |(_, rest)| rest.split("\n## ").next().unwrap_or_default());
    let row = |line: &str| {
        let mut cells = line.strip_prefix("| `")?.splitn(3, " | ");
        let (key, kind, meaning) = (cells.next()?, cells.next()?, cells.next()?);
        Some([key.strip_suffix('`')?, kind, meaning.trim_end_matches([' ', '|'])].map(str::to_owned))
    };
    section.lines().filter_map(row).collect()
}

/// Rows of a command, with another beginning of their keys.
fn rows_as(command: &str, from: &str, to: &str) -> Vec<[String; 3]> {
    let renamed = |[key, kind, meaning]: [String; 3]| {
        let rest = key.strip_prefix(from)?;
        Some([format!("{to}{rest}"), kind, meaning])
    };
    rows(command).into_iter().filter_map(renamed).collect()
}

/// Rows of a document, of which some are told of under other commands.
fn rows_of(command: &str) -> Vec<[String; 3]> {
    match command {
        "stuck" => rows_as("cluster", "cluster", "stuck"),
        "show" => {
            let parts = ["hosts", "gpus", "sessions", "communicators", "joining", "failed", "engines"];
            parts.into_iter().flat_map(rows).collect()
        }
        "watch" => {
            let lists = ["communicators", "joining", "flows", "hosts", "gpus"];
            let of_lists = lists.into_iter().flat_map(rows).chain(rows_as("links", "links", "paths"));
            rows(command).into_iter().chain(of_lists).collect()
        }
        _ => rows(command),
    }
}

/// The whole of which rows are parts.
fn tree(rows: &[[String; 3]]) -> Node {
    let mut root = Node::default();
    for [path, kind, meaning] in rows {
        let mut at = &mut root;
        for word in path.replace("[]", ".[]").split('.') {
            at = match word {
                "[]" => at.item.get_or_insert_default(),
                "*" => at.value.get_or_insert_default(),
                key => at.keys.entry(key.to_owned()).or_default(),
            };
        }
        (at.kind, at.meaning) = (Some(kind.clone()), meaning.clone());
    }
    root
}

impl Node {
    /// Whether a document may be without it.
    fn may_be_absent(&self) -> bool {
        let says = |text: &str| text.contains("absent");
        self.kind.as_deref().is_some_and(says) || says(&self.meaning)
    }

    fn schema(&self) -> Value {
        let mut schema = Map::new();
        let kinds = self.kinds();
        if let [kind] = &kinds[..] {
            schema.insert("type".into(), json!(kind));
        } else if !kinds.is_empty() {
            schema.insert("type".into(), json!(kinds));
        }
        if !self.meaning.is_empty() {
            schema.insert("description".into(), json!(self.meaning));
        }
        if let Some(item) = &self.item {
            schema.insert("items".into(), item.schema());
        } else if self.kind.as_deref().is_some_and(|kind| kind.starts_with("list of strings")) {
            schema.insert("items".into(), json!({ "type": "string" }));
        }
        if let Some(value) = &self.value {
            schema.insert("additionalProperties".into(), value.schema());
        }
        if !self.keys.is_empty() {
            let properties: Map<_, _> = self.keys.iter().map(|(key, node)| (key.clone(), node.schema())).collect();
            schema.insert("properties".into(), Value::Object(properties));
            // Below what is told of by its parts alone, others may stand.
            let required: Vec<_> =
                self.keys.iter().filter(|(_, node)| !node.may_be_absent()).map(|(key, _)| key).collect();
            if !required.is_empty() {
                schema.insert("required".into(), json!(required));
            }
        }
        Value::Object(schema)
    }

    /// JSON's types of it; none where anything may stand.
    fn kinds(&self) -> Vec<&'static str> {
        let Some(kind) = &self.kind else { return Vec::new() };
        let each = kind.split([',', ' ']).filter_map(|word| match word {
            "string" => Some("string"),
            "number" => Some("number"),
            "boolean" => Some("boolean"),
            "object" => Some("object"),
            "null" => Some("null"),
            "list" => Some("array"),
            _ => None,
        });
        each.collect()
    }
}

fn schema_of(command: &str) -> Value {
    let mut root = tree(&rows_of(command)).schema();
    // Lists begin with a key of elements: `hosts[].host`.
    if let Value::Object(root) = &mut root {
        root.insert("type".into(), json!("object"));
    }
    root
}

fn name_of(command: &str) -> String {
    let words = command.split([' ', '-']);
    words.map(|word| word.split_at(1)).map(|(first, rest)| first.to_uppercase() + rest).collect()
}

fn looks(command: &str, summary: &str, parameters: Value) -> Value {
    let error = |description: &str| {
        json!({ "description": description, "content": { "application/json": {
        "schema": { "$ref": "#/components/schemas/Error" } } } })
    };
    json!({
        "summary": summary,
        "parameters": parameters,
        "responses": {
            "200": { "description": "As mccsctl prints it.", "content": { "application/json": {
                "schema": { "$ref": format!("#/components/schemas/{}", name_of(command)) } } } },
            "304": { "description": "A document with the tag of If-None-Match is the newest." },
            "404": error("There is no such document, or no [controller] in service.toml."),
            "409": error("The service refuses."),
            "503": error("The service cannot be asked; error.since says since when, in seconds of the Unix epoch. Or others ask too much."),
            "default": error("The request is none that the console takes; error.code says why."),
        }
    })
}

/// The description, as JSON.
#[must_use]
pub fn description() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| whole().to_string());
    &TEXT
}

/// The body of every answer that is an error.
fn error_schema() -> Value {
    json!({ "type": "object", "required": ["error"], "properties": { "error": {
        "type": "object", "required": ["code", "message"], "properties": {
            "code": { "type": "string", "description": "For programs." },
            "message": { "type": "string", "description": "For people." },
            "since": { "type": "number", "description": "Since when the service cannot be asked, where it cannot." } } } } })
}

fn whole() -> Value {
    let tag = json!({ "name": "If-None-Match", "in": "header", "required": false, "schema": { "type": "string" },
        "description": "The ETag of what the caller has." });
    let number = json!({ "name": "communicator", "in": "path", "required": true,
        "schema": { "type": "integer", "minimum": 0 }, "description": "Its number, as communicators has it." });
    let (mut paths, mut schemas) = (Map::new(), Map::new());
    let mut add = |path: String, command: &str, summary: &str, parameters: Value| {
        paths.insert(format!("{API}/{path}"), json!({ "get": looks(command, summary, parameters) }));
        schemas.entry(name_of(command)).or_insert_with(|| schema_of(command));
    };
    for (path, command, _) in DOCUMENTS {
        let summary = match command {
            "watch" => "The output of mccsctl --json watch for one look, without accounts".to_owned(),
            command => format!("The output of mccsctl --json {command}"),
        };
        add(path.to_owned(), command, &summary, json!([tag]));
    }
    let one = |which: &str| format!("communicators/{{communicator}}/{which}");
    add(one("why-stuck"), "why-stuck", "The ranks that keep a communicator waiting", json!([number, tag]));
    add(one("accounts"), "why-stuck", "All hosts' accounts of a communicator now", json!([number, tag]));
    let acts = json!({ "name": "acts", "in": "query", "required": false, "schema": { "const": true },
        "description": "Only what operators did." });
    add(
        "policy/history".to_owned(),
        "policy history",
        "Acts and decisions: reason, author, outcome",
        json!([acts, tag]),
    );
    add("policy/diff".to_owned(), "policy diff", "Changes that a policy would make", json!([]));
    schemas.insert("Error".into(), error_schema());
    // The policy to compare is sent; nothing of it is put in force.
    if let Some(diff) = paths.get_mut(&format!("{API}/policy/diff")).and_then(Value::as_object_mut)
        && let Some(mut operation) = diff.remove("get")
    {
        // It is answered anew each time.
        if let Some(responses) = operation["responses"].as_object_mut() {
            responses.remove("304");
        }
        operation["requestBody"] = json!({ "required": true, "description": "A policy file.",
            "content": { "text/plain": { "schema": { "type": "string" } } } });
        diff.insert("post".into(), operation);
    }
    let query = |name: &str, schema: Value, description: &str| {
        json!({ "name": name, "in": "query", "required": false,
        "schema": schema, "description": description })
    };
    paths.insert(format!("{API}/trace"), json!({ "post": {
        "summary": "Has the service record for a while, for Perfetto; one trace at a time",
        "parameters": [
            query("seconds", json!({ "type": "number", "exclusiveMinimum": 0, "maximum": 10 }), "How long; 1 by default."),
            query("communicator", json!({ "type": "integer", "minimum": 0 }), "One communicator's number."),
        ],
        "responses": {
            "200": { "description": "A trace.", "content": { "application/json": { "schema": { "type": "object" } } } },
            "default": { "description": "Why there is none.", "content": { "application/json": {
                "schema": { "$ref": "#/components/schemas/Error" } } } },
        } } }));
    paths.insert(format!("{API}/acts"), json!({ "post": signed_acts() }));
    json!({
        "openapi": "3.1.0",
        "info": { "title": "mccs", "version": env!("CARGO_PKG_VERSION"), "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" },
            "description": "The views of mccsctl, as JSON; and acts, by token. Keys are added in later versions: ignore those that you do not know." },
        "servers": [{ "url": "/" }],
        "paths": paths,
        "components": { "schemas": schemas },
    })
}

/// Acts: one of those that the table has, signed.
fn signed_acts() -> Value {
    let authorization = json!({ "name": "Authorization", "in": "header", "required": true, "schema": { "type": "string" },
        "description": "mccs id=\"ID\", nonce=\"NONCE\", mac=\"MAC\": MAC is the HMAC-SHA-256, under the token's secret, of the \
                        lines mccs-act-1, ID, NONCE, and the body; NONCE is 32 hexadecimal digits, of each act its own." });
    let error = |description: &str| {
        json!({ "description": description, "content": { "application/json": {
        "schema": { "$ref": "#/components/schemas/Error" } } } })
    };
    let body = json!({ "type": "object", "oneOf": ACTS.iter().map(schema_of_act).collect::<Vec<_>>() });
    json!({
        "summary": "Has the service do what the holder of a token has signed",
        "parameters": [authorization],
        "requestBody": { "required": true, "description": format!("One act, of {} KiB at most.", ACT_BYTES_MAX >> 10),
            "content": { "application/json": { "schema": body } } },
        "responses": {
            "200": { "description": "It is done; `answer` is what the command prints with --json.", "content": { "application/json": {
                "schema": { "type": "object", "required": ["answer"], "properties": { "answer": {} } } } } },
            "400": error("bad_signature, bad_act: it cannot be read."),
            "401": error("no_token, wrong_token, expired, removed."),
            "403": error("no_right, spent."),
            "404": error("no_tenant."),
            "409": error("replayed; or refused, for the service's own reason."),
            "429": error("too_many_wrong."),
            "503": error("service_away, busy."),
            "default": error("The request is none that the console takes; error.code says why."),
        }
    })
}

fn schema_of_act(kind: &ActKind) -> Value {
    let mut properties = Map::from_iter([("act".to_owned(), json!({ "const": kind.act }))]);
    let mut required = vec!["act"];
    for (key, of, meaning) in kind.keys {
        let mut schema = Map::from_iter([("description".to_owned(), json!(meaning))]);
        if *of != "any" {
            schema.insert("type".to_owned(), json!(of));
        }
        properties.insert((*key).to_owned(), Value::Object(schema));
        if !meaning.contains("absent") {
            required.push(key);
        }
    }
    let right = kind.right.map_or("any token".to_owned(), |right| format!("right {right}"));
    json!({ "description": format!("{} ({right})", kind.summary), "type": "object", "properties": properties,
        "required": required, "additionalProperties": false })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_document_has_the_keys_of_its_table() {
        for (_, command, _) in DOCUMENTS {
            let schema = schema_of(command);
            let properties = schema["properties"].as_object().unwrap_or_else(|| panic!("{command}: {schema}"));
            assert!(!properties.is_empty(), "{command}");
        }
        let hosts = schema_of("hosts");
        assert_eq!(hosts["properties"]["hosts"]["items"]["properties"]["up"]["type"], "boolean");
        assert_eq!(
            hosts["properties"]["hosts"]["items"]["properties"]["last_error"]["type"],
            json!(["string", "null"])
        );
        let rail = &schema_of("communicators")["properties"]["communicators"]["items"];
        let required = rail["required"].as_array().expect("a list");
        assert!(required.contains(&json!("tenant")) && !required.contains(&json!("part_of")), "{required:?}");
        assert!(schema_of("stuck")["properties"]["stuck"]["properties"]["hosts"].is_object());
        assert!(schema_of("watch")["properties"]["paths"]["items"]["properties"]["peer"].is_object());
    }

    #[test]
    fn each_act_is_described_here_and_in_the_document() {
        let whole = whole();
        let acts = &whole["paths"]["/api/v1/acts"]["post"];
        let schemas = &acts["requestBody"]["content"]["application/json"]["schema"]["oneOf"];
        assert_eq!(schemas.as_array().map(Vec::len), Some(ACTS.len()));
        let page = include_str!("../../docs/CONSOLE.md");
        for kind in &ACTS {
            let right = kind.right.map_or("any".to_owned(), |right| format!("`{right}`"));
            let row = format!("| `{}` | {right} |", kind.act);
            assert!(page.contains(&row), "docs/CONSOLE.md has no {row}");
        }
    }

    #[test]
    fn references_lead_somewhere() {
        let whole = whole();
        let text = whole.to_string();
        for reference in text.split("\"#/components/schemas/").skip(1) {
            let name = reference.split('"').next().unwrap_or_default();
            assert!(whole["components"]["schemas"][name].is_object(), "{name}");
        }
        assert!(whole["paths"]["/api/v1/policy/diff"]["post"].is_object());
    }
}
