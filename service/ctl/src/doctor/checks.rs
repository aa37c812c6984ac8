//! Judges what was read: pure functions from facts to findings.

use std::time::{SystemTime, UNIX_EPOCH};

use mccs_config::service::{CudaUse, Ports, RdmaUse, ServiceConfig};
use mccs_control::overview::MemoryView;

use super::host::HostFacts;
use super::service::{ProcessFacts, ServiceFacts, ServiceState};
use super::{CONFIG, Configured, Finding, Verdict};

/// The first driver with CUDA 12.4, which the service needs.
const DRIVER_MIN: [u32; 2] = [550, 54];
/// As the service warns: sessions, flows and GPU memory take some hundred each.
const DESCRIPTORS_FEW: u64 = 4096;
/// The kernel's own default, of which the service gives seven eighths to regions of tenants.
const MAPPINGS_MIN: u64 = 65_530;
const CERTIFICATE_DAYS_FEW: u64 = 30;

/// Findings so far.
#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn ok(&mut self, check: &'static str, found: impl Into<String>) {
        self.0.push(Finding { check, verdict: Verdict::Ok, found: found.into(), advice: None });
    }

    fn bad(&mut self, check: &'static str, verdict: Verdict, found: impl Into<String>, advice: impl Into<String>) {
        self.0.push(Finding { check, verdict, found: found.into(), advice: Some(advice.into()) });
    }

    fn note(&mut self, check: &'static str, found: impl Into<String>, advice: impl Into<String>) {
        self.bad(check, Verdict::Note, found, advice);
    }

    fn warning(&mut self, check: &'static str, found: impl Into<String>, advice: impl Into<String>) {
        self.bad(check, Verdict::Warning, found, advice);
    }

    fn problem(&mut self, check: &'static str, found: impl Into<String>, advice: impl Into<String>) {
        self.bad(check, Verdict::Problem, found, advice);
    }

    /// Says that all is well, unless the check has found something else.
    fn ok_otherwise(&mut self, check: &'static str, found: impl Into<String>) {
        if self.0.iter().all(|finding| finding.check != check) {
            self.ok(check, found);
        }
    }
}

/// Everything that is found, in the order in which an operator would look.
pub(super) fn examine(configured: &Configured, service: &ServiceState, host: &HostFacts) -> Vec<Finding> {
    let mut findings = Findings::default();
    configuration(&mut findings, configured);
    liveness(&mut findings, configured, service, host);
    libraries(&mut findings, service.facts(), host);
    driver(&mut findings, configured, service.facts(), host);
    rdma(&mut findings, configured, service.facts(), host);
    if let Some(facts) = service.facts() {
        cluster(&mut findings, facts);
        peer_access(&mut findings, facts);
    }
    match service.facts().map(|facts| facts.process.as_ref()) {
        Some(Some(process)) => {
            limits(&mut findings, process, host);
            containers(&mut findings, process);
            cpus(&mut findings, process, host);
        }
        Some(None) => findings.note("limits", "nobody tells this user of the service's process", "run this as root"),
        None => {}
    }
    memory(&mut findings, service.facts(), host);
    clocks(&mut findings, host);
    ports(&mut findings, configured, host);
    findings.0
}

fn configuration(findings: &mut Findings, configured: &Configured) {
    match configured {
        Configured::Right(_) => findings.ok("configuration", "no mistakes found"),
        Configured::Absent => {
            findings.note(
                "configuration",
                format!("there is no {CONFIG}: all defaults"),
                "name another file by --config",
            );
        }
        Configured::Wrong(mistake) => findings.problem(
            "configuration",
            mistake,
            "correct it: the service does not start with it (mccs-service --check-config FILE)",
        ),
    }
}

fn liveness(findings: &mut Findings, configured: &Configured, service: &ServiceState, host: &HostFacts) {
    const CHECK: &str = "service";
    let facts = match service {
        ServiceState::Silent(asked, reason) => {
            let its_own = configured.right().map(ServiceConfig::control_socket).filter(|socket| socket != asked);
            let advice = its_own.map_or_else(
                || {
                    "start it (systemctl start mccs-service), or ask as root; journalctl -u mccs-service says why it does not start"
                        .to_owned()
                },
                |socket| format!("the configuration has another socket: mccsctl --socket {} doctor", socket.display()),
            );
            return findings.problem(CHECK, reason, advice);
        }
        ServiceState::Answers(facts) => facts,
    };
    let go_on = "mccsctl upgrade; where it is refused, mccsctl drain --wait 3600 && systemctl restart mccs-service";
    let own = env!("CARGO_PKG_VERSION");
    if facts.version != own {
        let found = format!("it is of version {}, mccsctl of {own}", facts.version);
        findings.warning(CHECK, found, format!("install one version, then {go_on}"));
    }
    if facts.process.as_ref().is_some_and(|process| process.is_replaced) {
        let found = "its program has been replaced while it runs: new libraries may be refused";
        findings.warning(CHECK, found, go_on);
    }
    if let Some(reason) = &facts.draining {
        let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
        findings.note(CHECK, format!("it is drained{reason}; new processes are refused"), "mccsctl drain --undo");
    }
    findings.ok_otherwise(CHECK, format!("version {own} answers, on Linux {}", host.kernel));
}

