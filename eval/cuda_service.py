#!/usr/bin/env python3
"""Service-executed collectives of GPUs (host-staged, copy engines), beside NCCL, on one service
and over two. Times are those of the callers' streams, beside the ways in which streams and service
can wait for each other. Two services have half of the GPUs each, joined by TCP, beside NCCL's
sockets and a communicator of host memory over the same two.

Needs GPUs, an even number, and writes NAME.json and NAME.md. Binaries: target/release, or the folder MCCS_BIN."""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import uuid

import bench

BINARIES = pathlib.Path(os.environ.get("MCCS_BIN", bench.BINARIES))
BOTH = "all_reduce,all_gather"
# Collectives of a graph.
GRAPH = 20
# How NCCL goes between hosts without RDMA: neither peer access nor shared memory, over the same
# interface as the services.
AS_HOSTS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


@contextlib.contextmanager
def services(texts, folder, environments=None, running=None):
    """A service for each name and text, with its own variables where there are some; gives their sockets, and puts its processes into
    `running`."""
    running, sockets = [] if running is None else running, []
    try:
        for name, text in texts.items():
            place = pathlib.Path(folder) / name
            place.mkdir()
            (place / "service.toml").write_text(f'[service]\nname = "{name}"\nruntime_dir = "{place}"\n{text}')
            process = subprocess.Popen([BINARIES / "mccs-service", "--config", place / "service.toml"],
                                       env={**os.environ, **(environments or {}).get(name, {})},
                                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            running.append(process)
            sockets.append(str(place / "mccs.sock"))
        for process in running:
            if process.stdout.readline() != "mccs-service ready\n":
                raise RuntimeError("a service did not start")
        yield sockets
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(timeout=60)


def strict(ordering):
    return {ordering: f'[cuda]\nuse = "required"\nexecution = "service"\nordering = "{ordering}"\n'}


def halves(folder, gpus, channels):
    """Two services that know each other, with half of the GPUs each."""
    keys = pathlib.Path(folder) / "keys"
    bench.run([BINARIES / "mccsctl", "keys", "--hosts", "h0,h1", "--dir", keys])
    hosts = "".join(f'[[host]]\nname = "h{number}"\naddress = "127.0.0.{number + 2}:7400"\n' for number in range(2))
    half = len(gpus) // 2
    return {f"h{number}": f'[cuda]\nuse = "required"\ngpus = {json.dumps(gpus[number * half:(number + 1) * half])}\n'
            f'[strategy]\nchannels = {channels}\n'
            f'[exchange]\nlisten = "127.0.0.{number + 2}:7400"\ncertificate = "{keys}/h{number}.crt"\nkey = "{keys}/h{number}.key"\n'
            f'authority = "{keys}/authority.crt"\n{hosts}' for number in range(2)}


def gpu_lines(sockets, options, operations, begin, end, factor, nccl=None, environment=None, graph=0):
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [BINARIES / "mccs-cuda-perf", "--socket", ",".join(sockets), "--nranks", options.gpus, "--operation", operations,
                   "--begin", begin, "--end", end, "--factor", factor, "--rounds", options.rounds, "--json", file.name, "--graph", graph]
        bench.run([*map(str, command), *(["--nccl", nccl] if nccl else [])], environment, timeout=300)
        return json.load(open(file.name))


def host_lines(sockets, options, operation, bytes):
    """The same over a communicator of host memory: rank 0's record."""
    name, processes = uuid.uuid4().hex, []
    for rank in range(options.gpus):
        environment = {**os.environ, "MCCS_SOCKET": sockets[rank * len(sockets) // options.gpus], "MCCS_RANK": str(rank),
                       "MCCS_NRANKS": str(options.gpus), "MCCS_UNIQUE_ID": name, "MCCS_ROOT_ADDRESS": "h0"}
        command = [BINARIES / "mccs-perf", "--json", "--operation", operation, "--begin", f"{bytes}B", "--end", f"{bytes}B",
                   "--iterations", "10", "--warmup", "3"]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    texts = [process.communicate(timeout=120)[0] for process in processes]
    return bench.records(texts[0])[0]


def cell(values):
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})" if values else "-"


def short_table(found):
    """Strict mode: by operation and size; for each ordering its time, and by how much that is more than NCCL's in the same run."""
    rows = {}
    for side, result in found.items():
        for line in result["lines"]:
            rows.setdefault((line["operation"], line["bytes"]), {})[side, line["side"]] = line
    def more(of, side):
        both = [statistics.median(of[side, whose]["stream_us"]) for whose in ("mccs", "nccl") if (side, whose) in of]
        return f"{both[0] - both[1]:+.1f}" if len(both) == 2 else "-"
    def row(key, of):
        cells = [[cell(of[side, "mccs"]["stream_us"]), more(of, side)] if (side, "mccs") in of else ["-", "-"] for side in found]
        nccl = cell(of["auto", "nccl"]["stream_us"]) if ("auto", "nccl") in of else "-"
        return [*key, nccl, *sum(cells, []), f"{of['auto', 'mccs']['busbw_gbps']:.1f}"]
    head = ["operation", "bytes", "NCCL beside auto, us", *(column for side in found for column in (f"{side}, us", "- NCCL")), "auto, GB/s"]
    return bench.table(head, [row(key, of) for key, of in rows.items()])


