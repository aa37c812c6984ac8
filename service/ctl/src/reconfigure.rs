//! `mccsctl reconfigure`: changes a communicator's strategy from a `change.toml`.

use std::path::PathBuf;

use anyhow::Context as _;
use mccs_config::change::StrategyChange;
use mccs_config::service::{Device, FlowPath, LargeFrom, Ports, TransportKind};
use mccs_control::ControlRequest;

#[derive(clap::Args)]
pub struct Reconfigure {
    /// Number of the communicator, as `communicators` shows it on this host. Any of its hosts will do.
    communicator: u64,
    /// File with the change (config/examples/change.toml). The options below take precedence.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Algorithm of collectives: auto, ring, tree, host_ring, host_tree, one_shot or single_pass.
    #[arg(long)]
    algorithm: Option<String>,
    /// Number of channels, with the rings of a new communicator.
    #[arg(long, conflicts_with = "ring")]
    channels: Option<u32>,
    /// Ranks of a channel's ring in order, such as 0,2,1,3. Repeat for each channel.
    #[arg(long, value_name = "RANK,...")]
    ring: Vec<String>,
    /// Transport of flows to other hosts: tcp, or rdma if all of its hosts have it.
    #[arg(long)]
    transport: Option<TransportKind>,
    /// A path through the network: source ports (50000-50499), a device of the sending hosts (@eth1), or both
    /// (50000-50499@eth1). Repeat for each path.
    #[arg(long, value_name = "PORTS@DEVICE", value_parser = path)]
    path: Vec<FlowPath>,
    /// GPUs: copy engines move data from this size on, such as 4MiB; 0 for never, or measured. By collective:
    /// 4MiB,broadcast=0.
    #[arg(long, value_name = "BYTES")]
    large_from: Option<LargeFrom>,
    /// GPUs: whether kernels use LL128, lines with their flag inside.
    #[arg(long, value_name = "on|off", hide_possible_values = true, value_parser = clap::builder::BoolishValueParser::new())]
    ll128: Option<bool>,
    /// GPUs: most thread blocks of a kernel; 0: as measured.
    #[arg(long, value_name = "N")]
    max_ctas: Option<u32>,
    /// Collectives that may start while hosts agree. Default: by their length.
    #[arg(long)]
    window: Option<u32>,
    /// Let the controller decide for it again; change nothing now.
    #[arg(long, conflicts_with_all = ["file", "algorithm", "channels", "ring", "transport", "path", "large_from", "ll128", "max_ctas", "window"])]
    unpin: bool,
}

impl Reconfigure {
    /// The request to the service.
    pub fn request(&self) -> anyhow::Result<ControlRequest> {
        if self.unpin {
            return Ok(ControlRequest::Unpin { communicator: self.communicator });
        }
        let mut change = self.file.as_deref().map(StrategyChange::load).transpose()?.unwrap_or_default();
        if let Some(name) = &self.algorithm {
            let text = format!("algorithm = {name:?}");
            change.algorithm = StrategyChange::parse(&text, "--algorithm")?.algorithm;
        }
        if self.channels.is_some() {
            (change.channels, change.rings) = (self.channels, None);
        }
        if !self.ring.is_empty() {
            let ring = |text: &String| text.split(',').map(|rank| rank.trim().parse()).collect::<Result<Vec<u32>, _>>();
            let rings = self.ring.iter().map(|text| ring(text).with_context(|| format!("--ring {text}")));
            (change.rings, change.channels) = (Some(rings.collect::<anyhow::Result<_>>()?), None);
        }
        change.transport = self.transport.or(change.transport);
        (change.large_from, change.ll128) = (self.large_from.or(change.large_from), self.ll128.or(change.ll128));
        change.max_ctas = self.max_ctas.or(change.max_ctas);
        if !self.path.is_empty() {
            change.paths = Some(self.path.clone());
        }
        anyhow::ensure!(!change.is_empty(), "nothing is to change: see --help");
        Ok(ControlRequest::Reconfigure { communicator: self.communicator, change, window: self.window })
    }
}

