//! Host-staged collectives as one kernel: a rank's data go to pinned host memory, and the result
//! comes back. The kernel says when data are there, and waits for the result. The parts can be left
//! out, for streams that write and wait for words by kernels only.

use bytemuck::{Pod, Zeroable};

use super::Aligned;

include!(concat!(env!("OUT_DIR"), "/stage.rs"));

/// The compiled kernel for `cuModuleLoadData`, or `None` where the build found no compiler.
pub static STAGE_IMAGE: Option<&'static [u8]> = match STAGE_COMPILED {
    Some(image) => Some(&image.0),
    None => None,
};

/// Its name.
pub const STAGE_FUNCTION: &str = "mccs_stage";
/// Threads of its only block, at most.
const THREADS_MAX: u64 = 1024;

/// The parameter of the kernel: the mirror of cuda/stage.cu. Addresses are as the GPU sees them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct StageArgs {
    /// First byte of the caller's data.
    pub send: u64,
    /// Address in host memory.
    pub slot_in: u64,
    /// Address of the result in host memory.
    pub slot_out: u64,
    /// First byte of the caller's place for it.
    pub recv: u64,
    /// A word in host memory that is written when data is there.
    pub ready_word: u64,
    /// The written value; 0: nothing.
    pub ready_value: u64,
    /// A word in host memory that says when the result is there.
    pub done_word: u64,
    /// Its least value then; 0: nothing is waited for.
    pub done_value: u64,
    /// A word in host memory: values above that are not 0 count from 1, and stand for the number that is there and those that follow; where
    /// 0 is there, for nothing. 0: there is no such word, they stand for themselves.
    pub ticket_word: u64,
    /// Bytes of the data.
    pub in_bytes: u64,
    /// Bytes of the result.
    pub out_bytes: u64,
}

const _: () = assert!(size_of::<StageArgs>() == 88);

impl StageArgs {
    /// Threads to launch, in one block: enough that each moves few vectors.
    #[must_use]
    pub fn threads(&self) -> u32 {
        self.in_bytes.max(self.out_bytes).div_ceil(16).next_multiple_of(32).clamp(32, THREADS_MAX) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_whole_warps_of_one_block() {
        let of = |in_bytes, out_bytes| StageArgs { in_bytes, out_bytes, ..StageArgs::zeroed() }.threads();
        assert_eq!([of(0, 0), of(8, 8), of(0, 513), of(4096, 0), of(1 << 20, 8)], [32, 32, 64, 256, 1024]);
    }
}
