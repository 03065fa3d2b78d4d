# SPDX-License-Identifier: Apache-2.0
"""Times other people's programs on Gloo and on fastcoll.

    python -m bench.programs [FILE.json] [--rounds 2]

Two ranks with one thread each. The trainings of tests/programs/trainers.py and Ray Train name the
backend "gloo". FASTCOLL_AS_GLOO=1 makes that fastcoll's Python backend or the compiled one. A step
goes from the end of one optimizer step to the next, on the slower rank. A step of transformers'
tensor parallel is a token. Runs take turns. ray.util.collective and torchft make single calls, by
turns in the same processes. Needs the packages of tests/programs/nightly.txt and fastcoll
installed. Half an hour. Nothing else should run meanwhile.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.records import write
from fastcoll.measure.results import provenance
from tests.programs.run import listed_version, run_alone, run_ranks

STEPS = 60
WAYS = ("gloo", "python", "compiled")
STEPS_OF = "bench.program_steps"
TRAININGS = ("accelerate", "trainer", "lightning", "fabric", "deepspeed")
HIDDEN = (16, 512)  # units of the two hidden layers: 2 KB and 1 MB of gradients
CALL_SIZES = (8, 64 << 10, 1 << 20)
PACKAGES = ("accelerate", "deepspeed", "lightning", "ray", "torchft", "transformers")
Times = dict[str, list[float]]


def programs() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each program with steps, and its words."""
    for hidden in HIDDEN:
        num_bytes = 4 * ((hidden + 11) * hidden + 1)
        for name in TRAININGS:
            words = ("train", name, str(hidden), str(STEPS))
            yield f"{name}, gradients of {num_bytes} bytes", words
    yield "transformers, tensor parallel", ("generate", str(STEPS))
    yield "Ray Train", ("ray_train", str(STEPS))


def run_steps(words: tuple[str, ...], way: str, folder: Path) -> list[float]:
    """Run a program once; return the time of each step on the slower rank."""
    function, *arguments = words
    os.environ["FASTCOLL_AS_GLOO"] = str(int(way != "gloo"))
    start = run_alone if function == "ray_train" else run_ranks
    options = {"folder": folder, "torch_backend": "python" if way == "gloo" else way}
    found: Any = start(f"{STEPS_OF}:{function}", *arguments, **options)
    ranks = [found] if function == "ray_train" else found
    for backend, _ in ranks:
        assert (backend == "ProcessGroupGloo") == (way == "gloo"), f"{way}: {backend}"
    return [max(times) for times in zip(*(times for _, times in ranks), strict=True)]


def time_steps(rounds: int) -> Iterator[dict[str, Any]]:
    for name, words in programs():
        times: Times = {way: [] for way in WAYS}
        for turn in range(rounds):
            for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
                with tempfile.TemporaryDirectory() as folder:
                    times[way] += run_steps(words, way, Path(folder))
        yield point_of(name, times)


def time_calls() -> Iterator[dict[str, Any]]:
    os.environ["FASTCOLL_AS_GLOO"] = "0"
    for size in CALL_SIZES:
        with tempfile.TemporaryDirectory() as folder:
            found = run_alone("tests.programs.actors:timed", str(size), "10", folder=Path(folder))
        yield point_of(f"ray.util.collective, allreduce of {size} bytes", found)
    for size in CALL_SIZES:
        times: Times = {way: [] for way in WAYS}
        for way in WAYS[1:]:
            with tempfile.TemporaryDirectory() as folder:
                words = (f"{STEPS_OF}:average", str(size), "10")
                ranks = run_ranks(*words, folder=Path(folder), torch_backend=way)
            for key, library in (("gloo", "gloo"), (way, "fastcoll")):
                windows = zip(*(one[library] for one in ranks), strict=True)
                times[key] += [max(both) for both in windows]
        yield point_of(f"torchft, allreduce of {size} bytes", times)


def point_of(name: str, times: Times) -> dict[str, Any]:
    """Return one program's record: its times in microseconds, and Gloo's over fastcoll's."""
    middle = {way: median(each) for way, each in times.items()}
    ends = {way: quantiles(each, n=10) for way, each in times.items()}
    point = {
        "point": name,
        "median_us": {way: round(one, 1) for way, one in middle.items()},
        "p10_us": {way: round(one[0], 1) for way, one in ends.items()},
        "p90_us": {way: round(one[8], 1) for way, one in ends.items()},
        "gloo_over": {
            way: round(middle["gloo"] / one, 3) for way, one in middle.items() if way != "gloo"
        },
    }
    print(point, flush=True)
    return point


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    document = {
        "kind": "programs",
        **provenance(),
        "settings": {
            "world_size": 2,
            "rounds": options.rounds,
            "steps": STEPS,
            "threads": 1,
            **{package: listed_version(package) for package in PACKAGES},
        },
        "points": [*time_steps(options.rounds), *time_calls()],
    }
    if options.file:
        write(document, options.file)


if __name__ == "__main__":
    main()
