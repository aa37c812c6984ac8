//! Puts of port channels between ranks' memory on GPUs: a thread for each GPU copies, and tells when each has ended.
//!
//! ```text
//! proxy engine: a put --> the thread of the source's GPU: copy, event --> event has happened --> proxy engine: signal, flush, next put
//! ```
//!
//! Streams here wait for nothing but copies, so a tenant's kernel holds nobody up. A copy between two GPUs goes by a copy engine while
//! kernels run. One within a GPU is a kernel of the driver's, in the service's context: it waits for a time slice while a tenant's kernel runs
//! there (decision 118).
//!
//! The thread looks for puts and their ends without pause for a while after each, since kernels wait for these, and then sleeps.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use mccs_cuda::{Context, DriverError, Event, OwnedStream};
use mccs_ipc::types::Handle;
use mccs_runtime::{Share, TurnReceiver, TurnSender, turn_channel};

use crate::cuda::gpu_health::GpuHealth;
use crate::cuda::memory::imports::GpuOperand;
use crate::cuda::{Gpus, NoCuda};
use crate::{DeviceEvent, DeviceEvents};

/// How long the thread looks for more without pause, and how long it pauses while something is on its way after that.
const SPIN_FOR: Duration = Duration::from_micros(200);
const LOOK_AFTER: Duration = Duration::from_micros(20);
/// Puts of this size and more have a stream of their own, so that short ones do not wait for them.
const LONG_BYTES: u64 = 1 << 20;
/// Puts that are on their way at a time: of each kind enough that its stream does not run dry, and tenants still take turns.
const SHORT_MAX: usize = 32;
const LONG_MAX: usize = 4;

/// A validated put between memories on GPUs, which its device has opened where it is copied from and to.
pub struct GpuPut {
    /// The GPU of the rank that puts, as the device counts them: it copies.
    pub gpu: usize,
    /// Source.
    pub from: GpuOperand,
    /// Destination.
    pub to: GpuOperand,
    /// Length.
    pub bytes: u64,
    /// Its communicator, which ends if the driver refuses.
    pub comm: Handle,
    /// The share by which it takes turns.
    pub share: Share,
}

/// To a GPU's thread, which ends when nobody has this any more.
pub(crate) type PutOrders = TurnSender<PutOrder>;

/// A put, and the job that it ends.
pub(crate) struct PutOrder {
    pub(crate) put: GpuPut,
    pub(crate) job: Handle,
}

/// Why a put is not copied.
#[derive(Debug, thiserror::Error)]
enum PutError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("bug: memory of a put is not open on its GPU")]
    NotOpen,
}

/// A put that is on its way.
struct Copying {
    event: Event,
    order: PutOrder,
}

/// A stream with what is on its way there.
struct Lane {
    stream: OwnedStream,
    copying: VecDeque<Copying>,
    most: usize,
}

struct Putter {
    gpu: usize,
    context: Context,
    orders: TurnReceiver<PutOrder>,
    /// Lanes of short puts and of long ones; made with the first.
    lanes: Option<[Lane; 2]>,
    unused: Vec<Event>,
    gpu_health: Arc<GpuHealth>,
    device_events: Arc<DeviceEvents>,
}

/// Starts a GPU's thread.
pub(crate) fn start(
    gpu: usize,
    gpus: &Gpus,
    gpu_health: &Arc<GpuHealth>,
    device_events: &Arc<DeviceEvents>,
) -> Result<PutOrders, NoCuda> {
    let (sender, orders) = turn_channel();
    let (context, lanes, unused) = (gpus.gpus[gpu].1.clone(), None, Vec::new());
    let (gpu_health, device_events) = (Arc::clone(gpu_health), Arc::clone(device_events));
    let putter = Putter { gpu, context, orders, lanes, unused, gpu_health, device_events };
    std::thread::Builder::new().name(format!("mccs-puts-{gpu}")).spawn(move || putter.run())?;
    Ok(sender)
}

