//! The caller's GPU memory, as the service knows it: registered when a large operation first uses it.
//!
//! Whole allocations are registered, so that buffers an allocator cuts out of one share it. An address may be freed and
//! come again as something else, which its buffer id tells: then the old region is given back.

use std::collections::HashMap;

use mccs_cuda::{Context, DeviceAddress, allocation_of, buffer_id, export};
use mccs_ipc::command::BufferRef;
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::types::Handle;

use crate::client::unexpected;
use crate::cuda::cuda_error;
use crate::requests::Requests;
use crate::{Client, Error};

/// Regions of a session at a time: the one that was not used for longest goes.
const REGIONS_MAX: usize = 128;

/// Regions by context and first address.
#[derive(Default)]
pub(crate) struct GpuRegions {
    known: HashMap<(usize, DeviceAddress), Known>,
    uses: u64,
}

struct Known {
    id: u64,
    handle: Handle,
    used: u64,
}

impl GpuRegions {
    /// Names a buffer to the service. The context must be current.
    pub(super) fn place(
        &mut self,
        client: &Client,
        context: &Context,
        address: DeviceAddress,
    ) -> Result<BufferRef, Error> {
        let (base, bytes) = allocation_of(address).map_err(cuda_error)?;
        let id = buffer_id(base).map_err(cuda_error)?;
        let (key, offset_bytes) = ((context.key(), base), address - base);
        self.uses += 1;
        if let Some(known) = self.known.get_mut(&key).filter(|known| known.id == id) {
            known.used = self.uses;
            return Ok(BufferRef { region: known.handle, offset_bytes });
        }
        let requests = &client.0.requests;
        self.forget_freed(context, requests);
        let ipc_handle = export(base).map_err(cuda_error)?.0.to_vec();
        let request = Request::RegisterGpuMemory { gpu: context.gpu().id.0, ipc_handle, bytes };
        let handle = match requests.call(request, &[])? {
            (Response::Region { region, .. }, _) => region,
            (other, _) => return Err(unexpected(&other)),
        };
        self.known.insert(key, Known { id, handle, used: self.uses });
        Ok(BufferRef { region: handle, offset_bytes })
    }

    /// Gives back what its owner has freed, and what there is no room for.
    fn forget_freed(&mut self, context: &Context, requests: &Requests) {
        let lives = |(of, base): &(usize, DeviceAddress), known: &Known| {
            *of != context.key() || buffer_id(*base).is_ok_and(|id| id == known.id)
        };
        let freed: Vec<_> = self.known.iter().filter(|(key, known)| !lives(key, known)).map(|(key, _)| *key).collect();
        let oldest = self.known.iter().min_by_key(|(_, known)| known.used).map(|(key, _)| *key);
        let oldest = oldest.filter(|_| freed.is_empty() && self.known.len() >= REGIONS_MAX);
        for key in freed.into_iter().chain(oldest) {
            if let Some(known) = self.known.remove(&key) {
                requests.send_and_forget(Request::FreeGpuMemory { region: known.handle });
            }
        }
    }
}
