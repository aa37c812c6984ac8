//! Kernels of collectives, all but ready to be launched.
//!
//! Arguments of a kernel depend on the kind of call but for its buffers and its number, and take longer to work out than all the rest of a
//! call. Programs repeat themselves, so the kernels of the last calls are kept.

use mccs_cuda::Function;
use mccs_ipc::device_initiated::{ControlPage, SymmetricBufferPart};
use mccs_ipc::strides::Strides;
use mccs_kernels::cuda::{Algorithm, CollectiveCall, DirectArgs, Launch};

use super::Member;
use crate::Error;

/// A kind of call, and how it is carried out.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Way {
    pub(super) call: CollectiveCall,
    pub(super) strides: Strides,
    pub(super) algorithm: Algorithm,
    /// As many blocks as it may take.
    pub(super) blocks: u32,
}

/// A collective's kernel.
pub(super) struct Prepared {
    /// Without a call's buffers and number.
    pub(super) launch: Launch<DirectArgs>,
    pub(super) function: Function,
    /// The part of symmetric buffers that it goes through.
    pub(super) part: SymmetricBufferPart,
}

impl Prepared {
    /// A call's kernel on this rank, which leaves such a stamp. None where there is no way for it: all ranks come to the same.
    pub(super) fn new(way: &Way, member: &Member, stamp: u64) -> Result<Option<Self>, Error> {
        // Data that does not fit the symmetric buffers goes in chunks that do, as every batch can.
        let algorithms = [way.algorithm, Algorithm::SimpleTwoShot, Algorithm::SimpleOneShot];
        let found = algorithms.into_iter().find_map(|algorithm| {
            let launch = Launch::collective_apart(&way.call, way.strides, &member.layout, algorithm, way.blocks)?;
            Some((launch, algorithm.part()))
        });
        let Some((mut launch, part)) = found else { return Ok(None) };
        launch.args.symmetric = member.buffers;
        launch.args.abort_word = member.on_page(ControlPage::ABORT_OFFSET);
        launch.args.call = stamp;
        Ok(Some(Prepared { function: member.function(launch.function)?, launch, part }))
    }
}
