//! Example: one rank of an all-reduce between GPUs, and of a ring of sends and receives. Start one
//! process a rank, with mccs-launch or by hand. It computes on the GPU, hands the result on, and
//! checks it.
//!
//! `MCCS_SOCKET=... MCCS_UNIQUE_ID=00112233445566778899aabbccddeeff MCCS_NRANKS=2 MCCS_RANK=0 cuda_all_reduce`

use mccs::{Client, Collective, Collectives, CudaSlice, CudaStreamRef, DataType, Group, RedOp};
use mccs_cuda::{Context, DeviceMemory, Module, OwnedStream, copy_to_host, gpus};

/// Element i becomes (i + rank) % 7. Usually a program has kernels of its own framework's.
const FILL: &str = r"
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .align 8 .b8 arguments[16])
{
    .reg .pred %p;
    .reg .b32 %r<8>;
    .reg .b64 %d<4>;
    .reg .f32 %f;
    ld.param.u64 %d1, [arguments];
    ld.param.u32 %r1, [arguments+8];
    ld.param.u32 %r2, [arguments+12];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p, %r6, %r1;
    @%p bra done;
    add.u32 %r7, %r6, %r2;
    rem.u32 %r7, %r7, 7;
    cvt.rn.f32.u32 %f, %r7;
    cvta.to.global.u64 %d1, %d1;
    mul.wide.u32 %d2, %r6, 4;
    add.u64 %d3, %d1, %d2;
    st.global.f32 [%d3], %f;
done:
    ret;
}
";

#[repr(C)]
struct Arguments {
    data: u64,
    count: u32,
    rank: u32,
}

fn number(name: &str) -> Result<u32, Box<dyn std::error::Error>> {
    Ok(std::env::var(name).map_err(|error| format!("{name}: {error}"))?.parse()?)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const COUNT: u32 = 1_000_003;
    let (rank, nranks) = (number("MCCS_RANK")?, number("MCCS_NRANKS")?);
    let id = std::env::var("MCCS_UNIQUE_ID")?.parse()?;
    mccs_cuda::driver()?;
    let gpus = gpus()?;
    let context = Context::primary(&gpus[rank as usize % gpus.len()])?;
    let _current = context.enter()?;
    let stream = OwnedStream::new(&context)?;
    let bytes = COUNT as usize * 4;
    let (data, passed_on) = (DeviceMemory::zeroed(&context, bytes)?, DeviceMemory::zeroed(&context, bytes)?);
    let module = Module::load_ptx(&context, FILL)?;
    let fill = module.function("fill")?;

    let root = std::env::var("MCCS_ROOT_ADDRESS").ok().filter(|root| !root.is_empty());
    let comm = Client::from_env()?.communicator(id, rank, nranks).root_address(root.as_deref()).join_cuda()?;
    let (next, last) = ((rank + 1) % nranks, (rank + nranks - 1) % nranks);
    let arguments = Arguments { data: data.address(), count: COUNT, rank };
    let (own, other, raw) = (data.address(), passed_on.address(), stream.raw().as_ptr());
    // SAFETY: all buffers are this program's own, of the communicator's context and long enough, and live to the end.
    unsafe {
        fill.launch(stream.raw(), COUNT.div_ceil(256), 256, &arguments)?;
        let group = Group::begin();
        comm.send(own, COUNT.into(), DataType::F32, next, raw)?;
        comm.recv(other, COUNT.into(), DataType::F32, last, raw)?;
        group.end()?;
        let (data, raw) = (CudaSlice::from_raw(own, DataType::F32, COUNT.into()), CudaStreamRef::from_raw(raw));
        comm.enqueue(&Collective::AllReduce { send: data, recv: data, op: RedOp::Sum.into() }, &raw)?;
        stream.raw().synchronize()?;
    }
    if let Some(error) = comm.async_error() {
        return Err(error.into());
    }
    let read = |memory: &DeviceMemory| {
        let mut read = vec![0; bytes];
        // SAFETY: it has that many bytes, and all operations have ended.
        unsafe { copy_to_host(&mut read, memory.address()) }.map(|()| read)
    };
    let filled = |rank: u32, at: u32| ((at + rank) % 7) as f32;
    let wrong = |memory: Vec<u8>, right: &dyn Fn(u32) -> f32| {
        let values = memory.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
        values.zip(0..).filter(|(value, at)| *value != right(*at)).count()
    };
    let sums = wrong(read(&data)?, &|at| (0..nranks).map(|rank| filled(rank, at)).sum());
    let received = wrong(read(&passed_on)?, &|at| filled(last, at));
    println!("rank {rank} of {nranks}: {COUNT} elements, {sums} wrong sums, {received} wrong of rank {last}'s");
    comm.destroy()?;
    if sums + received == 0 { Ok(()) } else { Err("wrong results".into()) }
}
