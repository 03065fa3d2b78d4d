# SPDX-License-Identifier: Apache-2.0
"""Times calls on lists of tensors, and a small call of each verb by itself.

    python bench/lists.py [FILE.json]

Two ranks run all_reduce_coalesced of 500 float32 tensors of 1 to 64 KiB. One call of their total
size, one call for each, and Gloo's coalesced call take turns with it. The results of fastcoll are
compared first, bit by bit. Then a group of one rank, which never waits, makes 8-byte calls of every
verb. About a minute. Nothing else should run meanwhile.
"""

import json
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from records import write

import fastcoll
from fastcoll.measure.results import provenance

NUM_TENSORS, MOST_KIB, ROUNDS = 500, 64, 60


def gloos(tensors: list[torch.Tensor]) -> None:
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.SUM
    group = dist.group.WORLD
    assert group is not None
    group.allreduce_coalesced(tensors, options).wait()


def time_lists(rank: int, folder: str) -> None:
    """Write the median time of each way, in us, to a file: rank 0's."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=2)
    comm = fastcoll.init(store=dist.PrefixStore("ours", store), rank=rank, world_size=2)
    random = torch.Generator().manual_seed(1)
    kibs = torch.randint(1, MOST_KIB + 1, (NUM_TENSORS,), generator=random).tolist()
    tensors = [torch.randn(256 * kib) for kib in kibs]
    one_by_one = [tensor.clone() for tensor in tensors]
    for turn in range(2):  # the second time by the plan of the first
        together = [tensor.clone() for tensor in tensors]
        comm.all_reduce_coalesced(together)
        for tensor in one_by_one if turn == 0 else ():
            comm.all_reduce(tensor)
        assert all(torch.equal(*pair) for pair in zip(together, one_by_one, strict=True))

    zeros = [torch.zeros_like(tensor) for tensor in tensors]
    whole = torch.zeros(256 * sum(kibs))
    ways: dict[str, Callable[[], Any]] = {
        "coalesced": lambda: comm.all_reduce_coalesced(zeros),
        "coalesced, asynchronous": lambda: comm.all_reduce_coalesced(zeros, async_op=True).wait(),
        "one call of the total size": lambda: comm.all_reduce(whole),
        "a call for each": lambda: [comm.all_reduce(tensor) for tensor in zeros],
        "gloo": lambda: gloos(zeros),
    }
    times_us: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 3):
        for name, way in ways.items():
            comm.barrier()
            start = time.perf_counter()
            way()
            if turn >= 3:  # the first ones touch memory
                times_us[name].append((time.perf_counter() - start) * 1e6)
    if rank == 0:
        found = {name: round(median(times), 1) for name, times in times_us.items()}
        Path(folder, "times.json").write_text(json.dumps(found))
    fastcoll.destroy()
    dist.destroy_process_group()


def time_calls() -> dict[str, int]:
    """Return the ns of one call, by verb: the best of many windows."""
    a, b, splits = torch.ones(2), torch.ones(2), [2]
    with fastcoll.init(store=dist.HashStore(), rank=0, world_size=1) as comm:
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: comm.all_reduce(a),
            "reduce_scatter_tensor": lambda: comm.reduce_scatter_tensor(b, a),
            "all_gather_into_tensor": lambda: comm.all_gather_into_tensor(b, a),
            "broadcast": lambda: comm.broadcast(a, 0),
            "barrier": comm.barrier,
            "reduce": lambda: comm.reduce(a, 0),
            "all_gather": lambda: comm.all_gather([b], a),
            "gather": lambda: comm.gather(a, [b]),
            "scatter": lambda: comm.scatter(b, [a]),
            "all_to_all_single": lambda: comm.all_to_all_single(b, a),
            "all_to_all_single, split sizes": lambda: comm.all_to_all_single(b, a, splits, splits),
            "all_to_all": lambda: comm.all_to_all([b], [a]),
            "all_reduce_coalesced": lambda: comm.all_reduce_coalesced([a]),
        }
        best: dict[str, float] = dict.fromkeys(calls, float("inf"))
        for _ in range(40):
            for name, call in calls.items():
                best[name] = min(best[name], timeit.timeit(call, number=2000) / 2000)
    return {name: round(seconds * 1e9) for name, seconds in best.items()}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        mp.spawn(time_lists, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
        times_us = json.loads(Path(folder, "times.json").read_text())
    against_gloo = times_us["gloo"] / times_us["coalesced"]
    against_one_call = times_us["coalesced"] / times_us["one call of the total size"]
    calls_ns = time_calls()
    document = {
        "kind": "lists",
        **provenance(),
        "settings": {"world_size": 2, "num_tensors": NUM_TENSORS, "most_kib": MOST_KIB},
        "times_us": times_us,
        "gloo_over_coalesced": round(against_gloo, 2),
        "coalesced_over_one_call": round(against_one_call, 3),
        "calls_ns": calls_ns,
    }
    if len(sys.argv) > 1:
        write(document, Path(sys.argv[1]))
    for name, time_us in times_us.items():
        print(f"{time_us:10.1f} us  {name}")
    print(f"Gloo's takes {against_gloo:.2f}x as long, ours {against_one_call:.3f}x one call's time")
    for name, time_ns in calls_ns.items():
        print(f"{time_ns:7d} ns  {name}, 8 bytes, one rank")


if __name__ == "__main__":
    main()
