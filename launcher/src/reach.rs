//! Ways to hosts: ssh, network namespaces of an emulated fabric, or a process here.
//!
//! ```text
//! local      EXE agent
//! namespace  ip netns exec NAMESPACE EXE agent
//! ssh        ssh OPTIONS -- DESTINATION 'EXE agent'
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use mccs_config::job::{Host, Ssh};
use serde::Deserialize;

use crate::host;

/// The program that knows which fabrics are up.
const FABRIC_PROGRAM: &str = "mccs-fabric";
/// Seconds after which ssh asks whether the other side is there, and how often in vain.
const ALIVE: [&str; 2] = ["ServerAliveInterval=10", "ServerAliveCountMax=3"];

/// The namespace of a host that has one.
#[must_use]
pub fn namespace(host: &Host) -> Option<String> {
    let node = host.node.as_ref().unwrap_or(&host.name);
    // As `mccs-fabric` names them.
    host.fabric.as_ref().map(|fabric| format!("mccs-{fabric}-{node}")).or_else(|| host.namespace.clone())
}

/// Program and arguments that start an agent on `host`.
///
/// # Errors
/// This program does not know where it is.
pub fn command(host: &Host, ssh: &Ssh) -> Result<Vec<String>> {
    let elsewhere = host.ssh.as_ref().and(ssh.agent.as_ref());
    let own = || std::env::current_exe().context("this program's path is unknown");
    let agent = host.agent.as_ref().or(elsewhere).cloned().map_or_else(own, Ok)?;
    let agent = agent.to_str().with_context(|| format!("{} is no UTF-8", agent.display()))?.to_owned();
    if let Some(destination) = &host.ssh {
        return Ok(over_ssh(destination, &agent, ssh, &host.ssh_options));
    }
    let way = namespace(host).map(|name| ["ip", "netns", "exec", &name].map(str::to_owned).to_vec());
    Ok([way.unwrap_or_default(), vec![agent, "agent".to_owned()]].concat())
}

fn over_ssh(destination: &str, agent: &str, ssh: &Ssh, own_options: &[String]) -> Vec<String> {
    // No questions, no terminal, no shared connection that would outlive this one, nothing forwarded.
    let fixed = ["BatchMode=yes", "ControlMaster=no", "ControlPath=none", "ClearAllForwardings=yes", "ForwardAgent=no"];
    let mut words = vec![ssh.program.clone(), "-T".to_owned(), "-x".to_owned()];
    // ssh takes the first of two that contradict each other, so the file's come first.
    words.extend(ssh.options.iter().chain(own_options).cloned());
    words.extend(fixed.into_iter().chain(ALIVE).flat_map(|option| ["-o".to_owned(), option.to_owned()]));
    words.extend(["--".to_owned(), destination.to_owned(), format!("exec {} agent", quoted(agent))]);
    words
}

/// `text` as one word of a POSIX shell.
#[must_use]
pub fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_@%+=:,./-".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// An entry of `mccs-fabric list --json`, as far as it matters here.
#[derive(Debug, Deserialize)]
struct Listed {
    name: String,
    topology: Option<Topology>,
}

#[derive(Debug, Deserialize)]
struct Topology {
    hosts: Vec<Node>,
}

#[derive(Debug, Deserialize)]
struct Node {
    name: String,
    addresses: Vec<String>,
}

/// Gives hosts of fabrics their addresses, where the file says none.
///
/// # Errors
/// A fabric is not up or has no such host, or nobody can be asked.
pub fn find_addresses(hosts: &mut [Host]) -> Result<()> {
    if hosts.iter().any(|host| host.fabric.is_some() && host.address.is_none()) {
        fill_addresses(hosts, &list_fabrics()?)?;
    }
    Ok(())
}

fn list_fabrics() -> Result<Vec<Listed>> {
    let program = host::find_program(Path::new(FABRIC_PROGRAM), Path::new(""));
    let program = program.unwrap_or_else(|| PathBuf::from(FABRIC_PROGRAM));
    let failed =
        || format!("{} list --json cannot tell the fabric's addresses; give each host its own", program.display());
    let output = Command::new(&program).args(["list", "--json"]).stdin(Stdio::null()).output().with_context(failed)?;
    if !output.status.success() {
        bail!("{}: {}", failed(), String::from_utf8_lossy(&output.stderr).trim());
    }
    serde_json::from_slice(&output.stdout).with_context(failed)
}

