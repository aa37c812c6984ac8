//! What a tenant's calls take beside a flood of another tenant, against the same beside processes that only compute.

pub mod attack;
pub mod children;
pub mod samples;
pub mod services;
pub mod victim;
