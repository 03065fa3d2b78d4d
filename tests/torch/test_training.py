# SPDX-License-Identifier: Apache-2.0
"""Programs of torch.distributed train on the backend "fastcoll" as on Gloo, bit by bit.

Wherever two ranks are summed, their sum has one order on every backend, so losses and parameters
must have Gloo's bits. Programs of four ranks use a mesh of two by two for that reason. Sums of
three differ: fastcoll adds in the order of the ranks, Gloo in that of its ring.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

import fastcoll
from fastcoll.integrations.torch_group import FastcollProcessGroup
from tests.support.backends import Program, no_caches, on_backend, same
from tests.support.harness import Attempt, Rank, attempt
from tests.support.training import (
    STEPS,
    accumulated,
    batches,
    check_training,
    data_parallel,
    fully_sharded,
    fully_sharded_1,
    hybrid_sharded,
    mesh_of,
    network,
    pipelined,
    shard,
    sharded_and_cut,
    tensor_parallel,
    train,
    whole,
    with_our_hook,
    with_our_objects,
    with_views,
    zero_redundancy,
)

TWO = [data_parallel, with_views, with_our_hook, accumulated, fully_sharded_1, fully_sharded]
TWO += [with_our_objects, zero_redundancy, tensor_parallel, pipelined]
FOUR = [hybrid_sharded, sharded_and_cut]


@pytest.mark.long
@pytest.mark.parametrize("program", TWO)
def test_two_ranks_train_as_on_gloo(bare_pools: Any, program: Program) -> None:
    ours = check_training(bare_pools, program, 2)
    assert same(ours, bare_pools(2).run(on_backend, "gloo", program))


@pytest.mark.slow
@pytest.mark.parametrize("program", FOUR)
def test_four_ranks_train_as_on_gloo(bare_pools: Any, program: Program) -> None:
    ours = check_training(bare_pools, program, 4)
    assert same(ours, bare_pools(4).run(on_backend, "gloo", program))


@pytest.mark.slow
def test_three_ranks_train_as_one_process(bare_pools: Any) -> None:
    rows = check_training(bare_pools, fully_sharded, 3)
    assert same(rows[0][1], rows[1][1])


def with_a_wrong_gradient(rank: Rank) -> Any:
    """One number of rank 1's first bucket is a little too large, in every step."""
    right = FastcollProcessGroup.allreduce

    def wrong(group: Any, tensors: Any, opts: Any = None) -> Any:
        if rank.rank == 1:
            tensors[0].view(-1)[0] *= 1 + 1e-9
        return right(group, tensors, opts)

    with mock.patch.object(FastcollProcessGroup, "allreduce", wrong):
        return data_parallel(rank)


def test_a_wrong_gradient_is_seen(bare_pools: Any) -> None:
    ours = bare_pools(2).run(on_backend, "fastcoll", with_a_wrong_gradient)
    assert not same(ours, bare_pools(2).run(on_backend, "gloo", data_parallel))


OURS = {
    "ddp.all_reduce": (with_our_hook, data_parallel),
    "fsdp.all_gather_into_tensor": (with_our_objects, fully_sharded),
    "fsdp.reduce_scatter_tensor": (with_our_objects, fully_sharded),
}


def with_counted_calls(rank: Rank, function: str, program: Program) -> Any:
    """Run a program, and see that it calls this function of ours."""
    from fastcoll.integrations import ddp, fsdp

    module, name = function.split(".")
    place = {"ddp": ddp, "fsdp": fsdp}[module]
    with mock.patch.object(place, name, wraps=getattr(place, name)) as counted:
        result = program(rank)
    assert counted.call_count >= STEPS
    return result


@pytest.mark.parametrize("function", OURS)
def test_groups_of_gloo_train_the_same_with_our_calls(bare_pools: Any, function: str) -> None:
    program, plain = OURS[function]
    ours = bare_pools(2).run(on_backend, "gloo", with_counted_calls, function, program)
    assert same(ours, bare_pools(2).run(on_backend, "gloo", plain))


def mixed_precision(rank: Rank, divide_by: float | None = None) -> Any:
    """FSDP2 in bfloat16; its gradients are averaged in float32, where float64 takes a sum."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    from fastcoll.integrations.fsdp import use_fastcoll

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(network().float(), mesh=mesh_of(rank.world_size), mp_policy=policy)
    if divide_by is not None:
        assert isinstance(model, FSDPModule)
        use_fastcoll(model)
        model.set_gradient_divide_factor(divide_by)
    return train(model, rank.rank, rank.world_size), whole(model)


def test_mixed_precision_trains_as_on_gloo(bare_pools: Any) -> None:
    ours = bare_pools(2).run(on_backend, "fastcoll", mixed_precision)
    assert same(ours, bare_pools(2).run(on_backend, "gloo", mixed_precision))


def test_a_factor_for_gradients_is_taken(bare_pools: Any) -> None:
    """FSDP2 reduces with torch's PREMUL_SUM then; Gloo has none."""
    mean = bare_pools(2).run(on_backend, "fastcoll", mixed_precision)
    assert same(mean, bare_pools(2).run(on_backend, "fastcoll", mixed_precision, 2.0))
    assert not same(mean, bare_pools(2).run(on_backend, "fastcoll", mixed_precision, 3.0))


