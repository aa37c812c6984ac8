#!/usr/bin/env python3
"""Collectives of GPUs of two hosts with emulated NICs, beside NCCL on the same NICs.

usage: nics.py NAME gpudirect|bounce|sockets --nics LIBRARY [--nccl FILE]... [--gpus N] [--gbit N] [--rounds N] [--trace SECONDS] [--preload FILE]
       [--rate PROGRAM] [--costs]

One machine is two hosts: each has half of the GPUs, as many NICs as GPUs, and a service. Ranks of both sides are the same
processes, and sides alternate. With `gpudirect` NICs reach memory of GPUs, with `bounce` host memory alone; with `sockets` both
sides take TCP over the loopback interface.

LIBRARY is libibverbs.so.1 as tests/nics/versioned links it. --preload names a library for the ranks' processes, --rate
tests/nics/nccl_sequence.c as a program, which says what the NICs carry. --trace says of each size how many messages and moves of a
rail are under way, and how busy NICs are. --costs counts processor time of services and memory traffic of hosts for each size. Writes NAME.json (data and provenance) and NAME.md.
Binaries: target/release, or the folder MCCS_BIN."""

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

import bench
import rail_moves
from cuda import machine_of
from cuda_service import BINARIES, cell, services
from idle import CpuTime

COLLECTIVES = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast"
HOSTS = ("h0", "h1")
# How threads of a service are called: its own, those of emulated NICs, and of emulated GPUs.
THREADS = ("mccs-", "nic ", "gpu")
# Ranks whose NCCL_HOSTID differs have no shared memory and no peer access. Multicast is left alone. NICs without a PCI path must not be
# merged, or NCCL finds none of them; and NCCL 2.28.9 must not look for a device API of theirs, or it fails.
NCCL = {"NCCL_NVLS_ENABLE": "0", "NCCL_MNNVL_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_MERGE_NICS": "0", "NCCL_GIN_ENABLE": "0",
        "NCCL_GIN_TYPE": "0"}
WAYS = {"gpudirect": {"NCCL_NET": "IB", "NCCL_NET_GDR_LEVEL": "SYS"}, "bounce": {"NCCL_NET": "IB", "NCCL_NET_GDR_LEVEL": "LOC"},
        "sockets": {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}}
# The busier host sends this part of a collective's bytes, as nccl-tests counts them.
CROSSING = {"all_reduce": 1, "all_gather": 1 / 2, "reduce_scatter": 1 / 2, "all_to_all": 1, "broadcast": 1}


