//! The device plugin of a kind of tenants, as kubelet calls it.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::api::device_plugin_server::{DevicePlugin, DevicePluginServer};
use crate::api::{
    AllocateRequest, AllocateResponse, CdiDevice, ContainerAllocateRequest, ContainerAllocateResponse, Device,
    DevicePluginOptions, Empty, HEALTHY, ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse, UNHEALTHY,
};
use crate::slots::{Slots, id, resource};
use crate::{cdi, kubelet};

/// Answers kubelet.
struct Plugin {
    kind: String,
    slots: Arc<Slots>,
    /// Whether the service answers.
    is_served: watch::Receiver<bool>,
}

impl Plugin {
    fn slot(&self, device: &str) -> Result<u32, Status> {
        let unknown = || Status::not_found(format!("{} has no device {device:?}", resource(&self.kind)));
        self.slots.slot_of(&self.kind, device).ok_or_else(unknown)
    }

    fn devices(kind: &str, slots: u32, is_served: bool) -> ListAndWatchResponse {
        let health = if is_served { HEALTHY } else { UNHEALTHY };
        let devices = (0..slots).map(|slot| Device { id: id(kind, slot), health: health.into() });
        ListAndWatchResponse { devices: devices.collect() }
    }

    fn allocate_one(&self, request: &ContainerAllocateRequest) -> Result<ContainerAllocateResponse, Status> {
        let [device] = &request.devices_ids[..] else {
            let asked = request.devices_ids.len();
            let what = resource(&self.kind);
            return Err(Status::invalid_argument(format!(
                "a container has one socket: ask for 1 of {what}, not {asked}"
            )));
        };
        self.slots.give(&self.kind, self.slot(device)?);
        let cdi_devices = vec![CdiDevice { name: cdi::device(device) }];
        Ok(ContainerAllocateResponse { cdi_devices, ..ContainerAllocateResponse::default() })
    }
}

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    type ListAndWatchStream = std::pin::Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(&self, _: Request<Empty>) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(kubelet::options()))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let slots = self.slots.file().tenant.get(&self.kind).map_or(0, |kind| kind.slots);
        let kind = self.kind.clone();
        let changes = WatchStream::new(self.is_served.clone());
        Ok(Response::new(Box::pin(changes.map(move |is_served| Ok(Self::devices(&kind, slots, is_served))))))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("all slots are alike"))
    }

    async fn allocate(&self, request: Request<AllocateRequest>) -> Result<Response<AllocateResponse>, Status> {
        let requests = request.into_inner().container_requests;
        let responses: Result<Vec<_>, Status> = requests.iter().map(|one| self.allocate_one(one)).collect();
        Ok(Response::new(AllocateResponse { container_responses: responses? }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        for device in request.into_inner().devices_ids {
            let slot = self.slot(&device)?;
            let started = self.slots.start(&self.kind, slot).await;
            started.map_err(|error| Status::unavailable(format!("{error:#}")))?;
        }
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

/// A plugin that listens. Ends with the value, and its socket goes.
pub struct Listening {
    kind: String,
    folder: PathBuf,
    inode: u64,
    server: JoinHandle<()>,
}

impl Listening {
    /// Listens for a kind of tenants in kubelet's folder.
    ///
    /// # Errors
    /// The kernel refuses the socket.
    pub async fn start(slots: &Arc<Slots>, kind: &str, is_served: watch::Receiver<bool>) -> anyhow::Result<Self> {
        let folder = slots.file().plugin_dir.clone();
        let path = folder.join(endpoint(kind));
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            _ => {}
        }
        let listener = UnixListener::bind(&path).with_context(|| format!("cannot listen on {}", path.display()))?;
        let inode = inode(&path).with_context(|| format!("{} is gone", path.display()))?;
        let plugin = Plugin { kind: kind.to_owned(), slots: Arc::clone(slots), is_served };
        let serving = Server::builder()
            .add_service(DevicePluginServer::new(plugin))
            .serve_with_incoming(UnixListenerStream::new(listener));
        let server = tokio::spawn(async move {
            if let Err(error) = serving.await {
                tracing::error!(%error, "kubelet is not answered any more");
            }
        });
        Ok(Listening { kind: kind.to_owned(), folder, inode, server })
    }

    /// Makes it known to kubelet.
    ///
    /// # Errors
    /// kubelet does not answer, or refuses.
    pub async fn register(&self) -> anyhow::Result<()> {
        kubelet::register(&self.folder, &endpoint(&self.kind), &resource(&self.kind)).await
    }

    /// Whether it can still be reached: a kubelet that starts removes all sockets, and waits for plugins to come again.
    #[must_use]
    pub fn is_in_place(&self) -> bool {
        !self.server.is_finished() && inode(&self.folder.join(endpoint(&self.kind))) == Some(self.inode)
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.server.abort();
        if self.is_in_place_of_own() {
            let _ = std::fs::remove_file(self.folder.join(endpoint(&self.kind)));
        }
    }
}

impl Listening {
    fn is_in_place_of_own(&self) -> bool {
        inode(&self.folder.join(endpoint(&self.kind))) == Some(self.inode)
    }
}

fn endpoint(kind: &str) -> String {
    format!("mccs-tenant-{kind}.sock")
}

fn inode(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok().map(|metadata| metadata.ino())
}
