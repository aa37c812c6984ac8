//! Users of a tenant's socket.

use std::sync::Arc;

use mccs_ipc::handshake::PeerCredentials;
use mccs_tenants::Tenant;

use crate::session::outlets::ProxyQueues;

/// A tenant that may connect.
#[derive(Clone)]
pub struct Admission {
    /// The question's mark.
    pub tenant: Arc<Tenant>,
    /// The users that are it; all, if `None`.
    pub uids: Option<Vec<u32>>,
    /// Part of the path of the cgroup that its processes are in; any, if `None`.
    pub cgroup: Option<String>,
    /// Queues of its commands.
    pub queues: ProxyQueues,
}

impl Admission {
    /// Whether a user may be this tenant.
    pub(super) fn admits(&self, peer: PeerCredentials) -> bool {
        let is_in = |part: &String| {
            let cgroups = std::fs::read_to_string(format!("/proc/{}/cgroup", peer.pid));
            cgroups.is_ok_and(|text| names_cgroup(&text, part))
        };
        self.uids.as_ref().is_none_or(|uids| uids.contains(&peer.uid)) && self.cgroup.as_ref().is_none_or(is_in)
    }

    /// The same, with a text.
    ///
    /// # Errors
    /// The user may not.
    pub(in crate::session) fn check(&self, peer: PeerCredentials) -> Result<(), String> {
        let refused = || format!("user {} is not tenant {} any more by service.toml", peer.uid, self.tenant.name);
        if self.admits(peer) { Ok(()) } else { Err(refused()) }
    }
}

/// Whether a process whose `/proc/PID/cgroup` this is, is in a cgroup below one of this name.
fn names_cgroup(text: &str, part: &str) -> bool {
    let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.flat_map(|path| path.split('/')).any(|name| name == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_is_named_by_a_whole_part_of_its_path() {
        let both = "12:cpuset:/slurm/uid_7/job_47\n0::/init.scope\n";
        assert!(names_cgroup(both, "job_47") && names_cgroup(both, "init.scope") && !names_cgroup(both, "job_471"));
        let v2 = "0::/system.slice/slurmstepd.scope/job_471/step_0\n";
        assert!(names_cgroup(v2, "job_471") && !names_cgroup(v2, "job_47") && !names_cgroup("", "job_47"));
    }
}
