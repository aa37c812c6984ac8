//! Terms of jobs' tenants, as files of schedulers have them: what `[[tenant]]` of `service.toml` says, of each job on a host.

use serde::{Deserialize, Serialize};

use crate::service::TenantConfig;
use crate::units::Bytes;
use crate::validate::Problems;

/// What a kind of jobs gets. Absent: as `service.toml` has it for a tenant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct JobTerms {
    /// The tenant of `policy.toml` whose caps, shares and priority hold for all such jobs together. Absent: one of the kind's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// See [`TenantConfig::weight`]; each job's, as all that follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// See [`TenantConfig::max_memory`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_memory: Option<Bytes>,
    /// See [`TenantConfig::max_gpu_memory`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_gpu_memory: Option<Bytes>,
    /// See [`TenantConfig::max_sessions`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_sessions: Option<u32>,
    /// See [`TenantConfig::max_communicators`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_communicators: Option<u32>,
    /// See [`TenantConfig::traffic_classes`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub traffic_classes: Option<Vec<u8>>,
}

impl JobTerms {
    /// These terms, and where they say nothing others.
    #[must_use]
    pub fn before(&self, others: &JobTerms) -> JobTerms {
        JobTerms {
            tenant: self.tenant.clone().or(others.tenant.clone()),
            weight: self.weight.or(others.weight),
            max_memory: self.max_memory.or(others.max_memory),
            max_gpu_memory: self.max_gpu_memory.or(others.max_gpu_memory),
            max_sessions: self.max_sessions.or(others.max_sessions),
            max_communicators: self.max_communicators.or(others.max_communicators),
            traffic_classes: self.traffic_classes.clone().or(others.traffic_classes.clone()),
        }
    }

    /// A job's tenant on these terms. Its socket is the service's choice.
    #[must_use]
    pub fn tenant_called(&self, name: String) -> TenantConfig {
        let said = TenantConfig::new(name, "");
        TenantConfig {
            rules: self.tenant.clone(),
            weight: self.weight.unwrap_or(said.weight),
            max_memory: self.max_memory,
            max_gpu_memory: self.max_gpu_memory,
            max_sessions: self.max_sessions,
            max_communicators: self.max_communicators,
            traffic_classes: self.traffic_classes.clone().unwrap_or_default(),
            ..said
        }
    }

    /// What would be wrong with the tenant is wrong here.
    pub(crate) fn validate_at(&self, key: &str, problems: &mut Problems) {
        let rules = None;
        problems.nested(key, &TenantConfig { rules, ..self.tenant_called("a".into()) });
        self.tenant.iter().for_each(|tenant| problems.name(format!("{key}.tenant"), tenant));
    }
}
