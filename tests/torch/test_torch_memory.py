# SPDX-License-Identifier: Apache-2.0
"""Tensors that change between two calls of torch.distributed, and what autograd sees of calls.

On both kinds of the backend "fastcoll": a later call sees a tensor as a first one does.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import on_backend
from tests.support.harness import Pool, Rank, attempt

Pools = Callable[[int], Pool]
KNOWN = 3  # calls of a kind after which C++ makes the next one
NUMEL = 64


def _others(tensor: torch.Tensor) -> list[torch.Tensor]:
    """One tensor for each rank; `tensor` is rank 0's."""
    world = dist.get_world_size()
    return [tensor, *(torch.zeros_like(tensor.detach()) for _ in range(world - 1))]


def _at_root(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
    return tensors if dist.get_rank() == 0 else None


def _pass_on(given: torch.Tensor, got: torch.Tensor) -> None:
    me, world = dist.get_rank(), dist.get_world_size()
    works = [dist.irecv(got, (me - 1) % world), dist.isend(given, (me + 1) % world)]
    for work in works:
        assert work is not None
        work.wait()


def _in_place(function: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., None]:
    def call(given: torch.Tensor, got: torch.Tensor) -> None:
        del given
        work = function(got, *args, **options)
        if work is not None:
            work.wait()

    return call


# A call with a tensor that it reads and one that it writes; the rank that writes, -1 for all; how
# many parts the two have, "w" for one of each rank.
VERBS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], int, str]] = {
    "all_reduce": (_in_place(dist.all_reduce), -1, "11"),
    "all_reduce, asynchronous": (_in_place(dist.all_reduce, async_op=True), -1, "11"),
    "reduce": (_in_place(dist.reduce, 0), 0, "11"),
    "broadcast": (_in_place(dist.broadcast, 0), 1, "11"),
    "all_gather_into_tensor": (lambda i, o: dist.all_gather_into_tensor(o, i), -1, "1w"),
    "reduce_scatter_tensor": (lambda i, o: dist.reduce_scatter_tensor(o, i), -1, "w1"),
    "all_gather": (lambda i, o: dist.all_gather(_others(o), i), -1, "11"),
    "gather": (lambda i, o: dist.gather(i, _at_root(_others(o)), 0), 0, "11"),
    "scatter": (lambda i, o: dist.scatter(o, _at_root(_others(i)), 0), -1, "11"),
    "reduce_scatter": (lambda i, o: dist.reduce_scatter(o, _others(i)), -1, "11"),
    "all_to_all_single": (lambda i, o: dist.all_to_all_single(o, i), -1, "ww"),
    "all_to_all": (lambda i, o: dist.all_to_all(_others(o), _others(i)), -1, "11"),
    "isend, irecv": (_pass_on, -1, "11"),
}


