# SPDX-License-Identifier: Apache-2.0
"""Training when a rank dies or is late in a backward pass, and what torch's C++ reads of it."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.nn.parallel import DistributedDataParallel

import fastcoll
from tests.support.backends import BACKENDS, on_backend, same
from tests.support.harness import DEADLINE_S, LATE_S, Attempt, Pool, Rank, Setup, attempt

Pools = Callable[[int], Pool]
ODD = 1
LIMIT_S = 1.0
NUM_STEPS = 2  # after the first one DDP makes its buckets anew; then no call is new

HOOKS: dict[str, Callable[[DistributedDataParallel, Any], None]] = {
    "none": lambda model, group: None,
    "of fastcoll": lambda model, group: model.register_comm_hook(group, fastcoll.ddp_hook),
    "of Python": lambda model, group: model.register_comm_hook(group, hooks.allreduce_hook),
    "FP16 of Python": lambda model, group: model.register_comm_hook(
        group, hooks.fp16_compress_hook
    ),
    "of C++": lambda model, group: model._register_builtin_comm_hook(
        dist.BuiltinCommHookType.ALLREDUCE
    ),
    "FP16 of C++": lambda model, group: model._register_builtin_comm_hook(
        dist.BuiltinCommHookType.FP16_COMPRESS
    ),
}


def backward(model: nn.Module, scale: float = 1.0) -> None:
    model(torch.full((3, 50), scale)).sum().backward()


def make_model(hook: str, group: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 2))
    model = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.005)
    HOOKS[hook](model, group)
    return model


def leave_alone(rank: Rank, how: str, num_steps: int) -> dict[str, Attempt]:
    """Rank 1 dies, or does not come, where the others wait in C++ of torch's."""
    group_of = {name: dist.new_group() for name in (*HOOKS, "funcol", "broadcast")}
    models = {hook: make_model(hook, group_of[hook]) for hook in HOOKS}
    for model in models.values():
        for _ in range(num_steps):
            backward(model)
    dist.barrier()
    if rank.rank == ODD:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        rank.wait_for(f"left alone after {num_steps} steps")
        return {}
    for group in group_of.values():
        group.set_timeout(timedelta(seconds=LIMIT_S if how == "is late" else DEADLINE_S))
    seen = {hook: attempt(backward, model) for hook, model in models.items()}
    tensor = torch.ones(4)
    for name, call in {
        "funcol": lambda group: funcol.all_reduce(tensor, "sum", group) + 1,
        "broadcast": lambda group: dist._broadcast_coalesced(group, [tensor], 1 << 20, ODD),
    }.items():
        seen[name] = attempt(call, group_of[name])
    meet_survivors(rank)
    if rank.rank == 0:
        rank.tell(f"left alone after {num_steps} steps")
    return seen


def meet_survivors(rank: Rank) -> None:
    """Wait until all ranks but the odd one are here."""
    if rank.store.add("survivors", 1) % (rank.world_size - 1) == 0:
        rank.store.set("all survivors", "")
    rank.wait_for("all survivors")


def check(seen: dict[str, Attempt], kind: str) -> None:
    assert len(seen) == len(HOOKS) + 2
    for name, one in seen.items():
        # Torch makes a RuntimeError of what its C++ finds in Python's futures.
        assert one.kind == kind or (one.kind == "RuntimeError" and f"{kind}: " in one.text), (
            name,
            one,
        )
        assert f"rank {ODD}" in one.text, (name, one)
        assert one.seconds < LATE_S, (name, one)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_steps", [0, NUM_STEPS])
@pytest.mark.slow  # the first import of DDP
def test_a_rank_that_dies_in_a_backward_pass(
    fresh_pool: Callable[..., Pool], backend: str, num_steps: int
) -> None:
    pool = fresh_pool(3, Setup(init=False, env={"FASTCOLL_TORCH_BACKEND": backend}))
    outcomes = pool.outcomes(on_backend, "fastcoll", leave_alone, "dies", num_steps)
    assert outcomes[ODD].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        check(outcomes[rank].value, "PeerLostError")


@pytest.mark.parametrize("num_steps", [0, NUM_STEPS])
@pytest.mark.slow  # each model waits for its limit
def test_a_rank_that_is_late_in_a_backward_pass(backend_pools: Pools, num_steps: int) -> None:
    rows = backend_pools(3).run(on_backend, "fastcoll", leave_alone, "is late", num_steps)
    for rank in (0, 2):
        check(rows[rank], "CollectiveTimeout")


def gradients(rank: Rank) -> tuple[list[str], list[torch.Tensor]]:
    """Return each hook's name in the log of DDP, and the gradients from the first step on."""
    names: list[str] = []
    found = []
    for hook in HOOKS:
        model = make_model(hook, dist.group.WORLD)
        for turn in range(3):
            model.zero_grad()
            backward(model, rank.rank + turn + 0.1)
            found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
        names.append(str(model._get_ddp_logging_data().get("comm_hook")))
    return names, found


@pytest.mark.slow  # the first import of DDP
def test_every_hook_of_ddp_does_as_on_gloo(backend_pools: Pools) -> None:
    ours = backend_pools(2).run(on_backend, "fastcoll", gradients)
    gloos = backend_pools(2).run(on_backend, "gloo", gradients)
    assert [names for names, _ in ours] == [names for names, _ in gloos]
    assert "BuiltinCommHookType.FP16_COMPRESS" in ours[0][0]
    assert len(ours[0][1]) == len(HOOKS) * 3 * 4
    assert same([found for _, found in ours], [found for _, found in gloos])


ODD_MODELS: dict[str, tuple[Callable[[bool], nn.Module], str]] = {
    "shape": (lambda odd: nn.Linear(4, 2 + odd), "sizes [3, 4]"),
    "order": (lambda odd: nn.Linear(3 if odd else 4, 4 if odd else 3, bias=False), "sizes [4, 3]"),
    "count": (lambda odd: nn.Linear(4, 2, bias=not odd), "inconsistent 1 params"),
    "dtype": (
        lambda odd: nn.Linear(4, 2).to(torch.float64 if odd else torch.float32),
        "params[0] is of torch.float64 on rank 1, and of torch.float32 on rank 0",
    ),
}


def make_differing_models(rank: Rank) -> tuple[dict[str, Attempt], float]:
    """Wrap models that differ on rank 1; then use the group."""
    seen = {
        name: attempt(DistributedDataParallel, make(rank.rank == ODD))
        for name, (make, _) in ODD_MODELS.items()
    }
    ranks = torch.tensor(float(rank.rank))
    dist.all_reduce(ranks)
    return seen, ranks.item()


def check_differing_models(rows: list[tuple[dict[str, Attempt], float]]) -> None:
    for seen, total in rows:
        for name, (_, part) in ODD_MODELS.items():
            assert seen[name].kind == "DesyncError", (name, seen[name])
            assert part in seen[name].text
            assert seen[name].text == rows[0][0][name].text, "the same on all ranks"
        assert total == sum(range(len(rows))), "the group can still be used"


@pytest.mark.slow  # the first import of DDP
def test_models_that_differ_are_an_error_on_all_ranks(backend_pools: Pools) -> None:
    check_differing_models(backend_pools(3).run(on_backend, "fastcoll", make_differing_models))


@pytest.mark.slow  # the first import of DDP
def test_models_that_differ_between_nodes(fresh_pool: Callable[..., Pool]) -> None:
    pool = fresh_pool(3, Setup(init=False, nodes="aab"))
    check_differing_models(pool.run(on_backend, "fastcoll", make_differing_models))
