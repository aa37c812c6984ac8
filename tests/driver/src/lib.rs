//! Emulated CUDA driver: what `mccs-cuda` calls, for hosts without GPUs. `tests/gpu-emulated.sh`
//! puts it where the driver would be found, and runs the tests of `tests/tests/gpu` on it.
//!
//! | of the driver | here |
//! | --- | --- |
//! | a GPU | a number; `MCCS_EMULATED_GPUS` says how many there are, `MCCS_EMULATED_WORDS=0` that their streams have no words, `MCCS_EMULATED_DMA_BUF=0` that their memory has no dma-bufs |
//! | peer access | between all; `MCCS_EMULATED_UNREACHED` and `MCCS_EMULATED_LOSSY` name pairs (`0-1,0-2`) without, and pairs that lose data |
//! | a GPU that breaks | `MCCS_EMULATED_LOST` names a folder; a file there called after its number breaks it for all processes that know the folder |
//! | its memory | a memfd an allocation (`physical.rs`), mapped where its address says (`memory.rs`) |
//! | handles for other processes | process, descriptor and a random number, by which the other one opens the memfd (`handle.rs`) |
//! | a stream | a thread (`stream.rs`) |
//! | a kernel | a function of the same argument (`kernels`), which runs on its stream's thread; or its own source, as a library (`kernels/compiled.rs`) |
//! | its callers | counted by thread and entry point (`counts.rs`) |
//! | a graph | nodes of what was enqueued, and behind which others each comes (`capture.rs`, `graph.rs`) |
//!
//! It refuses what the driver was seen to refuse: words in memory of another GPU, a handle in the process that made it, kernels that
//! touch what their context does not reach, calls that captures forbid. It waits where the driver waits: who frees memory, for all
//! streams of the process; who enqueues, for room. After an illegal access a context says nothing else any more.
//!
//! Absent: hardware queues, time slices, any notion of speed, contexts that are not primary, and the legacy stream's waiting for other
//! streams. Kernels of collectives have a protocol of their own inside the symmetric buffers' layout: what `kernels/cuda` does there is checked on
//! GPUs only.

mod accounts;
mod capture;
mod code;
mod counts;
mod device;
mod entries;
mod event;
mod graph;
mod handle;
mod kernels;
mod memory;
mod module;
mod object;
mod physical;
mod registry;
mod segments;
mod stream;
#[cfg(test)]
mod tests;
mod wait;
