# SPDX-License-Identifier: Apache-2.0
"""Programs under torch.compile: no frame of fastcoll is traced, and the numbers are Gloo's."""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import training
from tests.support.backends import no_caches, on_backend, same
from tests.support.harness import Pool, Rank
from tests.support.programs import run

Pools = Callable[[int], Pool]


# ---- training ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("program", ["data_parallel", "fully_sharded"])
def test_training(backend_pools: Pools, program: str, compiler: str) -> None:
    programs = {"data_parallel": data_parallel, "fully_sharded": fully_sharded}
    ours = backend_pools(2).run(on_backend, "fastcoll", programs[program], compiler, deadline_s=200)
    training.assert_as_one_process(ours)
    theirs = backend_pools(2).run(on_backend, "gloo", programs[program], compiler, deadline_s=200)
    assert same(ours, theirs)


def data_parallel(rank: Rank, compiler: str, hook: bool = False) -> Any:
    import fastcoll

    torch._dynamo.reset()
    model = torch.nn.parallel.DistributedDataParallel(training.network())
    if hook:
        model.register_comm_hook(None, fastcoll.ddp_hook)
    with no_caches(compiler):
        run = torch.compile(model, backend=compiler)
        return training.train(run, rank.rank, rank.world_size), training.whole(model)


def fully_sharded(rank: Rank, compiler: str) -> Any:
    torch._dynamo.reset()
    model = training.shard(training.network(), training.mesh_of(rank.world_size))
    with no_caches(compiler):
        run = torch.compile(model, backend=compiler)
        return training.train(run, rank.rank, rank.world_size), training.whole(model)


# ---- what the compiler traces --------------------------------------------------------------------


def calls(me: int) -> dict[str, Callable[[Tensor], Any]]:
    """Programs that call fastcoll where no graph holds the call; each result is known."""
    import fastcoll

    def symmetric(x: Tensor) -> Tensor:
        return fastcoll.empty(x.shape[0]).fill_(1) + fastcoll.from_tensor(x)

    def asynchronous(x: Tensor) -> Tensor:
        work = fastcoll.all_reduce(x, async_op=True)
        work.get_future().wait()
        work.wait()
        return x

    def lists(x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(2)]
        fastcoll.all_gather(parts, x)
        fastcoll.all_reduce_coalesced(parts)
        fastcoll.reduce_scatter(x, parts)
        return x

    def objects(x: Tensor) -> Tensor:
        found: list[Any] = [None, None]
        fastcoll.all_gather_object(found, {"tensor": x})
        return found[0]["tensor"] + found[1]["tensor"]

    def sent(x: Tensor) -> Tensor:
        work = fastcoll.isend(x, 1) if me == 0 else fastcoll.irecv(x, 0)
        work.wait()
        return x

    def grouped(x: Tensor) -> Tensor:
        with fastcoll.new_group([0, 1]) as group:
            fastcoll.all_reduce(x, group=group, numerics="fast", algorithm="ring")
            fastcoll.monitored_barrier(group)
        return x

    def torchs(x: Tensor) -> Tensor:
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        dist.broadcast(x, 0)
        return x

    programs = [symmetric, asynchronous, lists, objects, sent, grouped, torchs]
    return {program.__name__: program for program in programs}


RESULTS = {
    "symmetric": 2.0,
    "asynchronous": 2.0,
    "lists": 4.0,
    "objects": 2.0,
    "sent": 1.0,
    "grouped": 2.0,
    "torchs": 2.0,
}


def compiled_calls(rank: Rank) -> tuple[dict[str, float], set[str]]:
    """Return what each program gives, and the files of all frames that the compiler traced."""
    from torch._dynamo import utils

    utils.clear_compilation_metrics()
    utils.set_compilation_metrics_limit(10_000)
    results = {}
    for turn, (name, program) in enumerate(calls(rank.rank).items()):
        torch._dynamo.reset()
        run = torch.compile(program, backend="eager")
        sizes = (1000 + 300 * turn, 40_000 + turn)  # the first calls of their kind, by Python
        [results[name]] = {value for size in sizes for value in run(torch.ones(size)).tolist()}
    data_parallel(rank, "eager", hook=True)
    return results, {str(one.co_filename) for one in utils.get_compilation_metrics()}


@pytest.mark.long
def test_no_frame_of_the_library_is_traced(backend_pools: Pools) -> None:
    """Nor the methods of its dataclasses, whose code has no file."""
    of_torch = str(Path(torch.__file__).parent)
    for results, files in backend_pools(2).run(
        on_backend, "fastcoll", compiled_calls, deadline_s=200
    ):
        assert results == RESULTS
        assert __file__ in files
        others = {file for file in files if not file.startswith(of_torch)}
        # DDP's own functions use the last, on Gloo too.
        assert others <= {__file__, training.__file__, contextlib.__file__}


# ---- a compiler that refuses ---------------------------------------------------------------------


CANNOT_BE_TAUGHT = """
import torch
def refuse(*args, **kwargs):
    raise AssertionError("two rules for one object")
torch.compiler.substitute_in_graph = refuse
{imports}
fastcoll.init(store=torch.distributed.HashStore(), rank=0, world_size=1)
x = torch.ones(3)
fastcoll.all_reduce(x)
assert torch.compile(lambda x: x * 2, backend="eager")(x).tolist() == [2, 2, 2]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports", ["import torch._dynamo; import fastcoll", "import fastcoll; import torch._dynamo"]
)
def test_a_compiler_that_cannot_be_taught_costs_a_line_of_the_log(imports: str) -> None:
    program = CANNOT_BE_TAUGHT.format(imports=imports)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run([sys.executable, "-c", program], 120, env=environment)
    assert done.returncode == 0, done.stdout
    said = [line for line in done.stdout.splitlines() if line.startswith("fastcoll: ")]
    assert said == [
        "fastcoll: torch.compile can't be told of fastcoll: AssertionError('two rules for one "
        "object'). Don't compile functions that call fastcoll"
    ]
