//! Emulated kernels of `kernels/cuda`, on their stream's thread, by names and arguments.
//!
//! A kernel touches nothing that its context does not reach: that is looked up, and is an illegal access otherwise. If it waits for
//! other ranks it looks at its abort word.

mod arguments;
pub(crate) mod compiled;
mod direct;
mod p2p;
mod product;
mod reduce;
mod stage;
#[cfg(test)]
mod tests;

use std::ffi::c_void;

use mccs_ipc::types::{DataType, RedOp};
use mccs_kernels::cuda::{ReduceArgs, STAGE_FUNCTION, StageArgs};

use self::arguments::{DirectArgs, Message, P2pHead};
use crate::code::{Code, Done, ILLEGAL_ADDRESS};
use crate::device::Device;
use crate::memory;
use crate::wait::{Patience, word};

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// Combines what is there.
    Reduce(DataType),
    /// Combines parts that hosts have contributed.
    Combine(DataType),
    /// A short collective that the service carries out.
    Stage,
    /// A collective between ranks; of elements, where they are combined.
    Direct { form: Form, dtype: Option<DataType>, is_of_batches: bool },
    /// Sends and receives, with room for so many messages.
    P2p(usize),
    /// Writes where nothing is: of tests.
    Stray,
    /// Fills memory: of the examples.
    Fill,
    /// Multiplies matrices: of the training benchmark.
    Product,
}

/// Form of a collective's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Ll,
    Ll128,
    Simple,
    /// As [`Form::Simple`], from rank to rank.
    Chain,
}

/// Element types, as functions are called.
const TYPES: [(&str, DataType); 12] = [
    ("int8", DataType::I8),
    ("uint8", DataType::U8),
    ("int32", DataType::I32),
    ("uint32", DataType::U32),
    ("int64", DataType::I64),
    ("uint64", DataType::U64),
    ("half", DataType::F16),
    ("float", DataType::F32),
    ("double", DataType::F64),
    ("bfloat16", DataType::Bf16),
    ("f8e4m3", DataType::F8E4M3),
    ("f8e5m2", DataType::F8E5M2),
];

impl Kernel {
    /// By its function's name, in a compiled image or in PTX.
    pub(crate) fn find(name: &str, is_ptx: bool) -> Option<Kernel> {
        match name {
            "stray" => return is_ptx.then_some(Kernel::Stray),
            "fill" => return is_ptx.then_some(Kernel::Fill),
            "training_product" => return is_ptx.then_some(Kernel::Product),
            STAGE_FUNCTION => return Some(Kernel::Stage),
            "mccs_p2p_few" => return Some(Kernel::P2p(32)),
            "mccs_p2p_many" => return Some(Kernel::P2p(1024)),
            _ => {}
        }
        let (family, of) = name.strip_prefix("mccs_")?.split_once('_')?;
        let (of, is_of_batches) = of.strip_prefix("batch_").map_or((of, false), |of| (of, true));
        let dtype = TYPES.iter().find(|(text, _)| *text == of).map(|(_, dtype)| *dtype);
        let form = match family {
            "reduce" => return dtype.map(Kernel::Reduce),
            "combine" => return dtype.map(Kernel::Combine),
            "ll" => Form::Ll,
            "ll128" | "pipeline" => Form::Ll128,
            "simple" => Form::Simple,
            "chain" => Form::Chain,
            _ => return None,
        };
        (dtype.is_some() || of == "copy" && !["pipeline", "chain"].contains(&family)).then_some(Kernel::Direct {
            form,
            dtype,
            is_of_batches,
        })
    }
}

/// Why a kernel does not go on.
enum Stop {
    /// Its abort word says so.
    Aborted,
    /// Something is wrong, for good.
    Failed(Code),
}

impl From<Code> for Stop {
    fn from(code: Code) -> Self {
        Stop::Failed(code)
    }
}

/// A kernel that runs.
struct Running {
    device: &'static Device,
    /// 0: it has none.
    abort_word: u64,
}

impl Running {
    fn new(device: &'static Device, abort_word: u64) -> Result<Self, Stop> {
        let running = Running { device, abort_word };
        if abort_word != 0 {
            running.word(abort_word)?;
        }
        Ok(running)
    }

    /// So many bytes at an address, which must be there.
    fn at(&self, address: u64, bytes: u64) -> Result<u64, Stop> {
        memory::reach(self.device, address, bytes)?;
        Ok(memory::as_seen_by(self.device, address, bytes))
    }

