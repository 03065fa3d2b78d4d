# SPDX-License-Identifier: Apache-2.0
"""Parts of any size, and messages of all pairs, arrive whole on GPUs (others: test_parts.py).

Every element says which rank gave it to whom. All memory is laid out before the first call: a GPU
that is asked for more may wait for kernels that wait for this rank.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fastcoll.calls.batches import P2POp
from tests.support import oracle
from tests.support.sites import WITH_GPU, Site, at, finish, with_gpu

# Sizes and types.
KINDS = [
    *((scale, "float32") for scale in (0, 1, 3001)),
    *((143, dtype) for dtype in oracle.DTYPES),
]


@dataclass(frozen=True)
class Step:
    """A call, the tensors that it fills, and what they must then hold."""

    name: str
    start: Callable[[], Any]
    outputs: list[torch.Tensor]
    wants: list[torch.Tensor]

    def is_right(self) -> bool:
        """Whether all bits are; a copy, as what lies in pieces has no bytes to look at."""
        pairs = zip(self.outputs, self.wants, strict=True)
        return all(torch.equal(*(torch.cat([x]).view(torch.uint8) for x in pair)) for pair in pairs)


def content(giver: int, getter: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The elements that a rank gives another one."""
    numbers = (torch.arange(numel) * 3 + giver * 5 + getter * 7) % 16
    return (numbers % 2 if dtype is torch.bool else numbers).to(dtype)


def blank(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((numel,), 1 if dtype is torch.bool else 17).to(dtype)


def wait(work: Any) -> None:
    assert work.wait()


def in_turn(sizes: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Parts of one tensor, the last rank's first."""
    return list(blank(sum(sizes), dtype).split(sizes[::-1]))[::-1]


def shuffles(group: Any, scale: int, dtype: torch.dtype) -> Iterator[Step]:
    """all_to_all: rank i gives rank j its own number of elements."""
    me, ranks = group.rank, range(group.world_size)
    rows = [[scale * ((3 * by + 5 * to) % 7) for to in ranks] for by in ranks]
    sizes_in, sizes_out = rows[me], [row[me] for row in rows]
    gives = [content(me, to, size, dtype) for to, size in enumerate(sizes_in)]
    wants = [content(by, me, size, dtype) for by, size in enumerate(sizes_out)]
    whole, out = torch.cat(gives), blank(sum(sizes_out), dtype)
    yield Step(
        "split sizes",
        lambda: group.all_to_all_single(out, whole, sizes_out, sizes_in),
        [out],
        [torch.cat(wants)],
    )
    outs = [blank(size, dtype) for size in sizes_out]
    yield Step(
        "lists",
        lambda: wait(group.all_to_all(outs, gives, async_op=True)),
        outs,
        wants,
    )
    turned = in_turn(sizes_out, dtype)
    yield Step("a list in turn", lambda: group.all_to_all(turned, gives), turned, wants)


def gathers(group: Any, scale: int, dtype: torch.dtype) -> Iterator[Step]:
    """all_gather and, of what adds exactly, reduce_scatter, of a part of each rank's size."""
    me, ranks = group.rank, range(group.world_size)
    sizes = [scale * (5 * by + 1) for by in ranks]
    wants = [content(by, 0, size, dtype) for by, size in enumerate(sizes)]
    mine, outs = wants[me].clone(), [blank(size, dtype) for size in sizes]
    yield Step("all_gather", lambda: group.all_gather(outs, mine), outs, wants)
    line = list(blank(sum(sizes), dtype).split(sizes))
    yield Step(
        "all_gather, adjacent, not waited for at once",
        lambda: wait(group.all_gather(line, mine, async_op=True)),
        line,
        wants,
    )
    if dtype is torch.float32:
        parts = [content(me, to, size, dtype) for to, size in enumerate(sizes)]
        total = sum(content(by, me, sizes[me], dtype) for by in ranks)
        reduced = blank(sizes[me], dtype)
        yield Step(
            "reduce_scatter", lambda: group.reduce_scatter(reduced, parts), [reduced], [total]
        )


def messages(group: Any, scale: int, dtype: torch.dtype) -> Iterator[Step]:
    """A batch: two messages of each pair, a rank's own ones too, in any order of the peers."""
    me, ops, outputs, wants = group.rank, [], [], []
    for peer in random.Random(me).sample(range(group.world_size), group.world_size):
        for tag in range(2):
            numel = scale * (1 + tag)
            given = content(me, peer, numel, dtype)
            taken = blank(2 * numel, dtype).view(numel, 2)
            target = taken[:, 1] if tag else taken[:, 0].clone()
            if tag:  # which lies in pieces, on both sides
                given = torch.stack((given, given), 1)[:, 0]
                outputs.append(taken[:, 0])
                wants.append(blank(numel, dtype))
            ops += [P2POp("isend", given, peer, tag=tag), P2POp("irecv", target, peer, tag=tag)]
            outputs.append(target)
            wants.append(content(peer, me, numel, dtype))

    def start() -> None:
        for work, op in zip(group.batch_isend_irecv(ops), ops, strict=True):
            wait(work)
            assert work.source_rank() == op.peer or op.op == "isend"

    yield Step("messages", start, outputs, wants)


def go_through(rank: Any, steps: Any, kinds: list[tuple[int, str]]) -> list[str]:
    """Make the calls of some sizes and types; the names of those that brought wrong bytes."""
    todo = [
        (step, kind)
        for kind in kinds
        for step in steps(rank.comm, kind[0], getattr(torch, kind[1]))
    ]
    # Room for lists and strided tensors to be put together in: torch then has it.
    kept = [torch.cat([*step.outputs, *step.outputs]) for step, _ in todo]
    del kept
    finish(rank)
    for step, _ in todo:
        step.start()
    finish(rank)
    return [f"{step.name}: {kind}" for step, kind in todo if not step.is_right()]


@pytest.mark.parametrize("steps", [shuffles, gathers])
@with_gpu
def test_every_part_arrives(site: Site, steps: Callable[..., Iterator[Step]]) -> None:
    assert site.run(go_through, steps, KINDS) == [[]] * site.world


@at([param for param in WITH_GPU if not param.values[0].nodes])  # nodes/test_gpu_transfers.py
def test_every_message_arrives(site: Site) -> None:
    assert site.run(go_through, messages, KINDS) == [[]] * site.world


def test_a_part_of_another_rank_is_seen() -> None:
    """Negative control: what differs in one element, or lies behind the right place."""
    want = content(1, 0, 9, torch.float32)
    near = want.clone()
    near[8] += 1
    assert Step("", lambda: None, [want.clone()], [want]).is_right()
    for wrong in (near, content(0, 1, 9, torch.float32), want.roll(1)):
        assert not Step("", lambda: None, [wrong], [want]).is_right()
