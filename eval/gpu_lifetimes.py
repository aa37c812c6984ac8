#!/usr/bin/env python3
"""Remains of a killed process: GPU memory, copies and waiting streams.

usage: gpu_lifetimes.py NAME --out DIR [--gpus 1|2] [--mib 1024] [--rounds 5] [--commit HASH]

A *service* makes memory for descriptors and is killed with SIGKILL. A *tenant* has imported it. This script is the *keeper*: it holds
descriptors and never calls CUDA. Needs a driver (libcuda.so.1), and nothing else. Writes NAME.json and NAME.md into DIR."""

import argparse
import ctypes
import json
import mmap
import os
import signal
import socket
import statistics
import subprocess
import sys
import time

import bench

DESCRIPTOR, BLOCK = 1, 4096


class Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of one GPU, exported as a file descriptor."""
    _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int), ("place", ctypes.c_int), ("device", ctypes.c_int),
                ("windows", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""
    _fields_ = [("place", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]


class Process:
    """A process with a CUDA context. Its methods are called by the keeper, over a socket, by name."""

    def __init__(self, device):
        self.cuda, self.device = ctypes.CDLL("libcuda.so.1"), device
        self.mapped, self.stream = {}, ctypes.c_void_p()

    def call(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA's error {code}")

    def timed(self, name, *arguments):
        begun = time.monotonic()
        self.call(name, *arguments)
        return time.monotonic() - begun

    def begin(self):
        context = ctypes.c_void_p()
        times = {"cuInit": self.timed("cuInit", 0),
                 "context": self.timed("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)}
        self.call("cuCtxSetCurrent", context)
        self.call("cuStreamCreate", ctypes.byref(self.stream), 1)
        return times

    def properties(self):
        return Properties(kind=1, handles=DESCRIPTOR, place=1, device=self.device)

    def map(self, name, handle, bytes):
        address, access = ctypes.c_uint64(), Access(1, self.device, 3)
        self.call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(bytes), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
        times = {"map": self.timed("cuMemMap", address, ctypes.c_size_t(bytes), ctypes.c_size_t(0), handle, ctypes.c_uint64(0)),
                 "access": self.timed("cuMemSetAccess", address, ctypes.c_size_t(bytes), ctypes.byref(access), ctypes.c_size_t(1))}
        self.mapped[name] = (address, bytes, handle)
        return times

    def create(self, name, bytes):
        """Makes memory; gives a descriptor of it."""
        handle, descriptor, wanted = ctypes.c_uint64(), ctypes.c_int(), self.properties()
        times = {"create": self.timed("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(bytes), ctypes.byref(wanted), ctypes.c_uint64(0))}
        times |= self.map(name, handle, bytes)
        self.call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, DESCRIPTOR, ctypes.c_uint64(0))
        self.descriptors = [descriptor.value]
        return times

    def adopt(self, name, bytes, descriptor):
        handle = ctypes.c_uint64()
        times = {"import": self.timed("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), DESCRIPTOR)}
        os.close(descriptor)
        return times | self.map(name, handle, bytes)

    def drop(self, name):
        address, bytes, handle = self.mapped.pop(name)
        times = {"unmap": self.timed("cuMemUnmap", address, ctypes.c_size_t(bytes)), "release": self.timed("cuMemRelease", handle)}
        self.call("cuMemAddressFree", address, ctypes.c_size_t(bytes))
        return times

    def fill(self, name, seed):
        """Blocks of random bytes, each with its number."""
        address, bytes, _ = self.mapped[name]
        data = content(seed, bytes)
        self.call("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(bytes))

    def check(self, name, seeds):
        """How many blocks have the content of each seed; the last number is of those that have none's."""
        address, bytes, _ = self.mapped[name]
        found = ctypes.create_string_buffer(bytes)
        self.call("cuMemcpyDtoH_v2", found, address, ctypes.c_size_t(bytes))
        found, contents, counts = found.raw, [content(seed, bytes).raw for seed in seeds], [0] * (len(seeds) + 1)
        for at in range(0, bytes, BLOCK):
            block = found[at:at + BLOCK]
            counts[next((number for number, one in enumerate(contents) if one[at:at + BLOCK] == block), len(seeds))] += 1
        return counts

    def copy(self, into, sources, times):
        """Enqueues copies of the sources in turn, and does not wait."""
        target, bytes, _ = self.mapped[into]
        for number in range(times):
            source, _, _ = self.mapped[sources[number % len(sources)]]
            self.call("cuMemcpyAsync", target, source, ctypes.c_size_t(bytes), self.stream)

    def synchronize(self):
        return self.timed("cuStreamSynchronize", self.stream)

    def page(self, descriptor):
        self.memory = mmap.mmap(descriptor, 4096)
        at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(at), ctypes.c_size_t(4096), 2)
        self.words = ctypes.c_uint64()
        self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(self.words), ctypes.c_void_p(at), 0)

    def wait_for_word(self, value):
        """The stream waits until the word is at least `value`, and then writes it into the next word."""
        self.call("cuStreamWaitValue64_v2", self.stream, self.words, ctypes.c_uint64(value), 0)
        self.call("cuStreamWriteValue64_v2", self.stream, ctypes.c_uint64(self.words.value + 8), ctypes.c_uint64(value), 0)

    def free_bytes(self):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def serve(self, connection):
        while True:
            request, descriptors, _, _ = socket.recv_fds(connection, 65536, 4)
            if not request:
                return
            name, arguments = json.loads(request)
            self.descriptors = []
            try:
                answer = {"value": getattr(self, name)(*arguments, *descriptors)}
            except RuntimeError as error:
                answer = {"error": str(error)}
            socket.send_fds(connection, [json.dumps(answer).encode()], self.descriptors)
            for one in self.descriptors:
                os.close(one)


