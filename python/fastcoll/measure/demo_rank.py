# SPDX-License-Identifier: Apache-2.0
"""A rank of the demo: `python -m fastcoll.measure.demo_rank CONFIG_JSON RANK`.

Trains when told to, in phases: gradients averaged by fastcoll, by Gloo, or alone on the whole
batch. Decides which time counts as communication. Knows nothing of checks or pictures.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

import fastcoll
from fastcoll.measure.protocol import Line, Reply, connect
from fastcoll.measure.training import Training, TrainingConfig, num_gradients

FASTCOLL, GLOO, ALONE = "fastcoll", "gloo", "one process"
# Seldom enough that drawing the progress takes nothing from the cores that are measured.
_PROGRESS_INTERVAL_S = 0.3


@dataclass(frozen=True)
class DemoConfig:
    """The settings of a rank, from its command line."""

    training: TrainingConfig
    socket_path: str
    store_path: str
    num_threads: int
    symmetric: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "DemoConfig":
        fields = json.loads(text)
        return DemoConfig(**(fields | {"training": TrainingConfig(**fields["training"])}))


@dataclass
class StepTimes:
    """Microseconds of each step of one rank.

    `communication` is the averaging call alone, entered together after a barrier; `waiting` is
    that barrier, where a rank that computed faster waits for the others; `compute` is all the rest.
    """

    communication: list[float]
    waiting: list[float]
    compute: list[float]


def _train(
    training: Training,
    rank: int,
    num_ranks: int,
    average: Callable[[torch.Tensor], object] | None,
    on_step: Callable[[int, float], None],
) -> tuple[list[float], StepTimes]:
    """Take all steps; `average` sums a buffer over the ranks, None trains alone."""
    losses: list[float] = []
    times = StepTimes([], [], [])
    for step in range(training.config.num_steps):
        begin = time.perf_counter()
        losses.append(training.backward(step, rank, num_ranks))
        ready = together = averaged = time.perf_counter()
        if average is not None:
            fastcoll.barrier()
            together = time.perf_counter()
            average(training.gradients)
            averaged = time.perf_counter()
            training.gradients.div_(num_ranks)
        training.optimizer.step()
        end = time.perf_counter()
        times.communication.append((averaged - together) * 1e6)
        times.waiting.append((together - ready) * 1e6)
        times.compute.append((ready - begin + end - averaged) * 1e6)
        on_step(step, losses[-1])
    return losses, times


class Rank:
    """One rank of the demo and the phases it is told to run."""

    def __init__(self, config: DemoConfig, rank: int, line: Line) -> None:
        self.config, self.rank, self.line = config, rank, line
        torch.set_num_threads(config.num_threads)
        world_size = config.training.world_size
        store = dist.FileStore(config.store_path, world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        fastcoll.init(dist.group.WORLD)

    def run(self, phase: str) -> Reply:
        """Run one phase and return its results."""
        config, training_config = self.config, self.config.training
        alone = phase == ALONE
        buffer = None
        if phase == FASTCOLL and config.symmetric:
            buffer = fastcoll.empty(num_gradients(training_config), dtype=torch.float32)
        training = Training(training_config, buffer)
        average = {FASTCOLL: fastcoll.all_reduce, GLOO: dist.all_reduce, ALONE: None}[phase]
        if average is not None:
            # The first call makes connections and touches memory; it is no step's cost.
            average(training.gradients.zero_())
        rank, num_ranks = (0, 1) if alone else (self.rank, training_config.world_size)
        losses, times = _train(training, rank, num_ranks, average, self._report)
        return {
            "losses": losses,
            **asdict(times),
            "fingerprint": training.fingerprint(),
            "accuracy": training.accuracy(),
        }

    def _report(self, step: int, loss: float) -> None:
        now = time.monotonic()
        if self.rank == 0 and now - self._last_report > _PROGRESS_INTERVAL_S:
            self._last_report = now
            self.line.send_reply({"step": step, "loss": loss})

    _last_report = 0.0


def main(arguments: list[str]) -> None:
    """Join the group and run phases until told to quit."""
    config, rank = DemoConfig.from_json(arguments[0]), int(arguments[1])
    line = connect(config.socket_path, rank)
    try:
        runner = Rank(config, rank, line)
        line.send_reply({"version": fastcoll.__version__})
        while (command := line.receive()) not in ("", "quit"):
            line.send_reply(runner.run(command))
    except Exception as error:
        line.send_reply({"error": f"{type(error).__name__}: {error}"[:500]})
        raise
    fastcoll.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
