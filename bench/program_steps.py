# SPDX-License-Identifier: Apache-2.0
"""The ranks of bench/programs.py: other people's programs as tests/programs has them, with a clock.

Each function returns microseconds. `tests.programs.run` starts them, and passes words.
"""

import itertools
import json
import os
import time
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

SKIPPED = 10  # steps of a run before those that count
INPUTS, BATCH, WORLD = 8, 4, 2  # of trainers.samples


def model_of(hidden: int) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = (INPUTS, hidden, hidden, 1)
    first, second, last = (torch.nn.Linear(*pair) for pair in itertools.pairwise(sizes))
    return torch.nn.Sequential(first, torch.nn.ReLU(), second, torch.nn.ReLU(), last)


class Clock:
    """Notes when each step ends, and the backend that the program's group has by then."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.backend = ""

    def tick(self) -> None:
        """Note the end of a step."""
        if not self.backend:
            group: Any = dist.group.WORLD
            self.backend = type(group._get_backend(torch.device("cpu"))).__name__
        self.ends.append(time.perf_counter())

    def report(self, num_steps: int) -> tuple[str, list[float]]:
        """Return the backend's class, and the time of each step that counts."""
        assert len(self.ends) == num_steps, f"{len(self.ends)} steps, not {num_steps}"
        ends = self.ends[SKIPPED:]
        return self.backend, [1e6 * (b - a) for a, b in itertools.pairwise(ends)]


def train(name: str, hidden: str, num_steps: str) -> tuple[str, list[float]]:
    """Time the steps of a training of tests/programs/trainers.py, as its optimizer ends them."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from tests.programs import trainers

    clock, steps = Clock(), int(num_steps)
    trainers.STEPS = steps
    trainers.samples = partial(trainers.samples, WORLD * BATCH * steps)
    trainers.small_model = partial(model_of, int(hidden))
    register_optimizer_step_post_hook(lambda *_: clock.tick())
    getattr(trainers, name)("gloo")
    return clock.report(steps * (3 if name == "deepspeed" else 1))


def generate(num_tokens: str) -> tuple[str, list[float]]:
    """Time the tokens of transformers' Llama in tensor parallel."""
    from torch.nn.modules.module import register_module_forward_hook

    from tests.programs import trainers

    clock, trainers.STEPS = Clock(), int(num_tokens)

    def end(module: torch.nn.Module, *_: Any) -> None:
        if type(module).__name__ == "LlamaForCausalLM":
            clock.tick()

    register_module_forward_hook(end)
    trainers.tensor_parallel("gloo")
    return clock.report(len(clock.ends))


def ray_train(num_steps: str) -> tuple[str, list[float]]:
    """Time the steps of a training by Ray Train."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

    from tests.programs.actors import start
    from tests.programs.trainers import folder, samples, small_model

    said, steps = folder() / "steps", int(num_steps)

    def loop() -> None:
        clock, model = Clock(), prepare_model(small_model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data, rank = samples(WORLD * BATCH * steps), dist.get_rank()
        for step in range(steps):
            first = BATCH * (WORLD * step + rank)
            inputs, wanted = data[first : first + BATCH]
            torch.nn.functional.mse_loss(model(inputs), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.tick()
        if rank == 0:
            said.write_text(json.dumps(clock.report(steps)))

    start()
    TorchTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=WORLD, resources_per_worker={"CPU": 0.5}),
        torch_config=TorchConfig(backend="gloo"),
    ).fit()
    import ray

    ray.shutdown()
    found: tuple[str, list[float]] = json.loads(said.read_text())
    return found


def average(num_bytes: str, windows: str) -> dict[str, list[float]]:
    """Time an allreduce of torchft's groups, on Gloo and on fastcoll by turns."""
    from tests.programs.quorums import KINDS, RANK

    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    tensor = torch.zeros(int(num_bytes) // 4)
    groups = {name: kind(timeout=timedelta(seconds=60)) for name, kind in KINDS.items()}
    for name, group in groups.items():
        group.configure(f"{where}/{name}/0", f"replica {RANK}", RANK, WORLD, 0)
    found: dict[str, list[float]] = {name: [] for name in groups}
    for window in range(int(windows) + 1):
        for name, group in groups.items():
            times = []
            for _ in range(50):
                begin = time.perf_counter()
                group.allreduce([tensor], dist.ReduceOp.SUM).wait()
                times.append(1e6 * (time.perf_counter() - begin))
            if window > 0:  # the first one warms up
                found[name].append(median(times))
    for group in groups.values():
        group.shutdown()
    return found
