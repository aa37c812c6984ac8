//! Clients and servers of kubelet's services, from their names: without protoc.

use tonic_build::manual::{Builder, Method, Service};

const CODEC: &str = "tonic_prost::ProstCodec";

fn method(name: &str, route: &str, input: &str, output: &str) -> tonic_build::manual::MethodBuilder {
    let of_api = |message: &str| format!("crate::api::{message}");
    Method::builder()
        .name(name)
        .route_name(route)
        .input_type(of_api(input))
        .output_type(of_api(output))
        .codec_path(CODEC)
}

fn main() {
    let registration = Service::builder()
        .name("Registration")
        .package("v1beta1")
        .method(method("register", "Register", "RegisterRequest", "Empty").build())
        .build();
    let plugin = Service::builder()
        .name("DevicePlugin")
        .package("v1beta1")
        .method(method("get_device_plugin_options", "GetDevicePluginOptions", "Empty", "DevicePluginOptions").build())
        .method(method("list_and_watch", "ListAndWatch", "Empty", "ListAndWatchResponse").server_streaming().build())
        .method(
            method(
                "get_preferred_allocation",
                "GetPreferredAllocation",
                "PreferredAllocationRequest",
                "PreferredAllocationResponse",
            )
            .build(),
        )
        .method(method("allocate", "Allocate", "AllocateRequest", "AllocateResponse").build())
        .method(
            method("pre_start_container", "PreStartContainer", "PreStartContainerRequest", "PreStartContainerResponse")
                .build(),
        )
        .build();
    let pods = Service::builder()
        .name("PodResourcesLister")
        .package("v1")
        .method(method("list", "List", "ListPodResourcesRequest", "ListPodResourcesResponse").build())
        .build();
    Builder::new().compile(&[registration, plugin, pods]);
}
