//! Whether a tenant holds nothing any more.

use std::sync::Arc;

use mccs_tenants::Resource;

use crate::TestService;

const RESOURCES: [Resource; 10] = [
    Resource::MemoryBytes,
    Resource::GpuMemoryBytes,
    Resource::Mappings,
    Resource::Sessions,
    Resource::Communicators,
    Resource::Ranks,
    Resource::Imports,
    Resource::MappedBytes,
    Resource::Descriptors,
    Resource::SentDescriptors,
];

/// Ends whatever a tenant does, by `end`, and returns when nothing of it is left. The watchdog of the caller's ends what never comes back.
pub fn all_comes_back(service: &TestService, tenant: &str, end: impl FnOnce()) {
    let registry = &service.service().registry;
    let session = || registry.sessions().into_iter().find(|session| session.tenant.name == tenant);
    let held = session().map(|session| Arc::clone(&session.tenant));
    end();
    while session().is_some()
        || held.as_ref().is_some_and(|tenant| RESOURCES.iter().any(|resource| tenant.used(*resource) > 0))
    {
        std::thread::yield_now();
    }
}
