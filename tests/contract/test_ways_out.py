# SPDX-License-Identifier: Apache-2.0
"""A program that makes a usual mistake is told how to do it right, beside what was wrong."""

import re
from typing import Any

import pytest
import torch

from tests.support.harness import Rank, attempt
from tests.support.sites import Site, each_kind, of_fastcoll


def to_itself(rank: Rank, numel: int) -> list[Any]:
    """A blocking send to the own rank, then one that does not block."""
    comm, me = rank.comm, rank.rank
    tensor, got = torch.full((numel,), 5.0), torch.zeros(numel)
    receiving = comm.irecv(got, me)
    refused = attempt(comm.send, tensor, me)
    comm.isend(tensor, me).wait()
    receiving.wait()
    return [refused.kind, refused.text, got[-1].item()]


@pytest.mark.parametrize("numel", [2, 300, 5_000_000])
@each_kind
def test_a_send_to_oneself_is_refused_at_every_size(site: Site, numel: int) -> None:
    for rank, (kind, text, got) in enumerate(site.run(to_itself, numel)):
        if kind == "ValueError":  # torch's own
            continue
        assert kind == "UsageError"
        assert f"send to rank {rank}, which is this rank" in text
        assert "use isend" in text
        assert got == 5.0


def show_works(rank: Rank) -> list[str]:
    comm, me, world = rank.comm, rank.rank, rank.world_size
    tensor, shown = torch.ones(4), []
    comm.all_reduce(tensor)
    comm.barrier()
    for start in (
        lambda: [comm.all_reduce(tensor, async_op=True)],
        lambda: [comm.barrier(async_op=True)],
        lambda: [comm.irecv(torch.ones(4), (me - 1) % world), comm.isend(tensor, (me + 1) % world)],
    ):
        works = start()
        for work in works:
            work.wait()
            shown.append(repr(work))
    work = comm.irecv(torch.ones(4), (me - 1) % world)
    shown.append(repr(work))
    comm.isend(tensor, (me + 1) % world).wait()
    work.wait()
    return shown


@of_fastcoll
def test_a_work_shows_its_verb_and_state(site: Site) -> None:
    for rows in site.run(show_works):
        *over, barely = rows
        verbs = ("all_reduce", "barrier", "recv", "send")
        for verb, text in zip(verbs, over, strict=True):
            assert text.startswith(f"<fastcoll.Work {verb}"), text
            assert text.endswith(", done>"), text
        if not site.nodes:
            numbers = [re.search(r"\) #(\d+) in group", text) for text in over[:2]]
            first, second = (int(one[1]) for one in numbers if one)
            assert second == first + 1
        assert not barely.endswith("failed>")
