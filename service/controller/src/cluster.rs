//! The controller's knowledge of the cluster's hosts, links and flows, and its last words to each
//! host of them.

pub(crate) mod cluster_rates;
pub mod dead_paths;
pub mod hosts;
pub(crate) mod inventories;
pub(crate) mod link_faults;
pub(crate) mod pace_table;
pub(crate) mod reductions;
