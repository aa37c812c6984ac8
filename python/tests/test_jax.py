"""JAX on CPUs over mccs: collectives, sharded computations, groups, several hosts, bad input.

Ranks are forked, and import JAX themselves: its threads would not outlive a fork.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket as sockets
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest

if not os.environ.get("MCCS_TESTS_NEED_ALL"):
    pytest.importorskip("jax")

import mccs  # noqa: E402
from conftest import Failed, run  # noqa: E402

#: JAX raises a `JaxRuntimeError`, or a `ValueError` where an array is waited for.
ERRORS = (RuntimeError, ValueError)
PAGE = Path(__file__).parents[2] / "docs" / "PYTHON.md"


class Place(NamedTuple):
    """Which process of a job."""

    rank: int
    nranks: int


@pytest.fixture
def processes(socket, monkeypatch):
    """Runs functions in processes of one JAX job."""
    monkeypatch.setenv("MCCS_SOCKET", str(socket))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def start(function: Any, nranks: int, *arguments: Any) -> list[Any]:
        address = f"127.0.0.1:{free_port()}"

        def member(rank: int, nranks: int) -> Any:
            import mccs.jax

            mccs.jax.initialize(address, nranks, rank)
            return function(Place(rank, nranks), *arguments)

        return run(member, nranks)

    return start


def free_port() -> int:
    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def mine(seed: int, rank: int, *shape: int, dtype: Any = "float32") -> numpy.ndarray:
    """Numbers that are exact in each type, also when summed."""
    return numpy.random.default_rng([seed, rank]).integers(0, 4, shape).astype(dtype)


def distributed(values: numpy.ndarray, mesh: Any, *axes: Any) -> Any:
    """An array of all processes, each of which has its part of ``values``."""
    import jax

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def own(array: Any) -> numpy.ndarray:
    (shard,) = array.addressable_shards
    return numpy.asarray(shard.data)


def mesh_of(*axes: tuple[str, int]) -> Any:
    """A mesh of all processes' devices, by axes' names and lengths."""
    import jax

    devices = numpy.array(jax.devices()).reshape([length for _, length in axes])
    return jax.sharding.Mesh(devices, [name for name, _ in axes])


def collectives(place: Place, seed: int, counts: list[int], dtypes: list[str]) -> None:
    """All collectives of one computation, of ``nranks`` times ``count`` elements a rank."""
    import jax
    from jax import lax
    from jax.sharding import PartitionSpec as P

    n, rank = place.nranks, place.rank
    mesh = mesh_of(("x", n))
    ring = [(peer, (peer + 1) % n) for peer in range(n)]
    # The first gets nothing, which is zeros, and neither does the last.
    line = [(peer, peer + 1) for peer in range(n - 2)]

    def call(x: Any) -> dict[str, Any]:
        combined = {} if jax.numpy.iscomplexobj(x) else {"pmax": lax.pmax(x, "x"), "pmin": lax.pmin(x, "x")}
        return combined | {
            "psum": lax.psum(x, "x"),
            "all_gather": lax.all_gather(x, "x", tiled=True),
            "psum_scatter": lax.psum_scatter(x, "x", tiled=True),
            "all_to_all": lax.all_to_all(x.reshape(n, -1), "x", 0, 0).reshape(-1),
            "ring": lax.ppermute(x, "x", ring),
            "line": lax.ppermute(x, "x", line),
        }

    def right(all: numpy.ndarray) -> dict[str, numpy.ndarray]:
        return {
            "pmax": all.max(0),
            "pmin": all.min(0),
            "psum": all.sum(0, dtype=all.dtype),
            "all_gather": all.reshape(-1),
            "psum_scatter": all.sum(0, dtype=all.dtype).reshape(n, -1)[rank],
            "all_to_all": all.reshape(n, n, -1)[:, rank].reshape(-1),
            "ring": all[rank - 1],
            "line": all[rank - 1] * all.dtype.type(0 < rank < n - 1),
        }

    on_all = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    for dtype in dtypes:
        for count in counts:
            every = numpy.stack([mine(seed, peer, n * count, dtype=dtype) for peer in range(n)])
            wanted = right(every)
            for name, got in on_all(distributed(every.reshape(-1), mesh, "x")).items():
                assert got.dtype == every.dtype, f"{name}: {got.dtype}"
                assert (own(got) == wanted[name]).all(), f"{name} of {count} {dtype}: {got} is not {wanted[name]}"


def test_collectives_of_four_processes(processes) -> None:
    # The last is of several pieces: 6 MB a rank.
    processes(collectives, 4, 7, [250, 1_500_000 // 4], ["float32"])


def types(place: Place) -> None:
    import jax

    jax.config.update("jax_enable_x64", True)
    combined = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float64", "complex64"]
    collectives(place, 3, [100], combined)
    collectives(place, 4, [1, 1_500_000 // 2], ["float32"])
    narrow(place)


def narrow(place: Place) -> None:
    """Types that are widened on the way, by XLA or by the package, and one that XLA refuses."""
    import jax
    from jax.sharding import PartitionSpec as P

    mesh = mesh_of(("x", place.nranks))
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))

    def summed(every: numpy.ndarray) -> numpy.ndarray:
        return own(total(distributed(every.reshape(-1), mesh, "x")))

    small = numpy.stack([mine(5, peer, 64) for peer in range(place.nranks)])
    assert (summed(small.astype(jax.numpy.bfloat16)) == small.sum(0)).all()
    with pytest.raises(ERRORS, match="f16"):
        summed(small.astype("float16"))
    for dtype in ("int16", "uint16"):
        overflowing = numpy.random.default_rng(9).integers(0, 1 << 16, (place.nranks, 50)).astype(dtype)
        assert (summed(overflowing) == overflowing.sum(0, dtype=dtype)).all(), dtype


def test_types_and_sizes(processes) -> None:
    processes(types, 2)


def sharded(place: Place) -> None:
    """Computations that XLA divides, on meshes of two axes; groups are split off for each axis."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec as P

    mesh = mesh_of(("x", 2), ("y", 2))
    left, right = mine(1, 0, 64, 48), mine(2, 0, 48, 32)
    for places in [(("x", "y"), ("y", None)), (("x", None), (None, "y")), ((None, ("x", "y")), (("x", "y"), None))]:
        product = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("x", "y")))
        got = product(distributed(left, mesh, *places[0]), distributed(right, mesh, *places[1]))
        row, column = divmod(place.rank, 2)
        assert (own(got) == (left @ right)[32 * row :, 16 * column :][:32, :16]).all(), places

    def both(x: Any) -> Any:
        # Many collectives that wait for each other only through the data, over all three groups.
        for _ in range(8):
            x = jax.lax.psum(x, "x") % 5 + jax.lax.pmax(x, "y") + jax.lax.psum(x * 2, ("x", "y")) % 7
        return x

    values = mine(3, 0, 4, 16)
    got = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P(("x", "y")), out_specs=P(("x", "y")), check_vma=False))(
        distributed(values, mesh, ("x", "y"))
    )
    want = values.reshape(2, 2, 16)
    for _ in range(8):
        want = want.sum(0) % 5 + want.max(1, keepdims=True) + (2 * want).sum((0, 1)) % 7
    assert (own(got) == want.reshape(4, 16)[place.rank]).all()

    def loss(weights: Any, batch: Any) -> Any:
        return jnp.mean((batch @ weights) ** 2)

    # Steps of data-parallel training are enqueued faster than they end.
    batch, weights = mine(4, 0, 16, 8), mine(5, 0, 8, 2)
    step = jax.jit(lambda weights, batch: weights - 0.001 * jax.grad(loss)(weights, batch))
    alone, together = weights, jax.device_put(weights, NamedSharding(mesh, P()))
    shards = distributed(batch, mesh, ("x", "y"), None)
    for _ in range(20):
        alone, together = step(alone, batch), step(together, shards)
    numpy.testing.assert_allclose(own(together), alone, rtol=1e-4)

    every = multihost_utils.process_allgather(numpy.array([place.rank]))
    assert every.ravel().tolist() == [0, 1, 2, 3]
    assert multihost_utils.broadcast_one_to_all(numpy.array([place.rank + 7])) == 7
    multihost_utils.sync_global_devices("end")


