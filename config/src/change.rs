//! `change.toml`: what `mccsctl reconfigure` changes of a communicator's strategy while its job
//! runs.

use serde::{Deserialize, Serialize};

use crate::limits;
use crate::service::{AlgorithmChoice, FlowPath, LargeFrom, TransportKind};
use crate::validate::{Problems, Validate};

/// A change. What is absent stays as it is. Communicators whose collectives GPUs carry out have `large_from`, `ll128` and `max_ctas`, all others the rest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct StrategyChange {
    /// How collectives are carried out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub algorithm: Option<AlgorithmChoice>,
    /// So many channels, with rings as a new communicator has them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channels: Option<u32>,
    /// Order of ranks of each channel's ring; ranks of a host follow each other where hosts act for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rings: Option<Vec<Vec<u32>>>,
    /// What carries its flows to other hosts; sends and receives keep what they began with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transport: Option<TransportKind>,
    /// Ways through the network: channels go round them. Replaces all there were, and all of `flows`.
    #[serde(rename = "path", skip_serializing_if = "Option::is_none")]
    pub paths: Option<Vec<FlowPath>>,
    /// Flows that go another way than their channel. Replaces all there were.
    #[serde(rename = "flow", skip_serializing_if = "Option::is_none")]
    pub flows: Option<Vec<FlowChoice>>,
    /// Payload from which GPUs' collectives go by copy engines: those that it does not name, as measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub large_from: Option<LargeFrom>,
    /// Whether GPUs' kernels store lines with their flag inside.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ll128: Option<bool>,
    /// Most thread blocks of GPUs' kernels; 0: as measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_ctas: Option<u32>,
}

/// `[[flow]]`: the way of one flow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct FlowChoice {
    /// Its channel.
    pub channel: u32,
    /// Host that sends.
    pub from: String,
    /// Host that receives.
    pub to: String,
    /// Place of its way among the paths, from 0.
    pub path: u32,
}

crate::document!(StrategyChange);

impl StrategyChange {
    /// Whether nothing is to change.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == StrategyChange::default()
    }

    /// Whether it has what only communicators have whose collectives GPUs carry out.
    #[must_use]
    pub fn is_of_gpus(&self) -> bool {
        self.large_from.is_some() || self.ll128.is_some() || self.max_ctas.is_some()
    }

    /// Whether it has what only other communicators have.
    #[must_use]
    pub fn is_of_hosts(&self) -> bool {
        StrategyChange { large_from: None, ll128: None, max_ctas: None, ..self.clone() } != StrategyChange::default()
    }
}

impl Validate for StrategyChange {
    /// What can be said without knowing the communicator.
    fn validate(&self, problems: &mut Problems) {
        if self.is_of_gpus() && self.is_of_hosts() {
            problems.add("large_from", "no communicator has this, `ll128` or `max_ctas`, and anything else to change");
        }
        if let Some(most) = self.max_ctas.as_ref().filter(|most| **most != 0) {
            problems.within("max_ctas", most, &limits::CUDA_MAX_CTAS);
        }
        if let Some(channels) = &self.channels {
            problems.within("channels", channels, &limits::CHANNELS);
            if self.rings.is_some() {
                problems.add("channels", "there are as many as rings: give one of the two");
            }
        }
        if let Some(rings) = &self.rings {
            problems.within("rings", &(rings.len() as u32), &limits::CHANNELS);
        }
        FlowPath::validate_all(self.paths.as_deref().unwrap_or_default(), "path", problems);
        if let (Some(flows), Some(paths)) = (&self.flows, &self.paths) {
            for (index, flow) in flows.iter().enumerate().filter(|(_, flow)| flow.path as usize >= paths.len()) {
                problems
                    .add(format!("flow[{index}].path"), format!("there is no path {}, but {}", flow.path, paths.len()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::Crossover;
    use crate::units::Bytes;

    #[test]
    fn the_example_is_read_and_written_back() {
        let change = StrategyChange::parse(include_str!("../examples/change.toml"), "change.toml").unwrap();
        assert!(!change.is_empty());
        assert_eq!((change.rings.as_ref().map(Vec::len), change.transport), (Some(2), Some(TransportKind::Tcp)));
        let devices: Vec<_> = change.paths.iter().flatten().map(|path| path.device.clone()).collect();
        assert_eq!(devices, [None, Some("eth1".parse().unwrap())]);
        let text = serde_json::to_vec(&change).unwrap();
        assert_eq!(serde_json::from_slice::<StrategyChange>(&text).unwrap(), change);
    }

    #[test]
    fn changes_of_gpus_are_read_and_written_back() {
        let change = StrategyChange::parse("large_from = '4MiB'\nll128 = false", "change.toml").unwrap();
        assert_eq!((change.large_from, change.ll128), (Some(Crossover::Pinned(Bytes::mib(4)).into()), Some(false)));
        assert!(change.is_of_gpus() && !change.is_of_hosts() && !change.is_empty());
        let text = serde_json::to_vec(&change).unwrap();
        assert_eq!(serde_json::from_slice::<StrategyChange>(&text).unwrap(), change);
    }

    #[test]
    fn contradictions_are_refused_and_named() {
        let refusal = |text: &str| StrategyChange::parse(text, "change.toml").unwrap_err().to_string();
        assert!(refusal("channels = 2\nrings = [[0, 1]]").contains("one of the two"));
        assert!(refusal("channels = 0").contains("channels"));
        assert!(refusal("rings = []").contains("rings"));
        assert!(refusal("ring = [[0, 1]]").contains("ring"));
        assert!(refusal("transport = 'pigeon'").contains("transport"));
        assert!(refusal("[[path]]\ndscp = 64").contains("path[0].dscp"));
        let ports = |ports: &str| format!("[[path]]\nsource_ports = '{ports}'\n");
        let text = ports("10-19") + &ports("30-39") + &ports("15-24");
        assert!(refusal(&text).contains("path[2].source_ports: path 0 has some of these ports"), "{}", refusal(&text));
        for text in [ports("10-19") + &ports("20-29") + &ports("10-19"), ports("10-19") + &ports("15-24") + "dscp = 3"]
        {
            StrategyChange::parse(&text, "change.toml").expect("each is a path of its own, or the same one");
        }
        assert!(refusal(&ports("20000")).contains("of one port write \"20000-20000\""));
        assert!(refusal(&ports("9-3")).contains("the smaller one first: \"3-9\""));
        assert!(refusal(&ports("0-3")).contains("from 1 to 65535"));
        for device in
            ["", "eth 0", "net/eth0", "mlx5_0:0", "mlx5_0:x", "mlx5_0:256", "eth\u{e9}", "x".repeat(64).as_str()]
        {
            assert!(refusal(&format!("[[path]]\ndevice = {device:?}")).contains("is no device"), "{device:?}");
        }
        assert!(refusal("[[path]]\ndevice = 1").contains("device"));
        let flow = "[[flow]]\nchannel = 0\nfrom = \"a\"\nto = \"b\"\npath = 1\n[[path]]\ndscp = 3";
        assert!(refusal(flow).contains("flow[0].path"));
        assert!(refusal("ll128 = true\nchannels = 2").contains("no communicator has"));
        assert!(refusal("large_from = 'often'").contains("measured"));
        assert!(refusal("ll128 = 'on'").contains("ll128"));
        assert!(StrategyChange::parse("", "change.toml").unwrap().is_empty());
    }
}