def make_nics(options, folder):
    """The folder of the NICs: the list, and the library by both names that NCCL looks for."""
    nics = pathlib.Path(folder) / "nics"
    bench.run([*map(str, [BINARIES / "mccs-nics", nics, "init", "--hosts", ",".join(HOSTS), "--devices", options.gpus // 2, "--gbit-per-s",
                          max(1, int(options.gbit)), "--latency-ns", options.latency_ns, "--slot-bytes", options.slot_kib << 10, "--slots", options.slots]),
               *(["--slots-on-gpus"] if options.slots_on == "gpus" else [])])
    for host, number in [(host, number) for host in HOSTS for number in range(options.gpus // 2) if options.gbit != int(options.gbit)]:
        bench.run([*map(str, [BINARIES / "mccs-nics", nics, "fault", host, f"mlx5_{number}", "rate", int(options.gbit * 1000)])])
    shutil.copy(options.nics, nics / "libibverbs.so.1")
    (nics / "libibverbs.so").symlink_to("libibverbs.so.1")
    return nics


def gpus_of(options):
    """The GPUs' UUIDs, the first ones of the machine."""
    found = options.uuids.split(",") if options.uuids else bench.run(["nvidia-smi", "--format=csv,noheader", "--query-gpu=uuid"]).split()
    if len(found) < options.gpus:
        sys.exit(f"nics.py: --gpus asks for {options.gpus} GPUs, and there are {len(found)}")
    return found[:options.gpus]


def service_texts(options, folder, nics):
    """Two services that know each other, with half of the GPUs each."""
    keys, gpus, half = pathlib.Path(folder) / "keys", gpus_of(options), options.gpus // 2
    bench.run([BINARIES / "mccsctl", "keys", "--hosts", ",".join(HOSTS), "--dir", keys])
    known = "".join(f'[[host]]\nname = "{host}"\naddress = "127.0.0.{number + 2}:7400"\n' for number, host in enumerate(HOSTS))
    devices = [f"mlx5_{number}" for number in range(half)]
    rdma = f'[rdma]\nuse = "required"\nlibrary = "{nics}/libibverbs.so.1"\ndevices = {json.dumps(devices)}\n'
    rdma = "" if options.way == "sockets" else rdma
    channels = f"channels = {options.channels}\n" if options.channels else ""
    cuda = options.cuda + ('\ngpudirect = "off"' if options.way == "bounce" and "gpudirect" not in options.cuda else "")
    return {host: f'[cuda]\nuse = "required"\ngpus = {json.dumps(gpus[number * half:(number + 1) * half])}\n{cuda}\n'
            f'[strategy]\n{channels}{rdma}'
            f'[exchange]\nlisten = "127.0.0.{number + 2}:7400"\ncertificate = "{keys}/{host}.crt"\nkey = "{keys}/{host}.key"\n'
            f'authority = "{keys}/authority.crt"\n{known}' for number, host in enumerate(HOSTS)}


def environment_of(options, nics):
    """Options of the ranks' processes."""
    paths = [str(nics), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**NCCL, **WAYS[options.way], "NCCL_IBVERBS_LIB": f"{nics}/libibverbs.so.1", "LD_LIBRARY_PATH": ":".join(paths),
            **({"LD_PRELOAD": options.preload} if options.preload else {})}


def counted(nics, host, gpus):
    """Bytes that each NIC of a host has sent and taken, and of each those from and to memory of GPUs."""
    of = lambda number: bench.run([str(BINARIES / "mccs-nics"), str(nics), "carried", host, f"mlx5_{number}"]).split()
    return [list(map(int, of(number))) for number in range(gpus // 2)]


def carried(nics, gpus):
    """Bytes that each NIC has sent."""
    return {f"{host} mlx5_{number}": counts[0] for host in HOSTS for number, counts in enumerate(counted(nics, host, gpus))}


def costs(options, sockets, nics, runs, services_of):
    """Work of the services and NICs for each of our lines, counted while ranks call nothing else: processor time of each thread, and what NICs
    read from and write to memory of the host."""
    ours, found = dict.fromkeys((line["operation"], line["bytes"]) for run in runs for line in run["lines"] if line["side"] == "mccs"), []
    for operation, bytes in ours:
        look = lambda: ([CpuTime(process.pid) for process in services_of], [counted(nics, host, options.gpus) for host in HOSTS])
        before = look()
        bench.run(perf_command(options, sockets, operation, bytes, bytes), environment_of(options, nics), timeout=options.timeout)
        after = look()
        # Threads may begin and end with communicators.
        used = [{f"{then.names[thread]} {thread}": ns - now.by_thread_ns.get(thread, 0) for thread, ns in then.by_thread_ns.items()}
                for now, then in zip(before[0], after[0])]
        sent, taken, sent_gpu, taken_gpu = (sum(then[nic][at] - now[nic][at] for now, then in zip(before[1], after[1]) for nic in range(len(then)))
                                            for at in range(4))
        found.append({"operation": operation, "bytes": bytes, "sent_bytes": sent, "host_bytes": sent - sent_gpu + taken - taken_gpu,
                      "cpu_ns": used})
    return found


def perf(options, sockets, nics, nccl):
    """Both sides' lines, or ours alone."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = perf_command(options, sockets, options.operations, options.begin, options.end)
        command += ["--json", file.name, *(["--nccl", nccl] if nccl else [])]
        before = carried(nics, options.gpus)
        print(bench.run(command, environment_of(options, nics), timeout=options.timeout), flush=True)
        after = carried(nics, options.gpus)
        found = json.load(open(file.name))
    return {"nccl": found["nccl"], "lines": found["lines"], "nic_bytes": {nic: after[nic] - before[nic] for nic in after}}


def perf_command(options, sockets, operations, begin, end):
    return [*map(str, [BINARIES / "mccs-cuda-perf", "--socket", ",".join(sockets), "--host-variables", "NCCL_HOSTID,MCCS_NICS_HOST", "--nranks",
                       options.gpus, "--operation", operations, "--begin", begin, "--end", end, "--factor", options.factor, "--rounds",
                       options.rounds])]


def moves(options, sockets, nics, runs):
    """Work of rails in each of our lines, by traces of the first service while ranks call nothing else."""
    control, rate = pathlib.Path(sockets[0]).with_name("mccs-control.sock"), options.gbit / 8 * options.gpus / 2 * 1e3
    ours = dict.fromkeys((line["operation"], line["bytes"]) for run in runs for line in run["lines"] if line["side"] == "mccs")
    found = []
    for operation, bytes in ours:
        command = perf_command(options, sockets, operation, bytes, bytes)
        ranks = subprocess.Popen(command, env={**os.environ, **environment_of(options, nics)}, stdout=subprocess.DEVNULL)
        summaries = []
        # Work before and behind the calls is in some of the windows, too: the one that has the NICs busiest has the calls alone.
        while ranks.poll() is None:
            trace = pathlib.Path(nics) / "trace.json"
            bench.run([*map(str, [BINARIES / "mccsctl", "--socket", control, "trace", "--seconds", options.trace, "--out", trace])])
            summaries.append(rail_moves.summary(trace, rate, options.latency_ns / 1e3))
        if ranks.returncode != 0:
            sys.exit(f"nics.py: ranks that call {operation} of {bytes} bytes ended with status {ranks.returncode}")
        best = max(filter(None, summaries), key=lambda of: of["nic_busy"], default=None)
        found.append({"operation": operation, "bytes": bytes, "rails": best})
    return found


def check(options, sockets, nics):
    """Our side's elements, all of them."""
    command = [BINARIES / "mccs-cuda-perf", "--socket", ",".join(sockets), "--nranks", options.gpus, "--operation", options.operations, "--check",
               "--begin", "1B", "--end", options.check, "--factor", 37, "--dtypes", "float,bfloat16", "--redops", "sum,avg"]
    print(bench.run([*map(str, command)], environment_of(options, nics), timeout=options.timeout), flush=True)


def rates(options, nics):
    """Rates of the NICs, by bytes of a write: microseconds of one, and GB/s of several, one way and both ways at once. And what copy engines
    carry without NICs, of GPUs of all hosts at once."""
    if not options.rate:
        return [], []
    memory = options.memory if options.way == "gpudirect" else "host"
    output = bench.run([options.rate, f"{nics}/libibverbs.so.1", memory, "rate"], {"MCCS_NICS": str(nics)}, timeout=300)
    found = re.findall(r"(\d+) bytes: ([\d.]+) us a write; ([\d.]+) GB/s; both ways ([\d.]+) GB/s each", output)
    copies = re.findall(r"copies (.*): ([\d.]+) GB/s", output)
    return ([{"memory": memory, "bytes": int(bytes), "write_us": float(time), "gbps": float(rate), "both_ways_gbps": float(both)}
             for bytes, time, rate, both in found], [{"way": way, "gbps": float(rate)} for way, rate in copies])


def rows_of(run, about):
    """A row for each operation and size: times, the ratio, and which part of the NICs' rate the payload takes."""
    pairs = {}
    for line in run["lines"]:
        pairs.setdefault((line["operation"], line["bytes"]), {})[line["side"]] = line
    rate = about["gbit"] / 8 * about["gpus"] / 2 * 1e3
    for (operation, bytes), of in pairs.items():
        floor_us = CROSSING.get(operation, 0) * bytes / rate
        part = {side: floor_us / statistics.median(line["stream_us"]) for side, line in of.items()}
        both = [statistics.median(of[side]["stream_us"]) for side in ("nccl", "mccs") if side in of]
        ratio = f"{both[0] / both[1]:.2f}" if len(both) == 2 else "-"
        yield [operation, bytes, *(cell(of[side]["stream_us"]) if side in of else "-" for side in ("mccs", "nccl")), ratio,
               *(f"{of[side]['busbw_gbps']:.2f}" if side in of else "-" for side in ("mccs", "nccl")),
               *(f"{part[side]:.2f}" if side in of else "-" for side in ("mccs", "nccl"))]


def text_of_moves(moves):
    """A row for each size that goes by rails."""
    head = ["operation", "bytes", "NICs busy", "messages", "at most", "moves", "at most", "silent", "a move, us", "rounds"]
    rows = [[line["operation"], line["bytes"], *(f"{of[key]:.2f}" if key in ("nic_busy", "silent") else f"{of[key]:.1f}" for key in (
        "nic_busy", "messages", "messages_most", "moves", "moves_most", "silent", "move_us", "rounds"))]
            for line in moves if (of := line["rails"])]
    return ("\nRails of the first host, by its trace. NICs busy: bytes sent, of what they carry in that time. Messages and moves of a rail: under way at a "
            "time, while there are any. Silent: part of the time in which a rail has no message under way. A move: from when the stream has come to it "
            "until it is reported. Rounds: what it takes beyond its bytes, in latencies of a NIC.\n\n" + bench.table(head, rows))


def text_of_costs(costs):
    """A row for each size."""
    head = ["operation", "bytes", "sent, GB", "CPU s a GB, the service", "NICs", "GPUs", "threads", "host bytes a byte"]
    rows = []
    for line in (line for line in costs if line["sent_bytes"]):
        gb, threads = line["sent_bytes"] / 1e9, [used for of in line["cpu_ns"] for used in of.items()]
        cpu_s = [sum(ns for name, ns in threads if name.startswith(begin)) / 1e9 / gb for begin in THREADS]
        own = [ns for name, ns in threads if name.startswith(THREADS[0])]
        rows.append([line["operation"], line["bytes"], f"{gb:.3f}", *(f"{s:.2f}" for s in cpu_s), sum(ns > max(own) / 10 for ns in own),
                     f"{line['host_bytes'] / line['sent_bytes']:.3f}"])
    return ("\nProcessor time of both services for each GB that all NICs have sent: of the services' own threads, and of those of emulated NICs and "
            "GPUs in them. Threads: the services' own with a tenth of the busiest one's time or more. Host bytes: what NICs read from and wrote to "
            "memory of hosts, for each byte sent. With joining and leaving.\n\n" + bench.table(head, rows))


def text_of(about, runs, rates, copies):
    text = (f"Two hosts with {about['gpus'] // 2} GPUs and {about['gpus'] // 2} emulated NICs of {about['gbit']:g} Gbit/s each, on {about['machine']}; "
            f"{about['way']}{', slots on GPUs' if about['slots_on'] == 'gpus' else ''}; commit {about['commit']}. Times in us: median (least to greatest) of {about['rounds']} rounds, the slowest rank's, of "
            "calls back to back as the stream sees them; busbw in GB/s. Part: of the rate of a host's NICs, what the payload needs at least.\n")
    if rates:
        rows = [[rate["memory"], rate["bytes"], rate["write_us"], rate["gbps"], rate["both_ways_gbps"]] for rate in rates]
        text += "\nA NIC carries:\n\n" + bench.table(["memory", "bytes of a write", "one write, us", "several, GB/s", "both ways, GB/s each"], rows)
    if copies:
        text += ("\nCopy engines carry without NICs, in copies of 512 KiB, with GPUs of both hosts at once:\n\n" +
                 bench.table(["copies", "GB/s each"], [[copy["way"], copy["gbps"]] for copy in copies]))
    head = ["operation", "bytes", "mccs, us", "NCCL, us", "NCCL / mccs", "mccs, GB/s", "NCCL, GB/s", "mccs, part", "NCCL, part"]
    for run in runs:
        sent = ", ".join(f"{nic}: {bytes >> 20}" for nic, bytes in run["nic_bytes"].items())
        text += f"\nBeside NCCL {run['nccl'] or '(none)'}; MiB that NICs sent: {sent}.\n\n" + bench.table(head, rows_of(run, about))
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--nics", required=True, help="libibverbs.so.1 of the emulated NICs, with versions")
    parser.add_argument("--nccl", action="append", default=[], help="NCCL's library; several times for several versions")
    parser.add_argument("--gpus", type=int, default=4, help="an even number: half of them at each host")
    parser.add_argument("--uuids", help="the GPUs, comma-separated; default: nvidia-smi is asked")
    parser.add_argument("--gbit", type=float, default=400, help="a NIC's rate")
    parser.add_argument("--latency-ns", type=int, default=1500)
    parser.add_argument("--slot-kib", type=int, default=512, help="a slot of the NICs' rings")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--slots-on", choices=("host", "gpus"), default="host",
                        help="where long data of GPUs wait: in memory of the host, or of the receiver's GPU, which NVLink reaches")
    parser.add_argument("--spin-us", type=int, default=50, help="NICs' threads look on for so long after they have moved something")
    parser.add_argument("--copiers", type=int, default=2, help="threads that help to copy long host memory for NICs, of a rank")
    parser.add_argument("--operations", default=COLLECTIVES)
    parser.add_argument("--begin", default="8B")
    parser.add_argument("--end", default="512MiB")
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--check", default="3MiB", help="our side's elements are checked up to this size first; 0: they are not")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--channels", type=int, help="of our communicators; default: what services choose")
    parser.add_argument("--cuda", default="", help="lines for [cuda] of the services")
    parser.add_argument("--trace", type=float, default=0, help="seconds of a trace, with which it is told what rails do at each size; 0: it is not")
    parser.add_argument("--costs", action="store_true", help="processor time and host memory traffic of each size are counted, too")
    parser.add_argument("--preload", help="a library for the ranks' processes, such as tests/nics/peer_memory.c as one")
    parser.add_argument("--rate", help="the program that measures the NICs")
    parser.add_argument("--memory", choices=("dma-buf", "peer"), default="dma-buf", help="how that registers memory of GPUs")
    parser.add_argument("--folder", default="/dev/shm", help="where the NICs' memory is: a tmpfs with some GiB of room")
    parser.add_argument("--timeout", type=int, default=550, help="seconds of a run")
    parser.add_argument("--machine", help="what it is, where nvidia-smi does not know")
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    if options.gpus < 2 or options.gpus % 2:
        parser.error("--gpus: an even number, two at least")
    about = bench.facts(options, options.machine or machine_of(options.gpus), way=options.way, gpus=options.gpus, gbit=options.gbit,
                        latency_ns=options.latency_ns, slot_kib=options.slot_kib, slots=options.slots, slots_on=options.slots_on, copiers=options.copiers,
                        channels=options.channels)
    os.environ.update({"MCCS_NICS_SPIN_US": str(options.spin_us), "MCCS_NICS_COPIERS": str(options.copiers)})
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        nics = make_nics(options, folder)
        os.environ["MCCS_NICS"] = str(nics)
        (found, copies), runs = rates(options, nics), []
        # A service sends for all ranks of its host; of NCCL's ranks each has such threads.
        copiers = str(options.copiers * options.gpus // 2)
        of_hosts = {host: {"MCCS_NICS_HOST": host, "MCCS_NICS_COPIERS": copiers} for host in HOSTS}
        running = []
        with services(service_texts(options, folder, nics), folder, of_hosts, running) as sockets:
            if options.check != "0":
                check(options, sockets, nics)
            for nccl in options.nccl or [None]:
                runs.append(perf(options, sockets, nics, nccl))
            told = moves(options, sockets, nics, runs) if options.trace else []
            used = costs(options, sockets, nics, runs, running) if options.costs else []
    text = text_of(about, runs, found, copies) + (text_of_moves(told) if told else "") + (text_of_costs(used) if used else "")
    data = {**about, "rates": found, **({"copies": copies} if copies else {}), "runs": runs, **({"moves": told} if told else {}), **({"costs": used} if used else {})}
    bench.write_out(options, data, text)


if __name__ == "__main__":
    main()
