//! Cluster settings of a run's services: names, addresses, and TLS keys for this run alone.
//!
//! Only where a job has ranks on several hosts, and `[service.config]` says nothing of it: who writes `[exchange]` there
//! knows better. Keys are made here, go to their hosts like the services' files, and are removed with them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};

use anyhow::{Context, Result, bail};
use mccs_config::job::Host;
use mccs_config::service::{Address, Exchange, HostConfig};
use mccs_config::{JobFile, ServiceConfig};
use mccs_exchange::keys;

use super::PrivateFile;
use super::planner::Site;

/// Port of a service whose host has none in the file.
const PORT: u16 = 7400;

/// Lets the services of the sites find each other, if a job needs it.
///
/// # Errors
/// A host has no address, or a name that no certificate can have.
pub(super) fn connect(file: &JobFile, sites: &mut [Site]) -> Result<()> {
    let is_known = sites.iter().any(|site| site.config.exchange.is_some());
    let Some(job) = spread_job(file, sites).filter(|_| !is_known) else { return Ok(()) };
    let addresses = addresses(sites)
        .with_context(|| format!("job {job:?} has ranks on several hosts, whose services must find each other"))?;
    let name = |site: &mut Site| site.config.service.name.get_or_insert_with(|| site.host.name.clone()).clone();
    let names: Vec<String> = sites.iter_mut().map(name).collect();
    let hosts: Vec<_> = (names.iter().zip(&addresses))
        .map(|(name, address)| HostConfig { name: name.clone(), address: Address(*address) })
        .collect();
    let keys = keys::generate(&names)?;
    for ((site, name), address) in sites.iter_mut().zip(&names).zip(&addresses) {
        let files = keys::files(&site.runtime_dir, name);
        let mine = [format!("{name}.crt"), format!("{name}.key"), "authority.crt".to_owned()];
        let mine = keys.iter().filter(|file| mine.contains(&file.name));
        site.keys = mine.map(|file| PrivateFile { name: file.name.clone(), content: file.pem.clone() }).collect();
        site.config.exchange = Some(Exchange::new(*address, files.certificate, files.key, files.authority));
        site.config.hosts.clone_from(&hosts);
        site.config = ServiceConfig::parse(&site.config.to_toml(), "generated service.toml")?;
    }
    Ok(())
}

/// The first job with ranks on several hosts.
fn spread_job<'a>(file: &'a JobFile, sites: &[Site]) -> Option<&'a str> {
    let hosts: Vec<Host> = sites.iter().map(|site| site.host.clone()).collect();
    let is_spread = |job: &&mccs_config::job::Job| {
        let places = job.places(&hosts).unwrap_or_default();
        places.iter().any(|place| Some(place.host) != places.first().map(|first| first.host))
    };
    file.jobs.iter().find(is_spread).map(|job| job.name.as_str())
}

/// Address of each host's service: no two at the same place.
fn addresses(sites: &[Site]) -> Result<Vec<SocketAddr>> {
    let mut taken: Vec<SocketAddr> = Vec::new();
    // Held until all have their ports, so that none is given out twice.
    let mut held = Vec::new();
    let given = |site: &Site| {
        let port = site.host.port;
        port.map(|port| Ok(SocketAddr::new(ip(&site.host)?, port))).transpose()
    };
    let given: Vec<Option<SocketAddr>> = sites.iter().map(given).collect::<Result<_>>()?;
    for (site, given_one) in sites.iter().zip(&given) {
        let address = match given_one {
            Some(address) => *address,
            None if is_here(&site.host) => {
                let ip = ip(&site.host)?;
                let listener = TcpListener::bind((ip, 0))
                    .with_context(|| format!("host {:?} is this machine, and has no address {ip}", site.host.name))?;
                let address = listener.local_addr()?;
                held.push(listener);
                address
            }
            None => {
                let mut address = SocketAddr::new(ip(&site.host)?, PORT);
                while taken.contains(&address) || given.contains(&Some(address)) {
                    address.set_port(address.port() + 1);
                }
                address
            }
        };
        taken.push(address);
    }
    Ok(taken)
}

fn is_here(host: &Host) -> bool {
    host.ssh.is_none() && host.fabric.is_none() && host.namespace.is_none()
}

fn ip(host: &Host) -> Result<IpAddr> {
    match &host.address {
        Some(text) => text.trim_matches(['[', ']']).parse().ok().with_context(|| {
            format!("host {:?}: address = {text:?} is no IP address, and names are not looked up", host.name)
        }),
        None if is_here(host) => Ok(Ipv4Addr::LOCALHOST.into()),
        None => bail!(
            "host {:?} has no address; give it the one at which the others reach it: address = \"...\"",
            host.name
        ),
    }
}