impl Putter {
    fn run(mut self) {
        let context = self.context.clone();
        let entered = context.enter();
        if let Err(error) = &entered {
            tracing::error!(gpu = self.gpu, %error, "a GPU's context cannot be used");
        }
        // The next one, and when something last went on.
        let (mut next, mut moved_at) = (None, Instant::now());
        loop {
            let mut moved = self.look();
            next = next.or_else(|| self.orders.try_recv());
            if let Some(order) = next.take() {
                next = self.put(order);
                moved |= next.is_none();
            }
            let now = Instant::now();
            if moved {
                moved_at = now;
            }
            if now.saturating_duration_since(moved_at) < SPIN_FOR {
                std::hint::spin_loop();
                continue;
            }
            let look_after = (!self.is_idle()).then_some(LOOK_AFTER);
            match (next.is_some(), look_after) {
                // There is no room before something ends.
                (true, Some(pause)) => std::thread::sleep(pause),
                _ => match self.orders.recv(look_after) {
                    Ok(order) => next = Some(order),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) if self.is_idle() => return,
                    // The last ones are to end.
                    Err(RecvTimeoutError::Disconnected) => std::thread::sleep(LOOK_AFTER),
                },
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.lanes.iter().flatten().all(|lane| lane.copying.is_empty())
    }

    /// Issues a put, or gives it back where there is no room.
    fn put(&mut self, order: PutOrder) -> Option<PutOrder> {
        if self.lanes.as_ref().is_some_and(|lanes| !lanes[lane_of(&order)].has_room()) {
            return Some(order);
        }
        match self.issue(&order) {
            Ok(event) => {
                if let Some(lanes) = &mut self.lanes {
                    lanes[lane_of(&order)].copying.push_back(Copying { event, order });
                }
            }
            Err(error) => self.fail(&order, &error),
        }
        None
    }

    fn issue(&mut self, order: &PutOrder) -> Result<Event, PutError> {
        let GpuPut { gpu, from, to, bytes, .. } = &order.put;
        let address = |operand: &GpuOperand| operand.address(*gpu).ok_or(PutError::NotOpen);
        let (from, to) = (address(from)?, address(to)?);
        if self.lanes.is_none() {
            let lane = |most| {
                let (stream, copying) = (OwnedStream::new(&self.context)?, VecDeque::new());
                Ok::<_, DriverError>(Lane { stream, copying, most })
            };
            self.lanes = Some([lane(SHORT_MAX)?, lane(LONG_MAX)?]);
        }
        let event = self.unused.pop().map_or_else(|| Event::new(&self.context, false), Ok)?;
        let Some(lanes) = &self.lanes else { return Err(PutError::NotOpen) };
        let stream = lanes[lane_of(order)].stream.raw();
        // SAFETY: the stream lives with this thread, whose context is its own. Ranges were validated by the proxy engine; the order keeps
        // the regions open until the event behind the copy has happened.
        unsafe {
            stream.copy(to, from, *bytes as usize)?;
            event.record(stream)?;
        }
        Ok(event)
    }

    /// Tells of what has ended. Returns whether anything has.
    fn look(&mut self) -> bool {
        let mut ended = Vec::new();
        for lane in self.lanes.iter_mut().flatten() {
            while let Some(front) = lane.copying.front() {
                match front.event.has_happened() {
                    Ok(false) => break,
                    // A stream that has failed does not go on.
                    outcome => ended.extend(lane.copying.pop_front().map(|copied| (copied, outcome))),
                }
            }
        }
        let any = !ended.is_empty();
        for (Copying { event, order }, outcome) in ended {
            match outcome {
                Ok(_) => {
                    self.unused.push(event);
                    self.device_events.tell(DeviceEvent::JobDone { job: order.job });
                }
                Err(error) => self.fail(&order, &error.into()),
            }
        }
        any
    }

    /// Ends the communicator of a put.
    fn fail(&self, order: &PutOrder, error: &PutError) {
        if let PutError::Driver(error) = error {
            self.gpu_health.note(self.gpu, error);
        }
        let message = format!("a put of {} bytes on GPU {}: {error}", order.put.bytes, self.gpu);
        self.device_events.tell(DeviceEvent::CommFailed { comm: order.put.comm, message });
        self.device_events.tell(DeviceEvent::JobDone { job: order.job });
    }
}

impl Lane {
    fn has_room(&self) -> bool {
        self.copying.len() < self.most
    }
}

/// Which of the lanes a put takes.
fn lane_of(order: &PutOrder) -> usize {
    usize::from(order.put.bytes >= LONG_BYTES)
}
