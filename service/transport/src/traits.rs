//! The transport trait: listen, connect, accept, register, send, receive, test, close. Optional
//! abilities are in `abilities.rs`.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use super::{
    Abilities, FlowId, FlowSpec, FlowState, ListenOptions, Listener, ListenerHandle, MemoryKey, MemoryKind, MemorySpan,
    RecvFlow, Request, SendFlow, Status, TransportError, Usage,
};
use mccs_runtime::{Context, Progress};

/// Posting and finishing requests, and driving the transport.
pub trait DataPath: Send {
    /// Sends a message, and `tag` with it, which means nothing to the transport. `None`: as many requests as [`FlowOptions::requests`](crate::FlowOptions::requests) are unfinished or untested; try later.
    /// The bytes must not change until the request is done or the flow closed.
    ///
    /// # Errors
    /// The flow has failed, the flow or the memory is not there, or the span leaves it.
    fn isend(&mut self, flow: SendFlow, message: MemorySpan, tag: u32) -> Result<Option<Request>, TransportError>;

    /// Gives the sender a buffer for its next message, which may be shorter. `None` as for [`DataPath::isend`].
    ///
    /// # Errors
    /// As for [`DataPath::isend`].
    fn irecv(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError>;

    /// Asks that what done receives have put into `buffer` be visible to whoever reads it, where the device needs that
    /// (GPU memory written by a NIC). `None` as for [`DataPath::isend`].
    ///
    /// # Errors
    /// As for [`DataPath::isend`].
    fn flush(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError>;

    /// How far a request is. After `Done` its place is free and it must not be tested again.
    ///
    /// # Errors
    /// The flow failed before the request was done, or there is no such request.
    fn test(&mut self, request: Request) -> Result<Status, TransportError>;

    /// Moves bytes, a bounded amount. Requests make progress here, and may in `isend` and `irecv`.
    fn poll(&mut self, cx: &Context) -> Progress;

    /// Called when polls have been idle and the engine wants to sleep on [`DataPath::descriptor`]: arms it. Returns false
    /// if there is work to poll for.
    fn prepare_to_sleep(&mut self) -> bool;

    /// The descriptor, the same for the transport's whole life, that is readable when there is work to poll for. `None`:
    /// poll on.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// Memory, listeners and flows. Control path: may allocate. Engines hold a `Box<dyn Transport>`.
pub trait Transport: DataPath + Abilities {
    /// Makes memory known. The same memory may be registered more than once.
    ///
    /// # Safety
    /// The `bytes` bytes at `ptr` are of the given kind, and stay readable and writable until [`Transport::deregister`] has
    /// returned `Ok` or the transport is dropped. Others may write them meanwhile; whoever does decides what is sent.
    ///
    /// # Errors
    /// The table is full, the operating system refuses, or the transport cannot reach memory of this kind.
    unsafe fn register(&mut self, ptr: *mut u8, bytes: u64, kind: MemoryKind<'_>) -> Result<MemoryKey, TransportError>;

    /// Forgets memory.
    ///
    /// # Errors
    /// Unfinished requests use it (close their flows first), or there is no such memory.
    fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError>;

    /// Opens a listener, and says what peers need to connect to it. Cheap: listeners share what they listen with.
    ///
    /// # Errors
    /// The options contradict themselves, or the operating system refuses the address.
    fn listen(&mut self, options: &ListenOptions) -> Result<(Listener, ListenerHandle), TransportError>;

    /// Closes a listener. Flows that are connected stay; those still waiting fail.
    fn close_listener(&mut self, listener: Listener);

    /// Flow numbers below `number` are over: those still waiting fail, none is accepted or can be connected any more, and the
    /// listener keeps nothing of them. So one that lives for long, and counts upwards, stays small.
    fn end_numbers(&mut self, listener: Listener, below: u64);

    /// Begins to connect flow number `spec.number` of a listener.
    ///
    /// # Errors
    /// The handle, the device or the options are refused, there are too many flows, or no source port is free.
    fn connect(&mut self, listener: &ListenerHandle, spec: &FlowSpec, now: Instant)
    -> Result<SendFlow, TransportError>;

    /// Begins to wait for flow number `spec.number`; a listener accepts each number once while it lives. How many connections it has and how
    /// messages are cut is the sender's choice; of the options only those that concern this side count.
    ///
    /// # Errors
    /// The options are refused, there are too many flows, or the number was accepted before.
    fn accept(&mut self, listener: Listener, spec: &FlowSpec, now: Instant) -> Result<RecvFlow, TransportError>;

    /// Whether a flow is connected.
    ///
    /// # Errors
    /// Why it failed. A flow whose peer has closed it in good order has failed, too.
    fn state(&self, flow: FlowId) -> Result<FlowState, TransportError>;

    /// Ends a flow at once, whatever it is doing. Requests are forgotten and their buffers free when this returns; what
    /// completed sends have handed over still arrives, unless the peer closes too, or the transport is dropped while flows are
    /// [`Usage::lingering`]. Unknown flows are ignored.
    fn close(&mut self, flow: FlowId);

    /// Holdings of users now.
    fn usage(&self) -> Usage;
}
