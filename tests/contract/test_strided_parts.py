# SPDX-License-Identifier: Apache-2.0
"""Parts and lists of tensors that are not contiguous: what comes, and who makes the calls.

Decides the calls. Every element says which rank gave it to whom. The memory between the elements
must stay as it was.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.fallbacks import noting
from tests.support.harness import Pools, Rank, attempt
from tests.support.sites import Site, without_gpu

ROWS, GAP = 30, 77.0
Came = tuple[list[torch.Tensor], list[float]]  # what came, and what should


def columns(values: list[float]) -> list[torch.Tensor]:
    """Every second column of a matrix, each full of its value."""
    found = list(torch.full((ROWS, 2 * len(values)), GAP)[:, ::2].unbind(1))
    for column, value in zip(found, values, strict=True):
        column.fill_(value)
    return found


def gap_is_kept(column: torch.Tensor) -> bool:
    whole = column._base
    return whole is None or bool((whole[:, 1::2] == GAP).all())


def forms(comm: Any, me: int, world: int) -> dict[str, Callable[[], Came]]:
    """Calls of which each argument is strided; rank i gives rank j the value 10 * i + j."""
    everyone = range(world)
    given = [10.0 * me + to for to in everyone]
    firsts = [10.0 * by for by in everyone]  # what each rank gives to rank 0

    def gathered(in_place: bool) -> Came:
        outs = columns(firsts if in_place else [0] * world)
        comm.all_gather(outs, outs[me] if in_place else columns(firsts)[me])
        return outs, firsts

    def to_root() -> Came:
        outs = columns([0] * world)
        comm.gather(columns(given)[0], outs if me == 0 else None, 0)
        return (outs, firsts) if me == 0 else ([], [])

    def from_root() -> Came:
        [out] = columns([0])
        comm.scatter(out, columns(given) if me == 0 else None, 0)
        return [out], [float(me)]

    return {
        "all_gather": lambda: gathered(in_place=False),
        "all_gather in place": lambda: gathered(in_place=True),
        "gather": to_root,
        "scatter": from_root,
        **forms_of_all(comm, me, world),
    }


def forms_of_all(comm: Any, me: int, world: int) -> dict[str, Callable[[], Came]]:
    """Those in which each rank gives something to each other one, and lists."""
    everyone = range(world)
    given, wanted = [10.0 * me + to for to in everyone], [10.0 * by + me for by in everyone]

    def shuffled() -> Came:
        outs = columns([0] * world)
        comm.all_to_all(outs, columns(given))
        return outs, wanted

    def shuffled_rows() -> Came:
        rows, out = (torch.full((world * ROWS, 2), GAP)[:, ::2] for _ in range(2))
        for part, value in zip(rows.chunk(world), given, strict=True):
            part.fill_(value)
        comm.all_to_all_single(out, rows)
        return list(out.chunk(world)), wanted

    def reduced(in_place: bool) -> Came:
        parts = columns(given)
        out = parts[me] if in_place else columns([0])[0]
        comm.reduce_scatter(out, parts)
        return [out], [sum(wanted)]

    def summed_list() -> Came:
        tensors = columns(given)
        comm.all_reduce_coalesced(tensors)
        return tensors, [sum(10.0 * by + to for by in everyone) for to in everyone]

    def gathered_list() -> Came:
        wholes = list(torch.full((world * ROWS, 4), GAP)[:, ::2].unbind(1))
        comm.all_gather_into_tensor_coalesced(wholes, columns([float(me), 100.0 + me]))
        parts = [part for whole in wholes for part in whole.chunk(world)]
        return parts, [*map(float, everyone), *(100.0 + by for by in everyone)]

    return {
        "all_to_all": shuffled,
        "all_to_all_single": shuffled_rows,
        "reduce_scatter": lambda: reduced(in_place=False),
        "reduce_scatter in place": lambda: reduced(in_place=True),
        "all_reduce_coalesced": summed_list,
        "all_gather_into_tensor_coalesced": gathered_list,
    }


@dataclasses.dataclass(frozen=True)
class Asynchronous:
    """A group whose calls are asynchronous, and waited for."""

    comm: Any

    def __getattr__(self, verb: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            work = getattr(self.comm, verb)(*args, async_op=True)
            assert work is not None
            work.wait()

        return call


KINDS = pytest.mark.parametrize("kind", [None, Asynchronous], ids=["", "asynchronous"])


def wrong_ones(rank: Rank, kind: Any) -> list[str]:
    """Those of the calls whose results are wrong; the first of a kind is made in Python."""
    comm = kind(rank.comm) if kind else rank.comm
    wrong = []
    for name, call in forms(comm, rank.rank, rank.world_size).items():
        for number in range(3):
            came, wants = call()
            is_right = [bool((one == want).all()) for one, want in zip(came, wants, strict=True)]
            if not all(is_right) or not all(gap_is_kept(one) for one in came):
                wrong.append(f"{name}, {number}: {[one[0].item() for one in came]}, not {wants}")
    return wrong


@KINDS
@without_gpu
def test_what_comes(site: Site, kind: Any) -> None:
    assert site.run(wrong_ones, kind) == [[]] * site.world


def passed_on(rank: Rank, kind: Any) -> list[str]:
    """Those of the calls that C++ passes on to Python, though they are known."""
    comm = kind(rank.comm) if kind else rank.comm
    found = []
    for name, call in forms(comm, rank.rank, rank.world_size).items():
        call()
        with noting() as passed:
            call()
        if passed:
            found.append(f"{name}: {[verb for verb, _ in passed]}")
    return found


@KINDS
@pytest.mark.parametrize("world", [1, 2])
def test_known_calls_need_no_python(pools: Pools, world: int, kind: Any) -> None:
    assert pools(world).run(passed_on, kind) == [[]] * world


def behind_another_call(rank: Rank) -> list[list[float]]:
    """An asynchronous call gathers a column that the call before it sums; return what comes."""
    found = []
    for _ in range(3):
        outs, whole = columns([0.0] * rank.world_size), torch.ones(ROWS, 2)
        before = rank.comm.all_reduce(whole, async_op=True)
        rank.comm.all_gather(outs, whole[:, 0], async_op=True).wait()
        before.wait()
        found.append(torch.stack(outs).unique().tolist())
    return found


@without_gpu
def test_inputs_are_read_when_it_is_their_turn(site: Site) -> None:
    assert site.run(behind_another_call) == [[[site.world]] * 3] * site.world


def overlaps_taken(rank: Rank) -> list[str]:
    """Known calls that were carried out, though their tensors share memory; nothing is written."""
    comm, me, world = rank.comm, rank.rank, rank.world_size
    for call in forms(comm, me, world).values():
        call()
    whole = torch.ones(ROWS, 2 * world)
    parts, others = list(whole[:, ::2].unbind(1)), columns([1] * world)
    next_one = parts[(me + 1) % world]
    short = torch.ones(ROWS + 1).as_strided((ROWS,), (0,))
    calls: dict[str, Callable[[], Any]] = {
        "a part twice": lambda: comm.all_gather([parts[0]] * world, others[0]),
        "the part of another rank": lambda: comm.all_gather(parts, next_one),
        "an input among the outputs": lambda: comm.all_to_all(parts, [*others[1:], parts[0]]),
        "its own part, exchanged": lambda: comm.all_to_all(parts, parts),
        "a sum in another rank's part": lambda: comm.reduce_scatter(next_one, parts),
        "an expanded output": lambda: comm.all_gather([short, *others[1:]], others[0]),
        "a list with a tensor twice": lambda: comm.all_reduce_coalesced([parts[0]] * world),
    }
    found = {name: attempt(call).kind for name, call in calls.items()}
    comm.barrier()
    assert bool((whole == 1).all())
    return [f"{name}: {kind}" for name, kind in found.items() if kind != "UsageError"]


def test_overlaps_are_refused(pools: Pools) -> None:
    assert pools(2).run(overlaps_taken) == [[], []]
