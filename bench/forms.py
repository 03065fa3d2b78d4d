# SPDX-License-Identifier: Apache-2.0
"""Times calls in many forms: sizes that are new, strides, lists, arrays, process groups.

    python bench/forms.py [FILE.json]

Two ranks with 16 KiB of float32 each run the same forms by fastcoll's functions and by
torch.distributed's on Gloo, in turns. Results are checked first. A time is the median of 60
windows, in us, and includes the form itself, such as a view of another size. None: Gloo has no
such call. As in `fastcoll bench`, a rank stays on a core of its own in fastcoll's windows, and goes
where it likes in Gloo's. Half a minute. Nothing else should run meanwhile.
"""

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from records import write

import fastcoll
from fastcoll.measure.results import provenance

NUMEL, WINDOWS = 4096, 60
CALLS = {"fastcoll": 50, "gloo": 4}  # in a window
AWAKE = 3000  # barriers before one, as a CPU that has slept through Gloo's is slow at first
MAX = dist.ReduceOp.MAX
# Gloo takes strided memory for dense, so its results are wrong; and its parts are equal.
STRIDED = ("all_reduce of every second element", "all_reduce of a transposed matrix")
NOT_ON_GLOO = (*STRIDED, "all_gather of uneven parts")
Form = Callable[[], Any]


def forms(library: Any, rank: int, group: dist.ProcessGroup) -> dict[str, Form]:
    """Return the calls, which return their results; `library` is fastcoll or torch.distributed."""

    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, rank + 1.0)

    mine, whole = full(NUMEL), full(2 * NUMEL)
    rows = list(whole.view(2, NUMEL))
    room = full(2 * NUMEL + 4 * WINDOWS * max(CALLS.values()))
    numels = itertools.count(NUMEL)
    sliced, turned = full(NUMEL, 2)[:, 0], full(64, NUMEL // 64).t()
    array = np.full(NUMEL, rank + 1, np.float32)
    parameter = torch.nn.Parameter(mine.clone(), requires_grad=False)

    def reduced(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        library.all_reduce(tensor, MAX, **options)
        return tensor

    def reduced_array() -> torch.Tensor:
        library.all_reduce(array if library is fastcoll else torch.from_numpy(array), MAX)
        return torch.from_numpy(array)

    def waited() -> torch.Tensor:
        library.all_reduce(mine, MAX, async_op=True).wait()
        return mine

    return {
        "all_reduce": lambda: reduced(mine),
        "all_reduce of a size that is new": lambda: reduced(room[: next(numels)]),
        STRIDED[0]: lambda: reduced(sliced),
        STRIDED[1]: lambda: reduced(turned),
        "all_reduce of a NumPy array": reduced_array,
        "all_reduce of a Parameter": lambda: reduced(parameter.data),
        "all_reduce, asynchronous, and waited for": waited,
        "all_reduce on a torch process group": lambda: reduced(mine, group=group),
        **forms_of_parts(library, rank, mine, room),
        "broadcast": lambda: (library.broadcast(mine, 0), mine)[1],
        "all_gather into its own whole": lambda: (
            library.all_gather_into_tensor(whole, rows[rank]),
            whole,
        )[1],
        "all_gather of a list": lambda: (library.all_gather(rows, mine), rows)[1],
        "gather": lambda: (library.gather(mine, rows if rank == 0 else None, 0), rows)[1],
        "all_gather of objects": lambda: everybodys(library, rank),
    }


def forms_of_parts(
    library: Any, rank: int, mine: torch.Tensor, room: torch.Tensor
) -> dict[str, Form]:
    """Return the calls whose parts have sizes that no call had before."""
    # Form by form: some are not made on Gloo.
    of_lists, uneven, of_shuffles = (itertools.count(NUMEL) for _ in range(3))

    def reduced_list() -> list[torch.Tensor]:
        numel = next(of_lists)
        tensors = list(room[: 2 * numel].view(2, numel))
        if library is fastcoll:
            fastcoll.all_reduce_coalesced(tensors, MAX)
        else:
            options = dist.AllreduceCoalescedOptions()
            options.reduceOp = MAX
            dist.group.WORLD.allreduce_coalesced(tensors, options).wait()  # type: ignore[union-attr]
        return tensors

    def gathered_unevenly() -> list[torch.Tensor]:
        numel = next(uneven)
        parts = [room[:numel], room[numel : 2 * numel + 1]]
        library.all_gather(parts, mine.new_full((numel + rank,), 1))
        return parts

    def shuffled() -> torch.Tensor:
        give = next(of_shuffles) % NUMEL
        get = give if rank == 0 else NUMEL - give
        output = room[: 2 * get]
        sizes = [give, NUMEL - give]
        library.all_to_all_single(output, mine, [get, get], sizes)
        return output

    return {
        "a list of two of sizes that are new": reduced_list,
        "all_gather of uneven parts": gathered_unevenly,
        "all_to_all of new split sizes": shuffled,
    }


def everybodys(library: Any, rank: int) -> list[object]:
    found: list[object] = [None, None]
    library.all_gather_object(found, {"rank": rank, "text": "x" * 100})
    return found


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return all(same(*pair) for pair in zip(one, other, strict=True))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def measure(rank: int, folder: str) -> None:
    """Write the median time of each form, in us, to a file: rank 0's."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=2)
    comm = fastcoll.init(store=dist.PrefixStore("ours", store), rank=rank, world_size=2)
    group = dist.new_group([0, 1])
    calls = {
        name: forms(library, rank, group)
        for name, library in (("fastcoll", fastcoll), ("gloo", dist))
    }
    for name in NOT_ON_GLOO:
        del calls["gloo"][name]
    for name, call in calls["fastcoll"].items():
        mine = call()
        assert not name.startswith("all_reduce") or bool((mine == 2).all()), name
        assert name not in calls["gloo"] or same(mine, calls["gloo"][name]()), name
    cpus = sorted(os.sched_getaffinity(0))
    places = {"fastcoll": cpus[rank : rank + 1] if len(cpus) > 1 else cpus, "gloo": cpus}
    times_us: dict[str, dict[str, list[float]]] = {name: {} for name in calls["fastcoll"]}
    for _ in range(WINDOWS):
        for library, those in calls.items():
            os.sched_setaffinity(0, places[library])
            for name, call in those.items():
                for _ in range(AWAKE):
                    comm.barrier()
                start = time.perf_counter()
                for _ in range(CALLS[library]):
                    call()
                time_us = (time.perf_counter() - start) / CALLS[library] * 1e6
                times_us[name].setdefault(library, []).append(time_us)
    if rank == 0:
        found = {
            name: {
                library: round(median(those[library]), 2) if library in those else None
                for library in CALLS
            }
            for name, those in times_us.items()
        }
        Path(folder, "times.json").write_text(json.dumps(found))
    fastcoll.destroy()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fc") as folder:
        origin = provenance()
        mp.spawn(measure, (folder,), nprocs=2)  # type: ignore[no-untyped-call]
        times_us = json.loads(Path(folder, "times.json").read_text())
    settings = {"world_size": 2, "numel": NUMEL, "windows": WINDOWS}
    if len(sys.argv) > 1:
        write(
            {"kind": "forms", **origin, "settings": settings, "times_us": times_us},
            Path(sys.argv[1]),
        )
    for name, times in times_us.items():
        gloos = f"{times['gloo']:10.1f}" if times["gloo"] else "      none"
        print(f"{times['fastcoll']:10.2f} us {gloos} us  {name}")


if __name__ == "__main__":
    main()
