//! Profiler event descriptors in the memory layout of each version of NCCL's interface.
//!
//! An [`Event`] is told in the newest form; older versions get the fields that they know, in their own places. Version 7 adds a user's
//! tag, 6 and 5 have the events of calls, 4 moved the communicator's name and id to `init`, 1 has numbers in the place of names.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;

use super::events::{Coll, Event, Named, P2pCall, Tuning};

/// Names of data types, by NCCL's number.
const DATATYPES: [&CStr; 12] = [
    c"ncclInt8",
    c"ncclUint8",
    c"ncclInt32",
    c"ncclUint32",
    c"ncclInt64",
    c"ncclUint64",
    c"ncclFloat16",
    c"ncclFloat32",
    c"ncclFloat64",
    c"ncclBfloat16",
    c"ncclFloat8e4m3",
    c"ncclFloat8e5m2",
];

fn datatype_name(number: c_int) -> *const c_char {
    let known = usize::try_from(number).ok().and_then(|number| DATATYPES.get(number));
    known.map_or(c"unknown", |name| *name).as_ptr()
}

/// Bytes of a descriptor's part that depends on the event: as many as any version has.
const ROOM: usize = 128;

/// That part, as the C union that it is.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Body(MaybeUninit<[u8; ROOM]>);

impl Body {
    const NONE: Body = Body(MaybeUninit::zeroed());

    fn of<T: Copy>(value: T) -> Self {
        const { assert!(size_of::<T>() <= ROOM && align_of::<T>() <= align_of::<Body>()) };
        let mut body = Body::NONE;
        // SAFETY: the room is as long, and aligned.
        unsafe { body.0.as_mut_ptr().cast::<T>().write(value) };
        body
    }
}

/// A descriptor of versions 5 to 7.
#[repr(C)]
pub(super) struct Descriptor5 {
    kind: u64,
    parent: *mut c_void,
    rank: c_int,
    body: Body,
}