def test_sharded_computations(processes) -> None:
    processes(sharded, 4)


def test_processes_of_two_hosts(two_hosts, monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    address = f"127.0.0.1:{free_port()}"

    def member(rank: int, nranks: int) -> None:
        import mccs.jax

        os.environ["MCCS_SOCKET"] = str(two_hosts[rank])
        mccs.jax.initialize(address, nranks, rank)
        collectives(Place(rank, nranks), 11, [100], ["float32"])

    run(member, 2)


def test_code_of_the_page_runs(socket, monkeypatch, capfd) -> None:
    (block,) = [
        block for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        if "mccs.jax" in block
    ]
    monkeypatch.setenv("MCCS_SOCKET", str(socket))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    address = f"127.0.0.1:{free_port()}"

    def member(rank: int, nranks: int) -> None:
        names = {"coordinator": address, "processes": nranks, "process": rank}
        exec(compile(block, "docs/PYTHON.md", "exec"), names)
        assert float(names["total"]) == sum(range(8))

    run(member, 2)


def outlives(place: Place, text: Path) -> None:
    import jax
    from jax.sharding import PartitionSpec as P

    mesh = mesh_of(("x", 2))
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
    values = distributed(mine(1, 0, 2), mesh, "x")
    total(values).block_until_ready()
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ERRORS) as raised:
        total(values).block_until_ready()
    text.write_text(str(raised.value))


def test_a_dead_process_is_an_exception_of_the_others(processes, tmp_path) -> None:
    with pytest.raises(Failed, match="^rank 1 died$"):
        processes(outlives, 2, tmp_path / "text")
    assert "rank 0 of 2, all_reduce: " in (text := (tmp_path / "text").read_text()) and "rank 1" in text, text


def test_what_is_refused(socket, monkeypatch) -> None:
    monkeypatch.setenv("MCCS_SOCKET", str(socket))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def late(rank: int, nranks: int) -> None:
        import jax  # noqa: F401

        with pytest.raises(mccs.InvalidUsage, match="before jax"):
            importlib.import_module("mccs.jax")

    def several_devices(rank: int, nranks: int) -> None:
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import mccs.jax

        with pytest.raises(mccs.InvalidUsage, match="one CPU device each, and not 2"):
            mccs.jax.initialize("127.0.0.1:1", 1, 0)

    def without_world(rank: int, nranks: int, address: str) -> None:
        import mccs.jax
        import jax

        assert "MPITRAMPOLINE_LIB" not in os.environ
        jax.config.update("jax_cpu_collectives_implementation", "mpi")
        jax.distributed.initialize(address, nranks, rank)
        mesh = mesh_of(("x", 2))
        values = distributed(mine(1, 0, 2), mesh, "x")
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        with pytest.raises(ERRORS, match="mccs.jax.initialize"):
            jax.jit(lambda x: x.sum(), out_shardings=everywhere)(values).block_until_ready()

    run(late, 1)
    run(several_devices, 1)
    run(without_world, 2, f"127.0.0.1:{free_port()}")
