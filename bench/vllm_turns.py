# SPDX-License-Identifier: Apache-2.0
"""Compares fastcoll with vLLM's own shared memory by turns within one engine of vLLM.

    python bench/vllm_turns.py [--turn 36] [--tokens 500] [--repeats 3]

Two starts of one engine differ by up to 1.9 times, which hides small effects (`vllm_tokens.py`).
Here each worker has both communicators, and changes between them after `--turn` all_reduces. That
is four decode steps, as the model has nine all_reduces. Both go through one operator of this file.
So the gain by fastcoll's own operator in a compiled model is not seen. Prints, for each batch and
library, the milliseconds of a turn and of its calls: all_reduces, and all_gathers of logits. Needs
vLLM: tests/programs/vllm.txt. Two minutes. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm_engine import Batch, Engine, Model, run

from fastcoll.integrations.vllm_communicator import FastcollCommunicator

MODEL = Model(hidden=256, layers=4)
LIBRARIES = ("vllm", "fastcoll")
SIZES = (1, 4, 16, 64)
TURN, FOLDER = "VLLM_TURN", "VLLM_TURN_FOLDER"  # from main to the workers


class Turn(NamedTuple):
    """One turn: of which library and size, its duration, and the time in its calls."""

    library: str
    numel: int
    took_s: float
    inside_s: float


class ByTurns(CpuCommunicator):  # type: ignore[misc]
    """Has the communicators of both libraries; all ranks change at the same call."""

    def __init__(
        self,
        cpu_group: Any,
        device: Any = None,
        device_group: Any = None,
        unique_name: str = "",
        use_all2all: bool = False,
    ) -> None:
        place = (cpu_group, device, device_group, unique_name, use_all2all)
        super().__init__(*place)
        self._takes_turns = unique_name.startswith("tp") and self.world_size > 1
        if not self._takes_turns:
            return
        self._fastcoll = FastcollCommunicator(*place)
        self._calls, self._library, self._turns = 0, 0, [Turn("", 0, 0, 0)]
        self._start_s, self._inside_s = time.perf_counter(), 0.0
        _taking_turns.append(self)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if not self._takes_turns:
            return super().all_reduce(input_)  # type: ignore[no-any-return]
        torch.ops.fastcoll_bench.all_reduce_by_turns(input_)
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if not self._takes_turns:
            return super().all_gather(input_, dim)  # type: ignore[no-any-return]
        start_s = time.perf_counter()
        if self._library == 1:
            output = self._fastcoll.all_gather(input_, dim)
        else:
            output = super().all_gather(input_, dim)
        self._inside_s += time.perf_counter() - start_s
        return output  # type: ignore[no-any-return]

    def all_reduce_now(self, tensor: torch.Tensor) -> None:
        length = int(os.environ[TURN])
        if self._calls and self._calls % length == 0:
            self._end_turn(tensor.numel())
        self._calls += 1
        start_s = time.perf_counter()
        if self._library == 1:
            self._fastcoll.all_reduce(tensor)
        else:
            super().all_reduce(tensor)
        self._inside_s += time.perf_counter() - start_s

    def _end_turn(self, numel: int) -> None:
        end_s = time.perf_counter()
        self._turns.append(
            Turn(LIBRARIES[self._library], numel, end_s - self._start_s, self._inside_s)
        )
        self._start_s, self._inside_s = end_s, 0.0
        self._library = 1 - self._library
        if self.rank_in_group == 0 and len(self._turns) % 20 == 0:  # the engine kills its workers
            Path(os.environ[FOLDER], "turns.json").write_text(json.dumps(self._turns))


_taking_turns: list[ByTurns] = []


@torch.library.custom_op("fastcoll_bench::all_reduce_by_turns", mutates_args=("tensor",))
def all_reduce_by_turns(tensor: torch.Tensor) -> None:
    _taking_turns[0].all_reduce_now(tensor)


@all_reduce_by_turns.register_fake
def _all_reduce_of_fakes(tensor: torch.Tensor) -> None:
    del tensor


def show(turns: list[Turn]) -> None:
    """Print the turns that lie within the steps of one batch."""
    found: dict[tuple[int, str], list[Turn]] = defaultdict(list)
    for before, turn in pairwise(turns):
        if before.numel == turn.numel:
            found[turn.numel, turn.library].append(turn)
    print("batch library   turns   p10  median   p90    mean ms; in its calls, mean ms")
    for size in SIZES:
        for library in LIBRARIES:
            several = found[size * MODEL.hidden, library]
            times_ms = [turn.took_s * 1e3 for turn in several]
            tenth, *_, ninetieth = quantiles(times_ms, n=10)
            print(
                f"{size:5} {library:9} {len(several):5} {tenth:5.2f}  {median(times_ms):6.2f} "
                f"{ninetieth:5.2f}  {mean(times_ms):6.2f}; "
                f"{mean(turn.inside_s * 1e3 for turn in several):.2f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turn", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    engine = Engine(
        "", model=MODEL, options={"tensor_parallel_size": 2}, communicator="vllm_turns.ByTurns"
    )
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        os.environ.update({"OMP_NUM_THREADS": "1", TURN: str(options.turn), FOLDER: folder})
        run(Path(folder), engine, [Batch(n, 16, options.tokens, options.repeats) for n in SIZES])
        turns = json.loads(Path(folder, "turns.json").read_text())
    show([Turn(*turn) for turn in turns])


if __name__ == "__main__":
    main()
