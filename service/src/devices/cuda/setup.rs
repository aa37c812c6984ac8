//! The thread that allocates, reads and frees: calls that the driver may take milliseconds for, or wait for a GPU in.

use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Weak};

use mccs_cuda::{DeviceMemory, DriverError, OwnedStream};
use mccs_ipc::direct::{AreaName, DirectPage, DirectShare, DirectTerms, STRATEGY_WORDS};
use mccs_ipc::types::Handle;
use mccs_kernels::cuda::{AreaLayout, DirectStrategy};

use super::{Gpus, NoCuda, Prepared};
use crate::devices::{Areas, Counted, DirectGroup, Ended};
use crate::engines::proxy::ProxyMessage;
use crate::runtime::Sender;

/// To the thread.
pub(super) enum Order {
    /// Make what the ranks of a communicator share. Answered by [`ProxyMessage::Prepared`].
    Prepare { gpus: Vec<usize>, key: Handle },
    /// Read what areas have counted.
    Read { areas: Arc<Memory>, ended: Arc<Ended> },
    /// Let go of areas that nobody maps any more.
    Free(Arc<Memory>),
}

/// The ranks' areas, and their GPUs as the device counts them.
pub(super) type Memory = Vec<(usize, DeviceMemory)>;

/// Areas in use; go back to the thread when dropped, since freeing waits for the GPU.
struct AreasInUse {
    memory: Arc<Memory>,
    orders: Arc<Orders>,
}

impl Areas for AreasInUse {
    fn read(&self, ended: &Arc<Ended>) {
        let order = Order::Read { areas: Arc::clone(&self.memory), ended: Arc::clone(ended) };
        if self.orders.send(order).is_err() {
            ended.tell(Err("the thread that reads GPUs has ended".into()));
        }
    }
}

/// To the thread, which ends when nobody has this any more.
pub(super) type Orders = mpsc::Sender<Order>;

impl Drop for AreasInUse {
    fn drop(&mut self) {
        // If the thread could not be reached the memory would be freed here.
        let _ = self.orders.send(Order::Free(std::mem::take(&mut self.memory)));
    }
}

/// The thread's state.
pub(super) struct Setup {
    gpus: Arc<Gpus>,
    /// A GPU's, for what is read there.
    streams: Vec<OwnedStream>,
    /// To hand to areas.
    own: Weak<Orders>,
    orders: Receiver<Order>,
    done: Sender<ProxyMessage>,
}

impl Setup {
    /// Starts the thread. It ends when nobody can give it orders any more: with the device and the last areas.
    pub(super) fn start(gpus: Arc<Gpus>, done: Sender<ProxyMessage>) -> Result<Arc<Orders>, NoCuda> {
        let (sender, orders) = mpsc::channel();
        let sender = Arc::new(sender);
        let own = Arc::downgrade(&sender);
        let streams = gpus.gpus.iter().map(|(_, context)| OwnedStream::new(context)).collect::<Result<_, _>>()?;
        let setup = Setup { gpus, streams, own, orders, done };
        std::thread::Builder::new().name("mccs-cuda-setup".into()).spawn(move || setup.run())?;
        Ok(sender)
    }

    fn run(self) {
        while let Ok(order) = self.orders.recv() {
            match order {
                Order::Free(memory) => drop(memory),
                Order::Read { areas, ended } => ended.tell(self.read(&areas).map_err(|error| error.to_string())),
                Order::Prepare { gpus, key } => {
                    let prepared = self.prepare(&gpus).map_err(|error| error.to_string());
                    self.answer(ProxyMessage::Prepared { key, prepared });
                }
            }
        }
    }

    fn read(&self, areas: &Memory) -> Result<Vec<Counted>, DriverError> {
        let counted = areas.iter().map(|(gpu, area)| {
            // SAFETY: the area is mapped while it is held, in its GPU's context, which is the stream's.
            let read = |offset| unsafe { self.streams[*gpu].read_word(area.address() + offset) }.map(AreaLayout::ended);
            Ok(Counted {
                operations: read(AreaLayout::COUNTER_OFFSET)?,
                groups: read(AreaLayout::POINTS_COUNTER_OFFSET)?,
            })
        });
        counted.collect()
    }

    /// Waits for room: this thread has nothing better to do, and orders behind this one can wait.
    fn answer(&self, message: ProxyMessage) {
        let mut message = message;
        while let Err(back) = self.done.send(message) {
            message = back;
            std::thread::yield_now();
        }
    }

    fn prepare(&self, gpus: &[usize]) -> Result<Prepared, PrepareError> {
        let nranks = gpus.len() as u32;
        // A single rank has nobody to meet, and an area that nobody uses.
        let layout = AreaLayout::initial(nranks.max(2));
        let (mut memory, mut areas) = (Vec::new(), Vec::new());
        for (rank, number) in gpus.iter().enumerate() {
            let (gpu, context) = &self.gpus.gpus[*number];
            let failed = |error| PrepareError::Driver { rank, gpu: gpu.id.to_string(), error };
            let area = DeviceMemory::zeroed(context, layout.bytes() as usize).map_err(failed)?;
            let ipc_handle = area.export().map_err(failed)?.0.to_vec();
            areas.push(AreaName { ipc_handle, gpu: gpu.id.0 });
            memory.push((*number, area));
        }
        let (fd, page) = DirectPage::create()?;
        let mut strategy = DirectStrategy::initial(nranks);
        // There is no other way yet: the last rule takes all that is longer.
        for rules in &mut strategy.rules {
            if let Some(last) = rules.iter_mut().rev().find(|rule| rule.up_to_bytes != 0) {
                last.up_to_bytes = u64::MAX;
            }
        }
        page.publish(&DirectTerms { epoch: 0, from: 1, words: words_of(&strategy) });
        let share = DirectShare { layout: bytemuck::cast(layout), areas };
        let orders = self.own.upgrade().ok_or(PrepareError::Stopping)?;
        let areas = AreasInUse { memory: Arc::new(memory), orders };
        Ok(Prepared { share, page: fd, group: DirectGroup::new(page, Box::new(areas)) })
    }
}

/// A strategy as pages have it.
fn words_of(strategy: &DirectStrategy) -> [u64; STRATEGY_WORDS] {
    let mut words = [0; STRATEGY_WORDS];
    let bytes = bytemuck::bytes_of(strategy);
    bytemuck::cast_slice_mut(&mut words)[..bytes.len()].copy_from_slice(bytes);
    words
}

const _: () = assert!(size_of::<DirectStrategy>() <= STRATEGY_WORDS * 8);

/// Why a communicator cannot be had.
#[derive(Debug, thiserror::Error)]
enum PrepareError {
    #[error("no area for rank {rank} on {gpu}: {error}")]
    Driver { rank: usize, gpu: String, error: DriverError },
    #[error("the service is stopping")]
    Stopping,
    #[error("no page: {0}")]
    Page(#[from] mccs_ipc::shm::ShmError),
}
