//! Computing load on a GPU beside collectives: arithmetic in registers, on so many multiprocessors,
//! for so long.

use std::fmt::Write as _;

use bytemuck::{Pod, Zeroable};
use mccs_cuda::{Context, DeviceMemory, DriverError, Function, Module, RawStream};

/// Threads of a block, and accumulators of each: with them a block takes most of a multiprocessor's registers, so that no second
/// one runs there.
const THREADS: u32 = 1024;
const CHAINS: usize = 56;

/// The kernel's argument.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Work {
    /// Address of a word that nobody reads, so that the work is not optimised away.
    out: u64,
    rounds: u32,
    reserved: u32,
}

/// The kernel, loaded.
pub struct Load {
    _module: Module,
    function: Function,
    out: DeviceMemory,
}

/// Multiply-adds in chains that depend on nothing else.
fn source() -> String {
    let mut text = String::from(
        ".version 7.0\n.target sm_80\n.address_size 64\n\
         .visible .entry work(.param .align 8 .b8 work_0[16])\n.maxntid 1024, 1, 1\n{\n\
         .reg .pred %p<2>;\n.reg .b32 %r<4>;\n.reg .b64 %d<4>;\n",
    );
    let _ = writeln!(text, ".reg .f32 %f<{}>;", CHAINS + 1);
    text.push_str(
        "ld.param.u64 %d1, [work_0];\nld.param.u32 %r1, [work_0+8];\nmov.u32 %r2, %tid.x;\ncvt.rn.f32.u32 %f0, %r2;\n",
    );
    for chain in 1..=CHAINS {
        let _ = writeln!(text, "add.rn.f32 %f{chain}, %f0, 0f{:08X};", (chain as f32).to_bits());
    }
    text.push_str("again:\n");
    for chain in 1..=CHAINS {
        let _ = writeln!(text, "fma.rn.f32 %f{chain}, %f{chain}, 0f3F7FFFFF, 0f3F000000;");
    }
    text.push_str("sub.u32 %r1, %r1, 1;\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 bra again;\n");
    for chain in 2..=CHAINS {
        let _ = writeln!(text, "add.rn.f32 %f1, %f1, %f{chain};");
    }
    text.push_str("setp.ne.f32 %p1, %f1, 0fC0490FDB;\n@%p1 bra over;\nst.global.f32 [%d1], %f1;\nover:\nret;\n}\n");
    text
}

impl Load {
    /// Loads it into a context.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(context: &Context) -> Result<Self, DriverError> {
        let module = Module::load_ptx(context, &source())?;
        let function = module.function("work")?;
        Ok(Load { _module: module, function, out: DeviceMemory::zeroed(context, 64)? })
    }

    /// Computes on `blocks` multiprocessors, that many rounds. The load's context must be current.
    ///
    /// # Errors
    /// The driver's.
    pub fn run(&self, stream: RawStream, blocks: u32, rounds: u32) -> Result<(), DriverError> {
        let work = Work { out: self.out.address(), rounds: rounds.max(1), reserved: 0 };
        // SAFETY: the kernel takes such an argument, and writes to memory that lives with the load; the caller's stream lives.
        unsafe { self.function.launch(stream, blocks, THREADS, &work) }
    }
}
