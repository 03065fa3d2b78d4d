# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-call"
"""The pass of `fusing.py` in an engine of vLLM.

Decides how it gets into the compiler's settings of vLLM's workers, and what their log says of it.
Imports the compiler: only for a program that wants the pass.
"""

from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.graph import Graph
from vllm.logger import init_logger

from fastcoll.integrations.fusing import FUSING, add_pass

_SETTING = "post_grad_custom_pre_pass"
_log = init_logger("vllm.fastcoll")  # vLLM shows its own loggers only


class FusingForVllm(CustomGraphPass):
    """The pass as one of vLLM's settings: it is copied to the workers, and hashed there."""

    def __call__(self, graph: Graph) -> None:
        """Run the pass, and say what it found."""
        before = FUSING.num_fused, FUSING.num_sums
        FUSING(graph)
        num_fused, num_sums = FUSING.num_fused - before[0], FUSING.num_sums - before[1]
        if num_sums:
            _log.info("fastcoll fused a norm with %d of %d all_reduces", num_fused, num_sums)

    def uuid(self) -> str:
        """Return a key of the caches of the compiler and of vLLM, which takes text."""
        return repr(FUSING.uuid())


def add_to(settings: dict[str, Any]) -> None:
    """Add the pass to the compiler's settings in a configuration of vLLM, unless it is there."""
    others = settings.get(_SETTING)
    passes = others if isinstance(others, list | tuple) else [others]
    if not any(isinstance(one, FusingForVllm) for one in passes):
        settings[_SETTING] = add_pass(others, FusingForVllm())
