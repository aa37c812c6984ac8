#!/usr/bin/env python3
"""Stock NCCL of two hosts by its network plugin over the service, beside NCCL's own sockets.

usage: net_plugin.py NAME --nccl FILE [--gpus N] [--sizes LIST] [--rounds N] [--calls N]

One machine is two hosts, each with a service. Each side is a process, whose two ranks have a copy of NCCL each: NCCL reads its host's name
(NCCL_HOSTID) once. With one GPU both ranks have it. Sides alternate; a time is that of the slower rank, a figure the median of all rounds.
Every operation's result is compared with the host's own sums at each size, on random bytes.

Both sides go over the loopback interface. Writes NAME.json and NAME.md. Binaries: target/release, or the folder MCCS_BIN."""

import argparse
import ctypes
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import bench
from cuda import machine_of, version_of
from cuda_service import BINARIES, services

RANKS = 2
OPERATIONS = "all_reduce,all_gather,send_recv"
SIZES = "8,1024,16384,65536,262144,1048576,4194304,16777216,67108864"
MCCS, SOCKETS = "mccs", "sockets"
SIDES = (MCCS, SOCKETS)
# As several hosts have it. Connections and code are made before the first call: ranks of one GPU would wait for each other's kernels.
COMMON = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0", "NCCL_GIN_ENABLE": "0",
          "NCCL_RUNTIME_CONNECT": "0", "CUDA_MODULE_LOADING": "EAGER", "NCCL_DEBUG": "WARN"}
U8, SUM = 1, 0


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


def checked(name, status):
    if status != 0:
        raise RuntimeError(f"{name} returned {status}")


class Cuda:
    """The driver, as far as ranks need it."""
    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)

    def __call__(self, name, *arguments):
        checked(name, getattr(self.library, name)(*arguments))


