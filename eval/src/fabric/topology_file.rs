//! Writes the `topology.toml` of a fabric, for a controller on it.

use mccs_config::service::Ports;
use mccs_config::topology::{Class, Host, Leaf, Rates, Spine};
use mccs_config::{Rate, TopologyFile};

use super::spec::FabricSpec;

/// Rate of a link that nobody limits: as fast as the kernel moves packets, which no policy has to share out.
const UNLIMITED: Rate = Rate::gbit(100);

/// The network of a specification, as policies need to know it.
#[must_use]
pub fn topology_file(spec: &FabricSpec) -> TopologyFile {
    let spine = |number: u32| {
        // The specification was checked: the ports of all spines are ports.
        let first = spec.paths.first_port.saturating_add((number as u16).saturating_mul(spec.paths.ports));
        let last = first.saturating_add(spec.paths.ports.saturating_sub(1));
        Spine { name: format!("spine{number}"), source_ports: Some(Ports { first, last }), dscp: None }
    };
    let host = |host: &super::spec::Host| Host {
        name: host.name.clone(),
        devices: host.devices,
        leaf: Some(format!("leaf{}", host.leaf)),
        nics: Vec::new(),
    };
    // The last of them is served first.
    let class = |(priority, dscp): (u32, &u8)| Class { priority, dscp: u32::from(*dscp) };
    TopologyFile {
        rates: Rates {
            host_leaf: spec.rates.host_leaf.unwrap_or(UNLIMITED),
            leaf_spine: (spec.spines > 0).then(|| spec.rates.leaf_spine.unwrap_or(UNLIMITED)),
        },
        leaves: (0..spec.leaves).map(|number| Leaf { name: format!("leaf{number}") }).collect(),
        spines: (0..spec.spines).map(spine).collect(),
        links: Vec::new(),
        classes: (1..).zip(&spec.buffer.first).map(class).collect(),
        hosts: spec.hosts.iter().map(host).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn topologies_of_all_fabrics_are_read_by_a_controller() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fabric");
        let mut count = 0;
        for file in std::fs::read_dir(folder).expect("a folder").map(|file| file.expect("readable").path()) {
            let spec = FabricSpec::load(&file).expect("right");
            let text = topology_file(&spec).to_toml();
            let read = TopologyFile::parse(&text, "topology.toml").unwrap_or_else(|error| panic!("{error}\n{text}"));
            assert_eq!((read.hosts.len(), read.spines.len()), (spec.hosts.len(), spec.spines as usize), "{text}");
            let ports = read.spines.iter().filter_map(|spine| spine.source_ports);
            assert!(ports.clone().all(|ports| ports.last - ports.first + 1 == spec.paths.ports));
            assert!(ports.min_by_key(|ports| ports.first).is_none_or(|ports| ports.first == spec.paths.first_port));
            count += 1;
        }
        assert!(count >= 5, "{count}");
    }
}
