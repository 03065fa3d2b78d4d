# SPDX-License-Identifier: Apache-2.0
"""Programs that train a small model on torch.distributed, in any process group.

Each returns its rank's losses and the parameters in the end. Wherever two ranks are summed, their
sum has one order on every backend, so both must have the bits of another backend.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.backends import Program, on_backend
from tests.support.harness import Rank

WIDTH, BATCH, STEPS = 16, 24, 4


def network() -> nn.Sequential:
    torch.manual_seed(7)
    layers = [nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)]
    return nn.Sequential(*layers).double()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(11)
    inputs = torch.randn(STEPS, BATCH, WIDTH, dtype=torch.float64)
    return [(x, x.sin().sum(1, keepdim=True)) for x in inputs]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def train(
    model: nn.Module, rank: int = 0, world: int = 1, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    """Return the losses of a rank's share of each batch."""
    optimizer, losses = optimizer or sgd(model.parameters()), []
    for inputs, targets in batches():
        share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        # In one type, which torch 2.11 asks for where a model computes in another one.
        loss = nn.functional.mse_loss(model(inputs[share]).to(targets.dtype), targets[share])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> list[torch.Tensor]:
    """Return all parameters of a model that may be cut over the ranks."""
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [parameter.detach().clone() for parameter in found]


def mesh_of(*sizes: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])


# ---- programs ------------------------------------------------------------------------------------


def data_parallel(rank: Rank, hook: bool = False, **options: Any) -> Any:
    import fastcoll

    model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.002, **options)
    if hook:
        model.register_comm_hook(None, fastcoll.ddp_hook)
    losses = train(model, rank.rank, rank.world_size)
    return losses, whole(model)


def with_views(rank: Rank) -> Any:
    return data_parallel(rank, gradient_as_bucket_view=True, static_graph=True)


def with_our_hook(rank: Rank) -> Any:
    return data_parallel(rank, hook=True)


def accumulated(rank: Rank) -> Any:
    """Train DDP that reduces every second half batch only, so that the steps are the same."""
    model = nn.parallel.DistributedDataParallel(network())
    optimizer, losses = sgd(model.parameters()), []
    for inputs, targets in batches():
        mine = [half.chunk(2) for half in (inputs.chunk(2)[rank.rank], targets.chunk(2)[rank.rank])]
        optimizer.zero_grad()
        with model.no_sync():
            first = nn.functional.mse_loss(model(mine[0][0]), mine[1][0]) / 2
            first.backward()
        second = nn.functional.mse_loss(model(mine[0][1]), mine[1][1]) / 2
        second.backward()
        optimizer.step()
        losses.append((first + second).item())
    return losses, whole(model)


def fully_sharded_1(rank: Rank) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    model = Fsdp(network(), device_id=torch.device("cpu"), use_orig_params=True)
    losses = train(model, rank.rank, rank.world_size)
    with Fsdp.summon_full_params(model):
        return losses, whole(model)


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fully_sharded(rank: Rank) -> Any:
    model = shard(network(), mesh_of(rank.world_size))
    losses = train(model, rank.rank, rank.world_size)
    return losses, whole(model)


def with_our_objects(rank: Rank) -> Any:
    from fastcoll.integrations.fsdp import use_fastcoll

    model = shard(network(), mesh_of(rank.world_size))
    use_fastcoll(model)
    losses = train(model, rank.rank, rank.world_size)
    return losses, whole(model)


def zero_redundancy(rank: Rank) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    return train(model, rank.rank, rank.world_size, optimizer), whole(model)


def cut_by_tensor(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def tensor_parallel(rank: Rank) -> Any:
    """Train two linear layers cut over the ranks; every rank sees the whole batch."""
    model = cut_by_tensor(network(), mesh_of(rank.world_size))
    return train(model), whole(model)


def pipelined(rank: Rank) -> Any:
    """Train two stages with four micro-batches, forward and backward interleaved (1F1B)."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = network()
    part = model[:2] if rank.rank == 0 else model[2:]
    stage = PipelineStage(part, rank.rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer, losses = sgd(part.parameters()), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        parts: list[torch.Tensor] = []
        if rank.rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=parts)
        optimizer.step()
        mean = torch.stack(parts).mean() if parts else torch.zeros((), dtype=torch.float64)
        dist.broadcast(mean, 1)
        losses.append(mean.item())
    # Every rank returns all parameters, for the comparison.
    for index, layer in enumerate(model):
        for parameter in layer.parameters():
            dist.broadcast(parameter.data, 0 if index < 2 else 1)
    return losses, whole(model)


def hybrid_sharded(rank: Rank) -> Any:
    """Train HSDP: sharded over two, replicated over two."""
    model = shard(network(), mesh_of(2, 2))
    losses = train(model, rank.rank, rank.world_size)
    return losses, whole(model)


def sharded_and_cut(rank: Rank) -> Any:
    """Train on a mesh of two dimensions: FSDP2 over one, tensor parallelism over the other."""
    mesh = mesh_of(2, 2)
    model = shard(cut_by_tensor(network(), mesh["inner"]), mesh["outer"])
    return train(model, mesh.get_local_rank("outer"), 2), whole(model)


def assert_as_one_process(rows: Any) -> None:
    """Compare the ranks' losses and final parameters with those of one process."""
    alone = network()
    losses = train(alone)
    for row, parameters in rows:
        assert len(row) == STEPS
        for one, other in zip(parameters, alone.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.tensor([row for row, _ in rows]).mean(0), torch.tensor(losses))
    assert losses[-1] != losses[0]


def check_training(bare_pools: Any, program: Program, world: int) -> Any:
    """Check training on fastcoll against one process; return the results."""
    ours = bare_pools(world).run(on_backend, "fastcoll", program)
    assert_as_one_process(ours)
    return ours
