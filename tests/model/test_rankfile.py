# SPDX-License-Identifier: Apache-2.0
"""Rank files: every device of every host once, neighbours on the widest wires."""

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from fastcoll.cli import app
from fastcoll_model.errors import ModelError
from fastcoll_model.machines.described import describe
from fastcoll_model.machines.local import Core, Local
from fastcoll_model.machines.machine import Machine, load_machine, machine_of
from fastcoll_model.rankfile import device_order, rank_file


def cores(*numbers: int) -> Machine:
    found = tuple(Core(n, (n,), n // 2, n // 2, f"cache of {n // 2}", "") for n in numbers)
    return machine_of(describe(Local(found, {}, (), (), 1 << 30, ())), "here")


def test_gpus_are_put_in_the_order_of_the_widest_ring() -> None:
    machine = load_machine("dgx-1v")
    order = device_order(machine)
    assert sorted(order) == sorted(machine.ranks)
    for one, other in zip(order, [*order[1:], order[0]], strict=True):
        assert machine.wires[one, other].gbps == 40  # the double links; 0 1 2... has single ones
    numbers = ",".join(gpu.removeprefix("gpu") for gpu in order)
    text = rank_file(machine, ["a", "b-1.example"], "torchrun")
    assert text.count(f"CUDA_VISIBLE_DEVICES={numbers} torchrun --nnodes 2") == 2
    assert "--node-rank 1 --master-addr a" in text.splitlines()[3]
    text = rank_file(machine, ["a", "b"], "openmpi")
    order = f"-x CUDA_VISIBLE_DEVICES={numbers}"
    assert text.startswith(f"mpirun -n 16 --host a:8,b:8 --map-by slot {order}")


def test_cores_get_a_rank_each_beside_their_neighbours() -> None:
    machine = cores(0, 1, 2, 3)
    text = rank_file(machine, ["a", "b"], "openmpi")
    lines = [re.fullmatch(r"rank (\d+)=(\w) slot=(\d+)", line) for line in text.splitlines()]
    found = [(int(m[1]), m[2], int(m[3])) for m in lines if m]
    assert [rank for rank, _, _ in found] == list(range(8))
    want = [(host, core) for host in "ab" for core in range(4)]
    assert [(host, core) for _, host, core in found] == want
    assert rank_file(machine, ["a"], "torchrun").splitlines()[1].startswith("taskset -c ")


@pytest.mark.parametrize("hosts", [[], ["a", "a"], ["a b"], ["-x"], ["a;b"], [""]])
def test_hosts_that_are_none_are_refused(hosts: list[str]) -> None:
    with pytest.raises(ModelError, match="host"):
        rank_file(cores(0, 1), hosts, "torchrun")


def test_devices_without_numbers_are_refused() -> None:
    document: dict[str, Any] = describe(Local((), {}, (), (), 1 << 30, ()))
    document |= {"ranks": ["left"], "links": []}
    with pytest.raises(ModelError, match=r"left.*gpu0"):
        rank_file(machine_of(document, "x"), ["a"], "torchrun")


def test_the_command_prints_the_file_and_nothing_else() -> None:
    done = CliRunner().invoke(app, ["topo", "dgx-1v", "--hosts", "a,b", "--launcher", "openmpi"])
    assert done.exit_code == 0
    assert done.output == rank_file(load_machine("dgx-1v"), ["a", "b"], "openmpi")
    assert CliRunner().invoke(app, ["topo", "--hosts", "a"]).exit_code == 2
    assert CliRunner().invoke(app, ["topo", "dgx-1v", "--hosts", "a;b"]).exit_code == 2
