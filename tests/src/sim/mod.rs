//! Exchange simulation: many services' protocols on a simulated network and clock, in one thread,
//! under one seed.
//!
//! [`network`] carries frames and breaks things, [`world`] runs hosts and the jobs on them, [`proxy`] answers as a proxy engine
//! would, `talks` tells other hosts something, [`ledger`] keeps what each host was told and says afterwards what is wrong with it. Same seed, same build: same trace.

pub mod ledger;
pub mod network;
pub mod proxy;
mod talks;
pub mod world;
