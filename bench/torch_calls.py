# SPDX-License-Identifier: Apache-2.0
"""Times calls through torch.distributed: on fastcoll's backends, on Gloo, and on none.

    python bench/torch_calls.py [FILE.json] [--rounds 3]

Two ranks. Each round starts the backends one after another, so that none has the quieter minutes.
A figure is the median over the rounds, in microseconds. For a call it is that of the best of ten
windows. For DDP it is the time that communication adds to a step: the difference of the medians of
steps with and without it, in turns. Torch alone is its backend "fake", which communicates nothing,
but may copy its input. With every backend DDP copies all gradients into its buckets and back: no
small part with 25 million of them. That copying is the same for all backends; groups of one rank
measure it with each. The steps less its median are called communication there.
The networks are those of `fastcoll demo`. Six minutes. Nothing else should run meanwhile.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from records import write
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fastcoll  # noqa: F401 - registers the backend
from fastcoll.integrations import c10d_build
from fastcoll.measure.results import provenance
from fastcoll.measure.training import TrainingConfig

CLASSES = {
    "compiled": "FastcollBackend",
    "python": "ProfiledProcessGroup",
    "gloo": "ProcessGroupGloo",
}
ALONE = "fake"
BACKENDS = (*CLASSES, ALONE)
NUM_LAYERS = 80
BOTH = "DDP's communication and copies"
COPIES = "DDP's copies, 25M parameters"


def best_us(call: Callable[[], object], calls: int) -> float:
    """Return the time of a call, in the best of ten windows; both ranks make as many."""
    times = []
    for _ in range(10):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    return min(times) * 1e6


def ddp_us() -> float:
    """Return the time that a bucket adds to a backward pass: 80 layers, buckets of 1 KiB."""
    layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(NUM_LAYERS)))
    model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=1e-4)
    data = torch.ones(1, 16)
    for _ in range(5):
        model(data).sum().backward()
    alone = best_us(lambda: layers(data).sum().backward(), 5)
    return (best_us(lambda: model(data).sum().backward(), 5) - alone) / NUM_LAYERS


def ddp_step_us(num_params: int, num_steps: int) -> tuple[float, float]:
    """Return the time that DDP adds to a backward pass of the demo's network, and its copies'.

    These are of all gradients into its buckets, divided, and back. It makes them in a group of one
    rank, too, where nothing is communicated.
    """
    width = TrainingConfig(num_params, num_steps, 2, 128, 0.0).width

    def network(group: dist.ProcessGroup | None) -> nn.parallel.DistributedDataParallel:
        layers: list[nn.Module] = []
        for inputs, outputs in ((64, width), (width, width), (width, 10)):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.parallel.DistributedDataParallel(nn.Sequential(*layers), process_group=group)

    group_of_one, _ = dist.new_subgroups(1)
    together, alone = network(None), network(group_of_one)
    data = torch.ones(64, 64)
    steps: dict[str, tuple[nn.parallel.DistributedDataParallel, bool]] = {
        "communicates": (together, True),
        "copies": (alone, True),
        "neither": (together, False),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in range(3 + num_steps):
        for name, (model, synchronizes) in steps.items():
            with nullcontext() if synchronizes else model.no_sync():
                loss = model(data).sum()
                dist.barrier()
                start = time.perf_counter()
                loss.backward()
            if step >= 3:  # the first ones make the buckets
                times[name].append((time.perf_counter() - start) * 1e6)
    medians = {name: statistics.median(of_steps) for name, of_steps in times.items()}
    return medians["communicates"] - medians["neither"], medians["copies"] - medians["neither"]


def calls_us(slow: int = 1) -> dict[str, float]:
    """Return the times of calls; with `slow`, of so many times fewer of them."""
    small, whole, part = torch.ones(2), torch.ones(2048), torch.ones(1024)
    return {
        "all_reduce, 8 B": best_us(lambda: dist.all_reduce(small), 1000 // slow),
        "all_reduce, 8 B, async_op and wait": best_us(
            lambda: dist.all_reduce(small, async_op=True).wait(),  # type: ignore[union-attr]
            300 // slow,
        ),
        "all_gather_into_tensor, 4 KiB": best_us(
            lambda: dist.all_gather_into_tensor(whole, part), 500 // slow
        ),
        "barrier": best_us(dist.barrier, 500 // slow),
    }


def training_us() -> dict[str, float]:
    """Return the times that communication adds to training."""
    added_us, copies_us = ddp_step_us(25_000_000, 25)
    return {
        "a bucket of DDP, 1 KiB": ddp_us(),
        # Next to no copies: a hand-over to a thread alone would count as a copy.
        "DDP's communication, 100K parameters": ddp_step_us(100_000, 60)[0],
        f"{BOTH}, 25M parameters": added_us,
        COPIES: copies_us,
    }


def measure(rank: int, backend: str, file: str, result: "mp.SimpleQueue[dict[str, float]]") -> None:
    torch.set_num_threads(1)
    if backend == ALONE:
        dist.init_process_group(ALONE, store=FakeStore(), rank=rank, world_size=2)
        rows = calls_us()
    else:
        name = "gloo" if backend == "gloo" else "fastcoll"
        dist.init_process_group(name, init_method=f"file://{file}", rank=rank, world_size=2)
        kind = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__  # type: ignore[union-attr]
        if kind != CLASSES[backend]:
            sys.exit(f"the backend is {kind}: {c10d_build.reason()}")
        training = training_us()
        rows = calls_us(10 if backend == "gloo" else 1) | training
    if rank == 0:
        result.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds, origin = options.rounds, provenance()
    seen: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
    for _ in range(rounds):
        for backend in BACKENDS:
            os.environ["FASTCOLL_TORCH_BACKEND"] = "compiled" if backend == "compiled" else "python"
            result: mp.SimpleQueue[dict[str, float]] = mp.get_context("spawn").SimpleQueue()
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(measure, (backend, os.path.join(folder, "store"), result), nprocs=2)
            seen[backend].append(result.get())
    times_us = {
        row: {
            backend: round(statistics.median(one[row] for one in seen[backend]), 2)
            for backend in BACKENDS
            if row in seen[backend][0]
        }
        for row in seen["gloo"][0]
    }
    copies_us = statistics.median(one[COPIES] for backend in CLASSES for one in seen[backend])
    times_us["DDP's communication, 25M parameters"] = {
        backend: round(both_us - copies_us, 2)
        for backend, both_us in times_us[f"{BOTH}, 25M parameters"].items()
    }
    if options.file is not None:
        settings = {"world_size": 2, "rounds": rounds}
        write({"kind": "torch", **origin, "settings": settings, "times_us": times_us}, options.file)
    print(f"| microseconds, median of {rounds} rounds | {' | '.join(BACKENDS)} |")
    print("|---" * (1 + len(BACKENDS)) + "|")
    for row, times in times_us.items():
        cells = (f"{times[backend]:.1f}" if backend in times else "" for backend in BACKENDS)
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
