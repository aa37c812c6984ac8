//! Checks that a tenant holds nothing any more (leaks).

use mccs_tenants::Resource;

use crate::TestService;

const RESOURCES: [Resource; 11] = [
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
    Resource::KeptDescriptors,
];

/// Returns when a tenant, which does nothing any more, holds nothing any more. The watchdog of the caller's ends what never comes back.
///
/// # Panics
/// If the service has no such tenant.
pub fn all_comes_back(service: &TestService, tenant: &str) {
    let tenants = service.service().registry.tenants();
    let tenant = tenants.iter().find(|one| one.name == tenant).expect("a tenant of the service's");
    while RESOURCES.iter().any(|resource| tenant.used(*resource) > 0) {
        std::thread::yield_now();
    }
}