class Rank:
    """A rank on a thread, with its copy of NCCL."""
    def __init__(self, cuda, nccl, number, gpu):
        self.cuda, self.library, self.number, self.gpu = cuda, ctypes.CDLL(nccl), number, gpu
        self.library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        self.library.ncclGetErrorString.restype = ctypes.c_char_p
        self.comm, self.stream = ctypes.c_void_p(), ctypes.c_void_p()

    def nccl(self, name, *arguments):
        checked(name, getattr(self.library, name)(*arguments))

    def use_gpu(self):
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.cuda("cuDeviceGet", ctypes.byref(device), self.gpu)
        self.cuda("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.cuda("cuCtxSetCurrent", context)

    def unique_id(self):
        made = UniqueId()
        self.nccl("ncclGetUniqueId", ctypes.byref(made))
        return made

    def join(self, unique_id, nranks, number):
        self.nccl("ncclCommInitRank", ctypes.byref(self.comm), nranks, unique_id, number)

    def allocate(self, bytes):
        self.cuda("cuStreamCreate", ctypes.byref(self.stream), 1)
        self.send, self.receive = (self.allocated(RANKS * bytes) for _ in range(2))

    def allocated(self, bytes):
        place = ctypes.c_uint64()
        self.cuda("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(bytes))
        return place

    def call(self, operation, bytes):
        send, receive = (ctypes.c_void_p(place.value) for place in (self.send, self.receive))
        count = ctypes.c_size_t(bytes)
        if operation == "all_reduce":
            self.nccl("ncclAllReduce", send, receive, count, U8, SUM, self.comm, self.stream)
        elif operation == "all_gather":
            self.nccl("ncclAllGather", send, receive, count, U8, self.comm, self.stream)
        else:
            peer = 1 - self.number
            self.nccl("ncclGroupStart")
            self.nccl("ncclSend", send, count, U8, peer, self.comm, self.stream)
            self.nccl("ncclRecv", receive, count, U8, peer, self.comm, self.stream)
            self.nccl("ncclGroupEnd")

    def synchronize(self):
        self.cuda("cuStreamSynchronize", self.stream)

    def check(self, operation, bytes, seed):
        """Fails with the first byte that differs from what the host finds. Bytes are below 128: sums of two have no carry."""
        data = [random.Random(f"{seed} {rank}").randbytes(bytes).translate(LOW_BITS) for rank in range(RANKS)]
        if operation == "all_reduce":
            total = sum(int.from_bytes(of, "little") for of in data)
            expected = total.to_bytes(bytes, "little")
        else:
            expected = b"".join(data) if operation == "all_gather" else data[1 - self.number]
        self.cuda("cuMemcpyHtoD_v2", self.send, data[self.number], ctypes.c_size_t(bytes))
        self.cuda("cuMemsetD8_v2", self.receive, ctypes.c_ubyte(0xdd), ctypes.c_size_t(RANKS * bytes))
        self.cuda("cuCtxSynchronize")
        self.barrier.wait()
        self.call(operation, bytes)
        self.synchronize()
        found = ctypes.create_string_buffer(len(expected))
        self.cuda("cuMemcpyDtoH_v2", found, self.receive, ctypes.c_size_t(len(expected)))
        if found.raw != expected:
            at = next(at for at in range(len(expected)) if found.raw[at] != expected[at])
            raise RuntimeError(f"{operation} of {bytes} bytes, seed {seed}, rank {self.number}: byte {at} is wrong")

    def measure(self, operation, bytes, calls):
        """Microseconds of a call."""
        self.barrier.wait()
        begun = time.perf_counter()
        for _ in range(calls):
            self.call(operation, bytes)
        self.synchronize()
        return (time.perf_counter() - begun) / calls * 1e6


LOW_BITS = bytes(byte & 0x7f for byte in range(256))


def in_threads(ranks, body):
    """Results of `body` for each rank, each on a thread of its own."""
    given, failed = [None] * len(ranks), []

    def run(number):
        try:
            ranks[number].use_gpu()
            given[number] = body(ranks[number])
        except Exception as error:  # noqa: BLE001
            failed.append(error)
            # The others wait for nobody.
            ranks[number].barrier.abort()

    threads = [threading.Thread(target=run, args=[number]) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return given


def child(options):
    """A side: joins, then does what lines of the standard input ask for."""
    cuda, ranks = Cuda(), []
    os.environ.update(COMMON)
    for number in range(RANKS):
        folder = pathlib.Path(options.folder) / str(number)
        side = {"NCCL_NET_PLUGIN": str(folder / "libnccl-net-mccs.so"), "NCCL_NET": "mccs", "MCCS_SOCKET": options.sockets.split(",")[number]}
        os.environ.update({"NCCL_HOSTID": f"h{number}", **(side if options.child == MCCS else {"NCCL_NET_PLUGIN": "none", "NCCL_NET": "Socket"})})
        rank = Rank(cuda, str(folder / "libnccl.so.2"), number, number % options.gpus)
        ranks.append(rank)
        rank.use_gpu()
        # NCCL's copy reads its variables here.
        rank.join(rank.unique_id(), 1, 0)
        rank.alone, rank.comm = rank.comm, ctypes.c_void_p()
    barrier = threading.Barrier(RANKS)
    for rank in ranks:
        rank.barrier = barrier
    unique_id = ranks[0].unique_id()
    in_threads(ranks, lambda rank: rank.join(unique_id, RANKS, rank.number))
    in_threads(ranks, lambda rank: rank.allocate(options.most))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        operation, bytes, calls, seed = json.loads(line)
        if seed is not None:
            in_threads(ranks, lambda rank: rank.check(operation, bytes, seed))
        times = in_threads(ranks, lambda rank: rank.measure(operation, bytes, calls))
        print(json.dumps(max(times)), flush=True)
    in_threads(ranks, lambda rank: rank.nccl("ncclCommDestroy", rank.comm))
    in_threads(ranks, lambda rank: rank.nccl("ncclCommDestroy", rank.alone))


class Side:
    """A side's process."""
    def __init__(self, side, options, folder, sockets):
        command = [sys.executable, __file__, options.name, "--nccl", options.nccl, "--child", side, "--folder", folder, "--sockets", ",".join(sockets),
                   "--gpus", options.gpus, "--most", max(options.sizes)]
        self.side, self.errors = side, open(pathlib.Path(folder) / f"{side}.txt", "w+")
        self.process = subprocess.Popen([*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        self.hear()

    def hear(self):
        # NCCL's own lines are on the standard output, too.
        for line in self.process.stdout:
            try:
                return json.loads(line)
            except ValueError:
                print(f"{self.side}: {line}", end="", flush=True)
        self.errors.seek(0)
        raise RuntimeError(f"{self.side} has ended: {self.errors.read()}")

    def ask(self, *what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def end(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)


def service_texts(folder):
    """Two services that know each other, for memory of the host."""
    keys, hosts = pathlib.Path(folder) / "keys", [f"h{number}" for number in range(RANKS)]
    bench.run([BINARIES / "mccsctl", "keys", "--hosts", ",".join(hosts), "--dir", keys])
    known = "".join(f'[[host]]\nname = "{host}"\naddress = "127.0.0.{number + 2}:7400"\n' for number, host in enumerate(hosts))
    return {host: f'[exchange]\nlisten = "127.0.0.{number + 2}:7400"\ncertificate = "{keys}/{host}.crt"\nkey = "{keys}/{host}.key"\n'
            f'authority = "{keys}/authority.crt"\n{known}' for number, host in enumerate(hosts)}


def text_of(about, places):
    rows = []
    for place in places:
        own, sockets = (place["times_us"][side] for side in SIDES)
        ratios = sorted(theirs / ours for ours, theirs in zip(own, sockets))
        rows.append([place["operation"], place["bytes"], f"{statistics.median(own):.1f}", f"{statistics.median(sockets):.1f}",
                     f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"])
    return (f"NCCL {about['nccl']} of two hosts over the loopback interface, on {about['machine']}; commit {about['commit']}. Each rank is a host.\n"
            f"Medians of {about['rounds']} rounds, sides in turn, in us; ratios are of a round, median (least to greatest).\n\n"
            + bench.table(["operation", "bytes", "by mccs", "NCCL's sockets", "sockets / mccs"], rows))


def measure(options, sides):
    places = []
    for operation in options.operations.split(","):
        for bytes in options.sizes:
            calls = max(2, min(options.calls, (1 << 28) // max(bytes, 1)))
            times = {side: [] for side in SIDES}
            for number in range(options.rounds):
                for side in bench.in_turn(SIDES, number):
                    seed = random.randrange(1 << 62) if number == 0 else None
                    times[side].append(sides[side].ask(operation, bytes, calls, seed))
            places.append({"operation": operation, "bytes": bytes, "calls": calls, "times_us": times})
            print(operation, bytes, {side: round(statistics.median(of), 1) for side, of in times.items()}, flush=True)
    return places


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nccl", required=True, help="NCCL's library")
    parser.add_argument("--gpus", type=int, default=1, help="ranks go round them")
    parser.add_argument("--operations", default=OPERATIONS, help=f"comma-separated; default: {OPERATIONS}")
    parser.add_argument("--sizes", default=SIZES, type=lambda text: [int(size) for size in text.split(",")], help="bytes of a rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--machine", help="the machine in words; default: what nvidia-smi says")
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    # Options of a side's process.
    for hidden in ("--child", "--folder", "--sockets"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--most", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options)
    about = bench.facts(options, options.machine or machine_of(options.gpus), nccl=version_of(options.nccl), calls=options.calls)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(RANKS):
            place = pathlib.Path(folder) / str(number)
            place.mkdir()
            shutil.copy(options.nccl, place / "libnccl.so.2")
            shutil.copy(BINARIES / "libnccl_net_mccs.so", place / "libnccl-net-mccs.so")
        with services(service_texts(folder), folder) as sockets:
            sides = {side: Side(side, options, folder, sockets) for side in SIDES}
            places = measure(options, sides)
            communicators = [bench.run([BINARIES / "mccsctl", "--socket", str(pathlib.Path(socket).with_name("mccs-control.sock")), "communicators"])
                             for socket in sockets]
            for side in sides.values():
                side.end()
    print(*communicators, sep="\n")
    bench.write_out(options, {**about, "places": places}, text_of(about, places))
    return None


if __name__ == "__main__":
    main()
