//! A controller, agents and hosts that do what orders say, in one thread on a clock of the test's.

mod added_policy;
mod dead_links;
mod decisions;
mod diffs;
mod files;
mod files_rolled_back;
mod fixture;
mod inventory;
mod nics;
mod operator_acts;
mod operator_views;
mod orders;
mod pinned;
mod properties;
mod reductions;
mod reports;
mod rollouts;
mod rules;
mod shares;
mod takeover;
mod transport;
mod trouble;
mod untellable_paces;
mod windows;
