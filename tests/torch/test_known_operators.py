# SPDX-License-Identifier: Apache-2.0
"""The operators of fastcoll where the compiled backend runs them, without Python."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.support.backends import on_backend
from tests.support.harness import Rank, attempt

SUM = dist.ReduceOp.SUM


def python_of_known_calls(rank: Rank) -> tuple[bool, list[str]]:
    """Call the operators of a named group twice; return the functions that Python entered."""
    from fastcoll.integrations import ops

    group = dist.new_group()
    name, total = ops.name_of(group), ops.code_of(SUM)
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: torch.ops.fastcoll.all_reduce(x, total, name),
        lambda x: torch.ops.fastcoll.reduce_scatter(x, total, name),
        lambda x: torch.ops.fastcoll.all_gather(x, name),
    ]
    entered: list[str] = []

    def enter(frame: Any, event: str, arg: object) -> None:
        del arg
        if event == "call" and "fastcoll" in str(frame.f_globals.get("__name__")):
            entered.append(frame.f_code.co_qualname)

    with torch.inference_mode():
        x = torch.full((4, 3), rank.rank + 1.0)
        first = [call(x) for call in calls]
        sys.setprofile(enter)
        try:
            again = [call(x) for call in calls]
        finally:
            sys.setprofile(None)
    right = [x.new_full((4, 3), 3.0), x.new_full((2, 3), 3.0)]
    right.append(torch.cat([x.new_full((4, 3), 1.0), x.new_full((4, 3), 2.0)]))
    return all(map(torch.equal, first + again, right + right)), entered


def test_known_operators_need_no_python(compiled_pools: Any, bare_pools: Any) -> None:
    for right, entered in compiled_pools(2).run(on_backend, "fastcoll", python_of_known_calls):
        assert right
        assert entered == []
    for right, entered in bare_pools(2).run(on_backend, "fastcoll", python_of_known_calls):
        assert right
        assert "_all_reduce" in entered  # the probe sees the calls of the Python backend


def operators_of_groups_that_end(rank: Rank) -> list[str]:
    """Use a group, close it, and use it again; then the next default group by the same name."""
    import fastcoll
    from fastcoll.integrations import ops

    seen = []
    x = torch.full((3,), rank.rank + 1.0)
    group = fastcoll.new_group()
    name, total = ops.name_of(group), ops.code_of(SUM)
    seen.append(str(torch.ops.fastcoll.all_reduce(x, total, name).tolist()))
    group.close()
    seen.append(attempt(torch.ops.fastcoll.all_reduce, x, total, name).kind)
    del group
    seen.append(attempt(torch.ops.fastcoll.all_reduce, x, total, name).kind)
    seen.append(str(torch.ops.fastcoll.all_reduce(x, total, "").tolist()))
    fastcoll.destroy()
    fastcoll.init(dist.group.WORLD)
    seen.append(str(torch.ops.fastcoll.all_reduce(x, total, "").tolist()))
    return seen


def test_operators_of_groups_that_end(backend_pools: Any) -> None:
    sums = "[3.0, 3.0, 3.0]"
    for seen in backend_pools(2).run(on_backend, "gloo", operators_of_groups_that_end):
        assert seen == [sums, "UsageError", "UsageError", sums, sums]
