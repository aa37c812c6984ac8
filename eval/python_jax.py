#!/usr/bin/env python3
"""JAX on CPUs over mccs and over Gloo: what a computation with one collective takes.

usage: python_jax.py NAME [--nranks N,N] [--rounds N]

Needs the wheel, JAX and NumPy in the Python that runs it. A process' collectives are of one kind: sides take turns by jobs, several rounds.
Times have JAX's own part, which is that of the line "none". Writes eval/results/NAME.json and NAME.md."""

import argparse
import json
import os
import socket
import subprocess
import sys

import bench

SIDES = ["mccs", "gloo"]
SIZES = [8, 1 << 10, 128 << 10, 1 << 20, 16 << 20, 64 << 20]
OPERATIONS = ["none", "psum", "all_gather", "psum_scatter", "all_to_all", "ppermute"]
# Most time of a line of a side.
LINE_S = 0.15


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--nranks", default="2")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    times = {}
    with bench.service(settings='[cuda]\nuse = "off"') as (_, folder):
        for nranks in map(int, options.nranks.split(",")):
            for number in range(options.rounds):
                for side in bench.in_turn(SIDES, number):
                    for row in job(side, nranks, folder / "mccs.sock"):
                        key = nranks, row["what"], row["bytes"]
                        times.setdefault(key, {}).setdefault(side, []).append(row["us"])
    data = {**bench.provenance(), "rounds": options.rounds, "rows": [summary(*key, found) for key, found in times.items()]}
    bench.write_results(options.name, data, report(data))
    print(report(data))


def summary(nranks, what, size, found):
    return {"nranks": nranks, "what": what, "bytes": size, **bench.with_gloo(found, 1)}


def job(side, nranks, tenants_socket):
    """Rows of one job, from rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {**os.environ, "MCCS_SOCKET": str(tenants_socket), "JAX_PLATFORMS": "cpu"}
    ranks = [subprocess.Popen([sys.executable, __file__, "--rank-of", side, address, str(nranks), str(rank)], env=environment,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(nranks)]
    outputs = [rank.communicate(timeout=600) for rank in ranks]
    for rank, (output, errors) in zip(ranks, outputs):
        if rank.returncode:
            raise bench.failure([side], output, errors)
    return bench.records(outputs[0][0])


def rank_main(side, address, nranks, rank):
    if side == "mccs":
        import mccs.jax

        mccs.jax.initialize(address, nranks, rank)
    import jax

    if side == "gloo":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, nranks, rank)
    for operation in OPERATIONS:
        for size in SIZES if operation != "none" else SIZES[:1]:
            us = timed(*computation(jax, nranks, operation, size))
            if rank == 0:
                print(json.dumps({"what": operation, "bytes": size, "us": us}), flush=True)


def computation(jax, nranks, operation, size):
    """A compiled function and its argument. Bytes are those of a rank's longer buffer."""
    from jax import lax, numpy
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((nranks,), ("x",))
    count = max(nranks, size // 4 // nranks * nranks)
    own = count // nranks if operation == "all_gather" else count
    call = {
        "none": lambda x: x + 1,
        "psum": lambda x: lax.psum(x, "x"),
        "all_gather": lambda x: lax.all_gather(x, "x", tiled=True),
        "psum_scatter": lambda x: lax.psum_scatter(x, "x", tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True),
        "ppermute": lambda x: lax.ppermute(x, "x", [(rank, (rank + 1) % nranks) for rank in range(nranks)]),
    }[operation]
    spec = PartitionSpec("x")
    function = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    argument = jax.jit(lambda: numpy.ones(own * nranks, numpy.float32), out_shardings=NamedSharding(mesh, spec))()
    return function, argument


def timed(function, argument):
    """The median of a number of calls that the size decides: all ranks make as many."""
    function(argument).block_until_ready()
    calls = max(5, min(300, int(LINE_S / (100e-6 + argument.nbytes * 2e-9))))
    return bench.median_us(lambda: function(argument).block_until_ready(), calls)


def report(data):
    """The page."""
    text = "# JAX on CPUs: mccs and Gloo\n\n"
    text += "Times are medians of rounds' medians, in us. A ratio above 1 says that mccs is ahead.\n\n"
    return text + bench.table(["what", "bytes", "ranks", "mccs us", "Gloo us", "ratio", "least", "most"],
                              [[row["what"], row["bytes"], row["nranks"], row["us"]["mccs"], row["us"]["gloo"], row["ratio"],
                                row["least"], row["most"]] for row in data["rows"]])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank-of"]:
        rank_main(*sys.argv[2:4], *map(int, sys.argv[4:6]))
    else:
        main()
