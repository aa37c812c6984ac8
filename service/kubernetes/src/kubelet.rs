//! kubelet, as a plugin calls it over its sockets.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use crate::api::pod_resources_lister_client::PodResourcesListerClient;
use crate::api::registration_client::RegistrationClient;
use crate::api::{DevicePluginOptions, ListPodResourcesRequest, PodResources, RegisterRequest, VERSION};

/// kubelet's socket in the folder of plugins.
pub const SOCKET: &str = "kubelet.sock";
/// How long it may take to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
/// Longest list of pods.
const PODS_BYTES_MAX: usize = 16 << 20;

/// A connection to whoever listens on a socket.
///
/// # Errors
/// Nobody does.
pub async fn connect(path: &Path) -> anyhow::Result<Channel> {
    let own: PathBuf = path.to_owned();
    // The name is that of no host: the path says all.
    let endpoint = Endpoint::from_static("http://localhost").timeout(ANSWERS_WITHIN).connect_timeout(ANSWERS_WITHIN);
    let connector = service_fn(move |_| {
        let own = own.clone();
        async move { UnixStream::connect(own).await.map(TokioIo::new) }
    });
    endpoint.connect_with_connector(connector).await.with_context(|| format!("nobody answers on {}", path.display()))
}

/// Calls that kubelet may make to this plugin.
#[must_use]
pub fn options() -> DevicePluginOptions {
    DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: false }
}

/// Makes a plugin known, which listens on `endpoint` in kubelet's folder.
///
/// # Errors
/// kubelet does not answer, or refuses.
pub async fn register(folder: &Path, endpoint: &str, resource: &str) -> anyhow::Result<()> {
    let request = RegisterRequest {
        version: VERSION.into(),
        endpoint: endpoint.into(),
        resource_name: resource.into(),
        options: Some(options()),
    };
    let mut kubelet = RegistrationClient::new(connect(&folder.join(SOCKET)).await?);
    kubelet.register(request).await.with_context(|| format!("kubelet refuses {resource}"))?;
    Ok(())
}

/// Pods of the node with their devices.
///
/// # Errors
/// kubelet does not answer.
pub async fn pods(socket: &Path) -> anyhow::Result<Vec<PodResources>> {
    let kubelet = PodResourcesListerClient::new(connect(socket).await?);
    let mut kubelet = kubelet.max_decoding_message_size(PODS_BYTES_MAX);
    let answer = kubelet.list(ListPodResourcesRequest {}).await.context("kubelet does not say which pods there are")?;
    Ok(answer.into_inner().pod_resources)
}