/// Libraries of processes that start now: the service refuses those that speak another protocol, or maps less than they think.
fn libraries(findings: &mut Findings, service: Option<&ServiceFacts>, host: &HostFacts) {
    const CHECK: &str = "libraries";
    let (whose, wanted) =
        service.map_or(("mccsctl", env!("CARGO_PKG_VERSION")), |facts| ("the service", &facts.version));
    for library in &host.libraries {
        let advice =
            "install the package libmccs of the service's version; images of containers have libraries of their own";
        match &library.version {
            Some(version) if version == wanted => {}
            Some(version) => {
                findings.warning(
                    CHECK,
                    format!("/{} is of version {version}, {whose} of {wanted}", library.path),
                    advice,
                );
            }
            None => findings.warning(
                CHECK,
                format!("/{} names no version: it is older, or not of mccs", library.path),
                advice,
            ),
        }
    }
    if host.libraries.is_empty() {
        return findings.ok(CHECK, "none is installed on this host: jobs bring their own");
    }
    findings.ok_otherwise(CHECK, format!("{} of version {wanted}", host.libraries.len()));
}

/// Whether a version is the first one with what is needed, or a later one.
fn suffices(version: &str) -> bool {
    let parts: Vec<u32> = version.split('.').map_while(|part| part.parse().ok()).collect();
    parts.as_slice() >= DRIVER_MIN.as_slice()
}

fn driver(findings: &mut Findings, configured: &Configured, service: Option<&ServiceFacts>, host: &HostFacts) {
    const CHECK: &str = "driver";
    let [major, minor] = DRIVER_MIN;
    match &host.driver {
        None if host.gpus == 0 => return findings.ok(CHECK, "no NVIDIA GPU is on the bus"),
        None => {
            let found = format!("{} GPUs are on the bus, and no driver is loaded", host.gpus);
            return findings.problem(CHECK, found, format!("install NVIDIA's driver, {major}.{minor} or later"));
        }
        Some(version) if !suffices(version) => {
            let advice = format!("install {major}.{minor} or later: the service needs CUDA 12.4");
            findings.problem(CHECK, format!("the driver is {version}"), advice);
        }
        Some(_) => {}
    }
    if let (Some(module), Some(library)) = (&host.driver, &host.driver_library)
        && module != library
    {
        let found =
            format!("the loaded driver is {module}, its library libcuda.so.1 of {library}: programs that start fail");
        findings.problem(CHECK, found, "drain, then load the driver that is installed: reboot, or unload its modules");
    }
    if !host.missing_gpu_files.is_empty() {
        let found = format!("/{} is missing", host.missing_gpu_files.join(" and /"));
        findings.problem(CHECK, found, "make device files: nvidia-modprobe -c 0 -u, then restart the service");
    }
    let Some(service) = service else {
        return findings.ok_otherwise(CHECK, format!("{}, {} GPUs", host.driver.as_deref().unwrap_or("-"), host.gpus));
    };
    for gpu in service.gpus.iter().filter(|gpu| gpu.lost.is_some()) {
        let error = gpu.lost.as_deref().unwrap_or_default();
        let advice = "drain, look at it (nvidia-smi -q, dmesg | grep Xid), reset it if need be, restart the service";
        findings.problem(CHECK, format!("{} is lost: {error}", gpu.gpu), advice);
    }
    // If the operator leaves some out, fewer are right.
    let takes_all =
        configured.right().is_none_or(|config| config.cuda.usage != CudaUse::Off && config.cuda.gpus.is_empty());
    if takes_all && service.gpus.len() < host.gpus {
        let found = format!("the service uses {} of {} GPUs", service.gpus.len(), host.gpus);
        findings.warning(CHECK, found, "journalctl -u mccs-service says at its start which it leaves out, and why");
    }
    findings
        .ok_otherwise(CHECK, format!("{}, {} GPUs in use", host.driver.as_deref().unwrap_or("-"), service.gpus.len()));
}

fn peer_access(findings: &mut Findings, service: &ServiceFacts) {
    const CHECK: &str = "peer access";
    let unreached: Vec<_> = service.gpus.iter().flat_map(|gpu| &gpu.unreached).collect();
    if let [first, others @ ..] = &unreached[..] {
        let others = if others.is_empty() { String::new() } else { format!(" ({} more pairs)", others.len()) };
        let advice = "data between these GPUs go through host memory: look at nvidia-smi topo -p2p r; \
                      a virtual machine needs it from its host";
        findings.warning(CHECK, format!("{first}{others}"), advice);
    } else if service.gpus.len() > 1 {
        findings.ok(CHECK, "all GPUs reach each other");
    }
}