/// A descriptor of versions 1 to 4.
#[repr(C)]
pub(super) struct Descriptor1 {
    kind: u8,
    parent: *mut c_void,
    rank: c_int,
    body: Body,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct GroupApi {
    is_captured: bool,
    depth: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CollApi {
    function: *const c_char,
    count: usize,
    datatype: *const c_char,
    root: c_int,
    stream: *mut c_void,
    is_captured: bool,
    user_tag: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct P2pApi {
    function: *const c_char,
    count: usize,
    datatype: *const c_char,
    stream: *mut c_void,
    is_captured: bool,
    user_tag: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Coll4 {
    sequence: u64,
    function: *const c_char,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    root: c_int,
    datatype: *const c_char,
    channels: u8,
    warps: u8,
    algorithm: *const c_char,
    protocol: *const c_char,
    /// From 5 on.
    group: *mut c_void,
    /// From 7 on, as the two below.
    kernel_variant: *const c_char,
    is_symmetric: bool,
    user_tag: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct P2p4 {
    function: *const c_char,
    buffer: *mut c_void,
    datatype: *const c_char,
    count: usize,
    peer: c_int,
    channels: u8,
    /// From 5 on.
    group: *mut c_void,
    /// From 7 on.
    user_tag: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CeColl6 {
    sequence: u64,
    function: *const c_char,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    root: c_int,
    datatype: *const c_char,
    synchronization: *const c_char,
    synchronizes_in_batch: bool,
    batch: u32,
    batches: u32,
    ce_sequence: u32,
    stream: *mut c_void,
    /// From 7 on.
    user_tag: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct KernelCh {
    channel: u8,
    /// From 4 on.
    began_ns: u64,
}

/// Version 2 has the traffic (`TRAFFIC` is 1), version 3 does not (0): an empty array takes no room.
#[derive(Clone, Copy)]
#[repr(C)]
struct Coll2<const TRAFFIC: usize> {
    name: *const c_char,
    hash: u64,
    sequence: u64,
    function: *const c_char,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    root: c_int,
    datatype: *const c_char,
    traffic_bytes: [usize; TRAFFIC],
    channels: u8,
    warps: u8,
    algorithm: *const c_char,
    protocol: *const c_char,
}

const _: () = assert!(size_of::<Coll2<1>>() == size_of::<Coll2<0>>() + size_of::<usize>());

#[derive(Clone, Copy)]
#[repr(C)]
struct P2p2 {
    name: *const c_char,
    hash: u64,
    function: *const c_char,
    buffer: *mut c_void,
    datatype: *const c_char,
    count: usize,
    peer: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Coll1 {
    name: *const c_char,
    hash: u64,
    sequence: u64,
    function: u8,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    root: c_int,
    datatype: u8,
    operator: u32,
    traffic_bytes: usize,
    channels: u8,
    warps: u8,
    algorithm: u8,
    protocol: u8,
    is_collnet: c_int,
    is_nvls: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct P2p1 {
    name: *const c_char,
    hash: u64,
    function: u8,
    buffer: *mut c_void,
    datatype: u8,
    count: usize,
    peer: c_int,
}

impl Descriptor5 {
    pub(super) fn new(event: &Event<'_>, parent: *mut c_void, rank: c_int) -> Self {
        Descriptor5 { kind: event.kind(), parent, rank, body: new_body(event) }
    }
}

/// The part of an event from version 4 on.
fn new_body(event: &Event<'_>) -> Body {
    match *event {
        Event::GroupApi { is_captured, depth } => Body::of(GroupApi { is_captured, depth }),
        Event::CollApi(coll) => Body::of(CollApi {
            function: coll.function.name.as_ptr(),
            count: coll.count,
            datatype: datatype_name(coll.datatype),
            root: coll.root,
            stream: coll.stream,
            is_captured: coll.is_captured,
            user_tag: coll.user_tag,
        }),
        Event::P2pApi(p2p) => Body::of(P2pApi {
            function: p2p.function.name.as_ptr(),
            count: p2p.count,
            datatype: datatype_name(p2p.datatype),
            stream: p2p.stream,
            is_captured: p2p.is_captured,
            user_tag: 0,
        }),
        Event::KernelLaunch { stream } => Body::of(stream),
        Event::Group => Body::NONE,
        Event::Coll { coll, tuning, group } => Body::of(Coll4 {
            sequence: coll.sequence,
            function: coll.function.name.as_ptr(),
            send: coll.send,
            recv: coll.recv,
            count: coll.count,
            root: coll.root,
            datatype: datatype_name(coll.datatype),
            channels: tuning.channels,
            warps: tuning.warps,
            algorithm: tuning.algorithm.as_ptr(),
            protocol: tuning.protocol.as_ptr(),
            group,
            kernel_variant: c"".as_ptr(),
            is_symmetric: false,
            user_tag: coll.user_tag,
        }),
        Event::CeColl { coll } => Body::of(CeColl6 {
            sequence: coll.sequence,
            function: coll.function.name.as_ptr(),
            send: coll.send,
            recv: coll.recv,
            count: coll.count,
            root: coll.root,
            datatype: datatype_name(coll.datatype),
            synchronization: c"UC".as_ptr(),
            synchronizes_in_batch: false,
            batch: 0,
            batches: 0,
            ce_sequence: coll.sequence as u32,
            stream: coll.stream,
            user_tag: coll.user_tag,
        }),
        Event::P2p { p2p, group } => Body::of(P2p4 {
            function: p2p.function.name.as_ptr(),
            buffer: p2p.buffer,
            datatype: datatype_name(p2p.datatype),
            count: p2p.count,
            peer: p2p.peer,
            channels: 0,
            group,
            user_tag: 0,
        }),
        Event::KernelCh { began_ns } => Body::of(KernelCh { channel: 0, began_ns }),
    }
}

impl Descriptor1 {
    /// For versions 1 to 4. Collectives and p2p lie in their group there.
    pub(super) fn new(version: u32, event: &Event<'_>, parent: *mut c_void, rank: c_int, named: &Named<'_>) -> Self {
        let parent = match *event {
            Event::Coll { group, .. } | Event::P2p { group, .. } => group,
            _ => parent,
        };
        let body = match (version, event) {
            (1, Event::Coll { coll, tuning, .. }) => coll_1(coll, tuning, named),
            (1, Event::P2p { p2p, .. }) => p2p_1(p2p, named),
            (2, Event::Coll { coll, tuning, .. }) => coll_2::<1>(coll, tuning, named),
            (3, Event::Coll { coll, tuning, .. }) => coll_2::<0>(coll, tuning, named),
            (2 | 3, Event::P2p { p2p, .. }) => p2p_2(p2p, named),
            _ => new_body(event),
        };
        Descriptor1 { kind: event.kind() as u8, parent, rank, body }
    }
}

fn coll_1(coll: &Coll, tuning: &Tuning, named: &Named<'_>) -> Body {
    const RING: u8 = 1;
    let protocol = [c"LL", c"LL128"].iter().position(|name| *name == tuning.protocol).unwrap_or(2);
    Body::of(Coll1 {
        name: named.name.as_ptr(),
        hash: named.hash,
        sequence: coll.sequence,
        function: coll.function.number,
        send: coll.send,
        recv: coll.recv,
        count: coll.count,
        root: coll.root,
        datatype: coll.datatype as u8,
        operator: 0,
        traffic_bytes: 0,
        channels: tuning.channels,
        warps: tuning.warps,
        algorithm: RING,
        protocol: protocol as u8,
        is_collnet: 0,
        is_nvls: 0,
    })
}

fn coll_2<const TRAFFIC: usize>(coll: &Coll, tuning: &Tuning, named: &Named<'_>) -> Body {
    Body::of(Coll2 {
        name: named.name.as_ptr(),
        hash: named.hash,
        sequence: coll.sequence,
        function: coll.function.name.as_ptr(),
        send: coll.send,
        recv: coll.recv,
        count: coll.count,
        root: coll.root,
        datatype: datatype_name(coll.datatype),
        traffic_bytes: [0; TRAFFIC],
        channels: tuning.channels,
        warps: tuning.warps,
        algorithm: tuning.algorithm.as_ptr(),
        protocol: tuning.protocol.as_ptr(),
    })
}

fn p2p_1(p2p: &P2pCall, named: &Named<'_>) -> Body {
    Body::of(P2p1 {
        name: named.name.as_ptr(),
        hash: named.hash,
        function: p2p.function.number,
        buffer: p2p.buffer,
        datatype: p2p.datatype as u8,
        count: p2p.count,
        peer: p2p.peer,
    })
}

fn p2p_2(p2p: &P2pCall, named: &Named<'_>) -> Body {
    Body::of(P2p2 {
        name: named.name.as_ptr(),
        hash: named.hash,
        function: p2p.function.name.as_ptr(),
        buffer: p2p.buffer,
        datatype: datatype_name(p2p.datatype),
        count: p2p.count,
        peer: p2p.peer,
    })
}
