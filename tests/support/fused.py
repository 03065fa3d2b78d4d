# SPDX-License-Identifier: Apache-2.0
"""Programs compiled with the pass of `fastcoll.fuse_compiled`.

Decides how a program's sum is written, and the outcome that a test sees. Each program is
compiled anew, and the pass is taken out behind it.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastcoll
from fastcoll.integrations import ops

# Before, the compiler leaves out a rounding whose result is widened again.
KEEPS_ROUNDINGS = torch.__version__ >= "2.13"


def sum_by_fastcoll(x: Tensor) -> Tensor:
    fastcoll.all_reduce(x)
    return x


def sum_by_operator(x: Tensor) -> Tensor:
    return ops.all_reduce(x)


def start_by_torch(x: Tensor, group: Any = None, op: str = "sum") -> Tensor:
    """Begin torch's functional call; its end is where the result is read."""
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x, op, group or dist.group.WORLD)


def sum_by_torch(x: Tensor) -> Tensor:
    return start_by_torch(x)


def sum_in_place(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


SUMS = {
    "fastcoll": sum_by_fastcoll,
    "operator": sum_by_operator,
    "torch": sum_by_torch,
    "torch in place": sum_in_place,
}


@dataclass
class Compiled:
    """The outcome of a program.

    Attributes:
        num_fused: The matches of the pass.
        code: The compiler's.
    """

    results: Any
    num_fused: int
    code: str

    def calls(self, name: str) -> int:
        """Return how often the code calls an operator, of fastcoll or of torch."""
        return self.code.count(f"fastcoll.direct.{name}(") + self.code.count(f"{name}.default(")


def compiler_settings() -> Any:
    """Return the compiler's settings, once the pass could be among them."""
    importlib.import_module("torch._inductor.lowering")
    return importlib.import_module("torch._inductor.config")


def compile_fused(
    program: Callable[..., Any], *args: Any, kernels: bool = True, **options: Any
) -> Compiled:
    """Run a program compiled with the pass; it draws the numbers that torch draws.

    Without `kernels` its code calls torch's own operators. A kernel takes a C++ compiler a second
    or more, and the pass is over before.
    """
    config = compiler_settings()
    from torch._inductor.utils import run_and_get_code

    from fastcoll.integrations.fusing import FUSING

    before = config.post_grad_custom_pre_pass
    fastcoll.fuse_compiled()
    fastcoll.fuse_compiled()  # which changes nothing
    FUSING.num_fused = 0
    try:
        torch._dynamo.reset()
        with config.patch(
            force_disable_caches=True, fallback_random=True, fallback_by_default=not kernels
        ):
            made = torch.compile(program, backend="inductor", fullgraph=True, **options)
            results, code = run_and_get_code(made, *args)
        return Compiled(results, FUSING.num_fused, "\n".join(code))
    finally:
        fastcoll.fuse_compiled(False)
        assert config.post_grad_custom_pre_pass is before
