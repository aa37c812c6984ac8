//! Exchange engines that talk over the loopback: they meet, set communicators up, lose each other, and refuse strangers.
//!
//! Most tests poll their engines by hand in one thread. Every host has a loopback address of its own, so tests do not meet.

mod cluster;
mod fixture;
mod frames;
mod operator;
mod proxy;
mod turns;
mod unauthenticated_peers;
