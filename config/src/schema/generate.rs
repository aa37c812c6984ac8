//! Makes the schemas of the types, and compares the files; `MCCS_WRITE=1` writes them.

use std::borrow::Cow;
use std::path::Path;

use schemars::generate::SchemaSettings;
use schemars::transform::{Transform, transform_subschemas};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::Value;

use super::SCHEMAS;
use crate::change::StrategyChange;
use crate::cpus::CpuChoice;
use crate::policy::Channels;
use crate::service::{Address, CollectorUrl, Device, LargeFrom, Ports, TenantConfig};
use crate::{
    Bytes, ConsoleConfig, DurationText, JobFile, KubernetesFile, PolicyFile, Rate, ServiceConfig, SlurmFile,
    TopologyFile,
};

/// Says the form of a value that is written as a text.
macro_rules! written {
    ($type:ty, $name:literal, $about:literal, $pattern:literal) => {
        impl JsonSchema for $type {
            fn schema_name() -> Cow<'static, str> {
                $name.into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "description": $about, "pattern": $pattern })
            }
        }
    };
}

written!(Bytes, "Bytes", "Bytes with their unit, such as \"4MiB\".", r"^\s*[0-9]+\s*(B|KiB|MiB|GiB|TiB)?\s*$");
written!(
    DurationText,
    "Duration",
    "A time with its unit, such as \"50ms\"; \"0\" needs none.",
    r"^\s*(0+|[0-9]+\s*(h|m|s|ms|us|ns))\s*$"
);
written!(
    Rate,
    "Rate",
    "Bits per second with their unit, such as \"10Gbit/s\".",
    r"^\s*(0+|[0-9]+\s*(Tbit/s|Gbit/s|Mbit/s|kbit/s|bit/s))\s*$"
);
written!(
    CpuChoice,
    "CpuChoice",
    "\"any\", \"node 1\", or CPUs such as \"0-7,16\".",
    r"^\s*(any|node\s*[0-9]+|[0-9]+(-[0-9]+)?(\s*,\s*[0-9]+(-[0-9]+)?)*)\s*$"
);
written!(
    LargeFrom,
    "LargeFrom",
    "\"measured\", a size, \"0\" for never; or of collectives: \"4MiB, broadcast=0\".",
    r"^(\s*([a-z_]+\s*=)?\s*(measured|[0-9]+\s*(B|KiB|MiB|GiB|TiB)?)\s*(,|$))+$"
);
written!(
    Address,
    "Address",
    "An IP address with a port, such as \"10.0.0.1:7400\" or \"[fd00::1]:7400\".",
    r"^([0-9.]+|\[[0-9A-Fa-f:.%]+\]):[0-9]{1,5}$"
);
written!(Ports, "Ports", "Ports from one to another, such as \"20000-20999\".", r"^[0-9]{1,5}-[0-9]{1,5}$");
written!(
    CollectorUrl,
    "CollectorUrl",
    "Such as \"http://127.0.0.1:4318/v1/metrics\".",
    r"^http://[^\s/]+:[0-9]{1,5}/\S*$"
);
written!(
    Device,
    "Device",
    "A device or network interface, such as \"mlx5_0\"; \"mlx5_0:1\" is its first port.",
    r"^[^\s/:]+(:[0-9]{1,3})?$"
);

impl JsonSchema for Channels {
    fn schema_name() -> Cow<'static, str> {
        "Channels".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A number of channels, or \"nics\".",
            "oneOf": [{ "type": "integer", "minimum": 0, "maximum": u32::MAX }, { "const": "nics" }]
        })
    }
}

/// Makes a schema of JSON one of TOML, for people: no null, no links of the sources' comments, descriptions in one line.
#[derive(Clone)]
struct OfToml;

impl Transform for OfToml {
    fn transform(&mut self, schema: &mut Schema) {
        if let Some(about) = schema.get("description").and_then(Value::as_str) {
            let plain = about.replace("[`", "`").replace("`]", "`").split_whitespace().collect::<Vec<_>>().join(" ");
            schema.insert("description".into(), plain.into());
        }
        let is_null = |one: &Value| one == "null" || one["type"] == "null";
        for key in ["type", "anyOf"] {
            let Some(Value::Array(choices)) = schema.get_mut(key) else { continue };
            choices.retain(|choice| !is_null(choice));
            let [only] = &mut choices[..] else { continue };
            let only = only.take();
            schema.remove(key);
            match only {
                Value::Object(keys) => keys.into_iter().for_each(|(key, value)| drop(schema.insert(key, value))),
                only => drop(schema.insert(key.into(), only)),
            }
        }
        if schema.get("default") == Some(&Value::Null) {
            schema.remove("default");
        }
        transform_subschemas(self, schema);
    }
}

fn made<T: JsonSchema>(name: &str) -> String {
    let settings = SchemaSettings::draft2020_12().with_transform(OfToml);
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    schema.insert("title".into(), format!("{name}.toml").into());
    serde_json::to_string_pretty(&schema).expect("JSON") + "\n"
}

fn all() -> Vec<(&'static str, String)> {
    vec![
        ("change", made::<StrategyChange>("change")),
        ("console", made::<ConsoleConfig>("console")),
        ("job", made::<JobFile>("job")),
        ("kubernetes", made::<KubernetesFile>("kubernetes")),
        ("policy", made::<PolicyFile>("policy")),
        ("service", made::<ServiceConfig>("service")),
        ("slurm", made::<SlurmFile>("slurm")),
        ("tenant", made::<TenantConfig>("tenant")),
        ("topology", made::<TopologyFile>("topology")),
    ]
}

#[test]
fn schemas_are_those_of_the_types() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("schemas");
    let writes = std::env::var_os("MCCS_WRITE").is_some();
    let all = all();
    assert!(all.iter().map(|(name, _)| *name).eq(SCHEMAS.iter().map(|schema| schema.name)));
    for (name, text) in all {
        let path = folder.join(format!("{name}.json"));
        if writes {
            std::fs::write(&path, &text).expect("written");
        }
        let there = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(there == text, "{} is old: MCCS_WRITE=1 cargo test -p mccs-config schemas", path.display());
    }
}

/// Keys of a file's sections that are tables of one kind, so that a mistyped key is one in an editor too.
#[test]
fn every_table_refuses_keys_that_it_does_not_have() {
    for schema in &SCHEMAS {
        let document: Value = serde_json::from_str(schema.text).expect("JSON");
        let tables = document["$defs"].as_object().into_iter().flatten().map(|(name, table)| (name.as_str(), table));
        for (name, table) in tables.chain([("the file", &document)]) {
            let has_keys = table["type"] == "object" && table["properties"].is_object();
            assert!(!has_keys || table["additionalProperties"] == false, "{name} of {}", schema.name);
        }
    }
}
