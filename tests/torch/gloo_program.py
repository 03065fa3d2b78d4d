# SPDX-License-Identifier: Apache-2.0
"""A program for Gloo that knows nothing of fastcoll: test_stand_in.py runs it on either.

    python tests/torch/gloo_program.py FOLDER [VALUE...]

Forks two ranks, for each value of FASTCOLL_TORCH_BACKEND anew. Each rank writes to
FOLDER/VALUE-RANK.pt what every part returned.
"""

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

CPU = torch.device("cpu")
SOON = timedelta(seconds=100)  # for a loaded machine; nothing here waits as long


def kind_of(group: Any) -> str:
    return type(group._get_backend(CPU)).__name__


def names(me: int) -> list[Any]:
    """Return what torch and a program are told of the groups."""
    world: Any = dist.group.WORLD
    part = dist.new_group([0], timeout=SOON)
    told: list[Any] = [dist.get_backend(), dist.get_backend_config()]
    for group in (world, part)[: 2 - me]:
        options = group._get_backend(CPU).options
        told += [options._timeout, options.backend, options.global_ranks_in_group]
        told += [options.group_name]
    told += sorted(device.type for device in world._device_types)
    if me == 0:
        told += [dist.get_backend(part), dist.get_backend_config(part)]
        dist.destroy_process_group(part)
    return told


def steps(model: nn.Module, me: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + me)
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def ddp(me: int) -> list[Any]:
    model = nn.parallel.DistributedDataParallel(network())
    losses = steps(model, me)
    logged = model._get_ddp_logging_data()["backend_name"]
    return [losses, [p.detach() for p in model.parameters()], logged]


def fsdp(me: int) -> list[Any]:
    model = network()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    losses = steps(model, me)
    return [losses, [p.full_tensor().detach() for p in model.parameters()]]  # type: ignore[attr-defined]


def dtensor(me: int) -> list[Any]:
    del me
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(torch.arange(24.0).reshape(4, 6), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    summed = (columns @ distribute_tensor(torch.ones(6, 3), mesh, [Shard(0)])).redistribute(
        mesh, [Replicate()]
    )
    part = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    return [columns.to_local(), summed.to_local(), part.full_tensor()]


def objects(me: int) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {"rank": me})
    one = [("from", me)]
    dist.broadcast_object_list(one, src=1)
    got: list[Any] = [None]
    dist.scatter_object_list(got, ["a", "b"] if me == 0 else None, src=0)
    return [every, one, got]


def transfers(me: int) -> list[Any]:
    got = torch.zeros(5)
    ops = [
        dist.P2POp(dist.isend, torch.full((5,), me + 1.0), 1 - me),
        dist.P2POp(dist.irecv, got, 1 - me),
    ]
    sent, received = dist.batch_isend_irecv(ops)  # a Work for each
    received.wait()
    sent.wait()
    return [got]


def settings(me: int) -> list[Any]:
    """Barriers that name who is missing, limits, and the ends of groups."""
    dist.monitored_barrier(timeout=SOON)
    group: Any = dist.new_group(timeout=SOON)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=90), group)
    dist.barrier(group)
    tensor = torch.tensor([me + 1])
    dist.all_reduce(tensor, group=group)
    found = [tensor, dist.get_group_rank(group, 1), dist.get_process_group_ranks(group)]
    dist.barrier(group)
    dist.destroy_process_group(group)
    last = dist.new_group()
    dist.barrier(last)
    dist.distributed_c10d._abort_process_group(last)
    return found


def mixed(me: int) -> list[Any]:
    """A group of two backends; torch's fake one, which needs no GPU, lets no other stand in."""
    import torch.testing._internal.distributed.fake_pg

    both: Any = dist.new_group(backend="cpu:gloo,cuda:fake")
    tensor = torch.tensor([me + 1.0])
    dist.all_reduce(tensor, group=both)
    other = type(both._get_backend(torch.device("cuda"))).__name__
    return [tensor, dist.get_backend(both), dist.get_backend_config(both), other]


PARTS: tuple[Callable[[int], list[Any]], ...] = (
    names,
    ddp,
    fsdp,
    dtensor,
    objects,
    transfers,
    settings,
    mixed,
)


def run_rank(me: int, folder: str, value: str) -> None:
    os.environ["FASTCOLL_TORCH_BACKEND"] = value
    torch.set_num_threads(1)
    started_with = [name for name in sys.modules if name.split(".")[0] == "fastcoll"]
    meeting = f"file://{folder}/{value}-store"
    dist.init_process_group("gloo", meeting, timeout=SOON, rank=me, world_size=2)
    found: dict[str, Any] = {part.__name__: part(me) for part in PARTS}
    found["kinds"] = [kind_of(dist.group.WORLD), kind_of(dist.new_group())]
    found["kinds"].append(kind_of(dist.new_group(backend="cpu:gloo,cuda:fake")))
    dist.barrier()
    dist.destroy_process_group()
    found["imported"] = [started_with, "fastcoll" in sys.modules]
    torch.save(found, os.path.join(folder, f"{value}-{me}.pt"))


def main(folder: str, *values: str) -> int:
    failed = 0
    for value in values or ("auto",):
        pids = []
        for me in range(2):
            if (pid := os.fork()) == 0:
                try:
                    run_rank(me, folder, value)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
                os._exit(0)
            pids.append(pid)
        failed += sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
