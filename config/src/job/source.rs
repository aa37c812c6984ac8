//! Service configurations of a job's hosts: from the job file's text or another file, with
//! placeholders filled in for each host.
//!
//! Places are filled in the text, before TOML is read, so that in a file of its own `port = {port}` is a number (the
//! job file is TOML before that, too); lines stay, so that a complaint about `[service.config]` names the job file's
//! line.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::{Host, JobFile};
use crate::document;
use crate::error::{ConfigError, Diagnostic};
use crate::service::ServiceConfig;
use crate::template;
use crate::validate::{Problems, Validate, nearest};

/// Stands for the private folder, and for an address that is only known once a fabric is up, while a file is checked.
const FOLDER_FOR_CHECKS: &str = "/run/mccs-launch";
const ADDRESS_FOR_CHECKS: &str = "10.0.0.1";

/// The part of a job file that is a service's configuration.
#[derive(Deserialize)]
struct Nested {
    #[serde(default)]
    service: NestedService,
}

#[derive(Default, Deserialize)]
struct NestedService {
    config: Option<ServiceConfig>,
}

impl Validate for Nested {
    fn validate(&self, problems: &mut Problems) {
        let Some(config) = &self.service.config else { return };
        // The launcher gives each tenant its own socket: one that is not set must not count as shared.
        let mut config = config.clone();
        for tenant in &mut config.tenants {
            tenant.socket = format!("{}.sock", tenant.name).into();
        }
        problems.nested("service.config", &config);
        if config.service.runtime_dir.is_some() {
            problems.add("service.config.service.runtime_dir", "is chosen by the launcher for each run; leave it out");
        }
    }
}

impl JobFile {
    /// What the file says about the service of `host`, its `index`-th, whose private folder is `runtime_dir`: from
    /// `service.config_file`, from `[service.config]`, or the defaults.
    ///
    /// # Errors
    /// The file that it names cannot be read or is refused, or a place has no value for this host.
    pub fn service_config(&self, index: usize, host: &Host, runtime_dir: &Path) -> Result<ServiceConfig, ConfigError> {
        let places = host.places(index, &runtime_dir.display().to_string());
        let Some(path) = &self.service.config_file else {
            return self.nested_config(&places);
        };
        let path = self.directory.join(path);
        let name = path.display().to_string();
        let text = document::read_text(&path, ServiceConfig::BYTES_MAX)?;
        // A comment may speak of places; what is left in a value is a mistake.
        let config = ServiceConfig::parse(&template::fill(&text, &places), &name)?;
        refuse_left(config, &text, &name, &places)
    }

    fn nested_config(&self, places: &BTreeMap<String, String>) -> Result<ServiceConfig, ConfigError> {
        let (text, name) = &self.source;
        if self.service.config.is_none() {
            return Ok(ServiceConfig::default());
        }
        let nested: Nested = document::parse(&template::fill(text, places), name)?;
        refuse_left(nested.service.config.unwrap_or_default(), text, name, places)
    }

    /// What is wrong with `[service.config]` for any host.
    pub(super) fn check_services(&self) -> Vec<Diagnostic> {
        let mut found = Vec::new();
        for (index, host) in self.hosts().iter().enumerate() {
            let mut host = host.clone();
            if host.fabric.is_some() {
                host.address.get_or_insert_with(|| ADDRESS_FOR_CHECKS.to_owned());
            }
            if let Err(error) = self.nested_config(&host.places(index, FOLDER_FOR_CHECKS)) {
                found.extend(error.diagnostics().to_vec());
            }
        }
        found
    }
}

fn refuse_left(
    config: ServiceConfig,
    text: &str,
    file: &str,
    places: &BTreeMap<String, String>,
) -> Result<ServiceConfig, ConfigError> {
    let toml = config.to_toml();
    let Some(name) = template::places(&toml).next() else {
        return Ok(config);
    };
    let place = format!("{{{name}}}");
    let known = places.keys().map(String::as_str);
    let why = match nearest(name, known.clone()) {
        Some(near) => format!("host {:?} has no {place}; did you mean {{{near}}}?", places["host"]),
        None => {
            let known: Vec<String> = known.map(|name| format!("{{{name}}}")).collect();
            format!("host {:?} has no {place}; it has {}", places["host"], known.join(", "))
        }
    };
    let offset = text.find(&place).unwrap_or(0);
    Err(ConfigError::Invalid(vec![document::diagnostic(text, file, offset, String::new(), why)]))
}
