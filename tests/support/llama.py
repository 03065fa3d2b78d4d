# SPDX-License-Identifier: Apache-2.0
"""A decoder of two tensor-parallel layers, with the norms that programs write.

Decides the text of each norm: torch's function, and the modules of Hugging Face's Llama and Gemma
as transformers writes their arithmetic. Another is vLLM's, which reads the sum before its rounding.
Each has what the operator is told for it. The sum over the ranks is the program's.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastcoll.integrations import ops

Sum = Callable[[Tensor], Tensor]


class TorchNorm(nn.Module):
    """torch.nn.functional.rms_norm."""

    rounds_first = False
    wide_sum = False
    offset = 0.0
    is_weighted = True

    def __init__(self, columns: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, columns))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        summed = residual + x
        return self(summed), summed


class LlamaNorm(TorchNorm):
    """Rounds to the input's dtype before the weight."""

    rounds_first = True

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class GemmaNorm(TorchNorm):
    """Adds one to the weight."""

    offset = 1.0

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class UnweightedNorm(TorchNorm):
    """torch's, without a weight."""

    is_weighted = False

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), None, self.eps)


class VllmNorm(LlamaNorm):
    """vLLM's: of the sum as it is in float32."""

    wide_sum = True

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        wide = x.to(torch.float32) + residual.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return normed.to(self.weight.dtype) * self.weight, wide.to(x.dtype)


NORMS: dict[str, type[TorchNorm]] = {
    "torch": TorchNorm,
    "llama": LlamaNorm,
    "gemma": GemmaNorm,
    "unweighted": UnweightedNorm,
    "vllm": VllmNorm,
}


class Layer(nn.Module):
    """Two halves of a decoder's layer: project, sum over the ranks, add the residual, normalise."""

    def __init__(self, columns: int, norm: type[TorchNorm], total: Sum) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(columns, columns, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(norm(columns) for _ in range(2))
        self.total = total

    def forward(self, normed: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        for project, norm in zip(self.projections, self.norms, strict=True):
            normed, residual = norm.add_and_norm(self.total(project(normed)), residual)
        return normed, residual


class Decoder(nn.Module):
    """Layers, each half of which ends with a sum, an addition and a norm."""

    def __init__(self, columns: int, norm: str, total: Sum, num_layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        layers = (Layer(columns, NORMS[norm], total) for _ in range(num_layers))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = residual = x
        for layer in self.layers:
            normed, residual = layer(normed, residual)
        return normed, residual


def decode_by_operator(model: Decoder, x: Tensor) -> tuple[Tensor, Tensor]:
    """Run a decoder uncompiled, by the operator that its fused program has."""
    normed = residual = x
    for layer in model.layers:
        for project, norm in zip(layer.projections, layer.norms, strict=True):  # type: ignore[call-overload]
            normed, residual = ops.all_reduce_rms_norm(
                project(normed),
                residual,
                norm.weight if norm.is_weighted else None,
                norm.eps,
                offset=norm.offset,
                rounds_first=norm.rounds_first,
                wide_sum=norm.wide_sum,
            )
    return normed, residual
