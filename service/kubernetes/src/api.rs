//! Messages of kubelet's device-plugin API (`v1beta1`) and of its pod resources (`v1`), as far as they are used. Numbers of fields are
//! the API's. Fields that are not here are skipped.

use std::collections::HashMap;

/// Version of the device-plugin API.
pub const VERSION: &str = "v1beta1";
/// A device that may be used.
pub const HEALTHY: &str = "Healthy";
/// A device that may not.
pub const UNHEALTHY: &str = "Unhealthy";

/// Nothing.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Empty {}

/// Calls that kubelet may make.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DevicePluginOptions {
    /// Whether `PreStartContainer` comes before each start of a container.
    #[prost(bool, tag = "1")]
    pub pre_start_required: bool,
    /// Whether `GetPreferredAllocation` is there.
    #[prost(bool, tag = "2")]
    pub get_preferred_allocation_available: bool,
}

/// A plugin makes itself known.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RegisterRequest {
    /// Version of the API.
    #[prost(string, tag = "1")]
    pub version: String,
    /// The plugin's socket, in kubelet's folder.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    /// Resource that pods ask for.
    #[prost(string, tag = "3")]
    pub resource_name: String,
    /// Calls that may be made.
    #[prost(message, optional, tag = "4")]
    pub options: Option<DevicePluginOptions>,
}

/// A device.
#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
pub struct Device {
    /// Its name; at most 63 characters.
    #[prost(string, tag = "1")]
    pub id: String,
    /// [`HEALTHY`] or [`UNHEALTHY`].
    #[prost(string, tag = "2")]
    pub health: String,
}

/// All devices now.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListAndWatchResponse {
    /// The devices.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

/// Asks which devices are best; never asked of this plugin.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PreferredAllocationRequest {}

/// Never told.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PreferredAllocationResponse {}

/// Containers of a pod are given devices.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AllocateRequest {
    /// A container each.
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerAllocateRequest>,
}

/// Devices of a container.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerAllocateRequest {
    /// Their names.
    #[prost(string, repeated, tag = "1")]
    pub devices_ids: Vec<String>,
}

/// Answers for containers.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AllocateResponse {
    /// A container each.
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerAllocateResponse>,
}

/// The answer for a container. Only CDI is used.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerAllocateResponse {
    /// Variables.
    #[prost(map = "string, string", tag = "1")]
    pub envs: HashMap<String, String>,
    /// Devices that the container runtime finds in its CDI specifications.
    #[prost(message, repeated, tag = "5")]
    pub cdi_devices: Vec<CdiDevice>,
}

/// A device of a CDI specification.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CdiDevice {
    /// `vendor/class=name`.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// A container with these devices starts.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PreStartContainerRequest {
    /// Their names.
    #[prost(string, repeated, tag = "1")]
    pub devices_ids: Vec<String>,
}

/// It may.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PreStartContainerResponse {}

/// Asks which pods have which devices.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListPodResourcesRequest {}

/// Pods of the node.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListPodResourcesResponse {
    /// The pods.
    #[prost(message, repeated, tag = "1")]
    pub pod_resources: Vec<PodResources>,
}

/// A pod.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PodResources {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its namespace.
    #[prost(string, tag = "2")]
    pub namespace: String,
    /// Its containers.
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<ContainerResources>,
}

/// A container.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerResources {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its devices, by resource.
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<ContainerDevices>,
}

/// Devices of a resource.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerDevices {
    /// Resource that the pod has asked for.
    #[prost(string, tag = "1")]
    pub resource_name: String,
    /// Their names.
    #[prost(string, repeated, tag = "2")]
    pub device_ids: Vec<String>,
}

#[allow(missing_docs, clippy::all, clippy::unwrap_used, reason = "what tonic makes of build.rs")]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/v1beta1.Registration.rs"));
    include!(concat!(env!("OUT_DIR"), "/v1beta1.DevicePlugin.rs"));
    include!(concat!(env!("OUT_DIR"), "/v1.PodResourcesLister.rs"));
}

pub use generated::{
    device_plugin_client, device_plugin_server, pod_resources_lister_client, pod_resources_lister_server,
    registration_client, registration_server,
};

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    /// Bytes by hand, from the API's field numbers: what kubelet reads and writes.
    #[test]
    fn messages_are_the_apis() {
        let register = RegisterRequest {
            version: "v1beta1".into(),
            endpoint: "a.sock".into(),
            resource_name: "mccs.io/tenant-a".into(),
            options: Some(DevicePluginOptions { pre_start_required: true, get_preferred_allocation_available: false }),
        };
        assert_eq!(register.encode_to_vec(), b"\x0a\x07v1beta1\x12\x06a.sock\x1a\x10mccs.io/tenant-a\x22\x02\x08\x01");
        let devices = vec![Device { id: "a-0".into(), health: HEALTHY.into() }];
        assert_eq!(ListAndWatchResponse { devices }.encode_to_vec(), b"\x0a\x0e\x0a\x03a-0\x12\x07Healthy");
        let allocate = AllocateRequest::decode(&b"\x0a\x05\x0a\x03a-0\x0a\x05\x0a\x03a-1"[..]).expect("a request");
        let ids: Vec<_> = allocate.container_requests.iter().map(|one| one.devices_ids.join(",")).collect();
        assert_eq!(ids, ["a-0", "a-1"]);
        let cdi_devices = vec![CdiDevice { name: "x/y=z".into() }];
        let response = ContainerAllocateResponse { envs: HashMap::new(), cdi_devices };
        let answer = AllocateResponse { container_responses: vec![response] };
        assert_eq!(answer.encode_to_vec(), b"\x0a\x09\x2a\x07\x0a\x05x/y=z");
        let start = PreStartContainerRequest::decode(&b"\x0a\x03a-0"[..]).expect("a request");
        assert_eq!(start.devices_ids, ["a-0"]);
        // Answers of a later kubelet, with fields that are not here: CPUs of a container (3), and topology of
        // devices (3).
        let pods = b"\x0a\x23\x0a\x01p\x12\x01n\x1a\x1b\x0a\x01c\x12\x12\x0a\x03r/a\x12\x03a-0\x1a\x06\x0a\x04\x0a\x02\x08\x01\x1a\x02\x01\x02";
        let pods = ListPodResourcesResponse::decode(&pods[..]).expect("pods");
        let pod = &pods.pod_resources[0];
        let devices = &pod.containers[0].devices[0];
        assert_eq!((&*pod.name, &*pod.namespace, &*pod.containers[0].name), ("p", "n", "c"));
        assert_eq!((&*devices.resource_name, &devices.device_ids[..]), ("r/a", &["a-0".to_owned()][..]));
    }
}
