//! PCI placement of GPUs and NICs, from sysfs: NUMA nodes, and which NICs serve which GPU. Part of
//! the composition root.

use std::path::{Path, PathBuf};

use mccs_config::service::Device;

use mccs_model::nic_affinity::{BusPlace, nics_of_gpus};

/// The NICs of each GPU, nearest first. GPUs by their PCI bus ids; `sysfs` is `/sys`.
pub(crate) fn nics_by_gpu(sysfs: &Path, gpus: &[String], nics: &[Device]) -> Vec<Vec<Device>> {
    let gpus: Vec<_> = gpus.iter().map(|gpu| place_of(&entry_of_gpu(sysfs, gpu))).collect();
    let places: Vec<_> = nics.iter().map(|nic| place_of(&entry_of_nic(sysfs, nic))).collect();
    let own = |places: Vec<usize>| places.into_iter().filter_map(|place| nics.get(place).cloned()).collect();
    nics_of_gpus(&gpus, &places).into_iter().map(own).collect()
}

/// The NUMA node of each NIC, where the kernel knows it; `sysfs` is `/sys`.
pub(crate) fn nodes_of_nics(sysfs: &Path, nics: &[Device]) -> Vec<Option<u32>> {
    nics.iter().map(|nic| place_of(&entry_of_nic(sysfs, nic)).numa_node).collect()
}

/// The NUMA node of each GPU, by their PCI bus ids.
pub(crate) fn nodes_of_gpus(sysfs: &Path, gpus: &[String]) -> Vec<Option<u32>> {
    gpus.iter().map(|gpu| place_of(&entry_of_gpu(sysfs, gpu)).numa_node).collect()
}

fn entry_of_gpu(sysfs: &Path, gpu: &str) -> PathBuf {
    sysfs.join("bus/pci/devices").join(pci_address(gpu))
}

fn entry_of_nic(sysfs: &Path, nic: &Device) -> PathBuf {
    sysfs.join("class/infiniband").join(&nic.name).join("device")
}

/// A PCI bus id as CUDA has it, in the kernel's form: four digits of the domain, lower case.
fn pci_address(bus_id: &str) -> String {
    let lower = bus_id.to_ascii_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if rest.contains(':') => {
            format!("{:0>4}:{rest}", domain.trim_start_matches('0'))
        }
        _ => lower,
    }
}

/// Target of a device's entry; nowhere, if there is none.
fn place_of(entry: &Path) -> BusPlace {
    let Ok(target) = entry.canonicalize() else { return BusPlace::default() };
    let parts = target.components().map(|part| part.as_os_str().to_string_lossy().into_owned());
    // Devices of one machine hang off `/sys/devices`; what is above the host's bridge is shared by all and says nothing.
    let path: Vec<String> = parts.skip_while(|part| !part.starts_with("pci")).collect();
    let node = std::fs::read_to_string(target.join("numa_node")).ok();
    BusPlace { path, numa_node: node.and_then(|node| node.trim().parse().ok()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device of a made-up sysfs, and the link by which it is found.
    fn device(sysfs: &Path, path: &str, link: &str, node: &str) {
        let at = sysfs.join("devices").join(path);
        std::fs::create_dir_all(&at).expect("a folder");
        std::fs::write(at.join("numa_node"), node).expect("a file");
        let link = sysfs.join(link);
        std::fs::create_dir_all(link.parent().expect("a folder")).expect("a folder");
        std::os::unix::fs::symlink(&at, link).expect("a link");
    }

    #[test]
    fn sysfs_says_which_nic_is_nearest() {
        let folder = tempfile::tempdir().expect("a folder");
        let sysfs = folder.path();
        for (at, nic) in [(1, "mlx5_1"), (2, "mlx5_0")] {
            let switch = format!("pci0000:{at}0/0000:{at}0:01.0/0000:{at}1:00.0");
            let gpu = format!("0000:{at}b:00.0");
            device(sysfs, &format!("{switch}/0000:{at}2:00.0/{gpu}"), &format!("bus/pci/devices/{gpu}"), "0\n");
            let link = format!("class/infiniband/{nic}/device");
            device(sysfs, &format!("{switch}/0000:{at}2:01.0/0000:{at}4:00.0"), &link, "0\n");
        }
        let nics = ["mlx5_0:1", "mlx5_1:1"].map(|nic| nic.parse::<Device>().expect("a device"));
        let gpus = ["00000000:1B:00.0", "00000000:2B:00.0"].map(String::from);
        let own = nics_by_gpu(sysfs, &gpus, &nics);
        assert_eq!(own, [[nics[1].clone()], [nics[0].clone()]]);
        let unknown = nics_by_gpu(&sysfs.join("none"), &gpus, &nics);
        assert_eq!(unknown, [[nics[0].clone()], [nics[1].clone()]]);
    }

    #[test]
    fn bus_ids_of_cuda_are_addresses_of_the_kernel() {
        for (cuda, kernel) in [
            ("00000000:1B:00.0", "0000:1b:00.0"),
            ("0000:1B:00.0", "0000:1b:00.0"),
            ("00010000:01:00.0", "10000:01:00.0"),
            ("?", "?"),
        ] {
            assert_eq!(pci_address(cuda), kernel);
        }
    }
}
