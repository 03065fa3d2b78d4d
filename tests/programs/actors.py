# SPDX-License-Identifier: Apache-2.0
"""Programs of Ray: actors that call `ray.util.collective`, and Ray Train."""

import json
import os
import time
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.util import collective
from ray.util.collective.types import ReduceOp

from fastcoll.integrations import ray_collective

WORLD = 2


def start(**runtime: Any) -> None:
    environment = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}, **runtime}
    ray.init(num_cpus=WORLD, include_dashboard=False, log_to_driver=False, runtime_env=environment)


@ray.remote(num_cpus=0.5)
class Worker:
    def __init__(self, rank: int) -> None:
        ray_collective.register()
        ray_collective.register()  # a second time does nothing
        self.rank = rank

    def join(self, backend: str, name: str) -> None:
        collective.init_collective_group(WORLD, self.rank, backend, name)

    def use(self, name: str) -> dict[str, list[float]]:
        """The result of each call, on NumPy arrays and tensors."""
        me, peer = self.rank, 1 - self.rank
        mine = np.full(3, me + 1.0, np.float32)
        found: dict[str, Any] = {
            call: mine.copy() for call in ("sum", "max", "reduce", "broadcast")
        }
        collective.allreduce(found["sum"], name)
        collective.allreduce(found["max"], name, op=ReduceOp.MAX)
        collective.reduce(found["reduce"], 1, name)
        collective.broadcast(found["broadcast"], 1, name)
        parts = [torch.zeros(3) for _ in range(WORLD)]
        collective.allgather(parts, torch.from_numpy(mine), name)
        found["gathered"] = torch.cat(parts)
        found["scattered"] = torch.zeros(3)
        collective.reducescatter(
            found["scattered"], [torch.ones(3) * part for part in (1, 2)], name
        )
        found["received"] = torch.zeros(3)
        if me == 0:
            collective.send(torch.from_numpy(mine), peer, name)
            collective.recv(found["received"], peer, name)
        else:
            collective.recv(found["received"], peer, name)
            collective.send(torch.from_numpy(mine), peer, name)
        collective.barrier(name)
        assert collective.get_rank(name) == me
        assert collective.get_collective_group_size(name) == WORLD
        return {call: np.asarray(value).tolist() for call, value in found.items()}

    def leave(self, name: str) -> None:
        collective.destroy_collective_group(name)

    def time_allreduce(self, name: str, num_bytes: int, calls: int) -> float:
        """The median of an allreduce, in microseconds."""
        array = np.zeros(num_bytes // 4, np.float32)
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            collective.allreduce(array, name)
            times.append(time.perf_counter() - start)
        return float(np.median(times)) * 1e6


def collectives() -> Any:
    """Two actors' results in a group that they make, leave, and make again."""
    start()
    workers = [Worker.remote(rank) for rank in range(WORLD)]
    found = []
    for _ in range(2):
        ray.get([worker.join.remote("fastcoll", "ours") for worker in workers])
        found.append(ray.get([worker.use.remote("ours") for worker in workers]))
        ray.get([worker.leave.remote("ours") for worker in workers])
    ray_collective.register()
    collective.create_collective_group(workers, WORLD, [0, 1], "fastcoll", "declared")
    found.append(ray.get([worker.use.remote("declared") for worker in workers]))
    ray.shutdown()
    return found


def timed(num_bytes: str = "8", rounds: str = "3") -> Any:
    """Medians of an allreduce on Gloo and on fastcoll, by turns."""
    start()
    workers = [Worker.remote(rank) for rank in range(WORLD)]
    for backend in ("gloo", "fastcoll"):
        ray.get([worker.join.remote(backend, backend) for worker in workers])
    found: dict[str, list[float]] = {"gloo": [], "fastcoll": []}
    for _ in range(int(rounds)):
        for name, medians in found.items():
            calls = [worker.time_allreduce.remote(name, int(num_bytes), 300) for worker in workers]
            medians.append(round(ray.get(calls)[0], 1))
    ray.shutdown()
    return found


def train() -> Any:
    """Ray Train, whose workers find the backend by its name."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

    from tests.programs.trainers import digest, folder, samples, small_model

    said = folder() / "rank 0"

    def loop() -> None:
        assert dist.get_backend() == "fastcoll"
        model = prepare_model(small_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data, rank = samples(), dist.get_rank()
        for step in range(3):
            first = 8 * step + 4 * rank
            inputs, wanted = data[first : first + 4]
            torch.nn.functional.mse_loss(model(inputs), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
        seen: list[Any] = [None] * WORLD
        dist.all_gather_object(seen, digest(model.parameters()))
        if rank == 0:
            said.write_text(json.dumps({"same": len(set(seen)) == 1, "ranks": len(seen)}))

    start(worker_process_setup_hook="fastcoll.integrations.torch_backend.register")
    TorchTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=WORLD, resources_per_worker={"CPU": 0.5}),
        torch_config=TorchConfig(backend="fastcoll"),
    ).fit()
    ray.shutdown()
    return json.loads(said.read_text())
