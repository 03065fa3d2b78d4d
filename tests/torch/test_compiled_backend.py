# SPDX-License-Identifier: Apache-2.0
"""The compiled backend of torch.distributed: it is used, and does what Python's does."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastcoll
from fastcoll.integrations import c10d_build
from fastcoll.integrations.torch_group import FastcollProcessGroup
from tests.support import training
from tests.support.backends import COMPILE_S, in_cpp, on_backend, same
from tests.support.harness import Pool, Rank, Setup, attempt

# A rank may be compiling when its pool is asked for the first time.
pytestmark = [pytest.mark.native, pytest.mark.timeout(2 * COMPILE_S)]


def new_sizes(rank: Rank) -> list[int]:
    """Of sizes that nobody had before: those that Python's group is asked for."""
    usual, asked = FastcollProcessGroup.allreduce, []

    def count(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        asked.append(tensors[0].numel())
        return usual(group, tensors, *args)

    for numel in (100_000, 98_305, 111_111, 114_688, 114_689, 114_690):
        tensor = torch.full((numel,), rank.rank + 1.0)
        dist.all_reduce(tensor)
        assert bool((tensor == 3).all())
        FastcollProcessGroup.allreduce = count  # type: ignore[method-assign]
    FastcollProcessGroup.allreduce = usual  # type: ignore[method-assign]
    return asked


def test_sizes_near_known_ones_need_no_python(compiled_pools: Callable[[int], Pool]) -> None:
    assert compiled_pools(2).run(on_backend, "fastcoll", new_sizes) == [[114_689]] * 2


def order(rank: Rank) -> list[Any]:
    """Calls of both queues and none, in flight together: what one does the next one sees."""
    tensor, strided = torch.ones(64), torch.ones(64, 2)[:, 0]
    dist.all_reduce(tensor.clone())  # its plan is known from here on
    works = []
    for _ in range(20):
        works.append(dist.all_reduce(tensor, async_op=True))  # C++, unless Python is busy
        works.append(dist.all_reduce(strided, async_op=True))  # Python
        works.append(dist.all_reduce(tensor, async_op=True))
        fastcoll.all_reduce(tensor, group=dist.group.WORLD)  # behind all of them
        tensor /= rank.world_size**3
        dist.all_reduce(strided)
        strided /= rank.world_size**2
    for work in works:
        work.wait()
    return [tensor, strided, [work.is_completed() for work in works]]


def test_one_order_of_two_queues(compiled_pools: Callable[[int], Pool]) -> None:
    rows = compiled_pools(2).run(on_backend, "fastcoll", order)
    assert same(rows, [[torch.ones(64), torch.ones(64), [True] * 60]] * 2)


# ---- what Python's backend can't do --------------------------------------------------------------


def two_devices(rank: Rank) -> list[Any]:
    store = dist.PrefixStore("two devices", rank.store)
    devices = "cpu:fastcoll,cuda:gloo"
    dist.init_process_group(devices, store=store, rank=rank.rank, world_size=rank.world_size)
    try:
        group = dist.group.WORLD
        names = [group._get_backend(torch.device(d)).name() for d in ("cpu", "cuda")]  # type: ignore[union-attr]
        tensor = torch.ones(5)
        dist.all_reduce(tensor)
        both = dist.new_group(backend="cpu:fastcoll,cuda:fastcoll")
        dist.all_reduce(tensor, group=both)
        return [*names, tensor]
    finally:
        dist.destroy_process_group()


def test_a_group_with_a_backend_for_each_device(compiled_pools: Callable[[int], Pool]) -> None:
    rows = compiled_pools(2).run(two_devices)
    assert same(rows, [["fastcoll", "gloo", torch.full((5,), 4.0)]] * 2)


def in_detail(rank: Rank) -> list[Any]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return on_backend(rank, "fastcoll", wrapped)  # type: ignore[no-any-return]
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def wrapped(rank: Rank) -> list[Any]:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    tensor = torch.ones(3)
    for _ in range(3):
        dist.all_reduce(tensor)
    dist.barrier()
    found = [type(backend).__name__, tensor, str(backend.get_error())]
    return [*found, attempt(dist.all_reduce, torch.ones(3 + rank.rank))]


def test_torch_wraps_it_when_details_are_asked_for(compiled_pools: Callable[[int], Pool]) -> None:
    for name, tensor, error, mismatch in compiled_pools(2).run(in_detail):
        assert (name, error) == ("_ProcessGroupWrapper", "ErrorType.SUCCESS")
        assert same(tensor, torch.full((3,), 8.0))
        assert "Detected mismatch between collectives" in mismatch.text


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [training.data_parallel, training.with_views])
def test_training(compiled_pools: Callable[[int], Pool], program: Callable[[Rank], Any]) -> None:
    ours = compiled_pools(2).run(on_backend, "fastcoll", program)
    assert same(ours, compiled_pools(2).run(on_backend, "gloo", program))


