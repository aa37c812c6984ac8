//! Noisy neighbours: a tenant's calls beside another tenant's flood, against processes that only
//! compute.

pub mod attack;
pub mod children;
pub mod samples;
pub mod services;
pub mod victim;
