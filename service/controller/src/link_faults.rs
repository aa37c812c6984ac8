//! What hosts have found out of order: links on whose paths nothing is answered, and NICs that are down. What operators say of links is
//! apart from that (`links.rs`).

use std::time::Instant;

use mccs_config::service::{Device, TransportKind};

use super::history::Went;
use super::state::Controller;
use mccs_model::Name;
use mccs_policy::topology::Port;

impl Controller {
    /// Concludes from what hosts say of paths which links are dead; `why_not` is why one is taken for dead no more.
    pub(super) fn find_dead_links(&mut self, why_not: &str, now: Instant) {
        let Some(config) = self.config.clone() else { return };
        let [dead, well] = self.links.set_found(self.dead_paths.links(&config));
        for (lower, upper, why) in dead {
            tracing::warn!(lower, upper, why, "link found dead");
            let what = format!("link {lower} {upper} found dead");
            self.history.note(&*what, why, Went::Done, now);
            self.because(what);
        }
        for (lower, upper, _) in well {
            tracing::info!(lower, upper, why = why_not, "link not taken for dead any more");
            let what = format!("link {lower} {upper} taken for dead no more");
            self.history.note(&*what, why_not, Went::Done, now);
            self.because(what);
        }
    }

    /// These network interfaces of a host carry nothing. Those that the topology names are links to its leaves.
    pub(super) fn are_down<'a>(&mut self, host: &Name, down: impl IntoIterator<Item = &'a str>, now: Instant) {
        let down = down.into_iter().filter_map(|name| name.parse().ok()).collect();
        let news = self.links.set_down(host.as_str(), down);
        let Some(config) = self.config.clone() else { return };
        let Some(id) = config.network.hosts.get(host.as_str()) else { return };
        for (devices, is) in news.into_iter().zip(["down", "up again"]) {
            let named =
                |device: &Device| config.network.topology.port_called(*id, device, TransportKind::Tcp).is_some();
            for device in devices.into_iter().filter(named) {
                let what = format!("NIC {device} of host {host} is {is}");
                tracing::warn!(%host, %device, "a NIC is {is}");
                self.history.note(&*what, "as the host says", Went::Done, now);
                self.because(what);
            }
        }
    }

    /// Links that hosts have found dead, or whose NIC is down: their ends, and why.
    pub(super) fn dead_links(&self) -> Vec<[String; 3]> {
        let found = self.links.found().map(|(lower, upper, why)| [lower, upper, why].map(str::to_owned));
        let nics = self.config.iter().flat_map(|config| {
            let link = |(port, device): (Port, &Device)| {
                let (host, leaf) =
                    (config.network.topology.host_name(port.host), config.network.topology.leaf_name(port));
                [format!("{host} {device}"), leaf.to_owned(), format!("host {host} says that its NIC is down")]
            };
            self.links.nics_down(&config.network.topology).map(link)
        });
        found.chain(nics).collect()
    }
}
