#!/usr/bin/env python3
"""PyTorch, unchanged, on mccs: its NCCL back end loads our libnccl.so.2. One process a GPU; results are compared with what
they must be, and training in parallel with the same training on one GPU.

usage: pytorch.py NRANKS [SOCKET ...], with LD_PRELOAD naming the library and MCCS_SOCKET the service; or with the sockets of
several services, which get as many ranks each. MCCS_HOST_STAGED=1 where the service is to carry everything out itself. Without
LD_PRELOAD, and with NCCL_NET_PLUGIN=mccs, it is stock NCCL, to which each service is a host"""

import ctypes
import faulthandler
import os
import sys
import threading

import torch
import torch.distributed as dist
import torch.multiprocessing as processes


# Processes that still run then say where they stand.
WATCHDOG_S = 300


def check(what, actual, expected):
    if not torch.equal(actual, expected):
        raise SystemExit(f"{what}: {(actual != expected).sum().item()} wrong elements of {actual.numel()}")


def collectives(rank, nranks, device):
    generator = torch.Generator().manual_seed(7)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (1, 1000, 100_003, 3_000_000):
            # Small integers: sums are exact in every type, and every rank can make every other's
            # data.
            data = torch.randint(-3, 4, (nranks, count), generator=generator).to(dtype)
            own, total = data[rank].to(device), data.to(torch.float64).sum(0).to(dtype)
            summed = own.clone()
            dist.all_reduce(summed)
            check(f"all_reduce {dtype} {count}", summed.cpu(), total)
            gathered = torch.empty(nranks * count, dtype=dtype, device=device)
            dist.all_gather_into_tensor(gathered, own)
            check(f"all_gather {dtype} {count}", gathered.cpu(), data.flatten())
            scattered = torch.empty(count, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(scattered, own.repeat(nranks))
            check(f"reduce_scatter {dtype} {count}", scattered.cpu(), total)
            told = own.clone()
            dist.broadcast(told, src=nranks - 1)
            check(f"broadcast {dtype} {count}", told.cpu(), data[nranks - 1])
    dist.barrier()
    # A communicator for some of the ranks.
    pairs = [dist.new_group([first, first + 1]) for first in range(0, nranks - 1, 2)]
    if rank // 2 < len(pairs):
        number = torch.tensor([float(rank)], device=device)
        dist.all_reduce(number, group=pairs[rank // 2])
        check("all_reduce of a pair", number.cpu(), torch.tensor([float(rank // 2 * 4 + 1)]))


def points(rank, nranks, device):
    """Sends and receives: alone, in batches, and those that uneven exchanges, gathers and scatters are made of."""
    def data(sender, count, dtype=torch.float32):
        return torch.randint(-100, 100, (count,), generator=torch.Generator().manual_seed(sender * 1000 + count)).to(dtype)

    after, before = (rank + 1) % nranks, (rank - 1) % nranks
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for count in (1, 1000, 77_777, 5_000_001):
            received = torch.empty(count, dtype=dtype, device=device)
            batch = [dist.P2POp(dist.isend, data(rank, count, dtype).to(device), after),
                     dist.P2POp(dist.irecv, received, before)]
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            check(f"batch_isend_irecv {dtype} {count}", received.cpu(), data(before, count, dtype))
    # From rank to rank.
    for count in (3, 4096, 2_000_000):
        passed = data(0, count).to(device)
        if rank > 0:
            passed.zero_()
            dist.recv(passed, rank - 1)
        if rank + 1 < nranks:
            dist.send(passed, rank + 1)
        check(f"send and recv {count}", passed.cpu(), data(0, count))
    # Parts of different lengths, some of them empty.
    for unit in (1, 1001, 300_000):
        length = lambda sender, receiver: (sender + 2 * receiver) % 4 * unit
        parts = [data(rank * 10 + to, length(rank, to)) for to in range(nranks)]
        output = torch.empty(sum(length(sender, rank) for sender in range(nranks)), device=device)
        dist.all_to_all_single(output, torch.cat(parts).to(device), [length(sender, rank) for sender in range(nranks)],
                               [length(rank, to) for to in range(nranks)])
        wanted = [data(sender * 10 + rank, length(sender, rank)) for sender in range(nranks)]
        check(f"all_to_all_single {unit}", output.cpu(), torch.cat(wanted))
    wanted = [data(sender * 10 + rank, 1 + sender * 999) for sender in range(nranks)]
    outputs = [torch.empty_like(part, device=device) for part in wanted]
    dist.all_to_all(outputs, [data(rank * 10 + to, 1 + rank * 999).to(device) for to in range(nranks)])
    for output, part in zip(outputs, wanted):
        check("all_to_all", output.cpu(), part)
    root, own = nranks - 1, data(rank, 5000).to(device)
    gathered = [torch.empty_like(own) for _ in range(nranks)] if rank == root else None
    dist.gather(own, gathered, dst=root)
    for sender, part in enumerate(gathered or []):
        check("gather", part.cpu(), data(sender, 5000))
    scattered = torch.empty(5000, device=device)
    dist.scatter(scattered, [data(to, 5000).to(device) for to in range(nranks)] if rank == root else None, src=root)
    check("scatter", scattered.cpu(), data(rank, 5000))
    # A factor on the host, and one that the stream makes just before.
    for factor in (0.5, torch.full((1,), 3.0, device=device) * (rank + 1)):
        scaled = own.clone()
        dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(factor))
        factors = [0.5 if isinstance(factor, float) else 3.0 * (sender + 1) for sender in range(nranks)]
        check("pre-multiplied sum", scaled.cpu(), sum(f * data(sender, 5000) for sender, f in enumerate(factors)))


def pipeline(rank, nranks, device):
    """A step of training with a stage of the model on each GPU, against the same on one."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def stage(number):
        torch.manual_seed(number)
        return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()).to(device)

    torch.manual_seed(5)
    x, y = torch.randn(32, 64, device=device), torch.randn(32, 64, device=device)
    alone = torch.nn.Sequential(*[stage(number) for number in range(nranks)])
    loss_of = torch.nn.functional.mse_loss
    sum(loss_of(alone(x), y) for x, y in zip(x.chunk(4), y.chunk(4))).div(4).backward()
    own = stage(rank)
    schedule = ScheduleGPipe(PipelineStage(own, rank, nranks, device), n_microbatches=4, loss_fn=loss_of)
    schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == nranks - 1 else {}))
    for one, other in zip(alone[rank].parameters(), own.parameters()):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6)


def graph(rank, nranks, device):
    """A captured call, replayed on other data."""
    data = torch.zeros(10_000, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        dist.all_reduce(data)
    for turn in range(10):
        data.fill_(rank + turn)
        captured.replay()
        torch.cuda.synchronize()
        check(f"replay {turn}", data.cpu(), torch.full((10_000,), float(sum(range(nranks)) + nranks * turn)))


def training(rank, nranks, device):
    """Steps of data-parallel training, against the same on all of the data."""
    def model():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)

    torch.manual_seed(2)
    data, target = torch.randn(20, nranks, 32, 64), torch.randn(20, nranks, 32, 8)
    alone, together = model(), torch.nn.parallel.DistributedDataParallel(model(), device_ids=[device.index])
    for network, part in ((alone, slice(None)), (together, slice(rank, rank + 1))):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        for x, y in zip(data, target):
            optimizer.zero_grad()
            error = network(x[part].to(device).flatten(0, 1)) - y[part].to(device).flatten(0, 1)
            error.square().mean().backward()
            optimizer.step()
    for one, other in zip(alone.parameters(), together.parameters()):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


def one_process(nranks):
    """All ranks in one process, one thread: communicators made together, split and shrunk, and groups across them."""
    nccl, comms = ctypes.CDLL("libnccl.so.2"), (ctypes.c_void_p * nranks)()

    def call(name, *arguments):
        if getattr(nccl, name)(*arguments) != 0:
            nccl.ncclGetLastError.restype = ctypes.c_char_p
            raise SystemExit(f"{name}: {nccl.ncclGetLastError(None).decode()}")

    def together(of_rank, ranks=range(nranks)):
        call("ncclGroupStart")
        for rank in ranks:
            with torch.cuda.device(rank):
                of_rank(rank)
        call("ncclGroupEnd")
        for rank in range(nranks):
            torch.cuda.synchronize(rank)

    def pointer(tensor):
        return ctypes.c_void_p(tensor.data_ptr())

    def reduce(comms, ranks, what):
        data = [torch.full((5000,), rank + 1.0, device=rank) for rank in range(nranks)]
        together(lambda rank: call("ncclAllReduce", pointer(data[rank]), pointer(data[rank]), ctypes.c_size_t(5000), 7, 0,
                                   ctypes.c_void_p(comms[rank]), None), ranks)
        for rank in ranks:
            check(f"{what}: all_reduce", data[rank].cpu(), torch.full((5000,), float(sum(r + 1 for r in ranks))))

    everybody = list(range(nranks))
    call("ncclCommInitAll", comms, nranks, None)
    reduce(comms, everybody, "ncclCommInitAll")
    sent = [torch.full((70_000,), rank + 1.0, device=rank) for rank in everybody]
    received = [torch.zeros(70_000, device=rank) for rank in everybody]

    def pass_on(rank):
        comm, count = ctypes.c_void_p(comms[rank]), ctypes.c_size_t(70_000)
        call("ncclSend", pointer(sent[rank]), count, 7, (rank + 1) % nranks, comm, None)
        call("ncclRecv", pointer(received[rank]), count, 7, (rank - 1) % nranks, comm, None)

    together(pass_on)
    for rank in everybody:
        check("a group of several ranks", received[rank].cpu(), sent[(rank - 1) % nranks].cpu())
    split, shrunk = (ctypes.c_void_p * nranks)(), (ctypes.c_void_p * nranks)()
    at = lambda made, rank: ctypes.byref(made, rank * ctypes.sizeof(ctypes.c_void_p))

    def split_elsewhere(rank):
        # It is the communicator's GPU that counts, not the caller's.
        with torch.cuda.device((rank + 1) % nranks):
            call("ncclCommSplit", ctypes.c_void_p(comms[rank]), 0, -rank, at(split, rank), None)

    together(split_elsewhere)
    reduce(split, everybody, "ncclCommSplit")
    if nranks > 1:
        without = (ctypes.c_int * 1)(nranks - 1)
        together(lambda rank: call("ncclCommShrink", ctypes.c_void_p(comms[rank]), without, 1, at(shrunk, rank), None, 0),
                 everybody[:-1])
        reduce(shrunk, everybody[:-1], "ncclCommShrink")
    for comm in [*split, *filter(None, shrunk), *comms]:
        call("ncclCommDestroy", ctypes.c_void_p(comm))
    if nranks > 1:
        abort_beside_a_call(nccl, nranks)


def abort_beside_a_call(nccl, nranks):
    """A thread waits in a call for ranks that do not come, until another aborts the communicator."""
    comms, made, ended = (ctypes.c_void_p * nranks)(), ctypes.c_void_p(), []
    if nccl.ncclCommInitAll(comms, nranks, None) != 0:
        raise SystemExit("ncclCommInitAll, to be aborted")
    wait = threading.Thread(target=lambda: ended.append(nccl.ncclCommSplit(ctypes.c_void_p(comms[0]), 0, 0, ctypes.byref(made), None)))
    wait.start()
    # Its kernel is enqueued by then; were it not, the call would be refused instead of ended.
    wait.join(2)
    if ended:
        raise SystemExit("ncclCommSplit did not wait for the other ranks")
    for comm in comms:
        nccl.ncclCommAbort(ctypes.c_void_p(comm))
    wait.join()
    if ended == [0]:
        raise SystemExit("ncclCommSplit succeeded, though the communicator was aborted")


def run(rank, nranks, sockets):
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(nranks))
    is_plugin = os.environ.get("NCCL_NET_PLUGIN") == "mccs"
    if sockets:
        host = rank * len(sockets) // nranks
        os.environ["MCCS_SOCKET"] = sockets[host]
        if is_plugin:
            os.environ.update(NCCL_HOSTID=f"h{host}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    staged = len(sockets) > 1 or os.environ.get("MCCS_HOST_STAGED") == "1"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", device_id=device)
    collectives(rank, nranks, device)
    # Both libraries may be loaded; the service's page is mapped only where ours was called.
    with open("/proc/self/maps") as maps:
        if not any(("mccs-region" if staged else "mccs-device-initiated") in line for line in maps):
            raise SystemExit("PyTorch has used another " + ("network" if is_plugin else "NCCL: is LD_PRELOAD set?"))
    training(rank, nranks, device)
    points(rank, nranks, device)
    if nranks > 1:
        pipeline(rank, nranks, device)
    graph(rank, nranks, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    nranks = int(sys.argv[1])
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    sockets = sys.argv[2:]
    processes.spawn(run, args=(nranks, sockets), nprocs=nranks)
    if not sockets:
        one_process(nranks)
    print(f"PyTorch {torch.__version__}, {nranks} ranks, {max(len(sockets), 1)} services: all results are right")
