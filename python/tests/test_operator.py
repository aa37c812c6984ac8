"""An operator's views and commands from Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mccs
from conftest import hosts_running
from mccs.operator import Operator, Refused, table
from test_documents import blocks


#: One leaf, with the one host.
TOPOLOGY = """
[rates]
host_leaf = "10Gbit/s"
[[leaf]]
name = "leaf0"
[[host]]
name = "host-a"
leaf = "leaf0"
"""


@pytest.fixture(scope="module")
def socket(folder: Path) -> Iterator[Path]:
    """The tenants' socket of a service that is its own controller."""
    topology, policy = folder / "topology.toml", folder / "policy.toml"
    topology.write_text(TOPOLOGY)
    policy.write_text('[policy]\nname = "ecmp"\n')
    controller = f'[controller]\nhost = "host-a"\ntopology = "{topology}"\npolicy = "{policy}"\n'
    with hosts_running(folder / "one", ["host-a"], controller) as [socket]:
        yield socket


@pytest.fixture
def operator(socket: Path) -> Operator:
    return Operator(socket.with_name("mccs-control.sock"))


def test_counters_of_a_job_are_seen_and_its_strategy_changes(operator: Operator, ranks) -> None:
    def calls(comm: mccs.Communicator) -> None:
        array = np.full(1000, comm.rank + 1, np.float32)
        for _ in range(5):
            comm.all_reduce(array.copy())
        comm.barrier()
        if comm.rank == 0:
            [seen] = operator.communicators()
            assert seen["nranks"] == 3 and seen["operations"] >= 5
            assert {of["pid"] for of in seen["ranks"]} <= {of["pid"] for of in operator.sessions()}
            operator.reconfigure(seen["communicator"], algorithm="ring", rings=[[0, 2, 1]])
            [now] = operator.communicators()
            assert now["epoch"] > seen["epoch"]
            assert operator.why_stuck(seen["communicator"])
        comm.barrier()
        comm.all_reduce(array)
        assert (array == 6).all()

    ranks(calls, 3)


def test_code_of_the_page_runs(operator: Operator, socket: Path, ranks, tmp_path: Path, monkeypatch) -> None:
    [block] = [block for block in blocks() if "mccs.operator" in block]
    (tmp_path / "policy.toml").write_text('[policy]\nname = "ffa"\n')
    monkeypatch.chdir(tmp_path)

    def calls(comm: mccs.Communicator) -> None:
        comm.barrier()
        if comm.rank == 0:
            [seen] = operator.communicators()
            names = {"control_socket": socket.with_name("mccs-control.sock"), "number": seen["communicator"]}
            exec(compile(block, "docs/PYTHON.md", "exec"), names)
        comm.barrier()

    ranks(calls, 3)


def test_what_is_wrong_is_refused_with_the_reason(operator: Operator, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="4711"):
        operator.reconfigure(4711, algorithm="ring")
    policy = tmp_path / "policy.toml"
    policy.write_text('[policy]\nname = "best"\n')
    with pytest.raises(Refused, match="best"):
        operator.check_policy(policy)
    with pytest.raises(Refused, match="best"):
        operator.apply_policy(policy)
    with pytest.raises(Refused, match="none.sock"):
        Operator(tmp_path / "none.sock").hosts()


def test_a_policy_is_diffed_applied_shown_and_taken_back(operator: Operator, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('[policy]\nname = "ffa"\n')
    operator.check_policy(policy)
    assert operator.diff_policy(policy)["communicators"] == []
    assert operator.apply_policy(policy)["rolled_back"] is False
    assert operator.policy()["policy"] == "ffa"
    operator.roll_back_policy()
    assert operator.policy()["policy"] == "ecmp"


def test_rows_are_a_table_of_pandas(operator: Operator) -> None:
    rows = operator.hosts()
    found = table(rows)
    assert list(found["host"]) == [row["host"] for row in rows]
