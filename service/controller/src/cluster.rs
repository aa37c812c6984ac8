//! What the controller knows of the cluster's hosts, links and flows, and what it has told each
//! host of them.

pub(crate) mod cluster_rates;
pub mod dead_paths;
pub mod hosts;
pub(crate) mod inventories;
pub(crate) mod link_faults;
pub(crate) mod pace_table;
pub(crate) mod reductions;
