//! `pncclX` beside every `ncclX`, as NCCL has them for profilers. They put functions of their own
//! in the place of `ncclX`, and call what was there by its other name.

/// Defines functions that are others by another name: jumps, which know nothing of arguments. The library is linked so that they lead to its own
/// functions, whoever has put others in their place (`build.rs`).
macro_rules! aliases {
    ($($alias:ident = $($name:ident)::+;)+) => {
        $(
            /// See `nccl.h`.
            ///
            /// # Safety
            /// As for the function without `p`.
            #[unsafe(no_mangle)]
            #[unsafe(naked)]
            pub unsafe extern "C" fn $alias() {
                #[cfg(target_arch = "x86_64")]
                std::arch::naked_asm!("jmp {}", sym crate::$($name)::+);
                #[cfg(target_arch = "aarch64")]
                std::arch::naked_asm!("b {}", sym crate::$($name)::+);
            }
        )+
    };
}

aliases! {
    pncclAllGather = collectives::ncclAllGather;
    pncclAllGatherConfig = collectives::ncclAllGatherConfig;
    pncclAllReduce = collectives::ncclAllReduce;
    pncclAllReduceConfig = collectives::ncclAllReduceConfig;
    pncclAlltoAll = collectives::ncclAlltoAll;
    pncclAlltoAllConfig = collectives::ncclAlltoAllConfig;
    pncclBcast = collectives::ncclBcast;
    pncclBroadcast = collectives::ncclBroadcast;
    pncclBroadcastConfig = collectives::ncclBroadcastConfig;
    pncclCommAbort = communicators::ncclCommAbort;
    pncclCommCount = queries::ncclCommCount;
    pncclCommCuDevice = queries::ncclCommCuDevice;
    pncclCommDeregister = memory::ncclCommDeregister;
    pncclCommDestroy = communicators::ncclCommDestroy;
    pncclCommFinalize = communicators::ncclCommFinalize;
    pncclCommGetAsyncError = queries::ncclCommGetAsyncError;
    pncclCommGetUniqueId = grow::ncclCommGetUniqueId;
    pncclCommGrow = grow::ncclCommGrow;
    pncclCommInitAll = group::ncclCommInitAll;
    pncclCommInitRank = communicators::ncclCommInitRank;
    pncclCommInitRankConfig = communicators::ncclCommInitRankConfig;
    pncclCommInitRankScalable = communicators::ncclCommInitRankScalable;
    pncclCommMemStats = suspend::ncclCommMemStats;
    pncclCommQueryProperties = properties::ncclCommQueryProperties;
    pncclCommRegister = memory::ncclCommRegister;
    pncclCommResume = suspend::ncclCommResume;
    pncclCommRevoke = communicators::ncclCommRevoke;
    pncclCommShrink = split::ncclCommShrink;
    pncclCommSplit = split::ncclCommSplit;
    pncclCommSuspend = suspend::ncclCommSuspend;
    pncclCommUserRank = queries::ncclCommUserRank;
    pncclCommWindowDeregister = windows::ncclCommWindowDeregister;
    pncclCommWindowRegister = windows::ncclCommWindowRegister;
    pncclDevCommCreate = device_comm::ncclDevCommCreate;
    pncclDevCommDestroy = device_comm::ncclDevCommDestroy;
    pncclGather = collectives::ncclGather;
    pncclGatherConfig = collectives::ncclGatherConfig;
    pncclGetCftDeviceLeInfo = windows::ncclGetCftDeviceLeInfo;
    pncclGetErrorString = ncclGetErrorString;
    pncclGetLastError = ncclGetLastError;
    pncclGetLsaDevicePointer = windows::ncclGetLsaDevicePointer;
    pncclGetLsaMultimemDevicePointer = windows::ncclGetLsaMultimemDevicePointer;
    pncclGetMultimemDeviceLeInfo = windows::ncclGetMultimemDeviceLeInfo;
    pncclGetMultimemDevicePointer = windows::ncclGetMultimemDevicePointer;
    pncclGetPeerDeviceLeInfo = windows::ncclGetPeerDeviceLeInfo;
    pncclGetPeerDevicePointer = windows::ncclGetPeerDevicePointer;
    pncclGetUniqueId = communicators::ncclGetUniqueId;
    pncclGetVersion = ncclGetVersion;
    pncclGinBarrierCreateRequirement = device_comm::ncclGinBarrierCreateRequirement;
    pncclGinInboxA2ACreateRequirement = device_comm::ncclGinInboxA2ACreateRequirement;
    pncclGinOutboxCreateRequirement = device_comm::ncclGinOutboxCreateRequirement;
    pncclGroupEnd = group::ncclGroupEnd;
    pncclGroupSimulateEnd = group::ncclGroupSimulateEnd;
    pncclGroupStart = group::ncclGroupStart;
    pncclLLA2ACalcSlots = device_comm::ncclLLA2ACalcSlots;
    pncclLLA2ACreateRequirement = device_comm::ncclLLA2ACreateRequirement;
    pncclLsaBarrierCreateRequirement = device_comm::ncclLsaBarrierCreateRequirement;
    pncclMemAlloc = memory::ncclMemAlloc;
    pncclMemFree = memory::ncclMemFree;
    pncclParamBind = parameters::ncclParamBind;
    pncclParamDumpAll = parameters::ncclParamDumpAll;
    pncclParamGet = parameters::ncclParamGet;
    pncclParamGetAllParameterKeys = parameters::ncclParamGetAllParameterKeys;
    pncclParamGetI16 = parameters::ncclParamGetI16;
    pncclParamGetI32 = parameters::ncclParamGetI32;
    pncclParamGetI64 = parameters::ncclParamGetI64;
    pncclParamGetI8 = parameters::ncclParamGetI8;
    pncclParamGetParameter = parameters::ncclParamGetParameter;
    pncclParamGetStr = parameters::ncclParamGetStr;
    pncclParamGetU16 = parameters::ncclParamGetU16;
    pncclParamGetU32 = parameters::ncclParamGetU32;
    pncclParamGetU64 = parameters::ncclParamGetU64;
    pncclParamGetU8 = parameters::ncclParamGetU8;
    pncclPutSignal = one_sided::ncclPutSignal;
    pncclRecv = p2p::ncclRecv;
    pncclRedOpCreatePreMulSum = operators::ncclRedOpCreatePreMulSum;
    pncclRedOpDestroy = operators::ncclRedOpDestroy;
    pncclReduce = collectives::ncclReduce;
    pncclReduceConfig = collectives::ncclReduceConfig;
    pncclReduceScatter = collectives::ncclReduceScatter;
    pncclReduceScatterConfig = collectives::ncclReduceScatterConfig;
    pncclResetDebugInit = ncclResetDebugInit;
    pncclScatter = collectives::ncclScatter;
    pncclScatterConfig = collectives::ncclScatterConfig;
    pncclSend = p2p::ncclSend;
    pncclSetEncryption = encryption::ncclSetEncryption;
    pncclSignal = one_sided::ncclSignal;
    pncclTeamCft = device_comm::ncclTeamCft;
    pncclTeamCftMultimem = device_comm::ncclTeamCftMultimem;
    pncclTeamLsa = device_comm::ncclTeamLsa;
    pncclTeamRail = device_comm::ncclTeamRail;
    pncclTeamRankToLsa = device_comm::ncclTeamRankToLsa;
    pncclTeamRankToWorld = device_comm::ncclTeamRankToWorld;
    pncclTeamWorld = device_comm::ncclTeamWorld;
    pncclWaitSignal = one_sided::ncclWaitSignal;
    pncclWinGetUserPtr = windows::ncclWinGetUserPtr;
}
