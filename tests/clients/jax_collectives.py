#!/usr/bin/env python3
"""JAX on mccs: collectives of XLA over all GPUs, in one process for all of them or in one a GPU, checked against NumPy.

usage: jax_collectives.py NRANKS one|each, with LD_PRELOAD naming our libnccl.so.2 and MCCS_SOCKET the service"""

import os
import subprocess
import sys

import numpy as np

SIZES = (1, 37, 4096, 300_007, 2_500_000)


def rows(nranks, size, dtype):
    """Small integers, which every type sums exactly: a row a rank."""
    return np.random.default_rng(size).integers(-3, 4, (nranks, size)).astype(dtype)


def collectives(nranks):
    """Name, function of a rank's row inside of shard_map, and what all ranks' results are, of all rows."""
    import jax
    from jax import lax

    following = [(rank, (rank + 1) % nranks) for rank in range(nranks)]
    return {
        "psum": (lambda row: lax.psum(row, "ranks"), lambda all_rows: np.repeat(all_rows.sum(0, keepdims=True), nranks, 0)),
        "pmax": (lambda row: lax.pmax(row, "ranks"), lambda all_rows: np.repeat(all_rows.max(0, keepdims=True), nranks, 0)),
        "all_gather": (lambda row: lax.all_gather(row, "ranks", axis=1, tiled=True),
                       lambda all_rows: np.repeat(all_rows.reshape(1, -1), nranks, 0)),
        "ppermute": (lambda row: lax.ppermute(row, "ranks", following), lambda all_rows: np.roll(all_rows, 1, 0)),
        "psum_scatter": (lambda row: lax.psum_scatter(jax.numpy.tile(row, (1, nranks)), "ranks", scatter_dimension=1, tiled=True),
                         lambda all_rows: np.repeat(all_rows.sum(0, keepdims=True), nranks, 0)),
        "all_to_all": (lambda row: lax.all_to_all(jax.numpy.tile(row, (nranks, 1)), "ranks", 0, 0, tiled=True).reshape(1, -1),
                       lambda all_rows: np.repeat(all_rows.reshape(1, -1), nranks, 0)),
    }


def run(nranks):
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    assert len(jax.devices()) == nranks, f"JAX sees {len(jax.devices())} GPUs instead of {nranks}"
    mesh = Mesh(np.array(jax.devices()), ("ranks",))
    parts = PartitionSpec("ranks")
    checked = 0
    for name, (function, expected_of) in collectives(nranks).items():
        compiled = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False))
        for dtype in (np.float32, np.int32, jax.numpy.bfloat16):
            for size in SIZES:
                data = rows(nranks, size, dtype)
                sharding = NamedSharding(mesh, parts)
                result = compiled(jax.make_array_from_callback(data.shape, sharding, lambda index, data=data: data[index]))
                expected = expected_of(data.astype(np.float64))
                for shard in result.addressable_shards:
                    if not np.array_equal(np.asarray(shard.data).astype(np.float64), expected[shard.index]):
                        raise SystemExit(f"JAX: {name} of {size} {np.dtype(dtype)} is wrong on {shard.device}")
                    checked += 1
    return checked


def main():
    nranks, mode = int(sys.argv[1]), sys.argv[2]
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if mode == "one":
        print(f"JAX: {run(nranks)} results of {nranks} GPUs in one process are right")
    elif mode == "each":
        from training import free_port

        address = f"127.0.0.1:{free_port()}"
        workers = [subprocess.Popen([sys.executable, __file__, str(nranks), address, str(rank)]) for rank in range(nranks)]
        failed = [rank for rank, worker in enumerate(workers) if worker.wait()]
        if failed:
            raise SystemExit(f"JAX: processes {failed} failed")
        print(f"JAX: results of {nranks} processes are right")
    else:
        import jax

        rank = int(sys.argv[3])
        jax.distributed.initialize(mode, nranks, rank, local_device_ids=[rank])
        run(nranks)


if __name__ == "__main__":
    main()