def overlap(rank: Rank, waits: bool) -> int:
    """How many layers go backward while a bucket is reduced, in a trace of one backward pass.

    Rank 1 starts when rank 0 has its last gradient, so rank 0's first bucket is on its way until
    then. `waits`: every bucket is waited for at once, as without asynchronous calls; rank 1 starts
    when rank 0 has the first.
    """
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=0.01
    )

    def reduce(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        work.wait()
        return work.get_future().then(lambda done: done.value()[0])

    if waits:
        model.register_comm_hook(None, reduce)
    for _ in range(3):  # the buckets get their shapes, and their calls a plan
        model(torch.ones(2, 64)).sum().backward()
    start = f"gradient {waits}"
    if rank.rank == 0:
        layers[-1 if waits else 0].weight.register_hook(lambda _: rank.tell(start))
    loss = model(torch.ones(2, 64)).sum()
    if rank.rank == 1:
        rank.wait_for(start)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        loss.backward()
    spans = [event.time_range for event in trace.events() if event.name == "fastcoll:all_reduce"]
    starts = [event.time_range.start for event in trace.events() if event.name == "aten::mm"]
    assert len(spans) >= 5
    return sum(any(span.start < start < span.end for span in spans) for start in starts)


@pytest.mark.parametrize("waits", [False, True])
def test_buckets_are_reduced_during_the_backward_pass(
    compiled_pools: Callable[[int], Pool], waits: bool
) -> None:
    [during, _] = compiled_pools(2).run(on_backend, "fastcoll", overlap, waits)
    assert during == 0 if waits else during >= 5


# ---- without it ----------------------------------------------------------------------------------


def sums(rank: Rank) -> list[torch.Tensor]:
    tensors = [torch.full((numel,), rank.rank + 1) for numel in (1, 500, 30_000)]
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        assert work is not None
        work.wait()
    return tensors


def without(rank: Rank, cache: str, broken: str) -> tuple[list[Any], str]:
    """A group of ranks of which one can't compile."""
    if rank.rank == 1:
        os.environ["FASTCOLL_CACHE_DIR"] = cache
        if broken == "no compiler":
            os.environ["PATH"] = cache
        elif broken == "compiler fails":
            c10d_build._SOURCE = Path(cache, "c10d_backend.cpp")
            c10d_build._SOURCE.write_text("#error planted\n")
        elif broken == "no cache":
            os.environ["FASTCOLL_CACHE_DIR"] = os.path.join(cache, "file", "folder")
            Path(cache, "file").write_text("")
    return on_backend(rank, "fastcoll", sums), c10d_build.reason()


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("no compiler", "neither c++ nor g++ is on PATH"),
        ("compiler fails", "error: #error planted"),
        ("no cache", "NotADirectoryError"),
    ],
)
def test_ranks_do_without_together(
    fresh_pool: Callable[..., Pool], tmp_path: Path, broken: str, why: str
) -> None:
    pool = fresh_pool(2, Setup(init=False, env={"FASTCOLL_TORCH_BACKEND": "compiled"}))
    rows = pool.run(without, str(tmp_path), broken, deadline_s=COMPILE_S)
    gloos = pool.run(on_backend, "gloo", sums)
    assert same([row for row, _ in rows], gloos)
    assert rows[0][1] == ""  # it had a compiler, and did without all the same
    assert why in rows[1][1]


def builds_at_once(rank: Rank, cache: str) -> tuple[str, int]:
    os.environ["FASTCOLL_CACHE_DIR"] = cache
    name, _ = on_backend(rank, "fastcoll", in_cpp)
    return name, len(list(Path(cache).glob("*.draft")))


@pytest.mark.slow
def test_one_rank_compiles_for_all(fresh_pool: Callable[..., Pool], tmp_path: Path) -> None:
    pool = fresh_pool(3, Setup(init=False, env={"FASTCOLL_TORCH_BACKEND": "compiled"}))
    rows = pool.run(builds_at_once, str(tmp_path), deadline_s=COMPILE_S)
    assert rows == [("FastcollBackend", 0)] * 3
    assert len(list(tmp_path.glob("*.so"))) == 1
