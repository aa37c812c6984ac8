//! `mccs-nics`: makes a folder of emulated NICs, and injects faults (port down, loss, removal).

use std::net::Ipv4Addr;
use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::{Parser, Subcommand};
use mccs_emulated_nics::control::{Fault, carried, make};
use mccs_emulated_nics::fabric::{Fabric, LinkCarried, carried_by_links};
use mccs_emulated_nics::{Listed, RingShape, write_list};

#[derive(Parser)]
#[command(about)]
struct Arguments {
    /// The folder that processes share: `MCCS_NICS` of each.
    folder: PathBuf,
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Lists devices: for each host so many, named mlx5_0 and on.
    Init {
        /// Hosts, separated by commas.
        #[arg(long, value_delimiter = ',', default_value = "h0,h1")]
        hosts: Vec<String>,
        /// Devices of each.
        #[arg(long, default_value_t = 1)]
        devices: u8,
        /// Rate of a port.
        #[arg(long, default_value_t = 400.0)]
        gbit_per_s: f64,
        /// Time from device to device.
        #[arg(long, default_value_t = 1500)]
        latency_ns: u64,
        /// Bytes of a slot; copy engines need 512 KiB to carry 400 Gbit/s.
        #[arg(long, default_value_t = RingShape::default().slot_bytes)]
        slot_bytes: u32,
        /// Slots of a queue pair.
        #[arg(long, default_value_t = RingShape::default().slots)]
        slots: u32,
        /// Slots in memory of GPUs, too: long data of GPUs go from one to the other, both ways at a NIC's rate.
        #[arg(long)]
        slots_on_gpus: bool,
    },
    /// Makes a fault: down, up, fatal, loss PPM, rate MBIT_PER_S, latency NS, late NS, qp NUMBER, dma-buf 0|1, peer-memory 0|1.
    Fault {
        host: String,
        device: String,
        kind: String,
        #[arg(default_value_t = 0)]
        value: u64,
    },
    /// Puts leaves and spines between the listed devices, before any is opened.
    Fabric {
        /// Hosts of a leaf, separated by commas; once for each leaf.
        #[arg(long = "leaf", required = true)]
        leaves: Vec<String>,
        /// Between all leaves.
        #[arg(long, default_value_t = 2)]
        spines: u32,
        /// Rate of a link between leaf and spine.
        #[arg(long)]
        mbit_per_s: u64,
        /// First of the UDP source ports that name spines.
        #[arg(long, default_value_t = 50_000)]
        first_port: u16,
        /// Ports of a spine.
        #[arg(long, default_value_t = 100)]
        ports: u16,
        /// Seed of the hash by which other ports choose their spine.
        #[arg(long, default_value_t = 0)]
        seed: u64,
    },
    /// Prints the bytes that each link of the fabric has carried: leaf, spine, up, down.
    Links,
    /// Prints the bytes that a device has sent and taken, of each those from and to memory of GPUs, and those sent by slots on GPUs.
    Carried { host: String, device: String },
}

fn main() -> anyhow::Result<()> {
    let Arguments { folder, what } = Arguments::parse();
    match what {
        What::Init { hosts, devices, gbit_per_s, latency_ns, slot_bytes, slots, slots_on_gpus } => {
            let listed = hosts.iter().zip(0..).flat_map(|(host, number): (_, u8)| {
                (0..devices).map(move |device| Listed {
                    host: host.clone(),
                    name: format!("mlx5_{device}"),
                    address: Ipv4Addr::new(10, 77, device, number + 1),
                    mbit_per_s: (gbit_per_s * 1000.0) as u64,
                    latency_ns,
                    is_infiniband: false,
                })
            });
            std::fs::create_dir_all(&folder)?;
            RingShape { slot_bytes, slots, on_gpus: slots_on_gpus }.write(&folder)?;
            write_list(&folder, &listed.collect::<Vec<_>>()).with_context(|| format!("writing {}", folder.display()))
        }
        What::Fault { host, device, kind, value } => {
            let fault = match kind.as_str() {
                "down" => Fault::Down,
                "up" => Fault::Up,
                "fatal" => Fault::Fatal,
                "loss" => Fault::LossPpm(u32::try_from(value)?),
                "rate" => Fault::Rate(value),
                "latency" => Fault::Latency(value),
                "late" => Fault::CompletionDelay(value),
                "qp" => Fault::QueuePair(u32::try_from(value)?),
                "dma-buf" => Fault::DmaBuf(value != 0),
                "peer-memory" => Fault::PeerMemory(value != 0),
                _ => bail!(
                    "there is no fault {kind}: down, up, fatal, loss, rate, latency, late, qp, dma-buf or peer-memory"
                ),
            };
            make(&folder, &host, &device, fault).with_context(|| format!("{} of {host}", device))
        }
        What::Fabric { leaves, spines, mbit_per_s, first_port, ports, seed } => {
            let leaves = leaves.iter().map(|hosts| hosts.split(',').map(str::to_owned).collect()).collect();
            Fabric { leaves, spines, mbit_per_s, first_port, ports, seed }.write(&folder).context("no such fabric")
        }
        What::Links => {
            for LinkCarried { leaf, spine, up_bytes, down_bytes } in carried_by_links(&folder)? {
                println!("{leaf} {spine} {up_bytes} {down_bytes}");
            }
            Ok(())
        }
        What::Carried { host, device } => {
            let found = carried(&folder, &host, &device).with_context(|| format!("{} of {host}", device))?;
            let [sent, taken] = [found.out_bytes, found.in_bytes];
            println!("{sent} {taken} {} {} {}", found.out_gpu_bytes, found.in_gpu_bytes, found.twin_bytes);
            Ok(())
        }
    }
}