def tensors_of(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    numels = [NUMEL * (dist.get_world_size() if parts == "w" else 1) for parts in VERBS[name][2]]
    return torch.arange(float(numels[0])), torch.ones(numels[1])


def stored_otherwise(name: str, sides: tuple[int, ...]) -> list[torch.Tensor]:
    """The tensors of a verb; some are stored with the other sign."""
    tensors = tensors_of(name)
    return [torch._neg_view(-one) if side in sides else one for side, one in enumerate(tensors)]


def changed(rank: Rank, name: str, is_compiled: bool) -> list[str]:
    """Known tensors get memory that is stored otherwise; what they get then, against new ones.

    torch gives a C++ backend a copy of a tensor that is stored otherwise, and drops what is written
    there, on Gloo as well.
    """
    call, wrong = VERBS[name][0], []
    plain, want = tensors_of(name)
    call(plain, want)
    for sides in ((0,), (1,), (0, 1)):
        new, expected = stored_otherwise(name, sides)
        call(new, expected)
        given, got = tensors_of(name)
        for _ in range(KNOWN):
            call(given, got)
        given.data, got.data = stored_otherwise(name, sides)
        call(given, got)
        results = [one.resolve_neg() for one in (got, expected)]
        if not is_compiled or sides == (0,):
            results.append(want)
        if any(not torch.equal(results[0], other) for other in results[1:]):
            wrong.append(f"{sides}: {[one.tolist()[:4] for one in results]}")
        for one in (given, got):
            swap = attempt(torch.utils.swap_tensors, one, torch.zeros(3))
            wrong += [swap.text] if swap.kind else []
    return wrong


@pytest.mark.parametrize("name", VERBS)
def test_changed_tensors_are_read_anew(
    backend_pools: Pools, request: pytest.FixtureRequest, name: str
) -> None:
    is_compiled = "compiled" in request.node.name
    assert backend_pools(2).run(on_backend, "fastcoll", changed, name, is_compiled) == [[], []]


def shrunk(rank: Rank) -> list[str]:
    """Calls whose memory is gone on every rank; each verb that has no rank without memory."""
    wrong = []
    for name, (call, writes, _) in VERBS.items():
        for side in (0, 1):
            if writes >= 0 or name in ("scatter", "isend, irecv"):
                continue
            if side == 0 and name.startswith("all_reduce"):
                continue
            tensors = tensors_of(name)
            for _ in range(KNOWN):
                call(*tensors)
            tensors[side].untyped_storage().resize_(16)
            one = attempt(call, *tensors)
            if one.kind != "UsageError" or "freed or resized" not in one.text:
                wrong.append(f"{name}, {side}: {one}")
    return wrong


def test_memory_that_is_gone_is_not_touched(backend_pools: Pools) -> None:
    assert backend_pools(2).run(on_backend, "fastcoll", shrunk) == [[], []]


def saved(rank: Rank, name: str) -> list[str]:
    """A tensor that autograd needs is written, in a first call and in a known one; or read."""
    call, writes, _ = VERBS[name]
    is_in_place = name.partition(",")[0] in ("all_reduce", "reduce", "broadcast")
    wrong = []
    for turn in range(KNOWN + 1):
        leaves = [one.requires_grad_() for one in tensors_of(name)]
        given, got = (leaf * 1 for leaf in leaves)
        losses = [(one * one).sum() for one in (given, got)]
        with torch.no_grad():
            call(given, got)
        read, written = (attempt(loss.backward) for loss in losses)
        if read.kind and not is_in_place:
            wrong.append(f"turn {turn}: what was read only: {read.text}")
        if (written.kind == "RuntimeError") != (writes in (-1, rank.rank)):
            wrong.append(f"turn {turn}: of what was written: {written}")
    return wrong


@pytest.mark.parametrize("name", VERBS)
def test_autograd_sees_what_is_written(backend_pools: Pools, name: str) -> None:
    assert backend_pools(2).run(on_backend, "fastcoll", saved, name) == [[], []]


def lazily_cloned(rank: Rank, name: str) -> list[str]:
    """Outputs that share their memory with another tensor until one of the two is written."""
    call, wrong = VERBS[name][0], []
    for turn in range(KNOWN + 1):
        given, original = tensors_of(name)
        call(given, torch._lazy_clone(original))
        if not bool((original == 1).all()):
            wrong.append(f"turn {turn}: {original.tolist()[:4]}")
    return wrong


@pytest.mark.parametrize("name", VERBS)
def test_what_a_lazy_clone_was_made_of_stays(backend_pools: Pools, name: str) -> None:
    assert backend_pools(2).run(on_backend, "fastcoll", lazily_cloned, name) == [[], []]


def in_inference_mode(rank: Rank) -> bool:
    with torch.inference_mode():
        for name, (call, *_) in VERBS.items():
            tensors = tensors_of(name)
            for _ in range(KNOWN):
                call(*tensors)
    return True


def test_tensors_of_inference_mode_are_taken(backend_pools: Pools) -> None:
    assert backend_pools(2).run(on_backend, "fastcoll", in_inference_mode) == [True, True]
