//! Set-up for tests of sockets: the limit of descriptors.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Lets this process have as many descriptors as it may. Returns how many that are.
///
/// # Panics
/// The kernel refuses what it has promised.
pub fn raise_descriptor_limit() -> u64 {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("limit");
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).expect("the soft limit may be raised to the hard one");
    }
    hard
}