    /// A word that must be there.
    fn word(&self, address: u64) -> Result<&'static std::sync::atomic::AtomicU64, Stop> {
        let seen = self.at(address, 8)?;
        if address.is_multiple_of(8) { Ok(word(seen)) } else { Err(Stop::Failed(ILLEGAL_ADDRESS)) }
    }

    /// Copies.
    fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), Stop> {
        if bytes != 0 {
            memory::copy(self.at(to, bytes)?, self.at(from, bytes)?, bytes);
        }
        Ok(())
    }

    /// Fails if it is to end.
    fn check(&self) -> Result<(), Stop> {
        self.device.check()?;
        let is_aborted = self.abort_word != 0 && word(self.abort_word).load(std::sync::atomic::Ordering::Relaxed) != 0;
        if is_aborted { Err(Stop::Aborted) } else { Ok(()) }
    }

    /// Waits until something is so.
    fn until(&self, is_so: impl Fn() -> bool) -> Result<(), Stop> {
        let mut patience = Patience::new();
        while !is_so() {
            self.check()?;
            patience.pause();
        }
        Ok(())
    }
}

/// Operators, as kernels know them.
fn operator(code: u32) -> Result<RedOp, Stop> {
    let all = [RedOp::Sum, RedOp::Prod, RedOp::Max, RedOp::Min];
    all.get(code as usize).copied().ok_or(Stop::Failed(ILLEGAL_ADDRESS))
}

/// The examples' kernel.
fn fill(device: &'static Device, args: &arguments::Fill) -> Result<(), Stop> {
    let data = Running::new(device, 0)?.at(args.data, u64::from(args.count) * 4)? as *mut f32;
    for index in 0..args.count {
        // SAFETY: so many elements are there, as was looked up.
        unsafe { data.add(index as usize).write_unaligned(((index + args.rank) % 7) as f32) };
    }
    Ok(())
}

/// A launch as a stream's work: with a copy of the argument.
///
/// # Safety
/// The argument must be what the kernel takes.
pub(crate) unsafe fn work(
    kernel: Kernel,
    grid: u32,
    argument: *const c_void,
) -> Box<dyn Fn(&'static Device) -> Done + Send + Sync> {
    /// # Safety
    /// There must be one.
    unsafe fn read<T>(argument: *const c_void) -> T {
        // SAFETY: the caller's contract; `T` is plain data.
        unsafe { argument.cast::<T>().read_unaligned() }
    }
    type Body = Box<dyn Fn(&'static Device) -> Result<(), Stop> + Send + Sync>;
    // SAFETY: the caller says that the argument is this kernel's; of the list behind a head there is as much as the function's name says.
    let body: Body = unsafe {
        match kernel {
            Kernel::Reduce(dtype) => {
                let args = arguments::Reduce::from(read::<ReduceArgs>(argument));
                Box::new(move |device| reduce::run(device, dtype, &args))
            }
            Kernel::Combine(dtype) => {
                let args: arguments::Combine = read(argument);
                Box::new(move |device| reduce::combine_parts(device, dtype, &args))
            }
            Kernel::Stage => {
                let args: StageArgs = read(argument);
                Box::new(move |device| stage::run(device, &args))
            }
            Kernel::Direct { form, dtype, is_of_batches } => {
                let args: DirectArgs = read(argument);
                // A GPU's kernel of other calls would move the first message alone.
                let is_its_kind = (args.batch > 1) == is_of_batches;
                Box::new(move |device| match is_its_kind {
                    true => direct::run(device, form, dtype, grid, &args),
                    false => Err(Stop::Failed(ILLEGAL_ADDRESS)),
                })
            }
            Kernel::P2p(room) => {
                let head: P2pHead = read(argument);
                let list = argument.cast::<u8>().add(size_of::<P2pHead>()).cast::<c_void>();
                let message = |index: usize| read::<Message>(list.cast::<Message>().add(index).cast());
                let messages: Vec<_> = (0..room).map(message).collect();
                Box::new(move |device| p2p::run(device, &head, &messages))
            }
            Kernel::Stray => {
                let at: u64 = read(argument);
                Box::new(move |device| Running::new(device, 0)?.at(at, 4).map(drop))
            }
            Kernel::Fill => {
                let args: arguments::Fill = read(argument);
                Box::new(move |device| fill(device, &args))
            }
            Kernel::Product => {
                let args: arguments::Product = read(argument);
                Box::new(move |device| product::run(device, &args))
            }
        }
    };
    Box::new(move |device| match body(device) {
        Ok(()) | Err(Stop::Aborted) => Ok(()),
        Err(Stop::Failed(code)) => Err(code),
    })
}
