# SPDX-License-Identifier: Apache-2.0
"""A small Llama by torchtitan on CPUs, in each of the ways to share it out over the ranks.

torchtitan's own Trainer asks the device for its memory, which a CPU cannot tell. So this program
makes the model, its parts, the loss and the norm of the gradients by torchtitan, and steps itself.
"""

import importlib
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

STEPS, BATCH, LENGTH = 3, 4, 32


def llama(backend: str, *degrees: str) -> list[tuple[float, float]]:
    """Train with degrees such as "tensor_parallel_degree=2"; the loss and the norm of each step."""
    import fastcoll

    with mock.patch("torch._utils._get_available_device_type", lambda: "cpu"):
        importlib.import_module("torchtitan.tools.utils")  # decides for the process
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CommConfig, ParallelismConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as titan

    if backend == "fastcoll":
        fastcoll.make_default()
    world = titan.init_distributed(CommConfig(), base_folder=".")
    assert dist.get_backend() == backend
    split = {"data_parallel_shard_degree": 1}
    split |= {name: int(degree) for name, degree in (one.split("=") for one in degrees)}
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **split)
    dims = ParallelDims.from_config(parallelism, world)
    titan.set_spmd_backend(parallelism.spmd_backend)
    model, vocabulary = _model(parallelism, dims)
    loss_of = CrossEntropyLoss.Config(global_vocab_size=vocabulary).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    num_parts = split["data_parallel_shard_degree"] * split.get("data_parallel_replicate_degree", 1)
    batches = dims.get_mesh("batch") if num_parts > 1 else None
    context = titan.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)
    data, found = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        tokens = torch.randint(vocabulary, (BATCH, LENGTH + 1), generator=data)
        mine = tokens.chunk(num_parts)[batches.get_local_rank() if batches else 0]
        with context():
            loss, _ = loss_of(model(mine[:, :-1]), mine[:, 1:], torch.tensor(BATCH * LENGTH))
            loss.backward()
        norm = titan.clip_grad_norm_(list(model.parameters()), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if batches:
            dist.all_reduce(total, group=batches.get_group())
        found.append((float(total), float(norm)))
    dist.destroy_process_group()
    return found


def _model(parallelism: Any, dims: Any) -> tuple[torch.nn.Module, int]:
    """torchtitan's smallest Llama, shared out, with the same weights however that is."""
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    training = TrainingConfig(seq_len=LENGTH, mixed_precision_param="float32")
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:  # CPUs have no backward pass of flex attention
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = Trainer.Config(model_spec=spec, training=training, parallelism=parallelism)
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder=".",
    )
    model.to_empty(device="cpu")
    weights = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for parameter in model.parameters():
            full = 0.1 * torch.randn(parameter.shape, generator=weights)
            if isinstance(parameter, DTensor):
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements)
            parameter.copy_(full)
    return model, spec.model.vocab_size
