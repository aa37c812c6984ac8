//! `pncclX` beside every `ncclX`, as NCCL has them: profilers put functions of their own in the place of `ncclX`, and call what was there by
//! its other name.

/// Defines functions that are others by another name: jumps, which know nothing of arguments. The library is linked so that they lead to its own
/// functions, whoever has put others in their place (`build.rs`).
macro_rules! twins {
    ($($twin:ident = $($name:ident)::+;)+) => {
        $(
            /// See `nccl.h`.
            ///
            /// # Safety
            /// As for the function without `p`.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            pub unsafe extern "C" fn $twin() {
                #[cfg(target_arch = "x86_64")]
                std::arch::naked_asm!("jmp {}", sym crate::$($name)::+);
                #[cfg(target_arch = "aarch64")]
                std::arch::naked_asm!("b {}", sym crate::$($name)::+);
            }
        )+
    };
}

twins! {
    pncclAllGather = collectives::ncclAllGather;
    pncclAllReduce = collectives::ncclAllReduce;
    pncclAlltoAll = collectives::ncclAlltoAll;
    pncclBcast = collectives::ncclBcast;
    pncclBroadcast = collectives::ncclBroadcast;
    pncclCommAbort = communicators::ncclCommAbort;
    pncclCommCount = communicators::ncclCommCount;
    pncclCommCuDevice = communicators::ncclCommCuDevice;
    pncclCommDeregister = memory::ncclCommDeregister;
    pncclCommDestroy = communicators::ncclCommDestroy;
    pncclCommFinalize = communicators::ncclCommFinalize;
    pncclCommGetAsyncError = communicators::ncclCommGetAsyncError;
    pncclCommInitAll = group::ncclCommInitAll;
    pncclCommInitRank = communicators::ncclCommInitRank;
    pncclCommInitRankConfig = communicators::ncclCommInitRankConfig;
    pncclCommInitRankScalable = communicators::ncclCommInitRankScalable;
    pncclCommRegister = memory::ncclCommRegister;
    pncclCommRevoke = communicators::ncclCommRevoke;
    pncclCommShrink = derived::ncclCommShrink;
    pncclCommSplit = derived::ncclCommSplit;
    pncclCommUserRank = communicators::ncclCommUserRank;
    pncclCommWindowDeregister = memory::ncclCommWindowDeregister;
    pncclCommWindowRegister = memory::ncclCommWindowRegister;
    pncclDevCommCreate = memory::ncclDevCommCreate;
    pncclDevCommDestroy = memory::ncclDevCommDestroy;
    pncclGather = collectives::ncclGather;
    pncclGinBarrierCreateRequirement = teams::ncclGinBarrierCreateRequirement;
    pncclGetErrorString = ncclGetErrorString;
    pncclGetLastError = ncclGetLastError;
    pncclGetUniqueId = communicators::ncclGetUniqueId;
    pncclGetVersion = ncclGetVersion;
    pncclGroupEnd = group::ncclGroupEnd;
    pncclGroupSimulateEnd = group::ncclGroupSimulateEnd;
    pncclGroupStart = group::ncclGroupStart;
    pncclLLA2ACalcSlots = teams::ncclLLA2ACalcSlots;
    pncclLLA2ACreateRequirement = teams::ncclLLA2ACreateRequirement;
    pncclLsaBarrierCreateRequirement = teams::ncclLsaBarrierCreateRequirement;
    pncclMemAlloc = memory::ncclMemAlloc;
    pncclMemFree = memory::ncclMemFree;
    pncclRecv = points::ncclRecv;
    pncclRedOpCreatePreMulSum = operators::ncclRedOpCreatePreMulSum;
    pncclRedOpDestroy = operators::ncclRedOpDestroy;
    pncclReduce = collectives::ncclReduce;
    pncclReduceScatter = collectives::ncclReduceScatter;
    pncclResetDebugInit = ncclResetDebugInit;
    pncclScatter = collectives::ncclScatter;
    pncclSend = points::ncclSend;
    pncclTeamLsa = teams::ncclTeamLsa;
    pncclTeamRail = teams::ncclTeamRail;
    pncclTeamRankToLsa = teams::ncclTeamRankToLsa;
    pncclTeamRankToWorld = teams::ncclTeamRankToWorld;
    pncclTeamWorld = teams::ncclTeamWorld;
}
