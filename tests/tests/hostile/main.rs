//! A tenant that does not use the shim, but writes what it likes. Each case ends that call or that session with a clear
//! reason; another tenant's collectives go on, checked.

mod commands;
mod connections;
mod descriptors;
mod floods;
mod held;
mod joins;
mod memory;
mod parts;
mod port_channels;
mod random;
mod raw;
mod refused;
mod rounds;
mod sanitized;
mod victim;
