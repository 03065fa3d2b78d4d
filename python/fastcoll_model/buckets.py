# SPDX-License-Identifier: Apache-2.0
"""Gradients in buckets: the part reduced behind the backward pass, and the exposed part.

Buckets are reduced one after the other, each as soon as the backward pass has filled it. Source:
Li et al. 2020, PyTorch Distributed: experiences on accelerating data parallel training (VLDB
13(12)).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastcoll_model.errors import ModelError


@dataclass(frozen=True)
class Layer:
    """One layer, in the order of the backward pass."""

    gradient_bytes: float
    backward_us: float


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together."""

    size_bytes: float
    ready_us: float
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Overlap:
    """How the buckets lie beside the backward pass."""

    buckets: list[Bucket]
    backward_us: float

    @property
    def communication_us(self) -> float:
        """Time that buckets are under way."""
        return sum(bucket.end_us - bucket.start_us for bucket in self.buckets)

    @property
    def exposed_us(self) -> float:
        """Time from the end of the backward pass until the last bucket is there."""
        return max(0.0, self.buckets[-1].end_us - self.backward_us) if self.buckets else 0.0


def overlap(
    layers: Sequence[Layer], bucket_bytes: float, cost_us: Callable[[float], float]
) -> Overlap:
    """Return how buckets of at least `bucket_bytes` (but the last) are reduced.

    Args:
        layers: In the order of the backward pass: the model's last layer first.
        bucket_bytes: A bucket is closed when it holds so much.
        cost_us: Time to reduce a bucket of so many bytes.

    Raises:
        ModelError: `bucket_bytes` is not positive.
    """
    if bucket_bytes <= 0:
        raise ModelError(f"buckets of {bucket_bytes} bytes: they must hold something")
    buckets: list[Bucket] = []
    now = filled = free = 0.0
    for i, layer in enumerate(layers):
        now += layer.backward_us
        filled += layer.gradient_bytes
        if filled and (filled >= bucket_bytes or i == len(layers) - 1):
            start = max(now, free)
            free = start + cost_us(filled)
            buckets.append(Bucket(filled, now, start, free))
            filled = 0.0
    return Overlap(buckets, now)


def best_bucket_bytes(layers: Sequence[Layer], cost_us: Callable[[float], float]) -> float:
    """Return the bucket size that hides most, of 1, 2, 4, ... times the average layer."""
    total = sum(layer.gradient_bytes for layer in layers)
    sizes = [total / len(layers)] if layers else [1.0]
    while sizes[-1] < total:
        sizes.append(sizes[-1] * 2)
    return min(sizes, key=lambda size: overlap(layers, size, cost_us).exposed_us)