fn rdma(findings: &mut Findings, configured: &Configured, service: Option<&ServiceFacts>, host: &HostFacts) {
    const CHECK: &str = "rdma";
    if host.rdma_ports.is_empty() {
        return findings.ok(CHECK, "no RDMA device: flows go over TCP");
    }
    let is_off = configured.right().is_some_and(|config| config.rdma.usage == RdmaUse::Off);
    if is_off {
        return findings.note(CHECK, "the configuration does not use the RDMA devices", "[rdma] use = \"auto\"");
    }
    for port in host.rdma_ports.iter().filter(|port| port.state != "ACTIVE") {
        let found = format!("port {} is {}", port.name, port.state);
        findings.warning(CHECK, found, "look at cable, switch and interface (rdma link, ip link), if it is to be used");
    }
    if !host.has_verbs_files {
        findings.problem(CHECK, "there is no /dev/infiniband/uverbs*", "modprobe ib_uverbs, then restart the service");
    }
    if !host.has_verbs_library {
        let advice = "install it with its providers: libibverbs1 and ibverbs-providers, or libibverbs";
        findings.problem(CHECK, "there is no libibverbs.so.1", advice);
    }
    let own = service.into_iter().flat_map(|service| &service.hosts).find(|host| host.own);
    if let Some(reason) = own.and_then(|own| own.no_rdma.as_deref()) {
        let found = format!("the service does not use the devices: {reason}");
        findings.warning(CHECK, found, "remove the reason, then restart the service; until then flows go over TCP");
    }
    for gpu in service.into_iter().flat_map(|service| &service.gpus) {
        let (Some("bounce"), Some(reason)) = (gpu.nic_access.as_deref(), &gpu.nic_access_reason) else { continue };
        let advice = "data pass host memory: modprobe nvidia_peermem, or take the driver's open kernel modules";
        findings.warning(CHECK, format!("NICs do not reach memory of {}: {reason}", gpu.gpu), advice);
    }
    let ports: Vec<_> = host.rdma_ports.iter().map(|port| port.name.as_str()).collect();
    findings.ok_otherwise(CHECK, format!("{} active", ports.join(", ")));
}

fn cluster(findings: &mut Findings, service: &ServiceFacts) {
    const CHECK: &str = "cluster";
    for host in service.hosts.iter().filter(|host| !host.own && !host.up) {
        let error = host.last_error.as_deref().map(|error| format!(": {error}")).unwrap_or_default();
        let advice = "look whether its service runs, whether a firewall is between, and at both certificates";
        findings.problem(CHECK, format!("{} ({}) cannot be reached{error}", host.host, host.address), advice);
    }
    if let Some(end) = service.certificate_end {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let (days, advice) = (end.saturating_sub(now) / (24 * 3600), "renew it (docs/OPERATING.md, \"Renew keys\")");
        if end <= now {
            findings.problem(CHECK, "this host's certificate has ended: other hosts refuse it", advice);
        } else if days < CERTIFICATE_DAYS_FEW {
            findings.warning(CHECK, format!("this host's certificate ends in {days} days"), advice);
        }
    }
    if !service.hosts.is_empty() {
        findings.ok_otherwise(CHECK, format!("all {} hosts are up", service.hosts.len()));
    }
}

fn limits(findings: &mut Findings, process: &ProcessFacts, host: &HostFacts) {
    const CHECK: &str = "limits";
    if let Some(descriptors) = process.descriptors.filter(|descriptors| *descriptors < DESCRIPTORS_FEW) {
        let found = format!("the service may have {descriptors} descriptors: sessions are refused early");
        findings.warning(CHECK, found, "LimitNOFILE=1048576 in its unit");
    }
    if let (Some(bytes), false) = (process.locked_bytes, host.rdma_ports.is_empty()) {
        let found = format!("the service may lock {bytes} bytes: RDMA devices cannot register memory");
        findings.problem(CHECK, found, "LimitMEMLOCK=infinity in its unit");
    }
    if process.oom_score_adj >= 0 {
        let found = format!(
            "the kernel may end the service first when memory runs out (oom_score_adj {})",
            process.oom_score_adj
        );
        findings.warning(CHECK, found, "OOMScoreAdjust=-900 in its unit");
    }
    if let Some(mappings) = host.max_map_count.filter(|mappings| *mappings < MAPPINGS_MIN) {
        let found = format!("vm.max_map_count is {mappings}: tenants register few regions");
        findings.warning(CHECK, found, format!("sysctl vm.max_map_count={MAPPINGS_MIN}, or more"));
    }
    findings.ok_otherwise(CHECK, "descriptors, locked memory and OOM score are as they should be");
}

