//! Options of the RDMA transport: devices, queue pairs, GID index, MTU, time-outs, retries.

use std::net::IpAddr;

/// A device, and one of its ports where it is not the first active one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceChoice {
    /// Name, such as `mlx5_0`.
    pub name: String,
    /// Number, from 1. `None`: all.
    pub port: Option<u8>,
}

/// How a transport uses its devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaOptions {
    /// Devices, the preferred one first. Empty: all with an active port, of the kind and speed that carry most together.
    pub devices: Vec<DeviceChoice>,
    /// This host's address, which picks the GID where none is given.
    pub address: Option<IpAddr>,
    /// Place, counted round, of the port that flows of no path's device begin with: so that engines of one host go round its devices.
    pub turn: usize,
    /// Index of the GID on every device. `None`: RoCE v2 with `address`, else RoCE v2 with an IPv4 address.
    pub gid_index: Option<u8>,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Path MTU in bytes: 256 to 4096. `None`: that of the port. Both sides take the smaller one.
    pub mtu_bytes: Option<u32>,
    /// A packet is sent again when nothing has come for 4.096 us times 2 to this power. At most 31; 0 for ever.
    pub timeout: u8,
    /// How often, up to 7.
    pub retries: u8,
    /// How often a receiver that is not ready is tried again; 7 for ever.
    pub rnr_retries: u8,
    /// Service level, up to 15. A flow's priority takes its place.
    pub service_level: u8,
    /// Traffic class. A flow's DSCP takes the place of its upper six bits.
    pub traffic_class: u8,
    /// Writes of a queue pair that may be unfinished.
    pub outstanding: u32,
    /// Places of a completion queue, which flows share until it is full. No more than the device has.
    pub cq_entries: u32,
    /// Completions that are taken from a queue at a time.
    pub cq_poll: u32,
}

impl Default for RdmaOptions {
    fn default() -> Self {
        RdmaOptions {
            devices: Vec::new(),
            address: None,
            turn: 0,
            gid_index: None,
            pkey_index: 0,
            mtu_bytes: None,
            timeout: 14,
            retries: 7,
            rnr_retries: 7,
            service_level: 0,
            traffic_class: 0,
            outstanding: 64,
            cq_entries: 8192,
            cq_poll: 32,
        }
    }
}

impl RdmaOptions {
    /// The wanted path MTU as verbs count it: 1 for 256 bytes to 5 for 4096.
    pub(in crate::rdma) fn mtu(&self) -> Option<u8> {
        self.mtu_bytes.map(|bytes| (bytes.max(256).ilog2() as u8 - 7).min(5))
    }
}

/// Flow label from which devices make a UDP source port of RoCE v2: 0xc000 and above. They fold its upper six bits into the
/// lower fourteen, and take a label of 0 as none.
pub(in crate::rdma) fn flow_label(source_port: u16) -> u32 {
    match u32::from(source_port) & 0x3fff {
        0 => 1 << 14 | 1,
        low => low,
    }
}

/// First UDP port from which RoCE v2 can send.
pub(in crate::rdma) const SOURCE_PORT_MIN: u16 = 0xc000;

#[cfg(test)]
mod tests {
    use super::*;

    /// As devices do it.
    fn source_port(label: u32) -> u16 {
        ((label & 0x3fff) ^ ((label & 0xfc000) >> 14)) as u16 | SOURCE_PORT_MIN
    }

    #[test]
    fn labels_give_the_ports_that_were_asked_for() {
        for port in SOURCE_PORT_MIN..=u16::MAX {
            let label = flow_label(port);
            assert!(label > 0 && label < 1 << 20);
            assert_eq!(source_port(label), port);
        }
    }

    #[test]
    fn path_mtus_have_codes() {
        let code = |bytes| RdmaOptions { mtu_bytes: Some(bytes), ..RdmaOptions::default() }.mtu();
        assert_eq!([256, 512, 1024, 2048, 4096].map(code), [1, 2, 3, 4, 5].map(Some));
    }
}