def graph_table(found):
    rows = []
    for what, result in found.items():
        sides = {side: {(line["operation"], line["bytes"]): line["stream_us"] for line in result["lines"] if line["side"] == side}
                 for side in ("mccs", "nccl")}
        rows += [[what, *key, cell(times), cell(sides["nccl"].get(key))] for key, times in sides["mccs"].items()]
    return bench.table(["", "operation", "bytes", "graph, us", "NCCL, us"], rows)


def pair_table(found, host):
    rows, nccl = [], {(line["operation"], line["bytes"]): line for line in found["lines"] if line["side"] == "nccl"}
    for line in (line for line in found["lines"] if line["side"] == "mccs"):
        key = line["operation"], line["bytes"]
        beside = [record["busbw_gbps"] for record in host if (record["op"], record["bytes"]) == key]
        times = [theirs / own for own, theirs in zip(line["stream_us"], nccl[key]["stream_us"])] if key in nccl else []
        rows.append([*key, cell(line["stream_us"]), cell(nccl[key]["stream_us"]) if key in nccl else "-",
                     f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})" if times else "-", cell(line["single_us"]),
                     f"{line['busbw_gbps']:.2f}", f"{beside[0]:.2f}" if beside else "-"])
    return bench.table(["operation", "bytes", "stream, us", "NCCL, us", "times as fast", "alone, us", "GB/s", "host memory, GB/s"], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nccl", help="NCCL's library, to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpus", type=int, help="so many, the first ones; default: all")
    parser.add_argument("--channels", type=int, default=8, help="of the two services")
    parser.add_argument("--out", default=str(bench.RESULTS))
    bench.commit_option(parser)
    options = parser.parse_args()
    smi = ["nvidia-smi", "--format=csv,noheader"]
    gpus = bench.run([*smi, "--query-gpu=uuid"]).split()
    driver = bench.run([*smi, "--query-gpu=driver_version"]).split()[0]
    gpus = gpus[:options.gpus]
    options.gpus = len(gpus)
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    found, host, graphs = {}, [], {}
    for ordering in ("auto", "words", "kernels", "events"):
        with tempfile.TemporaryDirectory() as folder, services(strict(ordering), folder) as sockets:
            found[ordering] = gpu_lines(sockets, options, BOTH, "8B", "128MiB", 4, options.nccl)
            if ordering == "auto":
                graphs["one service, strict"] = gpu_lines(sockets, options, BOTH, "8B", "256KiB", 32, options.nccl, graph=GRAPH)
            print(f"{ordering} done", flush=True)
    with tempfile.TemporaryDirectory() as folder, services(halves(folder, gpus, options.channels), folder) as sockets:
        pair = gpu_lines(sockets, options, BOTH + ",reduce_scatter", "8B", "128MiB", 8, options.nccl, AS_HOSTS)
        graphs["two services"] = gpu_lines(sockets, options, BOTH, "8B", "256KiB", 32, options.nccl, AS_HOSTS, GRAPH)
        for operation in (BOTH + ",reduce_scatter").split(","):
            sizes = {line["bytes"] for line in pair["lines"] if line["bytes"] >= 1 << 20}
            host += [host_lines(sockets, options, operation, size) for size in sorted(sizes)]
    facts = bench.facts(options, f"{len(gpus)} {found['auto']['gpu']} of one host, driver {driver}, {os.cpu_count()} cores",
                        nccl=found["auto"]["nccl"])
    result = {**facts, "strict": found, "two_services": pair, "host": host, "graphs": graphs}
    text = (f"{facts['machine']}, one process each, float sum, out of place; NCCL {facts['nccl']}. Times in us: median (least to "
            f"greatest) of {options.rounds} rounds, the slowest rank's, of calls back to back as the stream sees them; busbw.\n\n"
            "One service that carries everything out (`execution = \"service\"`), in host memory, and from 128 KiB on by its engines; by the "
            f"ways in which streams wait (`ordering`):\n\n{short_table(found)}\n\nTwo services with half of the GPUs each, joined by TCP over the loopback "
            f"interface, {options.channels} channels, beside NCCL over sockets of that interface; last column: a communicator of host memory over the same services:\n\n"
            f"{pair_table(pair, host)}\n\nGraphs of {GRAPH} collectives, replayed; a collective's share of the time, and the same on NCCL, over sockets "
            f"where there are two services:\n\n{graph_table(graphs)}\n")
    bench.write_out(options, result, text)


if __name__ == "__main__":
    main()