fn fill_addresses(hosts: &mut [Host], listed: &[Listed]) -> Result<()> {
    let known: BTreeMap<&str, &Topology> =
        listed.iter().filter_map(|fabric| Some((fabric.name.as_str(), fabric.topology.as_ref()?))).collect();
    for host in hosts {
        let (Some(fabric), None) = (&host.fabric, &host.address) else { continue };
        let Some(topology) = known.get(fabric.as_str()) else {
            let up = known.keys().copied().collect::<Vec<_>>().join(", ");
            let up = if up.is_empty() { "none is".to_owned() } else { format!("up are: {up}") };
            bail!("host {:?}: fabric {fabric:?} is not up ({up}); `{FABRIC_PROGRAM} up FILE` builds it", host.name);
        };
        let name = host.node.as_ref().unwrap_or(&host.name);
        let Some(node) = topology.hosts.iter().find(|node| node.name == *name) else {
            let nodes: Vec<&str> = topology.hosts.iter().map(|node| node.name.as_str()).collect();
            bail!("host {:?}: fabric {fabric:?} has no host {name:?}; it has {}", host.name, nodes.join(", "));
        };
        host.address = node.addresses.first().cloned();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fabric_host(name: &str, node: Option<&str>) -> Host {
        let node = node.map(str::to_owned);
        Host { name: name.to_owned(), fabric: Some("f".to_owned()), node, ..Host::default() }
    }

    #[test]
    fn every_kind_of_host_has_its_command() {
        let ssh = Ssh {
            agent: Some("/opt/a b/mccs-launch".into()),
            options: vec!["-p".into(), "22".into()],
            ..Ssh::default()
        };
        let agent = Some(PathBuf::from("/bin/agent"));
        let words = |host: Host| command(&host, &ssh).unwrap().join(" ");
        let own = std::env::current_exe().unwrap().display().to_string();
        assert_eq!(words(Host::local()), format!("{own} agent"));
        assert_eq!(
            words(Host { agent: agent.clone(), ..fabric_host("h0", None) }),
            "ip netns exec mccs-f-h0 /bin/agent agent"
        );
        assert_eq!(namespace(&fabric_host("a", Some("h1"))).unwrap(), "mccs-f-h1");
        let raw = Host { namespace: Some("blue".to_owned()), ..Host::local() };
        assert_eq!(words(raw), format!("ip netns exec blue {own} agent"));
        let remote = Host { ssh: Some("u@n1".to_owned()), ssh_options: vec!["-4".into()], ..Host::local() };
        let over = words(remote.clone());
        assert!(over.starts_with("ssh -T -x -p 22 -4 -o BatchMode=yes "), "{over}");
        assert!(over.ends_with(" -- u@n1 exec '/opt/a b/mccs-launch' agent"), "{over}");
        assert!(words(Host { agent, ..remote }).ends_with("exec /bin/agent agent"));
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }

    #[test]
    fn a_fabrics_hosts_get_their_addresses() {
        let text = r#"[{"name": "f", "phase": "up", "spec": null, "topology": {"hosts": [
            {"name": "h0", "addresses": ["10.0.0.1", "10.0.0.2"]}, {"name": "h1", "addresses": ["10.0.1.1"]}]}},
            {"name": "g", "phase": "unfinished", "spec": null, "topology": null}]"#;
        let listed: Vec<Listed> = serde_json::from_str(text).unwrap();
        let mut hosts = [fabric_host("h0", None), fabric_host("x", Some("h1")), Host::local()];
        fill_addresses(&mut hosts, &listed).unwrap();
        let addresses: Vec<_> = hosts.iter().map(|host| host.address.as_deref()).collect();
        assert_eq!(addresses, [Some("10.0.0.1"), Some("10.0.1.1"), None]);
        let refused = |host: Host| fill_addresses(&mut [host], &listed).unwrap_err().to_string();
        assert!(refused(fabric_host("h2", None)).contains("has no host \"h2\"; it has h0, h1"));
        let absent = Host { fabric: Some("g".to_owned()), ..fabric_host("h0", None) };
        assert!(refused(absent).contains("\"g\" is not up (up are: f)"));
    }
}
