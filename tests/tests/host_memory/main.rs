//! Ranks of host memory on services of this process: collectives, groups and streams, mistakes, and what the
//! operator sees and changes meanwhile. One program, so that tests that wait run beside others.

mod collectives;
mod groups;
mod letting_go;
mod mismatch;
mod operator;
mod port_channels;
mod rounds;
mod semaphore_ordered;
