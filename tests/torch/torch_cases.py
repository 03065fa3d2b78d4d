# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own DistributedTest cases, loaded with their gates open.

Decides which cases there are, and which edits of upstream's source let them run here. Must not run
anything. Upstream gates its cases by backend name, by GPUs and by the number of ranks. CUDA's
devices mean the CPU.
"""

import functools
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Inside a case's deadline, so that a rank that waits reports it itself.
GROUP_TIMEOUT_S = 40
# Over a minute on two cores with either backend, of which nearly all is arithmetic.
TOO_LONG = ("test_ddp_uneven_inputs",)


class AnyBackend(str):
    """A backend's name that opens every gate: it is Gloo or MPI if that is asked, and NCCL too.

    Upstream skips a case by `BACKEND != "nccl"`, `BACKEND == "nccl"` or `BACKEND not in {...}`.
    """

    __slots__ = ()
    __hash__ = functools.partialmethod(lambda self: hash("gloo"))  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return False


# The changes to upstream's source: (pattern, replacement). Each must be found.
EDITS = (
    (r'^BACKEND = os\.environ\["BACKEND"\]', "BACKEND = ANY_BACKEND"),
    # Groups that are asked for as Gloo's are to be of the backend under test.
    (r"backend=dist\.Backend\.GLOO", "backend=str.lower(BACKEND)"),
    (r'@require_backend_is_available\(\{"nccl"\}\)', '@require_backend_is_available({"gloo"})'),
    (r"^default_pg_timeout = 60", f"default_pg_timeout = {GROUP_TIMEOUT_S}"),
)


def _passed_through(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function


def _open_gates(common: types.ModuleType) -> None:
    """Let upstream's decorators pass what needs no GPU here, and three ranks be enough."""
    common.skip_if_no_gpu = lambda function: function
    common.skip_if_lt_x_gpu = _passed_through
    common.nccl_skip_if_lt_x_gpu = _passed_through
    common.require_n_gpus_for_nccl_backend = _passed_through
    common.init_multigpu_helper = lambda world_size, _: {r: [r] for r in range(world_size)}

    def skip_if_small_worldsize(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if int(os.environ["WORLD_SIZE"]) < 3:
                sys.exit(common.TEST_SKIPS["small_worldsize"].exit_code)
            return function(*args, **kwargs)

        return wrapper

    common.skip_if_small_worldsize = skip_if_small_worldsize
    features = common.DistTestCases.backend_feature
    for name in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        features[name].add("fastcoll")


def _cuda_means_cpu() -> None:
    """Let the devices that tests ask for be the CPU."""
    import torch
    from torch import nn

    for name in ("set_device", "synchronize", "manual_seed"):
        # A function for each: the compiler has a rule for each of these objects.
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]

    def is_device(value: object) -> bool:
        return (isinstance(value, int) and not isinstance(value, bool)) or (
            str(value).startswith("cuda") and isinstance(value, str | torch.device)
        )

    def on_cpu(function: Callable[..., Any], first: int) -> Callable[..., Any]:
        """Call with device arguments (from the `first` on, and device=) on the CPU."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            head, tail = args[:first], args[first:]
            tail = tuple("cpu" if is_device(value) else value for value in tail)
            if is_device(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return function(*head, *tail, **kwargs)

        return wrapper

    torch.Tensor.to = on_cpu(torch.Tensor.to, 1)  # type: ignore[method-assign]
    nn.Module.to = on_cpu(nn.Module.to, 1)  # type: ignore[method-assign]
    for maker in (torch.ones, torch.rand, torch.randn, torch.tensor, torch.zeros):
        setattr(torch, maker.__name__, on_cpu(maker, 99))
    ddp = nn.parallel.DistributedDataParallel
    ddp_init = ddp.__init__

    @functools.wraps(ddp_init)
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        ddp_init(self, module, *args, **kwargs)

    ddp.__init__ = init  # type: ignore[method-assign]


def load(backend: str) -> type:
    """Return upstream's cases as a class for this backend."""
    import torch.testing._internal.common_distributed as common

    _open_gates(common)
    path = Path(common.__file__).parent / "distributed/distributed_test.py"
    source = path.read_text()
    for pattern, replacement in EDITS:
        source, count = re.subn(pattern, replacement, source, flags=re.M)
        if count == 0:
            raise RuntimeError(f"{path} has no {pattern}: this torch's cases need another edit")
    module = types.ModuleType("distributed_test")
    module.__file__ = str(path)
    module.ANY_BACKEND = AnyBackend(backend)  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module  # its classes are pickled
    exec(compile(source, str(path), "exec"), module.__dict__)
    _cuda_means_cpu()  # only now: what it imports is compiled from source
    return _with_results_compared(module)


def _with_results_compared(module: Any) -> type:
    """Add what upstream leaves out: its all_reduce cases know the result but do not compare it."""
    import torch.distributed as dist

    base = module.DistributedTest._DistTestBase

    class Cases(module.TestDistBackend, base):  # type: ignore[misc, name-defined]
        def _test_all_reduce_helper(
            self,
            group: Sequence[int],
            group_id: Any,
            rank: int,
            op: Any,
            master_value: Any,
            worker_value: Any,
            expected_value: Any,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            values = (op, master_value, worker_value, expected_value)
            super()._test_all_reduce_helper(group, group_id, rank, *values, *args, **kwargs)
            options = {"dtype": kwargs["dtype"]} if "dtype" in kwargs else {}
            for src in group:
                value = master_value if rank == src else worker_value
                tensor = module._build_tensor(src + 1, **options).fill_(value)
                work = dist.all_reduce(tensor, op, group_id, kwargs.get("async_op", False))
                if work is not None:
                    work.wait()
                wanted = module._build_tensor(src + 1, **options).fill_(expected_value)
                self.assertEqual(tensor, wanted)

    return Cases


def names(cases: type) -> list[str]:
    """Return the cases that can be run in reasonable time."""
    return sorted(n for n in dir(cases) if n.startswith("test_") and n not in TOO_LONG)