/// A way as `--path` has it.
fn path(text: &str) -> Result<FlowPath, String> {
    let (ports, device) = match text.split_once('@') {
        Some((ports, device)) => (ports, Some(device.parse::<Device>()?)),
        None => (text, None),
    };
    let source_ports = if ports.is_empty() && device.is_some() { None } else { Some(ports.parse::<Ports>()?) };
    Ok(FlowPath { device, source_ports, ..FlowPath::default() })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        reconfigure: Reconfigure,
    }

    fn asked(words: &str) -> Result<ControlRequest, String> {
        let line = Line::try_parse_from(words.split(' ')).map_err(|error| error.to_string())?;
        line.reconfigure.request().map_err(|error| error.to_string())
    }

    #[test]
    fn paths_have_ports_devices_or_both() {
        let toml = "[[path]]\nsource_ports = '1-2'\n[[path]]\ndevice = 'eth1'\n[[path]]\nsource_ports = '3-4'\ndevice = 'mlx5_0:1'";
        let change = StrategyChange::parse(toml, "a change").expect("well-formed");
        let request = ControlRequest::Reconfigure { communicator: 7, change, window: None };
        assert_eq!(asked("r 7 --path 1-2 --path @eth1 --path 3-4@mlx5_0:1"), Ok(request));
        for (words, why) in [
            ("r 7 --path 1-2@", "no device"),
            ("r 7 --path @", "no device"),
            ("r 7 --path @eth1:0", "no device"),
            ("r 7 --path eth1", "no range of ports"),
            ("r 7 --path 2-1@eth1", "no range of ports"),
        ] {
            let refusal = asked(words).expect_err(words);
            assert!(refusal.contains(why), "{refusal}");
        }
    }

    #[test]
    fn options_come_on_top_of_a_file() {
        let folder = tempfile::tempdir().expect("a directory");
        let file = folder.path().join("change.toml");
        std::fs::write(&file, "algorithm = 'ring'\ntransport = 'tcp'\nrings = [[0, 1]]\n").expect("a file");
        let file = file.to_str().expect("text");
        for (options, toml, window) in [
            ("", "algorithm = 'ring'\ntransport = 'tcp'\nrings = [[0, 1]]", None),
            ("--algorithm host_tree", "algorithm = 'host_tree'\ntransport = 'tcp'\nrings = [[0, 1]]", None),
            ("--channels 3", "algorithm = 'ring'\ntransport = 'tcp'\nchannels = 3", None),
            ("--transport rdma --window 9", "algorithm = 'ring'\ntransport = 'rdma'\nrings = [[0, 1]]", Some(9)),
            ("--ring 1,0 --ring 0,1", "algorithm = 'ring'\ntransport = 'tcp'\nrings = [[1, 0], [0, 1]]", None),
        ] {
            let change = StrategyChange::parse(toml, "a change").expect("well-formed");
            let request = ControlRequest::Reconfigure { communicator: 7, change, window };
            assert_eq!(asked(format!("r 7 --file {file} {options}").trim_end()), Ok(request), "{options}");
        }
        for (words, why) in [
            ("r 7 --algorithm circle", "circle"),
            ("r 7 --channels many", "many"),
            ("r 7 --channels 2 --ring 0,1", "cannot be used with"),
            ("r 7 --transport pigeon", "pigeon"),
            ("r 7 --window -1", "-1"),
            ("r 7 --window 4", "nothing is to change"),
        ] {
            let refusal = asked(words).expect_err(words);
            assert!(refusal.contains(why), "{refusal}");
        }
    }

    #[test]
    fn changes_of_gpus_are_asked_for() {
        let wanted = |toml| StrategyChange::parse(toml, "a change").expect("well-formed");
        for (words, toml) in [
            ("r 7 --large-from 4MiB --ll128 off", "large_from = '4MiB'\nll128 = false"),
            ("r 7 --ll128 on", "ll128 = true"),
            ("r 7 --large-from 0", "large_from = '0'"),
            ("r 7 --max-ctas 32", "max_ctas = 32"),
            ("r 7 --large-from 4MiB,all_reduce=0", "large_from = '4MiB, all_reduce=0'"),
            ("r 7 --large-from measured", "large_from = 'measured'"),
        ] {
            let request = ControlRequest::Reconfigure { communicator: 7, change: wanted(toml), window: None };
            assert_eq!(asked(words), Ok(request), "{words}");
        }
        for (words, why) in [
            ("r 7 --large-from 4MB", "MiB"),
            ("r 7 --ll128 maybe", "maybe"),
            ("r 7 --ll128", "on|off"),
            ("r 7 --unpin --ll128 on", "cannot be used with"),
            ("r 7", "nothing is to change"),
        ] {
            let refusal = asked(words).expect_err(words);
            assert!(refusal.contains(why), "{refusal}");
        }
    }
}
