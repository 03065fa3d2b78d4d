# SPDX-License-Identifier: Apache-2.0
"""fastcoll in place of Gloo: programs that ask for "gloo" and know nothing of fastcoll."""

import io
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.bootstrap import identity
from tests.support.backends import (
    BACKENDS,
    COMPILE_S,
    IS_COMPILED,
    Program,
    on_backend,
    same,
)
from tests.support.harness import Pool, Rank, Setup
from tests.support.programs import run_python
from tests.torch.test_torch_backend import parts_of, split

PROGRAM = Path(__file__).with_name("gloo_program.py")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
KINDS = {"python": "ProfiledProcessGroup", "compiled": "FastcollBackend"}


# ---- an unchanged program ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, Any]]]:
    """`results(backend)`: what the program returned on its ranks; "gloo": on torch's own."""

    @cache
    def run(backend: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp(backend)
        asked = {} if backend == "gloo" else {"FASTCOLL_AS_GLOO": "1"}
        served_by = backend if asked else "auto"
        done = run_python(PROGRAM, folder, served_by, limit_s=800, env=os.environ | asked)
        assert done.returncode == 0, done.stderr
        files = [folder / f"{served_by}-{rank}.pt" for rank in range(2)]
        return [torch.load(file, weights_only=False) for file in files]

    return run


@pytest.mark.long
@pytest.mark.timeout(800)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unchanged_program_is_served(
    results: Callable[[str], list[dict[str, Any]]], backend: str
) -> None:
    for on_gloo, here in zip(results("gloo"), results(backend), strict=True):
        gloo, ours = dict(on_gloo), dict(here)
        assert gloo.pop("kinds") == ["ProcessGroupGloo"] * 3
        assert ours.pop("kinds") == [KINDS[backend], KINDS[backend], "ProcessGroupGloo"]
        assert gloo.pop("imported") == [[], False]  # it is off unless asked for
        assert ours.pop("imported") == [[], True]
        assert gloo.keys() == ours.keys()
        assert [part for part in gloo if not same(gloo[part], ours[part])] == []


# ---- ranks that can't be one group ---------------------------------------------------------------


def ask_for_gloo(rank: Rank, program: Program, *args: Any) -> tuple[Any, list[str]]:
    """Run a program of Gloo where fastcoll stands in; return what this rank said, too."""
    fastcoll.stand_in_for_gloo()
    said = io.StringIO()
    with patch.object(sys, "stderr", said):
        found = on_backend(rank, "gloo", program, *args)
    return found, said.getvalue().splitlines()


def kinds(rank: Rank) -> list[str]:
    """Which backend serves the world, the world again, and a group of ranks 0 and 1."""
    pair, again = dist.new_group([0, 1]), dist.new_group()
    groups: list[Any] = [dist.group.WORLD, again, *([pair] if rank.rank < 2 else [])]
    for group in groups:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [group.size()] * 3
    assert {dist.get_backend(group) for group in groups} == {"gloo"}
    dist.barrier()
    return [type(group._get_backend(CPU)).__name__ for group in groups]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_on_several_machines_have_gloo(fresh_pool: Callable[..., Pool], backend: str) -> None:
    pool = fresh_pool(3, Setup(False, nodes="aab", env={"FASTCOLL_TORCH_BACKEND": backend}))
    rows = pool.run(ask_for_gloo, kinds, deadline_s=COMPILE_S)
    gloo = "ProcessGroupGloo"
    assert [found for found, _ in rows] == [[gloo, gloo, KINDS[backend]]] * 2 + [[gloo, gloo]]
    [line] = [line for _, said in rows for line in said]
    assert "their ranks are on several machines (node 0" in line


def on_a_large_machine(rank: Rank) -> tuple[list[str], list[str]]:
    """Three ranks of a machine, of which two share memory at most."""
    with patch.object(identity, "_MOST_RANKS", 2):
        return ask_for_gloo(rank, kinds)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_ranks_of_a_machine_are_served(fresh_pool: Callable[..., Pool], backend: str) -> None:
    pool = fresh_pool(3, Setup(False, env={"FASTCOLL_TORCH_BACKEND": backend}))
    rows = pool.run(on_a_large_machine, deadline_s=COMPILE_S)
    nodes = KINDS["python"]  # which serves several nodes on both backends
    assert [found for found, _ in rows] == [[nodes, nodes, KINDS[backend]]] * 2 + [[nodes, nodes]]
    assert [line for _, said in rows for line in said] == []


def of_another_version(rank: Rank) -> list[str]:
    identity.library_version = lambda: f"0.{rank.rank}"
    return kinds(rank)


def with_a_gpu(rank: Rank) -> list[Any]:
    """One rank sees a GPU: CUDA tensors of all ranks remain Gloo's."""
    torch.cuda.device_count = lambda: int(rank.rank == 1)  # type: ignore[assignment]
    group: Any = dist.new_group()
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert (tensor.tolist(), dist.get_backend(group)) == ([2] * 3, "gloo")
    return [type(group._get_backend(device)).__name__ for device in (CPU, GPU)]


@pytest.mark.parametrize(
    ("program", "backend", "found", "why"),
    [
        (of_another_version, "python", ["ProcessGroupGloo"] * 2, "versions of fastcoll"),
        (with_a_gpu, "python", ["ProcessGroupGloo"] * 2, "`fastcoll build` compiles it"),
        pytest.param(
            *(with_a_gpu, "compiled", ["FastcollBackend", "ProcessGroupGloo"], ""),
            marks=IS_COMPILED,
        ),
    ],
)
def test_what_only_gloo_can_do_remains_with_it(
    fresh_pool: Callable[..., Pool], program: Program, backend: str, found: list[str], why: str
) -> None:
    pool = fresh_pool(2, Setup(False, env={"FASTCOLL_TORCH_BACKEND": backend}))
    rows = pool.run(ask_for_gloo, program, deadline_s=COMPILE_S)
    assert [row[-2:] for row, _ in rows] == [found] * 2
    lines = [line for _, said in rows for line in said]
    assert [why in line for line in lines] == ([True] if why else []), lines


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_is_split(fresh_pool: Callable[..., Pool], backend: str) -> None:
    pool = fresh_pool(3, Setup(False, env={"FASTCOLL_TORCH_BACKEND": backend}))
    rows = pool.run(ask_for_gloo, split, deadline_s=COMPILE_S)
    assert [found for found, _ in rows] == parts_of(KINDS[backend])