fn containers(findings: &mut Findings, process: &ProcessFacts) {
    const CHECK: &str = "containers";
    if process.has_own_pid_namespace {
        let found = "the service has a PID namespace of its own: it sees no process of jobs";
        findings.warning(CHECK, found, "run its container in the host's (hostPID: true, --pid=host)");
    }
    if process.sees_own_user_alone {
        let found = "/proc is mounted with hidepid: the service sees no process of jobs";
        findings.warning(CHECK, found, "mount /proc without hidepid, or with gid= of a group of the service's user");
    }
    findings.ok_otherwise(CHECK, "the service sees the processes of jobs");
}

fn cpus(findings: &mut Findings, process: &ProcessFacts, host: &HostFacts) {
    const CHECK: &str = "cpus";
    for (node, cpus) in &host.nodes {
        if cpus.common(&process.cpus).is_empty() {
            let found = format!("the service may use no CPU of NUMA node {node}");
            findings.warning(CHECK, found, "threads for NICs and GPUs there run elsewhere: AllowedCPUs= in its unit");
        }
    }
    if host.nodes.len() > 1 && host.moves_pages {
        let found = "the kernel moves pages between NUMA nodes (kernel.numa_balancing)";
        findings.note(CHECK, found, "threads and memory are placed already: sysctl kernel.numa_balancing=0");
    }
    findings.ok_otherwise(CHECK, format!("{} CPUs, {} NUMA nodes", process.cpus.len(), host.nodes.len().max(1)));
}

fn memory(findings: &mut Findings, service: Option<&ServiceFacts>, host: &HostFacts) {
    const CHECK: &str = "memory";
    if host.overcommit == Some(2) {
        let found = "vm.overcommit_memory is 2: allocations are refused beyond CommitLimit";
        findings.note(CHECK, found, "sysctl vm.overcommit_ratio has more, if jobs are refused memory");
    }
    if host.has_huge_pages == Some(false) {
        let found = "shared memory has no huge pages";
        findings.note(CHECK, found, "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled");
    }
    findings.ok_otherwise(CHECK, "shared memory has huge pages where it asks for them");
    if let Some(memory) = service.and_then(|service| service.memory.as_ref()) {
        let found = memory.to_string();
        if memory.is_too_much() {
            findings.warning(CHECK, found, MemoryView::ADVICE);
        } else {
            findings.ok(CHECK, found);
        }
    }
}

fn clocks(findings: &mut Findings, host: &HostFacts) {
    const CHECK: &str = "clocks";
    if let Some(source) = host.clock_source.as_deref().filter(|source| cfg!(target_arch = "x86_64") && *source != "tsc")
    {
        let found = format!("the kernel keeps time by {source}: each look at the clock takes longer");
        let advice = "dmesg | grep -i tsc says why; virtual machines need an invariant TSC from their host";
        findings.note(CHECK, found, advice);
    }
    if host.is_synchronised == Some(false) {
        let found = "nothing keeps the time of day: certificates, logs and histories of hosts may disagree";
        findings.warning(CHECK, found, "run chrony or systemd-timesyncd");
    }
    findings.ok_otherwise(CHECK, "the time of day is kept");
}

/// Ports of one range that no range of the others has.
fn left_over(range: Ports, others: &[Ports]) -> bool {
    (range.first..=range.last).any(|port| !others.iter().any(|other| (other.first..=other.last).contains(&port)))
}

fn ports(findings: &mut Findings, configured: &Configured, host: &HostFacts) {
    const CHECK: &str = "ports";
    let (Some(config), Some(local)) = (configured.right(), host.local_ports) else { return };
    let of_paths = config.strategy.paths.iter().filter_map(|path| path.source_ports);
    let ranges: Vec<Ports> = of_paths.chain(config.tcp.source_ports).collect();
    if ranges.is_empty() {
        return;
    }
    let in_local = |range: &Ports| {
        let common = Ports { first: range.first.max(local.first), last: range.last.min(local.last) };
        (common.first <= common.last).then_some(common)
    };
    if ranges.iter().filter_map(in_local).any(|common| left_over(common, &host.reserved_ports)) {
        let all = host.reserved_ports.iter().chain(&ranges).map(|Ports { first, last }| format!("{first}-{last}"));
        let found = "the kernel gives ports of paths to other connections, which then go over their spines";
        let advice = format!("sysctl net.ipv4.ip_local_reserved_ports={}", all.collect::<Vec<_>>().join(","));
        findings.warning(CHECK, found, advice);
    }
    findings.ok_otherwise(CHECK, "ports of paths are kept for them");
}

#[cfg(test)]
mod tests;