# ---- errors --------------------------------------------------------------------------------------


def stays_away(rank: Rank) -> list[Attempt]:
    """Rank 1 has no backward; DDP makes a RuntimeError of what our hook raises, with its text."""
    comm = fastcoll.init(dist.group.WORLD)
    comm.set_timeout(1.5)
    model = nn.parallel.DistributedDataParallel(network())
    model.register_comm_hook(comm, fastcoll.ddp_hook)
    loss = model(batches()[0][0]).sum()
    attempts = []
    if rank.rank == 0:
        attempts = [attempt(loss.backward), attempt(comm.barrier)]
    dist.barrier()  # Gloo's: nobody leaves before
    return attempts


def test_an_error_in_the_hook_is_told(bare_pools: Any) -> None:
    [[first, then], _] = bare_pools(2).run(on_backend, "gloo", stays_away)
    assert "CollectiveTimeout: all_reduce(AVG" in first.text
    assert "for rank 1" in first.text
    assert then.kind == "CollectiveTimeout"


# ---- what is no training -------------------------------------------------------------------------


def uneven_inputs(rank: Rank) -> float:
    """DDP's join: rank 1 has a batch more."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    with model.join():
        for _ in range(2 + (rank.rank == 1)):
            model(torch.ones(3, 2)).sum().backward()
    return model.module.weight.grad.sum().item()  # type: ignore[union-attr, return-value]


def checkpoint(rank: Rank, directory: str) -> bool:
    """A model of FSDP2 and its optimizer's state, saved by shards, loaded cut in another way."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = mesh_of(rank.world_size)
    plain = torch.arange(12.0).view(6, 2)
    state = {"weight": distribute_tensor(plain, mesh, [Shard(0)])}
    model = shard(network(), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, rank.rank, rank.world_size, optimizer)
    state["model"], state["optimizer"] = get_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=directory)

    other = shard(network(), mesh)
    fresh = torch.optim.Adam(other.parameters(), lr=0.01)
    loaded = {"weight": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(1)])}
    loaded["model"], loaded["optimizer"] = get_state_dict(other, fresh)
    dcp.load(loaded, checkpoint_id=directory)
    set_state_dict(
        other,
        fresh,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    again = [
        train(one, rank.rank, rank.world_size, by)
        for one, by in ((model, optimizer), (other, fresh))
    ]
    return torch.equal(loaded["weight"].full_tensor(), plain) and again[0] == again[1]


def test_join_and_checkpoint(bare_pools: Any, tmp_path: Path) -> None:
    rows = bare_pools(2).run(on_backend, "fastcoll", uneven_inputs)
    assert rows == bare_pools(2).run(on_backend, "gloo", uneven_inputs)
    assert all(bare_pools(2).run(on_backend, "fastcoll", checkpoint, str(tmp_path / "dcp")))


def redistributed(rank: Rank) -> list[torch.Tensor]:
    """A tensor of torch's DTensor, from each layout on a mesh to each other."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = mesh_of(rank.world_size)
    plain, results = torch.arange(30.0).view(6, 5), []
    layouts = [Shard(0), Shard(1), Replicate()]  # five columns: parts of unequal size
    sources = [distribute_tensor(plain, mesh, [layout]) for layout in layouts]
    sources.append(DTensor.from_local(plain * (rank.rank + 1), mesh, [Partial()]))
    for source in sources:
        for layout in layouts:
            moved = source.redistribute(mesh, [layout])
            results += [moved.to_local().clone(), moved.full_tensor()]
    return results


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_tensors_are_laid_out_as_on_gloo(bare_pools: Any, world: int) -> None:
    ours = bare_pools(world).run(on_backend, "fastcoll", redistributed)
    assert same(ours, bare_pools(world).run(on_backend, "gloo", redistributed))
    plain, total = torch.arange(30.0).view(6, 5), sum(range(world + 1))
    wanted = [plain] * 9 + [plain * total] * 3
    assert all(same(results[1::2], wanted) for results in ours)


def compiled(rank: Rank, compiler: str) -> list[Any]:
    """Functional collectives, and calls in place that the compiler makes functional."""

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        total = funcol.all_reduce(x * 2, "sum", dist.group.WORLD)
        whole = funcol.all_gather_tensor(total + rank.rank, 0, dist.group.WORLD)
        part = funcol.reduce_scatter_tensor(whole * x.sum(), "sum", 0, dist.group.WORLD)
        in_place = x + rank.rank
        dist.all_reduce(in_place)
        return [whole.clone(), part.clone(), in_place]  # plain tensors, outside a graph too

    x = torch.arange(3.0) + rank.rank
    run = torch.compile(step, backend=compiler, fullgraph=True)
    with no_caches(compiler):
        return [run(x), run(x + 1), step(x), step(x + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_functional_collectives_compile(bare_pools: Any, compiler: str) -> None:
    rows = bare_pools(2).run(on_backend, "fastcoll", compiled, compiler, deadline_s=200)
    for graph, graph_again, plain, plain_again in rows:
        assert same([graph, graph_again], [plain, plain_again])
    assert same(
        [row[2:] for row in rows],
        [row[2:] for row in bare_pools(2).run(on_backend, "gloo", compiled, "eager")],
    )
