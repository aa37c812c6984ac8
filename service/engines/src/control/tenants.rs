//! Operators' requests about tenants that come and go while the service runs.

use std::path::PathBuf;

use mccs_config::service::TenantConfig;
use mccs_control::{ControlAnswer, TenantRow};
use mccs_registry::Registry;
use mccs_tenants::Resource;

/// Desk that adds tenants and takes them away. Answers at once.
pub trait TenantDesk: Send + Sync {
    /// Has a tenant from now on.
    fn add(&self, tenant: TenantConfig) -> ControlAnswer;

    /// Has its sessions end. It is gone once nothing of it is left.
    fn remove(&self, name: &str) -> ControlAnswer;

    /// Socket of processes of a tenant, if it was added.
    fn socket_of(&self, name: &str) -> Option<PathBuf>;
}

/// All tenants now.
pub(super) fn rows(registry: &Registry, desk: &dyn TenantDesk) -> Vec<TenantRow> {
    let row = |tenant: &std::sync::Arc<mccs_tenants::Tenant>| TenantRow {
        tenant: tenant.name.clone(),
        rules: tenant.rules.clone(),
        labels: tenant.labels.clone(),
        weight: tenant.share.weight,
        sessions: tenant.used(Resource::Sessions),
        communicators: tenant.used(Resource::Communicators),
        memory_bytes: tenant.used(Resource::MemoryBytes),
        added: desk.socket_of(&tenant.name),
        leaving: tenant.is_removed(),
    };
    registry.tenants().iter().map(row).collect()
}