def content(seed, bytes):
    """Every block is other bytes in every seed: a generator's, with the block's number."""
    import random
    pattern = bytearray(random.Random(seed).randbytes(BLOCK) * (bytes // BLOCK))
    for block in range(bytes // BLOCK):
        pattern[block * BLOCK:block * BLOCK + 8] = (seed << 32 | block).to_bytes(8, "little")
    return (ctypes.c_char * bytes).from_buffer(pattern)


class Remote:
    """A `Process`, seen by the keeper."""

    def __init__(self, device):
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = subprocess.Popen([sys.executable, __file__, "--process", str(device), str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()
        self.times = self.ask("begin")

    def ask(self, name, *arguments, descriptor=None):
        """The answer; for `create`, with the descriptor."""
        socket.send_fds(self.connection, [json.dumps([name, arguments]).encode()], [] if descriptor is None else [descriptor])
        answer, descriptors, _, _ = socket.recv_fds(self.connection, 65536, 4)
        if not answer:
            raise RuntimeError(f"{name}: the process has ended")
        answer = json.loads(answer)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return (answer["value"], descriptors[0]) if descriptors else answer["value"]

    def kill(self):
        """Seconds from SIGKILL until the process is gone."""
        begun = time.monotonic()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        return time.monotonic() - begun


def all_are(counts, which):
    return sum(counts) == counts[which]


def memory_of_the_killed(options, witness):
    """The exporter dies; importers and the keeper hold its memory."""
    bytes, before = options.mib << 20, witness.ask("free_bytes")
    service, tenant = Remote(0), Remote(options.gpus - 1)
    _, descriptor = service.ask("create", "memory", bytes)
    service.ask("fill", "memory", 1)
    tenant.ask("adopt", "memory", bytes, descriptor=descriptor)
    found = {"gone_after_s": service.kill()}
    found["tenant_reads"] = all_are(tenant.ask("check", "memory", [1]), 0)
    tenant.ask("fill", "memory", 2)
    heir = Remote(0)
    heir.ask("adopt", "memory", bytes, descriptor=descriptor)
    found["heir_reads_what_the_tenant_wrote"] = all_are(heir.ask("check", "memory", [2]), 0)
    heir.ask("fill", "memory", 3)
    found["tenant_reads_what_the_heir_wrote"] = all_are(tenant.ask("check", "memory", [3]), 0)
    heir.kill()
    tenant.kill()
    found["held_by_a_descriptor_alone"] = before - witness.ask("free_bytes") >= bytes
    last = Remote(0)
    last.ask("adopt", "memory", bytes, descriptor=descriptor)
    found["read_after_all_contexts_had_gone"] = all_are(last.ask("check", "memory", [3]), 0)
    last.kill()
    os.close(descriptor)
    begun = time.monotonic()
    while before - witness.ask("free_bytes") >= bytes and time.monotonic() - begun < 10:
        pass
    found["given_back_after_s"] = time.monotonic() - begun
    found["given_back"] = before - witness.ask("free_bytes") < bytes
    return found


def copies_of_the_killed(options):
    """The service is killed while its copies write the tenant's memory, and while the tenant reads the service's."""
    bytes, service, tenant = options.mib << 20, Remote(0), Remote(options.gpus - 1)
    _, target = tenant.ask("create", "target", bytes)
    tenant.ask("fill", "target", 9)
    for seed in (1, 2):
        os.close(service.ask("create", f"source {seed}", bytes)[1])
        service.ask("fill", f"source {seed}", seed)
    service.ask("adopt", "target", bytes, descriptor=target)
    service.ask("copy", "target", ["source 1", "source 2"], options.copies)
    found = {"gone_after_s": service.kill()}
    counts = tenant.ask("check", "target", [1, 2, 9])
    found["blocks"] = dict(zip(("one", "other", "before", "none"), counts))
    found["still_after"] = tenant.ask("check", "target", [1, 2, 9]) == counts
    tenant.ask("fill", "target", 3)
    found["tenant_goes_on"] = all_are(tenant.ask("check", "target", [3]), 0)
    # The same with the reader alive and the memory's maker killed.
    service = Remote(0)
    _, source = service.ask("create", "source", bytes)
    service.ask("fill", "source", 4)
    tenant.ask("adopt", "source", bytes, descriptor=source)
    tenant.ask("copy", "target", ["source"], options.copies)
    service.kill()
    found["tenants_own_copies_end_after_s"] = tenant.ask("synchronize")
    found["tenants_own_copies_are_right"] = all_are(tenant.ask("check", "target", [4]), 0)
    tenant.kill()
    return found


def words_of_the_killed(options):
    """A tenant's stream waits for a word of a page that a service and the keeper have mapped. The service is killed."""
    page = os.memfd_create("words")
    os.ftruncate(page, 4096)
    ours = mmap.mmap(page, 4096)
    words = (ctypes.c_uint64 * 2).from_buffer(ours)
    service, tenant = Remote(0), Remote(options.gpus - 1)
    service.ask("page", descriptor=page)
    tenant.ask("page", descriptor=page)
    service.ask("wait_for_word", 7)
    tenant.ask("wait_for_word", 7)
    found = {"gone_after_s": service.kill(), "waits": words[1] == 0}
    begun = time.monotonic()
    words[0] = 7
    while words[1] != 7 and time.monotonic() - begun < 10:
        pass
    found |= {"goes_on": words[1] == 7, "after_s": time.monotonic() - begun}
    tenant.ask("synchronize")
    tenant.kill()
    return found


def times_of_imports(options, witness):
    found = []
    for mib in options.imports:
        _, descriptor = witness.ask("create", "memory", mib << 20)
        importer, rounds = Remote(options.gpus - 1), []
        for _ in range(options.rounds):
            times = importer.ask("adopt", "memory", mib << 20, descriptor=descriptor)
            rounds.append(times | importer.ask("drop", "memory"))
        found.append({"mib": mib, "rounds": rounds})
        importer.kill()
        witness.ask("drop", "memory")
        os.close(descriptor)
    return found


def times_of_contexts(options):
    found = []
    for _ in range(options.rounds):
        process = Remote(options.gpus - 1)
        found.append(process.times | {"gone_after": process.kill()})
    return found


def milliseconds(values):
    return f"{statistics.median(values) * 1e3:.3g} ({min(values) * 1e3:.3g} to {max(values) * 1e3:.3g})"


def page(name, data):
    killed, copies, words = data["memory"], data["copies"], data["words"]
    yes = lambda value: "yes" if value else "**no**"
    rows = [
        ["the tenant reads memory of a killed service", *[yes(one["tenant_reads"]) for one in killed]],
        ["another process imports it by the keeper's descriptor", *[yes(one["heir_reads_what_the_tenant_wrote"]) for one in killed]],
        ["both see each other's writes", *[yes(one["tenant_reads_what_the_heir_wrote"]) for one in killed]],
        ["a descriptor alone holds the memory", *[yes(one["held_by_a_descriptor_alone"]) for one in killed]],
        ["its content is right after all contexts had gone", *[yes(one["read_after_all_contexts_had_gone"]) for one in killed]],
        ["closing the descriptor gives it back", *[yes(one["given_back"]) for one in killed]],
        ["no block is torn by a killed copy", *[yes(one["blocks"]["none"] == 0) for one in copies]],
        ["nothing is written once the process is gone", *[yes(one["still_after"]) for one in copies]],
        ["the tenant's context goes on", *[yes(one["tenant_goes_on"]) for one in copies]],
        ["the tenant's own copies from that memory are right", *[yes(one["tenants_own_copies_are_right"]) for one in copies]],
        ["a stream waits on, and goes on by the keeper's word", *[yes(one["waits"] and one["goes_on"]) for one in words]],
    ]
    text = f"# {name}\n\n{data['machine']}, commit {data['commit']}. Written by `eval/gpu_lifetimes.py`.\n\n```text\n{data['command']}\n```\n\n"
    text += bench.table(["question", *[f"round {number + 1}" for number in range(len(killed))]], rows)
    cut = sum(one["blocks"]["one"] > 0 and one["blocks"]["other"] > 0 for one in copies)
    text += f"\nThe service copied two sources in turn over one target. {cut} of {len(copies)} kills found a copy half done.\n\n"
    times = [["process gone after SIGKILL, memory of its own", milliseconds([one["gone_after_s"] for one in killed])],
             ["the same, with copies under way", milliseconds([one["gone_after_s"] for one in copies])],
             ["the same, with a stream that waits", milliseconds([one["gone_after_s"] for one in words])],
             ["stream goes on after the word", milliseconds([one["after_s"] for one in words])],
             ["`cuInit`", milliseconds([one["cuInit"] for one in data["contexts"]])],
             ["context", milliseconds([one["context"] for one in data["contexts"]])]]
    for one in data["imports"]:
        for step in ("import", "map", "access", "unmap", "release"):
            times.append([f"{step}, {one['mib']} MiB", milliseconds([each[step] for each in one["rounds"]])])
    return text + bench.table(["what", "ms, median (spread)"], times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--out", required=True)
    parser.add_argument("--gpus", type=int, default=1, choices=[1, 2], help="with two, service and tenant have one each")
    parser.add_argument("--mib", type=int, default=256, help="memory whose content is checked")
    parser.add_argument("--copies", type=int, default=2000, help="enqueued before the kill")
    parser.add_argument("--imports", type=lambda text: [int(one) for one in text.split(",")], default=[64, 1024, 8192], help="MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine", default=None)
    bench.commit_option(parser)
    options = parser.parse_args()
    machine = options.machine or bench.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).splitlines()[0]
    witness = Remote(0)

    def repeated(one):
        rounds = []
        for _ in range(options.rounds):
            rounds.append(one())
            print(json.dumps(rounds[-1]), flush=True)
        return rounds

    data = bench.facts(options, machine,
                       memory=repeated(lambda: memory_of_the_killed(options, witness)),
                       copies=repeated(lambda: copies_of_the_killed(options)),
                       words=repeated(lambda: words_of_the_killed(options)),
                       imports=times_of_imports(options, witness), contexts=times_of_contexts(options))
    witness.kill()
    bench.write_out(options, data, page(options.name, data))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        Process(int(sys.argv[2])).serve(socket.socket(fileno=int(sys.argv[3])))
    else:
        main()
